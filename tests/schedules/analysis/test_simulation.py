# SPDX-License-Identifier: Apache-2.0
"""Simulated times agree with published figures, obey their laws, and are streamed."""

import gc
import tracemalloc
from itertools import pairwise

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
    I,
    Link,
    R,
    ScheduleError,
    SizeError,
    Sizes,
    W,
    check,
    forward_only,
    gpipe,
    memory_over_time,
    one_f_one_b,
    pipedream,
    schedule,
    simulate,
    spans,
    split_backward,
    summarize,
)
from schedules.drawing.strips import make_strip
from schedules.replay.outputs import inputs_of, output_of
from schedules.testing import costs, orders, require_bounds, schedules
from tests.common.rows import edit

both = schedules([gpipe, one_f_one_b])


@pytest.mark.parametrize(
    ("factory", "comm", "makespan", "idle", "peak"),
    [
        (gpipe, 0, 33, 9, (8, 8, 8, 8)),
        (one_f_one_b, 0, 33, 9, (4, 3, 2, 1)),
        (one_f_one_b, 0.5, 41, 17, (4, 3, 2, 1)),
        (one_f_one_b, 1, 49, 25, (4, 3, 2, 1)),
    ],
)
def test_four_ranks_eight_microbatches(factory, comm, makespan, idle, peak):
    timeline = simulate(factory(ranks=4, microbatches=8), Costs(F=1, B=2, comm=comm))
    assert timeline.makespan == makespan
    assert timeline.makespan - max(timeline.busy) == idle
    assert timeline.peak_memory == peak


@pytest.mark.parametrize(
    ("microbatches", "F", "I", "W", "comm", "rate"),
    [
        (24, 18.522, 18.086, 9.337, 0.601, 0.2431),
        (32, 18.513, 18.086, 9.331, 0.626, 0.1985),
        (64, 18.546, 18.097, 9.321, 0.762, 0.1240),
        (24, 29.718, 29.444, 19.927, 0.527, 0.2347),
        (32, 29.802, 29.428, 19.530, 0.577, 0.1898),
        (64, 29.935, 29.621, 19.388, 0.535, 0.1091),
    ],
)
def test_bubble_rates_of_1f1b_on_eight_ranks(microbatches, F, I, W, comm, rate):  # noqa: E741 - the action's name
    """arXiv 2401.10241, table 5: measured times of the 1.5B and the 6.2B model."""
    timeline = simulate(one_f_one_b(ranks=8, microbatches=microbatches), Costs(F=F, B=I + W, comm=comm))
    assert round(timeline.bubble, 4) == rate


@given(both)
def test_idle_time_without_transfers_matches_the_docstrings(schedule):
    timeline = simulate(schedule, Costs(F=1, B=2))
    assert timeline.makespan - max(timeline.busy) == (schedule.ranks - 1) * 3


@given(schedules([one_f_one_b]))
def test_peak_memory_of_1f1b_matches_the_docstring(schedule):
    P, M = schedule.ranks, schedule.microbatches
    assert simulate(schedule).peak_memory == tuple(min(P - rank, M) for rank in range(P))


@settings(deadline=None)
@given(orders(), costs())
def test_nothing_starts_before_its_data_or_before_the_rank_is_free(case, times):
    schedule, graph = case
    home, ended, rows = schedule.placement.home, {}, [[] for _ in range(schedule.ranks)]
    for span in spans(schedule, times, graph):
        kind, s, i, _, part = span.action
        rows[span.rank].append(span)
        share = schedule.slices if KINDS[kind].after else 1
        assert span.end - span.start == pytest.approx(times.time(kind, s) / share)
        tokens = inputs_of(span.action, graph)
        arrivals = [ended[*token, part] + times.comm * (home(token[1], i) != span.rank) for token in tokens]
        free = rows[span.rank][-2].end if len(rows[span.rank]) > 1 else 0
        assert span.start >= max([free, *arrivals])
        if kind not in ("G", "U", "OVERLAP_F"):
            assert span.start == max([free, *arrivals]), "and no later than it must"
        ended[*output_of(span.action), part] = span.end
        if len(rows[span.rank]) > 1 and (opener := rows[span.rank][-2].action).kind == "OVERLAP_F":
            ended[*output_of(opener), opener.slice] = span.end  # what a pair makes leaves when it ends
    for rank, row in enumerate(rows):
        assert [span.action for span in row] == list(schedule.actions(rank))
        assert all(a.end <= b.start for a, b in pairwise(row))


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
    ("rows", "rule"),
    [(((F(0, 0),), (F(1, 1),)), "ordered"), (((F(0, 0),), (Action("SEND_F", 1, 0, 0),)), "compute_only")],
)
def test_a_violation_found_while_simulating_is_an_error(rows, rule):
    with pytest.raises(ScheduleError) as caught:
        simulate(edit(gpipe(2, 2), rows))
    assert caught.value.rule == rule


def peak(use, microbatches):
    gc.collect()
    tracemalloc.start()
    use(one_f_one_b(ranks=4, microbatches=microbatches))
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return used


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


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "name", "wrong"),
    [(Costs, "F", wrong) for wrong in (-1, NAN, INF, "1", None, [1, 2], (1, -2))]
    + [(Costs, "comm", wrong) for wrong in (-1, NAN, (1, 2))]
    + [(Costs, "jitter", wrong) for wrong in (-0.1, 1, NAN)]
    + [(Costs, "OVERLAP_F", -1), (Link, "latency", -1), (Link, "bandwidth", 0), (Link, "bandwidth", NAN)]
    + [(Link, "bytes", -1), (Link, "slow", (((0, 1), -3),))]
    + [(Sizes, name, -1) for name in ("activation", "inputs", "residual", "weight")],
)
def test_invalid_costs_are_refused(values, name, wrong):
    with pytest.raises(SizeError, match=f"{values.__name__}: got {name}=") as caught:
        values(**{name: wrong})
    assert repr(wrong) in str(caught.value)


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


def test_an_empty_schedule_takes_no_time():
    @schedule()
    def nothing(rank, ranks, microbatches):
        yield from ()

    timeline = simulate(nothing(ranks=2, microbatches=1))
    assert (timeline.makespan, timeline.span, timeline.bubble, timeline.idle) == (0, 0, 0, (0, 0))


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
        assert all(a[0] < b[0] for rank in levels for a, b in pairwise(rank))


def test_costs_may_be_numbers_of_numpy():
    numpy = pytest.importorskip("numpy")
    how = one_f_one_b(ranks=2, microbatches=2)
    assert simulate(how, Costs(F=numpy.float32(1), B=(numpy.int64(2), 2))).makespan == simulate(how).makespan
