# SPDX-License-Identifier: Apache-2.0
"""What `check` says, and that it is never wrong: it accepts exactly what, run on formulas, computes the whole model."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedules import (
    Action,
    B,
    C,
    Costs,
    F,
    Graph,
    GraphError,
    I,
    Limits,
    PipelineError,
    ScheduleError,
    Sizes,
    U,
    W,
    chain,
    check,
    critical_path,
    dualpipe,
    forward_only,
    gpipe,
    looped,
    lower,
    mirror,
    one_f_one_b,
    parse,
    pipedream,
    pipedream_2bw,
    reduce_gradients,
    schedule,
    simulate,
    spans,
    split_backward,
)
from schedules.files.csv import table
from schedules.playing.rows import edit
from schedules.proof.interpreter import ideal, interpret, prove, require_whole
from schedules.proof.networks import fifo, rendezvous
from schedules.testing import collective_orders, mutants, orders, schedules
from schedules.testing.mutants import EDITS, EditedProgram, mutant_programs
from tests.common.rows import rows
from tests.common.sizes import sampled

# ------- What a violation says: it names the culprit, whatever the rule. (That `check` is right: test_never_wrong.py.)


@settings(max_examples=100, deadline=None)
@given(schedules([gpipe, one_f_one_b]), st.data())
def test_a_dropped_action_is_named(schedule, data):
    schedule = data.draw(st.sampled_from([schedule, split_backward(schedule)]))
    changed = rows(schedule)
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    gone = changed[rank].pop(data.draw(st.integers(0, len(changed[rank]) - 1)))
    with pytest.raises(ScheduleError) as caught:
        check(edit(schedule, changed))
    assert str(gone) in str(caught.value)
    assert caught.value.rank == rank


@settings(max_examples=100, deadline=None)
@given(schedules([gpipe, one_f_one_b]), st.data())
def test_a_duplicated_action_is_named(schedule, data):
    changed = rows(schedule)
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    at = data.draw(st.integers(0, len(changed[rank]) - 1))
    again = data.draw(st.integers(at + 1, len(changed[rank])))
    changed[rank].insert(again, changed[rank][at])
    with pytest.raises(ScheduleError) as caught:
        check(edit(schedule, changed))
    assert (caught.value.rank, caught.value.position, caught.value.action) == (rank, again, changed[rank][at])


def refusal(plan, graph=None):
    with pytest.raises(ScheduleError) as caught:
        check(plan, graph)
    return str(caught.value)


def violation(*rows, ranks=2, microbatches=1, graph=None):
    return refusal(edit(gpipe(ranks, microbatches), rows), graph)


GOOD = (F(1, 0), B(1, 0))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            [F(0, 0), Action("SEND_F", 0, 0, 1), B(0, 0)],
            "rank 0, position 1, 0SEND_F0>1: is not a compute action [rule: compute_only]. "
            "Yield only F, B, I, W, C, R, OVERLAP_F, G, U, OFFLOAD, RELOAD, UNSHARD, RESHARD, REDUCE_GRAD; lower() "
            "inserts the transfers.",
        ),
        (
            [F(0, 0), B(0, 1)],
            "rank 0, position 1, 0B1: microbatch 1 does not exist [rule: compute_only]. Use microbatches 0 to 0.",
        ),
        (
            [F(2, 0)],
            "rank 0, position 0, 2F0: stage 2 does not exist [rule: compute_only]. Use stages 0 to 1.",
        ),
        (
            [F(0, 0), F(1, 0)],
            "rank 0, position 1, 1F0: stage 1 lives on rank 1 [rule: placed]. Yield 1F0 on rank 1.",
        ),
        (
            [B(0, 0), F(0, 0)],
            "rank 0, position 0, 0B0: comes before 0F0 [rule: forward_before_backward]. "
            "Add 0F0 before it, or move it later.",
        ),
        (
            [W(0, 0)],
            "rank 0, position 0, 0W0: comes before 0I0 [rule: forward_before_backward]. "
            "Add 0I0 before it, or move it later.",
        ),
        (
            [F(0, 0), W(0, 0), I(0, 0)],
            "rank 0, position 1, 0W0: comes before 0I0 [rule: forward_before_backward]. "
            "Add 0I0 before it, or move it later.",
        ),
        (
            [F(0, 0), I(0, 0), B(0, 0)],
            "rank 0, position 2, 0B0: has already run, or its backward has [rule: forward_before_backward]. "
            "Drop 0B0: each runs once, as B or as I and W.",
        ),
        (
            [F(0, 0), B(0, 0), F(0, 0)],
            "rank 0, position 2, 0F0: has already run, or its backward has [rule: forward_before_backward]. "
            "Drop 0F0: each runs once, as B or as I and W.",
        ),
        (
            [],
            "rank 0, position 0, end of its actions: 0F0, with its backward, never runs [rule: complete]. "
            "Add it to rank 0.",
        ),
        (
            [F(0, 0)],
            "rank 0, position 1, end of its actions: 0B0, or 0I0 and 0W0, never runs [rule: complete]. "
            "Add it to rank 0.",
        ),
        (
            [F(0, 0), I(0, 0)],
            "rank 0, position 2, end of its actions: 0W0 never runs [rule: complete]. Add it to rank 0.",
        ),
    ],
)
def test_each_rule_names_the_culprit(row, message):
    assert violation(row, GOOD) == message


def test_a_deadlock_is_named_all_the_way_around():
    assert violation(
        (F(0, 0), B(0, 0), F(0, 1), B(0, 1)),
        (F(1, 0), F(1, 1), B(1, 0), B(1, 1)),
        microbatches=2,
    ) == (
        "rank 0, position 1, 0B0: needs 1B0 or 1I0, and the ranks wait for each other: rank 0 at 0B0 needs 1B0 or 1I0, "
        "rank 1 at 1F1 needs 0F1 [rule: ordered]. Reorder the actions of one of these ranks."
    )


def test_a_missing_action_is_blamed_for_the_deadlock_it_causes():
    message = violation((F(0, 0), B(0, 0), F(0, 1), B(0, 1)), (F(1, 0), F(1, 1), B(1, 1)), microbatches=2)
    assert message.startswith("rank 1, position 3, end of its actions: 1B0, or 1I0 and 1W0, never runs")


def test_a_rank_that_waits_for_itself_is_named():
    @schedule(placement=looped)
    def backwards(rank, ranks, microbatches, chunks=2):
        yield from (F(1, 0), F(0, 0), B(1, 0), B(0, 0))

    with pytest.raises(ScheduleError, match=r"1F0: needs 0F0, which this rank runs only later .* Move 0F0 before it"):
        check(backwards(1, 1))


def test_values_that_are_not_actions_are_refused():
    assert "got '0F0', expected an action" in violation(["0F0"], GOOD)


def test_a_graph_of_another_size_is_refused():
    with pytest.raises(GraphError, match=r"got a graph of 3 stages for gpipe.*expected 2"):
        check(gpipe(2, 2), chain(3))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, "got None, expected an action"),
        (("F", 0, 0, None, None), "expected an action"),
        (F(False, 0), "expected integers"),
        (F(0, False), "got ('F', 0, False, None, None), expected integers"),
        (F("0", 0), "expected integers"),
        (F(0, "0"), "expected integers"),
        (F(0, 0.0), "expected integers"),
        (F(0, None), "expected integers"),
        (F(0, -1), "microbatch -1 does not exist"),
        (F(-1, 0), "stage -1 does not exist"),
        (F(0, 0, slice=False), "slice False does not exist"),
    ],
)
def test_stages_and_microbatches_out_of_range_are_refused(wrong, message):
    assert "position 0" in violation([wrong, B(0, 0)], GOOD)
    assert message in violation([wrong, B(0, 0)], GOOD)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (
            C(0, 0),
            "this schedule has no backwards [rule: forward_before_backward]. Write 0F0",
        ),
        (Action("OVERLAP_F", 0, 0), "Write 0F0."),
        (B(0, 0), "Drop 0B0."),
        (U(0, 0), "has no gradient to use: this schedule has no backwards [rule: updated]. Drop 0U0."),
    ],
)
def test_actions_for_a_backward_are_refused_where_there_is_none(action, message):
    row = [action] if action.kind in ("C", "OVERLAP_F") else [F(0, 0), action]
    s = edit(forward_only(ranks=1, microbatches=1), [row])
    with pytest.raises(ScheduleError) as caught:
        check(s)
    assert message in str(caught.value)
    with pytest.raises(PipelineError):
        prove(s)


def test_replicas_update_with_the_sum_of_their_gradients():
    s = mirror(one_f_one_b(ranks=2, microbatches=1))
    done = [[a for a in s.actions(rank) if a.kind != "G"] for rank in range(2)]
    sums = [[a for a in s.actions(rank) if a.kind == "G"] for rank in range(2)]
    updates = [[a._replace(kind="U") for a in row] for row in sums]
    right = edit(s, [a + b + c for a, b, c in zip(done, sums, updates, strict=True)])
    check(right)
    prove(right)
    assert simulate(right, sizes=Sizes(activation=0, weight=1)).peak_memory == (2, 2)
    wrong = edit(s, [a + b + c for a, b, c in zip(done, updates, sums, strict=True)])
    with pytest.raises(ScheduleError, match=r"0U0: comes before the gradients of the replicas are summed.*after 0G0"):
        check(wrong)
    with pytest.raises(PipelineError):
        prove(wrong)


@pytest.mark.parametrize("microbatch", range(4))
def test_the_memory_limit_holds_for_every_microbatch(microbatch):
    """All backwards wait for that of one microbatch, whichever it is: the last, too."""

    @schedule(limits=Limits(memory=lambda rank, ranks, microbatches: 1))
    def limited(rank, ranks, microbatches):
        for i in range(microbatches):
            yield F(rank, i)
            if i != microbatch - 1:
                yield from (B(rank, j) for j in range(max(0, i - (i == microbatch)), i + 1))

    if microbatch == 0:
        check(limited(ranks=1, microbatches=4))
        return
    with pytest.raises(ScheduleError) as caught:
        check(limited(ranks=1, microbatches=4))
    assert (caught.value.rule, caught.value.action) == ("within_memory", F(0, microbatch))
    assert "needs memory for activations of 2 microbatches, more than the limit of 1" in str(caught.value)


TIED = Graph(2, frozenset({(0, 1)}), frozenset({(0, 1)}), frozenset({(0, 1), (1, 0)}))


@pytest.mark.parametrize(
    ("rows", "graph", "message"),
    [
        (
            ("0F0,0B0,0F2,0B2,0G2,0U0,0U2", "0F1,0B1,0F3,0B3,0G3,0U3"),
            None,
            "0U0: updates before microbatch 2, but another rank holds the stage too: its gradient is complete only at "
            "the end [rule: updated]. Write one 0U2",
        ),
        (
            ("0F0,0F1,0B0,0U0,0B1,0U1", "1F0,1B0,1U0,1F1,1B1,1U1"),
            TIED,
            "1U0: updates before microbatch 1, but another stage holds some of its parameters",
        ),
        (
            ("0F0,1F0,1B0,1U0,0B0,0U0",),
            TIED,
            "1U0: needs all backwards of stage 0 on rank 0, which this rank runs only later [rule: ordered]",
        ),
        (
            ("0F0.0,0F0.1,0B0.1,0B0.0,0F1.0,0U0,0F1.1,0B1.1,0B1.0,0U1",),
            None,
            "0U0: comes between the slices of microbatch 1, which would use different weights [rule: updated]. Move it "
            "before the first forward of microbatch 1, or after the last.",
        ),
    ],
)
def test_replicas_and_slices_of_a_stage_are_updated_together(rows, graph, message):
    s = table(rows=rows)
    with pytest.raises(ScheduleError) as caught:
        check(s, graph)
    assert message in str(caught.value)
    for meaning in (prove, lambda *case: interpret(lower(*case), rendezvous)):
        with pytest.raises(PipelineError):
            meaning(s, graph)


def test_an_update_waits_for_the_gradients_of_stages_that_share_its_parameters():
    s = table(rows=("0F0,0B0,0U0", "1F0,1B0,1U0"))
    check(s, TIED)
    check(lower(s, TIED))
    prove(s, TIED)
    assert [" ".join(map(str, lower(s, TIED).actions(rank))) for rank in (0, 1)] == [
        "0F0 0SEND_F0>1 0RECV_B0<1 0RECV_G0<1 0B0 0SEND_G0>1 0WAIT_F0>1 0U0 0WAIT_G0>1",
        "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1SEND_G0>0 1RECV_G0<0 1U0 1WAIT_B0>0 1WAIT_G0>0",
    ]
    late = {span.action: span for span in spans(s, Costs(F=1, B=2, comm=4), TIED)}
    assert late[U(1, 0)].start == late[B(0, 0)].end + 4 == 18
    assert critical_path(s, Costs(U=1, comm=4), TIED).stretches[-1].span.action == U(1, 0)


@pytest.mark.parametrize("s", [pipedream(2, 3), pipedream_2bw(2, 3, accumulate=2)])
def test_stages_that_share_parameters_are_not_updated_several_times(s):
    check(s)
    with pytest.raises(ScheduleError, match="another stage holds some of its parameters"):
        check(s, TIED)


def test_a_program_is_checked_against_its_own_graph():
    program = lower(gpipe(2, 2))
    check(program, chain(2))
    with pytest.raises(GraphError, match="it has its own"):
        check(program, chain(3))


# -------------------------- What `check` says of collectives in wrong places. (That it is right: test_never_wrong.py.)

GATHERED = "0UNSHARD0,0F0,0RESHARD0,0UNSHARD1,0B0,0RESHARD1"


def test_a_gathered_stage_and_a_reduced_gradient_are_accepted():
    check(table(rows=(GATHERED,)))
    check(table(rows=(f"{GATHERED},0REDUCE_GRAD0,0U0",)))
    check(table(rows=("0UNSHARD0,0F0,0I0,0RESHARD0,0W0",)))  # the weight half reads no weights


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "0UNSHARD0,0F0,0RESHARD0,0B0",
            "rank 0, position 3, 0B0: reads weights that are not gathered [rule: gathered]. "
            "Add 0UNSHARD1 before it, or free them later.",
        ),
        (
            "0F0,0UNSHARD0,0B0,0RESHARD0",
            "rank 0, position 1, 0UNSHARD0: comes after a pass through stage 0, which read weights that were not "
            "gathered [rule: gathered]. Move it before the stage's first pass.",
        ),
        (
            "0UNSHARD0,0UNSHARD1,0F0,0B0,0RESHARD1",
            "rank 0, position 1, 0UNSHARD1: gathers weights that are gathered already [rule: gathered]. "
            "Free them before it, or drop 0UNSHARD1.",
        ),
        (
            "0UNSHARD1,0F0,0B0,0RESHARD1",
            "rank 0, position 0, 0UNSHARD1: is not numbered as gathering 0 of its stage [rule: gathered]. "
            "Write 0UNSHARD0.",
        ),
        (
            "0RESHARD0,0F0,0B0",
            "rank 0, position 0, 0RESHARD0: frees weights that are not gathered [rule: gathered]. "
            "Drop 0RESHARD0, or gather them before it.",
        ),
        (
            "0UNSHARD0,0F0,0B0,0RESHARD1",
            "rank 0, position 3, 0RESHARD1: does not have the number of the gathering that it ends, 0 "
            "[rule: gathered]. Write 0RESHARD0.",
        ),
        (
            "0UNSHARD0,0F0,0B0",
            "rank 0, position 3, end of its actions: 0RESHARD0 never runs: the weights stay gathered "
            "[rule: gathered]. Add it to rank 0.",
        ),
        (
            "0UNSHARD0,0F0,0B0,0U0,0RESHARD0",
            "rank 0, position 3, 0U0: updates the shards while the weights are gathered, which would then be out of "
            "date [rule: gathered]. Put 0RESHARD0 before it.",
        ),
        (
            "0F0,0REDUCE_GRAD0,0B0",
            "rank 0, position 1, 0REDUCE_GRAD0: comes before the backward of microbatch 0 [rule: reduced]. "
            "Move it later.",
        ),
        (
            "0F0,0B0,0REDUCE_GRAD0,0REDUCE_GRAD0",
            "rank 0, position 3, 0REDUCE_GRAD0: has already run [rule: reduced]. "
            "Drop 0REDUCE_GRAD0: a gradient is reduced once.",
        ),
        (
            "0F0,0B0,0U0,0REDUCE_GRAD0",
            "rank 0, position 3, 0REDUCE_GRAD0: comes after 0U0, which updated with a gradient that was not reduced "
            "[rule: reduced]. Move it earlier.",
        ),
        (
            "0F0,0B0,0F1,0B1,0REDUCE_GRAD0",
            "rank 0, position 4, 0REDUCE_GRAD0: is not named after the last microbatch that this rank runs, 1 "
            "[rule: reduced]. Write 0REDUCE_GRAD1.",
        ),
        (
            "0F0,0F1,0B0,0B1,0REDUCE_GRAD1,0U0,0U1",
            "rank 0, position 5, 0U0: updates before microbatch 1, but 0REDUCE_GRAD1 has reduced the gradient of all "
            "as one sum [rule: updated]. Write one 0U1, after 0REDUCE_GRAD1.",
        ),
    ],
)
def test_each_rule_of_collectives_names_the_culprit(row, message):
    assert refusal(table(rows=(row,))) == message


def test_a_reduced_sum_has_no_part_that_an_update_could_apply():
    part = table(rows=("0F0,0F1,0B0,0B1,0REDUCE_GRAD1,0U0,0U1",))
    for meaning in (prove, lambda case: interpret(lower(case), rendezvous)):
        with pytest.raises(PipelineError, match=r"rank 0, position 5, 0U0: applies .* a part of a reduced sum"):
            meaning(part)
    prove(table(rows=("0F0,0F1,0B0,0B1,0REDUCE_GRAD1,0U1",)))


def test_all_stages_are_reduced_or_none():
    schedule = reduce_gradients(gpipe(ranks=2, microbatches=1))
    left_out = edit(schedule, [rows(schedule)[0], rows(schedule, without=("REDUCE_GRAD",))[1]])
    assert refusal(left_out) == (
        "rank 1, position 2, end of its actions: 1REDUCE_GRAD0 never runs, though the gradients of other stages are "
        "reduced [rule: reduced]. Add it to rank 1."
    )


def test_replicas_are_summed_before_they_are_reduced():
    first, *others = rows(reduce_gradients(dualpipe(ranks=2, microbatches=4)))
    at = next(at for at, action in enumerate(first) if action.kind == "REDUCE_GRAD")
    first[at - 1], first[at] = first[at], first[at - 1]
    message = refusal(edit(reduce_gradients(dualpipe(ranks=2, microbatches=4)), [first, *others]))
    assert f"{first[at - 1]}: comes before {first[at]} has summed the gradients of the replicas" in message


def test_a_schedule_without_backwards_has_nothing_to_reduce():
    schedule = forward_only(ranks=1, microbatches=1)
    reduced = edit(schedule, [[*rows(schedule)[0], Action("REDUCE_GRAD", 0, 0)]])
    assert "0REDUCE_GRAD0: has no gradient to reduce: this schedule has no backwards" in refusal(reduced)


@pytest.mark.parametrize(("number", "why"), [(-1, "gathering -1 does not exist"), (9, "is not numbered as gathering")])
def test_gatherings_are_counted_from_0(number, why):
    schedule = one_f_one_b(ranks=1, microbatches=1)
    assert why in refusal(edit(schedule, [[Action("UNSHARD", 0, number), *rows(schedule)[0]]]))


# -------------------------- `check` is never wrong: it accepts exactly what, run on formulas, computes the whole model

often = settings(max_examples=settings().max_examples * 2, deadline=None, suppress_health_check=list(HealthCheck))


def is_accepted(plan, graph=None):
    try:
        check(plan, graph)
    except ScheduleError:
        return False
    return True


def computes(schedule, graph):
    try:
        require_whole(ideal(schedule, graph), schedule, graph)
    except PipelineError:
        return False
    return True


def runs(program):
    try:
        for network in (rendezvous, fifo):
            require_whole(interpret(program, network), program.schedule, program.graph)
    except PipelineError:
        return False
    return True


CASES = pytest.mark.parametrize("cases", [orders(), collective_orders()], ids=["alone", "with collectives"])


@sampled(1)
@CASES
@often
@given(st.data())
def test_every_correct_order_is_accepted_and_so_is_its_program(cases, data):
    case = data.draw(cases)
    check(*case)
    check(lower(*case))
    prove(*case)


@sampled(1)
@pytest.mark.parametrize(
    ("cases", "edits"),
    [(orders(), EDITS), (collective_orders(), EDITS), (collective_orders(), ("insert",))],
    ids=["alone", "with collectives", "with collectives and updates too many"],
)
@often
@given(st.data())
def test_a_schedule_is_accepted_exactly_if_it_computes_the_whole_model(cases, edits, data):
    schedule, graph = data.draw(cases)
    for _ in range(10):
        mutant = data.draw(mutants(schedule, edits))
        assert is_accepted(mutant, graph) == computes(mutant, graph)


@sampled(1)
@CASES
@often
@given(st.data())
def test_a_program_is_accepted_exactly_if_it_runs_over_either_network(cases, data):
    program = lower(*data.draw(cases))
    for _ in range(10):
        mutant = data.draw(mutant_programs(program))
        assert is_accepted(mutant) == runs(mutant)


def judge(*rows):
    rows = tuple(tuple(map(parse, row.split())) for row in rows)
    return refusal(EditedProgram(gpipe(2, 1), chain(2), rows))


FIRST, SECOND = "0RECV_B0<1 0F0 0SEND_F0>1 0B0", "1RECV_F0<0 1F0 1B0 1SEND_B0>0"


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ((FIRST.replace(" 0SEND_F0>1", ""), SECOND), "1F0: waits for 0SEND_F0>1, which rank 0 never runs"),
        ((FIRST, SECOND.replace("1RECV_F0<0 ", "")), "1F0: waits for 0SEND_F0>1, for which no receive is posted"),
        (("0RECV_B0<1 0F0 0B0 0SEND_F0>1", SECOND), "for each other: rank 0 at 0B0, rank 1 at 1F0 [rule: flows]"),
        ((FIRST + " 0SEND_F0>1", SECOND), "0SEND_F0>1: is sent before it is made, or twice"),
        ((FIRST, SECOND + " 1WAIT_B0>0 1WAIT_B0>0"), "1WAIT_B0>0: waits for no earlier send, or waits twice"),
        ((FIRST, SECOND + " 1RECV_F0<0"), "1RECV_F0<0 is posted, but never sent [rule: nothing_left]"),
        ((FIRST + " 1RECV_B0<0", SECOND), "1RECV_B0<0: is not a message for rank 0 [rule: received_once]"),
        ((FIRST + " 0SEND_F0>7", SECOND), "names a stage that does not exist"),
    ],
)
def test_a_wrong_program_is_refused_with_the_reason(rows, why):
    assert why in judge(*rows)
