# SPDX-License-Identifier: Apache-2.0
"""What the docstrings of the families say holds for all sizes: formulas, limits, refusals, kinships, figures."""

import inspect
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as incumbent

from schedules import Costs, SizeError, check, families, forwards, simulate
from schedules.families.asynchronous import pipedream, pipedream_2bw
from schedules.families.bidirectional import chimera
from schedules.families.fill_drain import forward_only, gpipe
from schedules.families.looped import breadth_first, interleaved_1f1b, interleaved_zero_bubble
from schedules.families.one_forward_one_backward import eager_1f1b, kfkb, one_f_one_b
from schedules.families.sliced import seq_1f1b
from schedules.families.wave import hanayo
from schedules.testing import conformance, require_round_trip
from tests.common.rows import rows

EVERY = [getattr(families, name) for name in families.__all__]
MOST = {"ranks": 8, "microbatches": 20, "chunks": 4, "slices": 5, "waves": 3, "k": 5, "accumulate": 12}
QUARTERS = st.integers(1, 40).map(lambda quarters: quarters / 4)


@st.composite
def members(draw, factory):
    """What `factory` makes of any sizes that it does not refuse."""
    names = inspect.signature(factory).parameters
    try:
        return factory(**{name: draw(st.integers(1, MOST[name])) for name in names if name in MOST})
    except SizeError:
        reject()


def parametrize(factories):
    return {"argvalues": factories, "ids": [factory.__name__ for factory in factories]}


@pytest.mark.parametrize("factory", **parametrize(EVERY))
@given(data=st.data())
def test_any_member_is_correct_within_its_limits_and_round_trips(factory, data):
    schedule = data.draw(members(factory))
    check(schedule)
    require_round_trip(schedule)
    peak = simulate(schedule).peak_memory
    assert all(held <= schedule.memory(rank) + 1e-9 for rank, held in enumerate(peak))


@pytest.mark.parametrize("factory", **parametrize([factory for factory in EVERY if factory is not forward_only]))
def test_the_family_conforms(factory):
    conformance(factory)()


@pytest.mark.parametrize(
    "factory",
    [
        lambda ranks, microbatches: kfkb(ranks, microbatches, k=3),
        lambda ranks, microbatches: hanayo(ranks, microbatches, waves=2),
        lambda ranks, microbatches: seq_1f1b(ranks, microbatches, slices=3),
        lambda ranks, microbatches: pipedream_2bw(ranks, microbatches, accumulate=ranks),
    ],
    ids=["kfkb", "hanayo", "seq_1f1b", "pipedream_2bw"],
)
def test_the_family_conforms_with_its_own_parameters(factory):
    conformance(factory)()


IDLE = {
    gpipe: lambda P, M, F, B: (P - 1) * (F + B),
    forward_only: lambda P, M, F, B: (P - 1) * F,
    one_f_one_b: lambda P, M, F, B: (P - 1) * (F + B),
    eager_1f1b: lambda P, M, F, B: (P - 1) * (F + B),
    kfkb: lambda P, M, F, B, k: (P - 1) * (F + B),
    interleaved_1f1b: lambda P, M, F, B, chunks: (P - 1 + (chunks - 1) * max(0, P - M)) * (F + B),
    breadth_first: lambda P, M, F, B, chunks: (P - 1 + (chunks - 1) * max(0, P - M)) * (F + B),
    hanayo: lambda P, M, F, B, waves: (
        2 * (min(P, M) - 1) * (max(F, B) + (max(1, M // P) - 1) * abs(F - B)) + 2 * waves * max(0, P - M) * (F + B)
    ),
    seq_1f1b: lambda P, M, F, B, slices: (P - 1) * (F + B) / slices,
    pipedream: lambda P, M, F, B: (P - 1) * (F + B),
    pipedream_2bw: lambda P, M, F, B, accumulate: (P - 1) * (F + B),
}
OURS = list(IDLE)
KEEPING = [interleaved_zero_bubble, *(factory for factory in OURS if factory is not forward_only)]


def idle(schedule, costs):
    timeline = simulate(schedule, costs)
    return timeline.makespan - max(timeline.busy)


@pytest.mark.parametrize("factory", **parametrize(OURS))
@given(data=st.data(), F=QUARTERS, B=QUARTERS, U=QUARTERS)
def test_idle_time_matches_the_docstring(factory, data, F, B, U):
    schedule = data.draw(members(factory))
    P, M, *rest = (value for _, value in schedule.arguments)
    assert idle(schedule, Costs(F=F, B=B, U=U)) == pytest.approx(IDLE[factory](P, M, F, B, *rest))


@given(s=members(interleaved_zero_bubble), F=QUARTERS, I=QUARTERS, W=QUARTERS)
def test_idle_time_with_deferred_weight_gradients_matches_the_docstring(s, F, I, W):  # noqa: E741 - the action's name
    W = min(F, W)
    if s.microbatches >= s.ranks:
        assert idle(s, Costs(F=F, I=I, W=W)) == pytest.approx((s.ranks - 1) * (F + I - min(I, W)))


@given(eager=members(eager_1f1b), grouped=members(kfkb), F=QUARTERS, B=QUARTERS, share=st.floats(0, 1))
def test_idle_time_with_overlapped_transfers_matches_the_docstrings(eager, grouped, F, B, share):
    comm = share * (F + B) / 2
    assert idle(eager, Costs(F=F, B=B, comm=comm)) == pytest.approx((eager.ranks - 1) * (F + B + 2 * comm))
    comm *= dict(grouped.arguments)["k"] - 1
    assert idle(grouped, Costs(F=F, B=B, comm=comm)) == pytest.approx((grouped.ranks - 1) * (F + B + 2 * comm))


@pytest.mark.parametrize("factory", **parametrize(KEEPING))
@given(data=st.data(), F=QUARTERS, B=QUARTERS)
def test_peak_memory_is_the_limit(factory, data, F, B):
    schedule = data.draw(members(factory))
    limits = [schedule.memory(rank) for rank in range(schedule.ranks)]
    assert list(simulate(schedule, Costs(F=F, B=B)).peak_memory) == pytest.approx(limits)


def versions(schedule, rank):
    """The most versions of its weights that the rank keeps: the newest, and what microbatches in flight began with."""
    newest, began, most = 0, {}, 1
    for kind, _, i, _, _ in schedule.actions(rank):
        if kind == "F":
            began[i] = newest
        elif kind == "B":
            del began[i]
        else:
            newest += 1
        most = max(most, len({newest, *began.values()}))
    return most


@given(stashed=members(pipedream), doubled=members(pipedream_2bw))
def test_the_number_of_weight_versions_matches_the_docstring(stashed, doubled):
    P, M = stashed.ranks, stashed.microbatches
    for rank in range(P):
        kept, limit = versions(stashed, rank), stashed.versions(rank)
        assert kept <= limit <= P - rank
        assert kept == P - rank or 2 * (P - 1 - rank) > M
    assert all(versions(doubled, rank) <= doubled.versions(rank) == 2 for rank in range(doubled.ranks))


@given(members(pipedream_2bw))
def test_updates_come_after_every_group_and_after_the_remainder(s):
    M, accumulate = s.microbatches, dict(s.arguments)["accumulate"]
    for row in rows(s, without="F"):
        updates = [before.microbatch for before, action in pairwise(row) if action.kind == "U"]
        assert updates == [action.microbatch for action in row if action.kind == "U"]
        assert updates == [*range(accumulate - 1, M - 1, accumulate), M - 1]


@given(s=members(gpipe), k=st.integers(1, 5))
def test_families_coincide_at_their_special_sizes(s, k):
    P, M = s.ranks, s.microbatches
    one = rows(one_f_one_b(P, M))
    assert rows(s) == rows(breadth_first(P, M, chunks=1)) == rows(kfkb(P, M, k=M))
    assert rows(forward_only(P, M)) == rows(forwards(s))
    assert one == rows(interleaved_1f1b(P, M, chunks=1)) == rows(kfkb(P, M, k=1)) == rows(seq_1f1b(P, M, slices=1))
    assert one == rows(pipedream(P, M), without="U") == rows(pipedream_2bw(P, M, accumulate=P + k), without="U")
    assert rows(pipedream(1, M)) == rows(pipedream_2bw(1, M, accumulate=1))


@given(P=st.integers(1, 5), R=st.integers(1, 4))
def test_one_wave_is_chimera_with_its_replicas_merged(P, R):
    folded = rows(chimera(2 * P, 2 * P * R), without="G")[:P]
    assert rows(hanayo(P, P * R)) == [[a._replace(microbatch=a.microbatch // 2) for a in row] for row in folded]


@given(s=members(interleaved_1f1b) | members(interleaved_zero_bubble))
def test_interleaved_schedules_are_those_of_torch_for_all_sizes_that_it_takes(s):
    P, M, V = (value for _, value in s.arguments)
    stage = SimpleNamespace(group_rank=0, group_size=P, num_stages=P * V, submod=None)
    kinds = {interleaved_1f1b: incumbent.ScheduleInterleaved1F1B}
    try:
        theirs = kinds.get(s.factory, incumbent.ScheduleInterleavedZeroBubble)([stage] * V, M).pipeline_order
    except ValueError:
        reject()
    ours = eager_1f1b(P, M) if s.factory is interleaved_1f1b and V == 1 else s
    texts = [[str(action) for action in theirs[rank] if action] for rank in range(P)]
    assert texts == [[str(action) for action in row] for row in rows(ours)]


@pytest.mark.parametrize(
    ("schedule", "comm", "makespan", "peak"),
    [
        (gpipe(4, 8), 0, 33, (8, 8, 8, 8)),
        (eager_1f1b(4, 8), 0, 33, (7, 5, 3, 1)),
        (eager_1f1b(4, 8), 0.5, 36, (7, 5, 3, 1)),
        (eager_1f1b(4, 8), 1, 39, (7, 5, 3, 1)),
        (kfkb(4, 8, k=2), 0, 33, (8, 6, 4, 2)),
        (kfkb(4, 8, k=2), 1, 39, (8, 6, 4, 2)),
        (seq_1f1b(4, 8, slices=4), 0, 26.25, (1.75, 1.5, 1.25, 1)),
    ],
    ids=repr,
)
def test_published_figures(schedule, comm, makespan, peak):
    timeline = simulate(schedule, Costs(F=1, B=2, comm=comm))
    assert (timeline.makespan, timeline.peak_memory) == (makespan, peak)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "2"])
@pytest.mark.parametrize(
    ("factory", "name"), [(kfkb, "k"), (hanayo, "waves"), (interleaved_1f1b, "chunks"), (seq_1f1b, "slices")]
)
def test_invalid_sizes_are_refused(factory, name, size):
    with pytest.raises(
        SizeError, match=rf"^{factory.__name__}: got {name}={size!r}, expected an integer of at least 1"
    ):
        factory(ranks=2, microbatches=2, **{name: size})


@pytest.mark.parametrize("size", [0, 3, True, 4.0])
def test_two_versions_are_too_few_for_small_groups(size):
    message = rf"^pipedream_2bw: got accumulate={size!r}, expected an integer of at least 4. .* need a third version"
    with pytest.raises(SizeError, match=message):
        pipedream_2bw(ranks=4, microbatches=8, accumulate=size)
