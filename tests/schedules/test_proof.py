# SPDX-License-Identifier: Apache-2.0
"""The interpreter must be able to say no: programs broken on purpose do not pass."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    B,
    F,
    G,
    Graph,
    I,
    Placement,
    Program,
    ProgramError,
    W,
    chain,
    dualpipe,
    forward_only,
    from_rows,
    gpipe,
    interleaved_1f1b,
    linear,
    lower,
    one_f_one_b,
    parse,
    seq_1f1b,
)
from schedules.language.actions import message_of, receive_of
from schedules.playing.rows import edit
from schedules.proof.formulas import formula, whole_model
from schedules.proof.interpreter import ideal, interpret, prove
from schedules.proof.networks import fifo, rendezvous
from schedules.testing import orders, require_matching_ends

networks = pytest.mark.parametrize("network", [fifo, rendezvous])


@dataclass(frozen=True)
class Table(Program):
    """A program written out by hand."""

    rows: tuple[str, ...] = ()

    def actions(self, rank):
        return map(parse, self.rows[rank].split())


def program(*rows, graph=None, microbatches=1):
    return Table(gpipe(ranks=len(rows), microbatches=microbatches), graph or chain(len(rows)), rows)


GOOD = (
    "0RECV_B0<1 0F0 0SEND_F0>1 0B0 0WAIT_F0>1",
    "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1WAIT_B0>0",
)


@networks
def test_a_message_of_a_slice_to_its_own_stage_is_never_sent(network):
    how = seq_1f1b(ranks=1, microbatches=1, slices=2)
    row = " ".join([*map(str, lower(how).actions(0)), "0RECV_B0.1<0"])
    with pytest.raises(ProgramError, match=r"left over at the end: 0RECV_B0\.1<0"):
        interpret(Table(how, chain(1), (row,)), network)


@networks
def test_a_correct_program_passes(network):
    interpret(program(*GOOD), network).require(chain(2), 1)


def without(word):
    return tuple(row.replace(word, "").strip() for row in GOOD)


@networks
@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (without("0SEND_F0>1 "), "deadlock: rank 0 at position 2, 0B0 needs B 1>0 of microbatch 0; rank 1 at"),
        (without("1RECV_F0<0 1F0 1B0 1SEND_B0>0 1WAIT_B0>0"), "deadlock: rank 0 at position 3, 0B0 needs"),
        (("0F0 0B0 0WAIT_F0>1", ""), "deadlock: rank 0 at position 1, 0B0 needs B 1>0"),
        (("0F0 0WAIT_F0>1", "1F0"), "rank 0, position 1, 0WAIT_F0>1: .* Wait once, after the send"),
        (("0F0 0SEND_F0>1 0WAIT_F0>1", ""), "rank 0 at position 2, 0WAIT_F0>1 needs F 0>1 of microbatch 0"),
        (without("0RECV_B0<1 "), "deadlock: rank 0 at position 2, 0B0 needs B 1>0 of microbatch 0; rank 1"),
        (without("1RECV_F0<0 "), "deadlock.*rank 1 at position 0, 1F0 needs F 0>1 of microbatch 0"),
        (without("1B0 1SEND_B0>0 1WAIT_B0>0"), "deadlock: rank 0 at position 3, 0B0 needs B 1>0"),
        (without("0B0 "), "left over at the end: residuals 0>0 of microbatch 0, B 1>0 of microbatch 0"),
        (("0F0 0F0", "1F0"), "rank 0, position 1, 0F0: makes residuals 0>0 of microbatch 0 again"),
        (("0F0 0SEND_F0>1 0SEND_F0>1", "1F0"), "rank 0, position 2, 0SEND_F0>1: "),
        (("0SEND_F0>1 0F0", "1F0"), "rank 0, position 0, 0SEND_F0>1: "),
        (("1F0", "0F0"), "rank 0, position 0, 1F0: "),
        (("2F0", ""), "rank 0, position 0, 2F0: "),
        ((GOOD[0], GOOD[1].replace("1F0", "1RECV_F0<0 1F0")), "left over at the end: 1RECV_F0<0"),
        ((f"{GOOD[0]} 0WAIT_F0>1", GOOD[1]), "0WAIT_F0>1: waits for no send, or waits again"),
        ((f"{GOOD[0]} 1RECV_F0<0", GOOD[1]), "1RECV_F0<0: is not an action on a stage that this rank holds"),
    ],
)
def test_broken_programs_are_refused(network, rows, why):
    with pytest.raises(ProgramError, match=why):
        interpret(program(*rows), network).require(chain(2), 1)


@networks
def test_waits_may_be_left_out(network):
    interpret(program(*without("0WAIT_F0>1")), network).require(chain(2), 1)


def swapped():
    return program(
        "0RECV_B0<1 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B1<1 0B0 0B1 0WAIT_F0>1 0WAIT_F1>1",
        "1RECV_F1<0 1RECV_F0<0 1F0 1F1 1B0 1SEND_B0>0 1B1 1SEND_B1>0 1WAIT_B0>0 1WAIT_B1>0",
        microbatches=2,
    )


def test_two_swapped_receives_pass_only_where_tags_match():
    interpret(swapped(), rendezvous).require(chain(2), 2)
    with pytest.raises(ProgramError, match=r"got 0SEND_F0>1 at the head of its channel, where 1RECV_F1<0 is posted"):
        interpret(swapped(), fifo)
    with pytest.raises(AssertionError, match="Post them in the sender's order"):
        require_matching_ends(swapped())


@networks
def test_a_shared_gradient_must_be_complete(network):
    graph = Graph(2, frozenset(), frozenset(), frozenset({(0, 1)}))
    second = "1F0 1F1 1B0 1B1 1RECV_G1<0"
    good = program("0F0 0B0 0F1 0B1 0SEND_G1>1 0WAIT_G1>1", second, graph=graph, microbatches=2)
    early = program("0F0 0B0 0F1 0SEND_G1>1 0B1 0WAIT_G1>1", second, graph=graph, microbatches=2)
    twice = program("0F0 0B0 0F1 0B1 0SEND_G1>1 0SEND_G1>1", second, graph=graph, microbatches=2)
    never = program("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", graph=graph, microbatches=2)
    interpret(good, network).require(graph, 2)
    with pytest.raises(ProgramError, match=r"stage 1: got .* as gradient of stage 0's parameters"):
        interpret(early, network).require(graph, 2)
    with pytest.raises(ProgramError, match="0SEND_G1>1: sends a value that does not exist, or sends it again"):
        interpret(twice, network)
    with pytest.raises(ProgramError, match="G 0>1 of microbatch 1 never arrives"):
        interpret(never, network)


@networks
def test_shared_gradients_must_go_both_ways(network):
    graph = Graph(2, frozenset(), frozenset(), frozenset({(0, 1), (1, 0)}))
    rows = "0F0 0RECV_G0<1 0B0 0SEND_G0>1 0WAIT_G0>1", "1F0 1RECV_G0<0 1B0 1SEND_G0>0 1WAIT_G0>0"
    interpret(program(*rows, graph=graph), network).require(graph, 1)
    one_way = rows[0].replace("0RECV_G0<1 ", ""), rows[1].replace(" 1SEND_G0>0 1WAIT_G0>0", "")
    with pytest.raises(ProgramError, match="G 1>0 of microbatch 0 never arrives"):
        interpret(program(*one_way, graph=graph), network)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ((F(0, 0), B(0, 0), F(0, 0), B(0, 0)), "stage 0: got the outputs"),
        ((), "stage 0: got the outputs"),
        ((F(0, 1), B(0, 1)), "stage 0: got the outputs"),
        ((F(0, 0), I(0, 0)), "left over at the end: deferred 0>0"),
        ((F(0, 0), W(0, 0), I(0, 0)), "needs deferred 0>0 of microbatch 0"),
        ((parse("0SEND_F0>1"),), "rank 0, position 0, 0SEND_F0>1: "),
    ],
)
def test_broken_schedules_are_refused(row, why):
    with pytest.raises(ProgramError, match=why):
        prove(edit(gpipe(1, 1), (row,)))


ONE, TWO = gpipe(1, 1), gpipe(1, 2)
PAST = from_rows(((),), linear(1), 1, versions=(-1,))
HALF_TIED, TIED = (Graph(2, frozenset(), frozenset(), frozenset(edges)) for edges in ([(0, 1)], [(0, 1), (1, 0)]))
BOTH = [" ".join(map(str, dualpipe(2, 2).actions(rank))) for rank in range(2)]
REDUCED = "0F0 1F0 1B0 0B0 1REDUCE_GRAD0 {} 0REDUCE_GRAD0 {}"


@pytest.mark.parametrize(
    ("how", "graph", "rows", "why"),
    [
        (ONE, None, ["0F0 0UNSHARD0 0B0 0RESHARD0"], "0UNSHARD0: gathers weights that are already gathered"),
        (ONE, None, ["0UNSHARD1 0F0 0B0 0RESHARD1"], "0UNSHARD1: .* has the wrong number"),
        (ONE, None, ["0UNSHARD0 0F0 0B0 0U0 0RESHARD0"], "0U0: leaves gathered weights out of date"),
        (ONE, None, ["0UNSHARD0 0F0 0RESHARD0 0B0"], "0B0: reads weights that are not gathered"),
        (
            ONE,
            None,
            ["0UNSHARD0 0C0 0RESHARD0 0R0 0UNSHARD1 0B0 0RESHARD1"],
            "0R0: reads weights that are not gathered",
        ),
        (ONE, None, ["0F0 0B0 0RESHARD0"], "0RESHARD0: frees weights that are not gathered"),
        (ONE, None, ["0UNSHARD0 0F0 0B0"], "left over at the end: weights"),
        (ONE, None, ["0F0 0B0 0U0 0REDUCE_GRAD0"], "0REDUCE_GRAD0: .*comes too late"),
        (ONE, None, ["0F0 0B0 0REDUCE_GRAD0 0REDUCE_GRAD0"], "0REDUCE_GRAD0: does not reduce a whole gradient"),
        (TWO, None, ["0F0 0B0 0REDUCE_GRAD1 0F1 0B1"], "0REDUCE_GRAD1: does not reduce a whole gradient"),
        (TWO, None, ["0F0 0F1 0B0 0B1 0REDUCE_GRAD1 0U0 0U1"], "0U0: applies .* a part of a reduced sum"),
        (ONE, None, ["0F0 0B0 0U1"], "0U1: applies gradients that do not exist"),
        (ONE, None, ["0F0 0B0 0U0 0U0"], "0U0: applies .* already applied"),
        (TWO, None, ["0F0 0F1 0B0 0B1 0U0"], "no update applies the gradients of stage 0 after microbatch 0"),
        (gpipe(2, 1), None, ["0F0 0B0 0REDUCE_GRAD0", "1F0 1B0"], "rank 1 never reduces the gradient of stage 1"),
        (
            gpipe(2, 2),
            HALF_TIED,
            ["0F0 0B0 0U0 0F1 0B1 0U1", "1F0 1B0 1F1 1B1 1U1"],
            "copies of stage 0's weights drift",
        ),
        (interleaved_1f1b(1, 1, 2), TIED, [REDUCED.format("1U0", "0U0")], "1U0 needs G 0>1 of microbatch 0"),
        (dualpipe(2, 2), None, [f"{BOTH[0]} 0G0", BOTH[1]], "0G0: is not the one sum over the stage's replicas"),
        (dualpipe(2, 2), None, [BOTH[0].replace("0G0", "0G1"), BOTH[1]], "0G1: is not an action on a stage"),
        (dualpipe(2, 4), None, ["0F0 0F2 0G0", ""], "0G0: is not the one sum over the stage's replicas"),
        (PAST, None, ["0F0 0B0"], "0F0: uses other weights than an earlier slice, or some not made yet"),
        (ONE, None, ["0OVERLAP_F0 0B0"], "deadlock: rank 0 at position 0, 0OVERLAP_F0 needs residuals 0>0"),
        (ONE, None, ["0F0 0OVERLAP_F0"], "0OVERLAP_F0: overlaps with no backward"),
        (forward_only(1, 1), None, ["0C0"], "0C0: is checkpointed, and the schedule has no backwards"),
        (seq_1f1b(1, 1, 2), None, ["0F0.0 0U0 0F0.1 0B0.1 0B0.0"], "0U0: applies gradients that do not exist"),
        (
            seq_1f1b(1, 2, 2),
            None,
            ["0F0.0 0F0.1 0B0.1 0B0.0 0F1.0 0U0 0F1.1 0B1.1 0B1.0 0U1"],
            "0F1.1: uses other weights than an earlier slice",
        ),
    ],
)
def test_wrong_sums_updates_and_gatherings_are_refused(how, graph, rows, why):
    with pytest.raises(ProgramError, match=why):
        ideal(edit(how, [map(parse, row.split()) for row in rows]), graph)


def test_gradients_are_reduced_before_another_stage_updates_with_them():
    rows = map(parse, REDUCED.format("", "1U0 0U0").split())
    ideal(edit(interleaved_1f1b(1, 1, 2), [rows]), TIED)


@networks
@pytest.mark.parametrize("part", ["", ".3"])
def test_a_gradient_of_three_replicas_is_sent_to_one_of_them(network, part):
    rows = tuple((F(0, i), B(0, i), G(0, i)) for i in range(3))
    how = from_rows(rows, Placement(3, (0,), ((1,), (2,))), microbatches=3)
    first, *others = [" ".join(map(str, lower(how).actions(rank))) for rank in range(3)]
    interpret(Table(how, chain(1), (first, *others)), network).require(chain(1), 3)
    wrong = first.replace("SEND_G0.1>", f"SEND_G0{part}>", 1)
    with pytest.raises(ProgramError, match=rf"0SEND_G0{part}>0: is not an action on a stage that this rank holds"):
        interpret(Table(how, chain(1), (wrong, *others)), network)


def test_a_sum_over_replicas_must_have_all_terms():
    both = dualpipe(ranks=2, microbatches=2)
    early = [F(0, 0), F(1, 1), B(1, 1), I(0, 0), G(0, 0), W(0, 0), G(1, 1)]
    late = "gradients were summed too early. Put each G after all backwards"
    with pytest.raises(ProgramError, match=f"stage 0: its {late}"):
        ideal(edit(both, (early, [*both.actions(1)])))


@settings(deadline=None)
@given(orders())
def test_both_networks_and_no_network_mean_the_same(case):
    schedule, graph = case
    program = lower(schedule, graph)
    assert ideal(schedule, graph) == interpret(program, fifo) == interpret(program, rendezvous)


def test_gradients_come_in_the_order_of_the_backwards():
    rows = ((F(0, 0), F(0, 1), B(0, 1), B(0, 0)),)
    got, model = ideal(edit(gpipe(1, 2), rows)), whole_model(chain(1), 2)
    assert got.outputs == model.outputs
    assert got.gradients == (model.gradients[0][::-1],)
    assert ideal(one_f_one_b(4, 8)) == whole_model(chain(4), 8)


@given(st.lists(st.integers() | st.text()), st.lists(st.integers() | st.text()))
def test_formulas_are_equal_exactly_when_their_parts_are(some, others):
    assert (formula(*some) == formula(*others)) == (some == others)


def test_both_ends_name_the_same_message():
    send = parse("2SEND_F1>5")
    assert receive_of(send) == parse("5RECV_F1<2")
    assert message_of(receive_of(send)) == send == message_of(parse("2WAIT_F1>5"))
