# SPDX-License-Identifier: Apache-2.0
"""Transfers are where they must be, whatever the order and the graph."""

import gc
import re
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise, product, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    KINDS,
    Action,
    B,
    F,
    Graph,
    GraphError,
    Schedule,
    ScheduleError,
    chain,
    check,
    dualpipe_v,
    families,
    forward_only,
    forwards,
    gpipe,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    parse,
    split_backward,
)
from schedules.arrays.abreast import can_be_played
from schedules.files.csv import table
from schedules.language.actions import message_of, receive_of
from schedules.lowering import program as lowering
from schedules.lowering.turns import Turns
from schedules.playing.rows import edit
from schedules.proof.interpreter import Interpreter, require_whole
from schedules.proof.networks import Links, fifo, rendezvous
from schedules.testing import orders, require_matching_ends, schedules
from schedules.testing.mutants import EditedProgram
from tests.common.chains import any_order_of_a_chain
from tests.common.sizes import NIGHTLY, by_night, sampled


def texts(program):
    return [" ".join(map(str, program.actions(rank))) for rank in range(program.schedule.ranks)]


def test_one_rank_sends_nothing():
    assert texts(lower(gpipe(1, 2))) == ["0F0 0F1 0B0 0B1"]


def test_a_chain():
    assert texts(lower(one_f_one_b(ranks=2, microbatches=2))) == [
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0RECV_B1<1 0B0 0WAIT_F0>1 0B1 0WAIT_F1>1",
        "1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1WAIT_B0>0 1WAIT_B1>0",
    ]


def test_cotangents_leave_with_the_input_half():
    assert texts(lower(split_backward(gpipe(ranks=2, microbatches=1))))[1] == (
        "1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0 1WAIT_B0>0"
    )


def test_a_skip_and_a_shared_parameter():
    graph = Graph(2, frozenset({(0, 1)}), frozenset(), frozenset({(0, 1)}))
    assert texts(lower(gpipe(ranks=2, microbatches=1), graph)) == [
        "0F0 0SEND_F0>1 0B0 0SEND_G0>1 0WAIT_F0>1 0WAIT_G0>1",
        "1RECV_F0<0 1F0 1RECV_G0<0 1B0",
    ]


def test_gradients_of_a_shared_parameter_are_exchanged():
    """Nobody waits for the other's before the end; a third stage on the same rank sends and is sent nothing."""
    edges = {(s, t) for s in range(3) for t in range(3) if s != t}
    graph = Graph(3, frozenset({(0, 1), (1, 2)}), frozenset({(0, 1), (1, 2)}), frozenset(edges))
    rows = (F(0, 0), F(2, 0), B(2, 0), B(0, 0)), (F(1, 0), B(1, 0))
    how = table(rows=tuple(",".join(map(str, row)) for row in rows))
    check(lower(how, graph))
    found = [[word for word in row.split() if "_G" in word or word[1:] == "B0"] for row in texts(lower(how, graph))]
    assert [" ".join(row) for row in found] == [
        "2B0 2SEND_G0>1 0RECV_G0<1 2RECV_G0<1 0B0 0SEND_G0>1 2WAIT_G0>1 0WAIT_G0>1",
        "1RECV_G0<2 1B0 1SEND_G0>0 1SEND_G0>2 1RECV_G0<0 1WAIT_G0>0 1WAIT_G0>2",
    ]


def test_evaluation_needs_values_only():
    graph = Graph(3, frozenset({(0, 1), (0, 2), (1, 2)}), frozenset())
    assert texts(lower(forwards(gpipe(3, 1)), graph))[2] == "2RECV_F0<0 2RECV_F0<1 2F0"


def test_evaluation_is_a_few_microbatches_ahead_at_most():
    """Else the first rank would keep the values of all microbatches until its peer has caught up."""
    assert texts(lower(forwards(one_f_one_b(ranks=2, microbatches=4)))) == [
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0WAIT_F0>1 0F2 0SEND_F2>1 0WAIT_F1>1 0F3 0SEND_F3>1 0WAIT_F2>1 0WAIT_F3>1",
        "1RECV_F0<0 1RECV_F1<0 1F0 1RECV_F2<0 1F1 1RECV_F3<0 1F2 1F3",
    ]


@settings(deadline=None)
@given(orders(), st.sampled_from([fifo, rendezvous]))
def test_forwards_never_wait_in_a_circle(case, network):
    """Even if a send ends only when its receive begins."""
    schedule, graph = case
    schedule = forwards(schedule)
    program = lower(schedule, graph)
    streams = [program.actions(rank) for rank in range(schedule.ranks)]
    require_whole(Interpreter(schedule, graph, streams, Links(network)).run(), schedule, graph)
    for rank in range(schedule.ranks if program.waits_early else 0):
        flying = Counter[int]()
        for action in program.actions(rank):
            flying[action.microbatch] += {"SEND_F": 1, "WAIT_F": -1}.get(action.kind, 0)
            assert sum(count > 0 for count in flying.values()) <= 2


@settings(deadline=None)
@given(orders())
def test_the_compute_actions_are_those_of_the_schedule(case):
    schedule, graph = case
    for rank in range(schedule.ranks):
        computed = [action for action in lower(schedule, graph).actions(rank) if action.peer is None]
        assert computed == list(schedule.actions(rank))


@settings(deadline=None)
@given(orders())
def test_both_ends_of_a_channel_agree(case):
    require_matching_ends(lower(*case))


@settings(deadline=None)
@given(orders())
def test_every_send_is_followed_by_one_wait(case):
    program = lower(*case)
    for rank in range(program.schedule.ranks):
        actions = list(program.actions(rank))
        sends = [action for action in actions if action.kind.startswith("SEND")]
        waits = [action for action in actions if action.kind.startswith("WAIT")]
        assert Counter(map(message_of, waits)) == Counter(sends)
        assert len(set(sends)) == len(sends)
        assert all(actions.index(message_of(wait)) < actions.index(wait) for wait in waits)


def posted_later(rows, program):
    """Each rank, place and earlier place of a receive that is not posted before the action before its use's."""
    for rank, row in enumerate(rows):
        heads = {turn.actions[0]: turn for turn in Turns(program.schedule, program.graph, rank) if turn.actions}
        places = [at for at, action in enumerate(row) if action in heads]
        for before, at in pairwise(places):
            waits = {receive_of(message) for message in heads[row[at]].waits}
            yield from ((rank, place, before) for place in range(before, at) if row[place] in waits)


@sampled(3)
@pytest.mark.parametrize("name", families.__all__)
def test_receives_are_posted_a_compute_action_ahead_unless_their_message_depends_on_it(name):
    program = lower(getattr(families, name)(ranks=4, microbatches=8))
    rows = [list(program.actions(rank)) for rank in range(4)]
    needless = 0
    for rank, place, before in posted_later(rows, program):
        row = rows[rank][:]
        row.insert(before, row.pop(place))
        moved = EditedProgram(program.schedule, program.graph, (*rows[:rank], row, *rows[rank + 1 :]))
        try:
            check(moved, device=True)
        except ScheduleError:
            continue
        needless += 1
    assert needless <= 2 * name.startswith("v_"), "a V has circles of circles, of which one rank too many may go on"


def test_ranks_that_wait_for_each_other_are_followed_once(monkeypatch):
    """Not all around the circle whenever one of them goes on: else the cost of an action grows with the ranks."""
    followed = list[int]()
    blocker = lowering._Play._blocker
    monkeypatch.setattr(lowering._Play, "_blocker", lambda play, rank: followed.append(1) or blocker(play, rank))
    streams = lower(replace(interleaved_1f1b(ranks=64, microbatches=16), ticks=None)).streams(range(64))
    actions = sum(1 for stream in streams for _ in stream)
    assert 0 < len(followed) < actions


@settings(deadline=None)
@given(orders(ranks=6, stages=9, microbatches=5))
def test_each_rank_alone_finds_its_part_of_the_program(case):
    """In a run, every process lowers for its own rank; all must resolve who waits for whom in the same way."""
    program = lower(*case)
    together = [list(stream) for stream in program.streams(range(program.schedule.ranks))]
    assert together == [list(program.actions(rank)) for rank in range(program.schedule.ranks)]


@settings(deadline=None)
@given(any_order_of_a_chain(walks=True))
def test_a_rank_between_others_needs_to_know_its_neighbors_only(how):
    program, actions, read = lower(how), Schedule.actions, set[int]()
    together = [list(stream) for stream in program.streams(range(how.ranks))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedule, "actions", lambda self, rank: read.add(rank) or actions(self, rank))
        for rank, expected in enumerate(together):
            read.clear()
            assert list(program.actions(rank)) == expected
            assert read == {max(0, rank - 1), rank, min(how.ranks - 1, rank + 1)}


def test_a_rank_of_a_ring_without_ticks_needs_to_know_all():
    program = lower(replace(interleaved_1f1b(ranks=5, microbatches=5), ticks=None))
    assert all(program._deciding(rank) == {*range(5)} for rank in range(5))


def test_ranks_that_a_ring_hides_decide_on_the_program_of_a_rank():
    """Two schedules differ in rank 3 only, to which rank 1 has no channel. In one of them, rank 1 must receive 4SEND_F0
    before it runs 5B2, since that waits for what rank 0 does after the send; in the other, only after 1F3, since the
    message depends on it. So without ticks, no rank of a ring can do without any other.
    """
    before = [F(s, i) for i in (1, 2) for s in range(8)] + [B(7, 1), B(6, 1), B(5, 1)]
    before += [F(0, 0), F(1, 0), F(2, 0), F(0, 3)]
    middle = {
        "one": [F(3, 0), F(4, 0), B(4, 1), B(3, 1), B(7, 2), B(6, 2), B(5, 2), F(1, 3), F(2, 3), F(3, 3)],
        "other": [B(7, 2), B(6, 2), B(5, 2), F(1, 3), F(2, 3), F(3, 3), F(3, 0), F(4, 0), B(4, 1), B(3, 1)],
    }
    after = [F(s, i) for i in (0, 3) for s in range(5 - (i > 0), 8)]
    after += [B(s, i) for i, top in ((1, 3), (2, 5), (0, 8), (3, 8)) for s in reversed(range(top))]
    whole = {name: [*before, *some, *after] for name, some in middle.items()}
    rows = {name: [[a for a in order if a.stage % 4 == rank] for rank in range(4)] for name, order in whole.items()}
    assert rows["one"][:3] == rows["other"][:3]
    how = interleaved_1f1b(4, 4)
    one, other = (lower(edit(how, some)) for some in rows.values())
    for program, first, second in ((one, "5RECV_F0<4", "5B2"), (other, "1F3", "5RECV_F0<4")):
        check(program, device=True)
        found = [*map(str, program.actions(1))]
        assert found.index(first) < found.index(second)
    for program, wrong in ((one, other), (other, one)):
        mixed = [list(program.actions(0)), list(wrong.actions(1)), list(program.actions(2)), list(program.actions(3))]
        with pytest.raises(ScheduleError, match="would never end"):
            check(EditedProgram(program.schedule, program.graph, tuple(mixed)), device=True)


RINGS = [families.interleaved_1f1b, families.breadth_first, families.interleaved_zero_bubble, families.gis]


@settings(deadline=None)
@given(schedules(RINGS) | any_order_of_a_chain(ticked=True))
def test_a_rank_of_a_schedule_with_ticks_needs_to_know_its_peers_only(how):
    program, actions, read = lower(how), Schedule.actions, set[int]()
    together = [list(stream) for stream in program.streams(range(how.ranks))]
    require_matching_ends(program)
    check(program, device=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedule, "actions", lambda self, rank: read.add(rank) or actions(self, rank))
        for rank, expected in enumerate(together):
            read.clear()
            assert list(program.actions(rank)) == expected
            assert read == {rank} | {b for a, b in program.channels if a == rank}


def test_a_rank_of_a_large_ring_is_lowered_with_its_neighbors(monkeypatch):
    read, actions = set[int](), Schedule.actions
    monkeypatch.setattr(Schedule, "actions", lambda self, rank: read.add(rank) or actions(self, rank))
    for make in RINGS:
        group = {"group": 2048} if make is families.gis else {}
        found = [*islice(lower(make(ranks=2048, microbatches=2048, **group)).actions(1000), 3000)]
        assert str(found[0]) == "1000RECV_F0<999"
    assert read == {999, 1000, 1001}


@by_night
@pytest.mark.parametrize("make", RINGS)
def test_the_ticks_of_rings_put_all_passes_in_order(make):
    for P, M, V in product(range(1, 10 if NIGHTLY else 6), range(1, 25 if NIGHTLY else 12), range(1, 5)):
        groups = {1024, P, (P + 1) // 2} if make is families.gis else {None}
        for group in groups:
            how = make(P, M, V) if group is None else make(P, M, V, group=group)
            check(how)


WRONG_TICKS = {
    "missing": lambda s: ([], []),
    "none": lambda s: None,
    "no_numbers": lambda s: ("ab", "cd"),
    "no_one_kind": lambda s: ([s, "a"], [8 - s, 9 - s]),
    "equal": lambda s: ([0, 0], [8 - s, 9 - s]),
    "against_values": lambda s: ([-s, 1 - s], [8 - s, 9 - s]),
    "against_cotangents": lambda s: ([s, s + 1], [8 + s, 9 + s]),
}


@pytest.mark.parametrize("ticks", [*WRONG_TICKS.values()], ids=[*WRONG_TICKS])
def test_wrong_ticks_are_refused(ticks):
    right = replace(gpipe(2, 2), ticks=lambda s: ([s, s + 1], [8 - s, 9 - s]))
    check(lower(right), device=True)
    wrong = replace(right, ticks=ticks)
    with pytest.raises(ScheduleError, match="ticked"):
        check(wrong)
    assert not can_be_played(wrong, chain(2))


def test_a_rank_whose_input_has_a_later_tick_is_not_lowered():
    program = lower(replace(gpipe(2, 2), ticks=lambda s: ([-s, 1 - s], [8 - s, 9 - s])))
    with pytest.raises(ScheduleError, match="1F0: waits for 0SEND_F0>1, but its sender has a later tick"):
        [*program.actions(1)]


@settings(deadline=None)
@given(orders())
def test_sends_follow_the_action_that_makes_the_value(case):
    schedule, graph = case
    for rank in range(schedule.ranks):
        before = last = None
        for action in lower(schedule, graph).actions(rank):
            if action.peer is None:
                before, last = last, action
            elif action.kind in ("SEND_F", "SEND_B"):
                pair = [before, last] if before and before.kind == "OVERLAP_F" else [last]
                makers = [one for one in pair if KINDS[one.kind].crosses == action.kind[-1]]
                assert [(one.stage, one.microbatch, one.slice) for one in makers] == [(*action[1:3], action.slice)]
            elif action.kind == "SEND_G":
                assert KINDS[last.kind].after == "done" or last.kind == "G"


class Impatient(Interpreter):
    """A run in which only the waits at the end may have to wait."""

    def run_rank(self, rank):
        for needed in super().run_rank(rank):
            action = parse(self.store.at[rank].split(", ")[1])
            assert not action.kind.startswith("WAIT") or action in trailing_waits(self.program, rank), action
            yield needed


def trailing_waits(program, rank):
    return list(takewhile(lambda action: action.kind.startswith("WAIT"), reversed(list(program.actions(rank)))))


@settings(deadline=None)
@given(orders(), st.sampled_from([fifo, rendezvous]))
def test_a_wait_after_proof_that_the_message_arrived_never_blocks(case, network):
    schedule, graph = case
    program = lower(schedule, graph)
    streams = [program.actions(rank) for rank in range(schedule.ranks)]
    run = Impatient(schedule, graph, streams, Links(network))
    run.program = program
    require_whole(run.run(), schedule, graph)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (((F(0, 0),), (F(1, 0), F(1, 1))), "1F1: waits for 0SEND_F1>1, which rank 0 never runs, or runs only once"),
        (((F(0, 0),), (F(1, 0), F(1, 0))), "1F0: waits for 0SEND_F0>1, which rank 0 never runs, or runs only once"),
        (
            ((B(0, 0), F(0, 0)), (F(1, 0), B(1, 0))),
            "0B0: waits for 1SEND_B0>0, but its sender needs 0SEND_F0>1 first",
        ),
    ],
)
def test_schedules_that_cannot_be_lowered_are_refused(rows, why):
    program = lower(edit(gpipe(2, 2), rows))
    with pytest.raises(ScheduleError, match=why):
        [list(program.actions(rank)) for rank in (1, 0)]


@pytest.mark.parametrize("thing", ["0F0", ("F", 0, 0), ("F", 0, 0, None, None), None, 3])
@pytest.mark.parametrize("how", [gpipe(2, 1), forward_only(2, 1)])
def test_what_is_not_an_action_is_refused_by_its_place(how, thing):
    why = re.escape(f"rank 0, position 1, {thing}: got {thing!r}, expected an action [rule: compute_only].")
    program = lower(edit(how, ((F(0, 0), thing, B(0, 0)), (F(1, 0), B(1, 0)))))
    with pytest.raises(ScheduleError, match=why):
        list(program.actions(0))
    with pytest.raises(ScheduleError, match=why):
        check(program.schedule)


def test_a_fused_action_that_comes_twice_is_refused():
    how = dualpipe_v(ranks=3, microbatches=6)
    rows = [list(how.actions(rank)) for rank in range(how.ranks)]
    again = parse("1OVERLAP_F4")
    rows[1].insert(rows[1].index(again), again)
    with pytest.raises(ScheduleError, match="1OVERLAP_F4: has already run"):
        [*lower(edit(how, rows)).actions(0)]


def most_alive(microbatches):
    """The most actions that exist at once while a rank in the middle is lowered, looked at every now and then."""
    gc.collect()
    before, most = alive(), 0
    for at, _ in enumerate(lower(one_f_one_b(ranks=4, microbatches=microbatches)).actions(1)):
        if at % microbatches == 0:
            most = max(most, alive() - before)
    return most


def alive():
    return sum(type(thing) is Action for thing in gc.get_objects())


@by_night
def test_memory_of_lowering_does_not_grow_with_the_number_of_microbatches():
    assert 0 < most_alive(1024 if NIGHTLY else 256) <= most_alive(64) + 10 < 60


def test_a_graph_of_another_size_is_refused():
    with pytest.raises(GraphError, match="expected 2"):
        lower(gpipe(2, 2), chain(3))
