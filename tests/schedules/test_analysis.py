# SPDX-License-Identifier: Apache-2.0
"""Simulated times obey their laws and are streamed; critical paths; costs that are read off timelines."""

import gc
import json
import tracemalloc
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    KINDS,
    Action,
    B,
    C,
    Costs,
    F,
    Graph,
    I,
    Link,
    R,
    ScheduleError,
    SizeError,
    Sizes,
    Span,
    Timeline,
    W,
    chain,
    check,
    critical_path,
    drawing,
    dualpipe,
    estimate,
    forward_only,
    gpipe,
    interleaved_1f1b,
    lower,
    memory_over_time,
    one_f_one_b,
    pipedream,
    recompute,
    reduce_gradients,
    schedule,
    seq_1f1b,
    simulate,
    spans,
    split_backward,
    summarize,
    update_weights,
    zb_h1,
)
from schedules.drawing import text, texts
from schedules.drawing.strips import make_strip
from schedules.errors import TimelineError
from schedules.files import pipelining, pipelining_2_15
from schedules.files.csv import table
from schedules.language.actions import COLLECTIVES
from schedules.playing.outputs import inputs_of, output_of
from schedules.playing.rows import edit
from schedules.testing import collective_orders, costs, orders, require_bounds, schedules
from tests.common.sizes import by_night

# ------------------------------------- Simulated times agree with published figures, obey their laws, and are streamed

both = schedules([gpipe, one_f_one_b])


@settings(deadline=None)
@given(orders(), costs())
def test_nothing_starts_before_its_data_or_before_the_rank_is_free(case, times):
    schedule, graph = case
    home, ended, rows = schedule.placement.home, {}, [[] for _ in range(schedule.ranks)]
    busy = [[] for _ in rows]  # without moves of memory, which go on beside
    for span in spans(schedule, times, graph):
        kind, s, i, _, part = span.action
        rows[span.rank].append(span)
        share = schedule.slices if KINDS[kind].after else 1
        assert span.end - span.start == pytest.approx(times.time(kind, s) / share)
        tokens = inputs_of(span.action, graph)
        arrivals = [ended[*token, part] + times.comm * (home(token[1], i) != span.rank) for token in tokens]
        if KINDS[kind].before == "forward":
            arrivals += [ended[token] for token in [("RELOAD", s, i, part)] if token in ended]
        free = busy[span.rank][-1].end if busy[span.rank] else 0
        assert span.start >= max([free, *arrivals])
        ended[*output_of(span.action), part] = span.end
        if KINDS[kind].beside:
            continue
        busy[span.rank].append(span)
        if kind not in ("G", "U", "OVERLAP_F"):
            assert span.start == max([free, *arrivals]), "and no later than it must"
        if len(busy[span.rank]) > 1 and (opener := busy[span.rank][-2].action).kind == "OVERLAP_F":
            ended[*output_of(opener), opener.slice] = span.end  # what a pair makes leaves when it ends
    for rank, row in enumerate(rows):
        assert [span.action for span in row] == list(schedule.actions(rank))
        assert all(a.end <= b.start for a, b in pairwise(busy[rank]))


@settings(deadline=None)
@given(orders(), costs())
def test_no_timeline_is_shorter_than_its_lower_bound(case, times):
    require_bounds(*case, times)


@given(both, costs())
def test_faster_transfers_never_make_a_schedule_slower(schedule, times):
    free = Costs(times.F, times.B, times.I, times.W, comm=0)
    assert simulate(schedule, free).makespan <= simulate(schedule, times).makespan


@given(both, costs())
def test_splitting_without_deferring_never_makes_a_schedule_slower(schedule, times):
    whole = Costs(times.F, times.I + times.W, times.I, times.W, times.comm)
    assert simulate(split_backward(schedule), whole).makespan <= simulate(schedule, whole).makespan


def test_costs_may_differ_from_stage_to_stage():
    times = Costs(F=(1, 5), B=2)
    assert [span.end - span.start for span in spans(gpipe(2, 1), times)] == [1, 5, 2, 2]


def test_a_measured_timeline_is_summarized_like_a_simulated_one():
    s = one_f_one_b(3, 4)
    late = (span._replace(start=span.start + 100, end=span.end + 100) for span in spans(s, Costs()))
    assert summarize(late, s) == simulate(s)


def test_activations_are_held_until_the_weight_half_is_done():
    deferred = (F(0, 0), I(0, 0), F(0, 1), I(0, 1), W(0, 0), W(0, 1))
    assert simulate(edit(gpipe(1, 2), (deferred,))).peak_memory == (2,)
    assert simulate(split_backward(one_f_one_b(1, 2))).peak_memory == (1,)


@pytest.mark.parametrize(
    ("rows", "where", "rule", "why"),
    [
        (("0F0", "1F1"), (1, 0, "1F1"), "ordered", "needs 0F1, which rank 0 never runs"),
        (("0F0,0B0,0F1", "1F1,1F0,1B0"), (0, 1, "0B0"), "ordered", "wait for each other"),
        (
            ("2F0,0F0", "1F0"),
            (0, 0, "2F0"),
            "ordered",
            "for each other: rank 0 at 2F0 needs 1F0, rank 1 at 1F0 needs 0F0",
        ),
    ],
)
def test_a_block_is_traced_to_its_cause(rows, where, rule, why):
    with pytest.raises(ScheduleError, match=why) as caught:
        list(spans(table(rows), Costs()))
    assert (caught.value.rank, caught.value.position, str(caught.value.action)) == where
    assert caught.value.rule == rule


def test_only_compute_actions_are_simulated():
    with pytest.raises(ScheduleError) as caught:
        simulate(edit(gpipe(2, 2), ((F(0, 0),), (Action("SEND_F", 1, 0, 0),))))
    assert caught.value.rule == "compute_only"


def peak(use, microbatches):
    gc.collect()
    tracemalloc.start()
    use(one_f_one_b(ranks=4, microbatches=microbatches))
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return used


@by_night
@pytest.mark.parametrize("use", [simulate, check])
def test_memory_does_not_grow_with_the_number_of_microbatches(use):
    peak(use, 16)
    assert peak(use, 1024) < 1.5 * peak(use, 64)


def test_memory_in_bytes_counts_weights_activations_and_residuals():
    split = edit(gpipe(1, 2), ((F(0, 0), F(0, 1), I(0, 0), I(0, 1), W(0, 0), W(0, 1)),))
    assert simulate(split, sizes=Sizes(activation=10, residual=3, weight=100)).peak_memory == (120,)
    late = edit(gpipe(1, 2), ((F(0, 0), I(0, 0), F(0, 1), I(0, 1), W(0, 0), W(0, 1)),))
    assert simulate(late, sizes=Sizes(activation=10, residual=3, weight=100)).peak_memory == (113,)
    again = edit(gpipe(1, 2), ((C(0, 0), C(0, 1), R(0, 0), B(0, 0), R(0, 1), B(0, 1)),))
    assert simulate(again, sizes=Sizes(activation=10, inputs=1)).peak_memory == (2 + 9,)
    by_version = simulate(pipedream(3, 8), sizes=Sizes(activation=0, weight=1))
    assert by_version.peak_memory == (3, 2, 1)


def test_links_may_differ_and_jitter_is_drawn_from_a_seed():
    s = one_f_one_b(2, 3)
    slow = Costs(comm=Link(latency=1, bandwidth=2, bytes=(4, 6), slow=(((1, 0), 10),)))
    first, *_ = [span for span in spans(s, slow) if span.rank == 1]
    assert first.start == 1 + 1 + 4 / 2
    back = next(span for span in spans(s, slow) if span.action == B(0, 0))
    sent = next(span for span in spans(s, slow) if span.action == B(1, 0))
    assert back.start == sent.end + (1 + 6 / 2) * 10
    one, again, other = (simulate(s, Costs(jitter=0.2, seed=seed)) for seed in (1, 1, 2))
    assert one == again != other
    exact = {span.action: span.end - span.start for span in spans(s, Costs())}
    drawn = [(span.end - span.start) / exact[span.action] for span in spans(s, Costs(jitter=0.2, seed=1))]
    assert all(0.8 - 1e-9 <= factor <= 1.2 + 1e-9 for factor in drawn)
    assert len({round(factor, 9) for factor in drawn}) == len(drawn)


@pytest.mark.parametrize("numbers", [(1,), (1, 2), (1, 2, 3, 4)])
def test_tuples_of_costs_and_sizes_need_one_number_per_stage(numbers):
    s = one_f_one_b(ranks=3, microbatches=4)
    for costs_ in (Costs(B=numbers), Costs(comm=Link(bytes=numbers))):
        with pytest.raises(SizeError, match=r"got \w+=\(.*expected a number, or a tuple of 3: one for each stage"):
            simulate(s, costs_)
    for sizes in (Sizes(activation=numbers), Sizes(weight=numbers)):
        with pytest.raises(SizeError, match="a tuple of 3"):
            simulate(s, sizes=sizes)
        with pytest.raises(SizeError, match="a tuple of 3"):
            summarize(spans(s, Costs()), s, sizes)


def test_without_a_backward_no_activations_are_kept():
    s = forward_only(ranks=2, microbatches=3)
    assert simulate(s).peak_memory == summarize(spans(s, Costs()), s).peak_memory == (0, 0)


def test_no_time_has_no_idle_share():
    timeline = Timeline(0.0, 0.0, (0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
    assert (timeline.bubble, timeline.bubble_of_busiest, timeline.idle) == (0, 0, (0, 0))


def test_the_bubble_is_the_idle_share_of_all_ranks():
    timeline = simulate(one_f_one_b(4, 8), Costs(F=(9, 1, 1, 1), B=(18, 2, 2, 2)))
    assert (timeline.busy, timeline.makespan) == ((216, 24, 24, 24), 216)
    assert (timeline.bubble, timeline.bubble_of_busiest) == (pytest.approx(2 / 3), 0)


@pytest.mark.parametrize(
    ("given", "times"),
    [
        ({}, (2, 1, 1)),
        ({"B": 6}, (6, 3, 3)),
        ({"B": 6, "I": 4}, (6, 4, 2)),
        ({"B": 6, "W": 7}, (6, 0, 7)),
        ({"I": 3}, (4, 3, 1)),
        ({"I": 3, "W": 2}, (5, 3, 2)),
        ({"B": 6, "I": 2, "W": 3}, (6, 2, 3)),
        ({"B": (6, 2), "I": (1, 1)}, (6, 1, 5)),
    ],
)
def test_halves_follow_the_whole_and_the_whole_its_halves(given, times):
    assert tuple(Costs(F=3, **given).time(kind, 0) for kind in "BIW") == times
    assert [Costs(F=3, **given).time(kind, 0) for kind in "CR"] == [3, 3]


def test_microbatches_and_slices_may_differ():
    """ChunkFlow, arXiv 2503.02356: chunks of lengths 4, 2, 1, 1, and of equal ones."""
    for lengths, idle in (((4, 2, 1, 1), 57.14), ((2, 2, 2, 2), 42.86)):
        times = Costs(F=1, B=2, microbatches=lengths)
        assert round(100 * simulate(one_f_one_b(4, 4), times).bubble, 2) == idle
    uneven = Costs(F=4, B=8, slices=(1, 3), microbatches=(1, 2))
    ends = [span.end - span.start for span in spans(seq_1f1b(1, 2, slices=2), uneven)]
    assert ends == [1, 3, 6, 2, 2, 6, 12, 4]
    for wrong in (Costs(microbatches=(1, 2)), Costs(slices=(1, 2, 3))):
        with pytest.raises(SizeError, match=r"expected a tuple of \d: one for each of the schedule's"):
            simulate(seq_1f1b(2, 3, slices=2), wrong)


@pytest.mark.parametrize("rows", [("0F0", "1F0,1B0"), ("0F0,0B0", "1B0,1F0"), ("0F0,0F0,0B0", "1F0,1B0")])
def test_simulate_refuses_what_check_refuses(rows):
    errors = []
    for refuse in (check, simulate):
        with pytest.raises(ScheduleError) as caught:
            refuse(table(rows))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_a_peak_without_duration_counts():
    for kinds in ({"F": 0, "B": 0}, {"F": 0, "I": 0, "W": 0, "B": 0}, {"F": 1, "B": 0}, {"F": 0, "B": 2}):
        s, times = gpipe(ranks=2, microbatches=3), Costs(**kinds)
        for drawn in (
            memory_over_time(spans(s, times), s),
            tuple(make_strip(spans(s, times)).memory_levels(rank, None) for rank in range(2)),
        ):
            assert [max(level for _, level in rank) for rank in drawn] == [3, 3]
            assert [rank[-1][1] for rank in drawn] == [0, 0]
    s = one_f_one_b(ranks=1, microbatches=3)
    assert memory_over_time(spans(s, Costs(F=0, B=0)), s) == (((0.0, 1.0), (0.0, 0.0)),)


@settings(deadline=None)
@given(orders(), st.sampled_from([0, 1]), st.sampled_from([0, 1]), st.sampled_from([0, 2]))
def test_the_peak_is_the_highest_level_if_some_actions_take_no_time(case, F, I, W):  # noqa: E741 - the action's name
    schedule, graph = case
    timeline = list(spans(schedule, Costs(F=F, B=I + W, I=I, W=W), graph))
    levels = memory_over_time(timeline, schedule)
    peaks = [max((level for _, level in rank), default=0) for rank in levels]
    assert peaks == pytest.approx(simulate(schedule, Costs(), graph).peak_memory)


@settings(deadline=None)
@given(orders(), costs())
def test_the_peak_is_the_highest_level_over_time(case, times):
    schedule, graph = case
    sizes = Sizes(activation=4, inputs=1, residual=2)
    for some in (None, sizes):
        levels = memory_over_time(spans(schedule, times, graph), schedule, some)
        peaks = [max((level for _, level in rank), default=0) for rank in levels]
        assert peaks == pytest.approx(simulate(schedule, times, graph, some).peak_memory)
        assert all(rank[-1][1] == pytest.approx(0) for rank in levels if rank)
        assert all(a[0] < b[0] or a[1] > b[1] for rank in levels for a, b in pairwise(rank)), "a moment's peak"


def test_costs_may_be_numbers_of_numpy():
    numpy = pytest.importorskip("numpy")
    how = one_f_one_b(ranks=2, microbatches=2)
    assert simulate(how, Costs(F=numpy.float32(1), B=(numpy.int64(2), 2))).makespan == simulate(how).makespan


# ------------------------- The critical path is unbroken, as long as the makespan, and shortening it shortens the step


@settings(deadline=None)
@given(orders() | collective_orders(), costs(), st.integers(0, 8), st.integers(0, 8))
def test_the_path_is_unbroken_and_as_long_as_the_makespan(case, times, gather, reduce):
    schedule, graph = case
    times = replace(times, UNSHARD=gather / 4, REDUCE_GRAD=reduce / 4, G=0.25, U=0.5)
    path = critical_path(schedule, times, graph)
    first, last = path.stretches[0].span, path.stretches[-1].span
    assert first.start == 0
    assert last.end == pytest.approx(simulate(schedule, times, graph).makespan)
    for before, after in pairwise(path.stretches):
        assert before.span.end + after.transfer == pytest.approx(after.span.start)
        if before.span.rank != after.span.rank and after.span.action.kind not in ("G", "U", "OVERLAP_F", *COLLECTIVES):
            actions = list(schedule.actions(before.span.rank))
            at = actions.index(before.span.action)
            pair = [one for one in actions[max(0, at - 1) : at] if one.kind == "OVERLAP_F"]
            made = {one.stage for one in (before.span.action, *pair)}
            assert made.intersection(token[1] for token in inputs_of(after.span.action, graph))
    assert sum(share.time for share in path.shares) == pytest.approx(last.end)


def test_shortening_an_action_on_the_path_shortens_the_step():
    slow = Costs(F=(1, 1, 5, 1), B=2)
    path = critical_path(one_f_one_b(ranks=4, microbatches=8), slow)
    share = path.shares[0]
    assert (share.what, share.time, share.passes) == ("F of stage 2", 40, 8)
    faster = Costs(F=(1, 1, 4, 1), B=2)
    s = one_f_one_b(ranks=4, microbatches=8)
    assert simulate(s, slow).makespan - simulate(s, faster).makespan == share.passes


def test_transfers_are_on_the_path():
    path = critical_path(gpipe(ranks=2, microbatches=1), Costs(comm=10))
    assert [(share.what, share.time) for share in path.shares[:2]] == [
        ("transfers from rank 0 to rank 1", 10),
        ("transfers from rank 1 to rank 0", 10),
    ]


def test_the_path_is_the_same_in_any_unit_of_time():
    s = one_f_one_b(ranks=3, microbatches=4)
    paths = [critical_path(s, Costs(F=unit, B=2 * unit, comm=64 * unit)).stretches for unit in (1, 2.0**-40)]
    first, second = ([stretch.span.action for stretch in path] for path in paths)
    assert first == second


def test_an_empty_timeline_has_no_path():
    @schedule()
    def nothing(rank, ranks, microbatches):
        yield from ()

    assert critical_path(nothing(ranks=2, microbatches=1)).stretches == ()


# -------- Collectives run one after the other, beside the rank's other actions, and only what uses their results waits

GATHERED = table(
    rows=("0UNSHARD0,1UNSHARD0,0F0,0RESHARD0,1F0,1B0,1RESHARD0,0UNSHARD1,0B0,0REDUCE_GRAD0,0RESHARD1,1REDUCE_GRAD0",)
)
COSTS = Costs(UNSHARD=2, REDUCE_GRAD=3)


def test_a_rank_waits_for_the_weights_of_the_stage_that_it_runs():
    assert drawing.text(GATHERED, COSTS).splitlines() == [
        "rank 0 |.   .   0F0e.   1F0 1B0    e.   .   0B0    e.   .   .   .   .   .   |",
        "       |0A0     1A0     .   .   .   0A1     .   .   0D0         1D0         |",
    ]


def test_reductions_go_on_beside_the_backwards():
    s = reduce_gradients(interleaved_1f1b(ranks=2, microbatches=2, chunks=2))
    assert drawing.text(s, Costs(REDUCE_GRAD=3)).splitlines() == [
        "rank 0 |0F0 0F1 2F0 2F1 .   .   2B0     .   2B1     0B0     0B1     .   .   .   |",
        "       |.   .   .   .   .   .   .   .   .   .   .   2D1         .   0D1         |",
        "rank 1 |.   1F0 1F1 3F0 3B0     3F1 3B1     1B0     1B1     .   .   .   .   .   |",
        "       |.   .   .   .   .   .   .   .   .   3D1         .   1D1         .   .   |",
    ]


def test_an_update_waits_for_the_reduction():
    s = update_weights(reduce_gradients(interleaved_1f1b(ranks=1, microbatches=1, chunks=1)))
    assert simulate(s, Costs(REDUCE_GRAD=3, U=1)).makespan == 1 + 2 + 3 + 1


def test_gathered_weights_count_while_they_are_gathered():
    timeline = simulate(GATHERED, COSTS, sizes=Sizes(gathered=(5, 3), weight=1))
    assert timeline.peak_memory == (2 + 8 + 1,)  # two shards; both stages gathered, and what 0F0 saves
    levels = memory_over_time(spans(GATHERED, COSTS), GATHERED, Sizes(gathered=(5, 3)))
    assert max(level for _, level in levels[0]) == 8 + 1
    assert levels[0][-1][1] == 0


def test_the_critical_path_goes_through_the_collectives():
    path = critical_path(GATHERED, COSTS)
    names = " ".join(str(stretch.span.action) for stretch in path.stretches)
    assert names == "0UNSHARD0 1UNSHARD0 1F0 1B0 1RESHARD0 0UNSHARD1 0B0 0REDUCE_GRAD0 1REDUCE_GRAD0"


def test_the_critical_path_of_an_update_goes_through_its_own_replica_of_a_shared_gradient():
    """2U0 takes 1G0 from rank 2. It starts while 1G1, of the other replica, is still on its way to 2U1."""
    s = table(rows=("1F1,2F0,2B0,1B1,1G1,1U1,2G0,2U0", "0F0,0F1,2F1,2B1,2G1,2U1,0B1,0B0,0U1", "1F0,1B0,1G0,1U0"))
    times = Costs(F=2, B=0, comm=1, U=1)
    graph = Graph(3, chain(3).values, chain(3).cotangents, frozenset({(0, 1), (1, 2)}))
    path = critical_path(s, times, graph)
    length = sum(span.end - span.start + transfer for span, transfer in path.stretches)
    assert length == simulate(s, times, graph).makespan == 16


@settings(deadline=None)
@given(collective_orders(), st.integers(0, 8), st.integers(0, 8))
def test_totals_are_those_of_the_spans(case, gather, reduce):
    schedule, graph = case
    times, sizes = Costs(UNSHARD=gather / 4, REDUCE_GRAD=reduce / 4, U=0.5), Sizes(gathered=4, weight=1)
    check(schedule, graph)
    timeline = list(spans(schedule, times, graph))
    assert summarize(timeline, schedule, sizes) == simulate(schedule, times, graph, sizes)
    estimated = estimate(schedule, timeline)
    assert {estimated.UNSHARD, estimated.REDUCE_GRAD} <= {0, *_each(gather / 4, schedule), *_each(reduce / 4, schedule)}


def _each(time, schedule):
    """Return what `estimate` may make of one time: it for all stages, or 0 for those without."""
    return set(product((0, time), repeat=schedule.stages))


def test_a_trace_has_a_thread_for_the_collectives():
    events = json.loads(drawing.trace({"": spans(GATHERED, COSTS)}))["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {0: "rank 0", 1: "rank 0, beside"}
    assert {event["name"] for event in events if event["ph"] == "X" and event["tid"] == 1} == {
        *(
            "0UNSHARD0",
            "1UNSHARD0",
            "0UNSHARD1",
            "0RESHARD0",
            "1RESHARD0",
            "0RESHARD1",
            "0REDUCE_GRAD0",
            "1REDUCE_GRAD0",
        )
    }


def test_torch_gets_the_collectives_that_a_program_has():
    assert pipelining(lower(GATHERED), 0) == (
        "0UNSHARD,1UNSHARD,0F0,0RESHARD,1F0,1B0,1RESHARD,0UNSHARD,0B0,0REDUCE_GRAD,0RESHARD,1REDUCE_GRAD"
    )
    assert pipelining(GATHERED, 0) == "0F0,1F0,1B0,0B0"
    reduced = reduce_gradients(interleaved_1f1b(ranks=1, microbatches=1, chunks=2))
    assert pipelining_2_15(lower(reduced), 0) == (
        "0UNSHARD,0F0,1UNSHARD,1F0,1B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,"
        "0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD"
    )


# ------------------------------------------------- Costs that are read off a timeline are those with which it was made

TIMES = st.floats(0.5, 4)


@st.composite
def costs_by_stage(draw, stages):
    """Times that differ from stage to stage; the halves of a backward take half of it each."""
    by_stage = {kind: tuple(draw(TIMES) for _ in range(stages)) for kind in ("F", "B")}
    halves = {kind: tuple(time / 2 for time in by_stage["B"]) for kind in "IW"}
    return Costs(**by_stage, **halves, comm=draw(st.just(0.0) | TIMES))


def measure(how, costs):
    """The simulated timeline, with a span of a wait wherever a rank of a chain waits for a value."""
    last = [0.0] * how.ranks
    for span in spans(how, costs):
        what = KINDS[span.action.kind].crosses
        source = span.action.stage + {"F": -1, "B": 1, "": 0}[what]
        if what and 0 <= source < how.stages and span.start > last[span.rank]:
            wait = Action(f"RECV_{what}", span.action.stage, span.action.microbatch, source, span.action.slice)
            yield Span(span.rank, wait, last[span.rank], span.start)
        last[span.rank] = span.end
        yield span


def close(costs):
    return {name: pytest.approx(value) for name, value in vars(costs).items() if value is not None}


@given(st.data(), schedules([gpipe, one_f_one_b, zb_h1, interleaved_1f1b]))
def test_costs_are_recovered_from_the_timeline_they_made(data, how):
    costs = data.draw(costs_by_stage(how.stages))
    found = estimate(how, measure(how, costs))
    if how.ranks > 1:
        assert vars(found) | {"comm": 0} == close(costs) | {
            "C": None,
            "R": None,
            "OVERLAP_F": None,
            "RELOAD": None,
            "comm": 0,
        }
        assert found.comm == pytest.approx(costs.comm), "the first value of a step is always waited for"


@given(st.data(), schedules([gpipe, one_f_one_b]))
def test_simulated_waits_are_the_idle_time_of_a_rank(data, how):
    """Whether there are spans of them, or not."""
    costs = data.draw(costs_by_stage(how.stages))
    found, want = summarize(measure(how, costs), how), simulate(how, costs)
    assert found.waited == pytest.approx(want.waited)
    assert want.waited == pytest.approx(
        tuple(idle - before for idle, before in zip(want.idle, outside(how, costs), strict=True))
    )
    assert (found.makespan, found.span, *found.busy) == pytest.approx((want.makespan, want.span, *want.busy))


@given(schedules([gpipe, one_f_one_b, interleaved_1f1b]))
def test_a_picture_with_waits_differs_only_where_a_rank_is_idle(how):
    costs = Costs(F=1, B=2, comm=1)
    picture = texts({"": measure(how, costs)})
    assert picture.replace("-", ".") == text(how, costs)
    for line in picture.splitlines():
        assert "." not in line[: line.rindex("B")], "each was waited for"


def outside(how, costs):
    """Per rank, the time before its first action and after its last."""
    rows = [[span for span in spans(how, costs) if span.rank == rank] for rank in range(how.ranks)]
    end = max(row[-1].end for row in rows)
    return [row[0].start + end - row[-1].end for row in rows]


def test_transfers_that_waited_for_something_else_do_not_count():
    """Before a rank's first action and after its last."""
    how = gpipe(ranks=2, microbatches=1)
    timeline = [*spans(how, Costs()), Span(0, Action("WAIT_F", 0, 0, 1), 6, 9)]
    assert summarize(timeline, how) == summarize(spans(how, Costs()), how).__class__(6, 6, (3, 3), (0, 0), (1, 1))


def test_all_kinds_and_whole_microbatches_of_slices():
    costs = Costs(F=1, B=2, I=1.5, W=0.5, C=3, R=4, OVERLAP_F=5, G=6)
    for how in (recompute(gpipe(2, 3)), seq_1f1b(2, 3, slices=2), dualpipe(4, 4)):
        found = estimate(how, spans(how, costs))
        done = {(span.action.kind, span.action.stage) for span in spans(how, costs)}
        assert all(found.time(*one) == costs.time(*one) for one in done)
        assert simulate(how, found) == simulate(how, costs)


def test_costs_of_halves_and_whole_backwards_are_derived_from_each_other():
    costs = Costs(F=1, B=3, I=2, W=1)
    whole, split = gpipe(2, 2), split_backward(gpipe(2, 2))
    found = estimate(whole, spans(whole, costs))
    assert (found.B, found.I, found.W) == ((3, 3), (1.5, 1.5), (1.5, 1.5))
    found = estimate(split, spans(split, costs))
    assert (found.B, found.I, found.W) == ((3, 3), (2, 2), (1, 1))


def test_disturbed_actions_and_hidden_transfers_do_not_count():
    how = one_f_one_b(2, 5)
    costs = Costs(F=1, B=2, comm=0.5)
    timeline = list(measure(how, costs))
    slow = [span._replace(end=span.end + 100) if span.action == F(0, 4) else span for span in timeline]
    assert estimate(how, slow) == estimate(how, timeline)
    late = [Span(1, Action("RECV_F", 1, i, 0), 500, 600) for i in range(5)]  # they had been sent long before
    unknown = [Span(1, Action("RECV_G", 1, 4, 0), 500, 600), Span(0, Action("WAIT_F", 0, 4, 1), 500, 600)]
    actions = [span for span in timeline if not span.waits]
    assert estimate(how, [*actions, *late, *unknown]).comm == 0


def test_a_fused_pair_sends_when_both_are_done():
    how, wait = gpipe(2, 1), Span(1, Action("RECV_F", 1, 0, 0), 0, 5)
    plain = list(spans(how, Costs()))
    fused = [s._replace(action=s.action._replace(kind="OVERLAP_F")) if s.action == F(0, 0) else s for s in plain]
    assert (estimate(how, [*plain, wait]).comm, estimate(how, [*fused, wait]).comm) == (4, 0)


def test_steps_are_pooled_but_not_mixed():
    how = one_f_one_b(2, 3)
    steps = [list(measure(how, Costs(F=time, B=2, comm=1))) for time in (1, 1.25, 1.5)]
    found = estimate(how, *steps)
    assert found.F == (1.25, 1.25)
    assert found.comm == 1
    assert estimate(how, [span for step in steps for span in step]).comm < 1, "the steps look like one"
    assert estimate(how, iter(steps[0])) == estimate(how, steps[0])


def test_a_stage_without_spans_is_named():
    how = gpipe(2, 1)
    with pytest.raises(TimelineError, match=r"stage 1: got spans of nothing, expected a forward and a backward.*all"):
        estimate(how, (span for span in spans(how, Costs()) if span.rank == 0))
    with pytest.raises(TimelineError, match=r"stage 0: got spans of \['F'\]"):
        estimate(how, (span for span in spans(how, Costs()) if span.action.kind == "F"))


@schedule(backward=False)
def alone(rank, ranks, microbatches):
    yield from (F(rank, i) for i in range(microbatches))


def test_forwards_need_no_backwards():
    how = alone(2, 2)
    assert estimate(how, spans(how, Costs(F=3))).F == (3, 3)
