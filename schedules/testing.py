# SPDX-License-Identifier: Apache-2.0
"""Property tests for schedules: strategies, and a whole suite in one line. Needs Hypothesis.

Problem. A schedule that works for 4 ranks and 8 microbatches may fail for 3 and 2, and nobody writes that test.

Idea. `conformance(factory)` is a test: Hypothesis looks for sizes, a stage graph and costs with which something that
must hold for every schedule does not, shrinks them, and the picture of the smallest such schedule is in the message.

    from schedules.testing import conformance
    test_mine = conformance(mine)
"""

from __future__ import annotations

import inspect
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, pairwise

from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import schedules as package
from schedules.actions import KINDS, Action
from schedules.authoring import Factory, Schedule
from schedules.channels import Lowered, target_of
from schedules.costs import Costs
from schedules.errors import ScheduleError, SizeError
from schedules.graph import Edge, Graph, chain
from schedules.interchange import table
from schedules.interpreter import prove
from schedules.lowering import lower
from schedules.networks import receive_of, send_of
from schedules.placement import Placement
from schedules.replay import makes, needs
from schedules.rules import check
from schedules.simulation import simulate

RANKS, MICROBATCHES, CHUNKS = 8, 12, 4
ALMOST = 1e-6  # thirds and the like do not add up exactly


def sizes() -> st.SearchStrategy[tuple[int, int]]:
    """Ranks from 1 to 8 and microbatches from 1 to 12."""
    return st.tuples(st.integers(1, RANKS), st.integers(1, MICROBATCHES))


def costs() -> st.SearchStrategy[Costs]:
    """Costs in quarters, whose sums floating point keeps exactly."""
    times = st.integers(1, 20).map(lambda quarters: quarters / 4)
    return st.builds(Costs, F=times, B=times, I=times, W=times, comm=st.just(0) | times)


@st.composite
def graphs(draw: st.DrawFn, stages: int) -> Graph:
    """Stage graphs in which every stage but the first is fed by an earlier one.

    Cotangents flow back along some of the values' edges and along others too; some stages share parameters.
    """

    def edges(smallest: int) -> frozenset[Edge]:
        starts = (draw(st.sets(st.integers(0, t - 1), min_size=smallest, max_size=3)) for t in range(1, stages))
        return frozenset((s, t) for t, these in enumerate(starts, 1) for s in these)

    values = edges(1)
    dead = draw(st.sets(st.sampled_from(sorted(values)), max_size=3)) if values else set()
    extra = draw(st.just(frozenset[Edge]()) | st.builds(edges, st.just(0)))
    shared = draw(st.just(frozenset[Edge]()) | st.builds(edges, st.just(0)))
    return Graph(stages, values, (values - dead) | extra, shared)


@st.composite
def schedules(draw: st.DrawFn, factories: Sequence[Callable[..., Schedule]]) -> Schedule:
    """What one of the factories makes of `sizes`, and of `chunks` from 1 to 4 if it takes them.

    Sizes that the factory refuses with `SizeError` are passed over.
    """
    factory: Callable[..., Schedule] = draw(st.sampled_from(factories))
    ranks, microbatches = draw(sizes())
    takes_chunks = "chunks" in inspect.signature(factory).parameters
    chunks = {"chunks": draw(st.integers(1, CHUNKS))} if takes_chunks else {}
    try:
        return factory(ranks=ranks, microbatches=microbatches, **chunks)
    except SizeError:
        reject()


@st.composite
def orders(draw: st.DrawFn, ranks: int = 4, stages: int = 6, microbatches: int = 4) -> tuple[Schedule, Graph]:
    """Any correct schedule of at most these sizes, with the graph that it is correct for.

    A placement and a graph at random, with one route or two; then, again and again, any action whose data are there:
    whole backwards and halves of them mixed, forwards with and without recomputation, slices, updates of the weights;
    some neighbours fused. Shrinks towards one microbatch after the other.
    """
    S, M, slices = draw(st.integers(1, stages)), draw(st.integers(1, microbatches)), draw(st.sampled_from([1, 1, 1, 2]))
    routes = draw(st.integers(1, min(2, M)))
    homes = [draw(st.lists(st.integers(0, ranks - 1), min_size=S, max_size=S)) for _ in range(routes)]
    used = sorted({rank for route in homes for rank in route})
    first, *mirrors = (tuple(used.index(rank) for rank in route) for route in homes)
    placement = Placement(len(used), first, tuple(mirror for mirror in mirrors if mirror != first))
    graph = draw(graphs(S))
    rows: list[list[Action]] = [[] for _ in used]
    for action in _any_order(draw, graph, M, slices):
        rows[placement.home(action.stage, action.microbatch)].append(action)
    _sum_replicas(placement, M, rows)
    if not placement.mirrors and draw(st.booleans()):
        _update_weights(draw, slices, rows)
    return _fused(draw, rows, graph), graph


def _any_order(draw: st.DrawFn, graph: Graph, microbatches: int, slices: int) -> Iterator[Action]:
    """All compute actions of all units, each at a moment at which what it needs is there."""
    parts = [None] if slices == 1 else [*range(slices)]
    each = [(s, i, part) for i in range(microbatches) for part in parts for s in range(graph.stages)]
    split, recomputed = (draw(st.sets(st.sampled_from(each))) for _ in "ab")
    waiting = [
        Action(kind, *unit[:2], None, unit[2])
        for unit in each
        for kind in ("CR" if unit in recomputed else "F") + ("IW" if unit in split else "B")
    ]
    made = set[tuple[object, ...]]()
    while waiting:
        ready = [action for action in waiting if made.issuperset(_tokens(action, graph, slices, recomputed))]
        action = ready[draw(st.integers(0, len(ready) - 1))]
        waiting.remove(action)
        made.add((*makes(action), action.slice))
        yield action


def _tokens(
    action: Action, graph: Graph, slices: int, recomputed: set[tuple[int, int, int | None]]
) -> Iterator[tuple[object, ...]]:
    """What an action needs, slice by slice: the slice before it going forward, the one behind it going back."""
    kind, s, i, _, part = action
    for token in needs(action, graph):
        yield (*token, part)
    if kind in ("B", "I") and (s, i, part) in recomputed:
        yield "R", s, i, part
    if part is not None and (crosses := KINDS[kind].crosses):
        neighbour = part - 1 if crosses == "F" else part + 1
        if 0 <= neighbour < slices:
            yield crosses, s, i, neighbour


def _sum_replicas(placement: Placement, microbatches: int, rows: list[list[Action]]) -> None:
    """Where a stage has replicas, each ends with the sum of their gradients."""
    for s in range(placement.stages):
        for route, homes in enumerate(placement.routes):
            if len(placement.replicas(s)) > 1:
                last = range(route, microbatches, len(placement.routes))[-1]
                rows[homes[s]].append(Action("G", s, last))


def _update_weights(draw: st.DrawFn, slices: int, rows: list[list[Action]]) -> None:
    """Updates of every stage, after some of the microbatches up to which all are done, and after the last."""
    for row in rows:
        for s in {action.stage for action in row}:
            total = sum(action.stage == s and KINDS[action.kind].after == "done" for action in row)
            done, applied, at = set[tuple[int, int | None]](), -1, 0
            while at < len(row):
                action, at = row[at], at + 1
                if action.stage == s and KINDS[action.kind].after == "done":
                    done.add((action.microbatch, action.slice))
                    full = next(i for i in count() if sum(j == i for j, _ in done) < slices) - 1
                    if full > applied and (len(done) == total or draw(st.booleans())):
                        row.insert(at, Action("U", s, full))
                        applied, at = full, at + 1


def _fused(draw: st.DrawFn, rows: list[list[Action]], graph: Graph) -> Schedule:
    """The schedule of these rows, with some neighbours fused where it stays correct."""
    for row in rows:
        for at, (first, second) in enumerate(pairwise(row)):
            if first.kind == "F" and second.kind in "BI" and draw(st.booleans()):
                row[at] = first._replace(kind="OVERLAP_F")
                try:
                    check(_table(rows), graph)
                except ScheduleError:
                    row[at] = first
    return _table(rows)


def _table(rows: list[list[Action]]) -> Schedule:
    return table(rows=tuple(",".join(map(str, row)) for row in rows))


@st.composite
def _cases(draw: st.DrawFn, factory: Callable[..., Schedule]) -> tuple[Schedule, Graph, Costs]:
    schedule = draw(schedules([factory]))
    return schedule, draw(st.just(chain(schedule.stages)) | graphs(schedule.stages)), draw(costs())


def conformance(factory: Callable[..., Schedule]) -> Callable[[], None]:
    """A test for pytest that `factory(ranks=, microbatches=)`, with `chunks=` if it takes them, makes good schedules.

    For 1 to 8 ranks, 1 to 12 microbatches, the chain or any graph, and any costs:

    - `check` accepts it, and its `repr` and its pickle give it back;
    - of every channel of its program, both ends post the same messages in the same order;
    - run on formulas it computes the whole model, as it is and lowered, with tags and without (`interpreter.prove`);
    - its simulated makespan is at least the busiest rank's work and the time of one microbatch on its way.

    >>> from schedules import one_f_one_b, split_backward
    >>> test_one_f_one_b = conformance(one_f_one_b)
    >>> test_split = conformance(lambda ranks, microbatches: split_backward(one_f_one_b(ranks, microbatches)))
    """

    @settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
    @given(case=_cases(factory))
    def conforms(case: tuple[Schedule, Graph, Costs]) -> None:
        schedule, graph, times = case
        with _drawn(schedule):
            check(schedule, graph)
            require_round_trip(schedule)
            require_matching_ends(lower(schedule, graph))
            prove(schedule, graph)
            require_bounds(schedule, graph, times)

    conforms.__doc__ = f"{factory!r} makes schedules that conform."
    return conforms


def require_round_trip(schedule: Schedule) -> None:
    """`repr` evaluates to an equal schedule, and so does its pickle, if its factories can be imported."""
    again = eval(repr(schedule), {**vars(package), "table": table, **_factories(schedule)})
    assert again == schedule, f"repr gives {again!r}, expected {schedule!r}. Give the arguments a repr that evaluates."
    if all(_importable(factory) for factory in _factories(schedule).values()):
        copy = pickle.loads(pickle.dumps(schedule))
        assert copy == schedule, f"pickle gives {copy!r}, expected {schedule!r}. Give the arguments an equality."


def _factories(schedule: Schedule) -> dict[str, Factory[...]]:
    """By name: the schedule's factory, and those of the schedules among its arguments."""
    inner = [value for _, value in schedule.arguments if isinstance(value, Schedule)]
    found = {name: factory for one in inner for name, factory in _factories(one).items()}
    return {**found, schedule.factory.__name__: schedule.factory}


def _importable(factory: Factory[...]) -> bool:
    return getattr(sys.modules.get(factory.__module__), factory.__qualname__, None) is factory


def require_matching_ends(program: Lowered) -> None:
    """Per channel, the receives posted at one end are the sends posted at the other, in the same order."""
    placement = program.schedule.placement
    sends: dict[Edge, list[Action]] = defaultdict(list)
    receives: dict[Edge, list[Action]] = defaultdict(list)
    for rank in range(program.schedule.ranks):
        for action in program.actions(rank):
            kind, s, i, peer, part = action
            if kind.startswith("SEND") and peer is not None:
                sends[rank, target_of((kind[5:], s, i, peer, part), placement)].append(receive_of(action))
            if kind.startswith("RECV"):
                send = send_of(action)
                receives[placement.home(send.stage, send.microbatch), rank].append(action)
    assert receives == sends, f"posted are the receives {receives}, expected {sends}. Post them in the sender's order."


def require_bounds(schedule: Schedule, graph: Graph, times: Costs) -> None:
    """No timeline is shorter than the work of one rank, nor than the way of one microbatch through all stages."""
    makespan = simulate(schedule, times, graph).makespan
    share = {kind: schedule.slices if word.after else 1 for kind, word in KINDS.items()}
    work = [
        sum(times.time(a.kind, a.stage) / share[a.kind] for a in schedule.actions(rank))
        for rank in range(schedule.ranks)
    ]
    way = _way(schedule, graph, times)
    assert makespan >= max(work) - ALMOST, (
        f"makespan {makespan} is less than the work {max(work)} of rank {work.index(max(work))}."
    )
    assert makespan >= way - ALMOST, f"makespan {makespan} is less than the {way} that one microbatch takes."


def _way(schedule: Schedule, graph: Graph, times: Costs) -> float:
    """The time of microbatch 0, or of its last slice, through all stages and back, if no rank keeps it waiting."""
    home, done = schedule.placement.homes, dict[tuple[str, int, int], float]()
    each = (action for rank in range(schedule.ranks) for action in schedule.actions(rank))
    mine = [a for a in each if a.microbatch == 0 and a.slice in (None, schedule.slices - 1) and KINDS[a.kind].after]
    rising = sorted((a for a in mine if KINDS[a.kind].crosses == "F"), key=lambda a: a.stage)
    falling = sorted((a for a in mine if KINDS[a.kind].crosses == "B"), key=lambda a: -a.stage)
    recomputed = [a for a in mine if a.kind == "R"]
    for action in (*rising, *recomputed, *falling, *(a for a in mine if a.kind == "W")):
        s = action.stage
        ready = (
            done[token] + times.transfer(token[0], token[1], home[token[1]], home[s]) for token in needs(action, graph)
        )
        done[makes(action)] = max(ready, default=0) + times.time(action.kind, s) / schedule.slices
    return max(done.values())


@contextmanager
def _drawn(schedule: Schedule) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"{schedule!r}\n{schedule}")
        raise
