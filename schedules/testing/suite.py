# SPDX-License-Identifier: Apache-2.0
"""A suite of properties for one factory of schedules."""

from __future__ import annotations

import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import schedules as package
from schedules.analysis.simulation import simulate
from schedules.checking.channels import LoweredProgram, target_of
from schedules.checking.rules import check
from schedules.drawing import text
from schedules.errors import ScheduleError
from schedules.files.csv import table
from schedules.language.actions import COLLECTIVES, KINDS, Action, message_of, receive_of
from schedules.language.graph import Edge, Graph, chain
from schedules.language.schedule import Factory, Schedule
from schedules.lowering.program import lower
from schedules.proof.interpreter import prove
from schedules.replay.costs import Costs
from schedules.replay.outputs import inputs_of, output_of
from schedules.testing.strategies import costs, graphs, schedules
from schedules.testing.timing import TOLERANCE, require_same_times
from schedules.transforms.connect import connect


@st.composite
def _cases(
    draw: st.DrawFn, factory: Callable[..., Schedule], along: Callable[[Schedule], Graph] | None
) -> tuple[Schedule, Graph, Costs]:
    schedule = draw(schedules([factory]))
    if along is not None:
        schedule = connect(schedule, along(schedule))
    if schedule.graph is not None:
        return schedule, schedule.graph, draw(costs())
    graph = draw(st.just(chain(schedule.stages)) | graphs(schedule.stages))
    if any(action.kind == "U" for rank in range(schedule.ranks) for action in schedule.actions(rank)):
        graph = replace(graph, gradients=frozenset())  # shared parameters cannot be updated as often as others
    return schedule, graph, draw(costs())


def conformance(
    factory: Callable[..., Schedule], graph: Callable[[Schedule], Graph] | None = None
) -> Callable[[], None]:
    """Return a pytest test of the schedules that `factory(ranks=, microbatches=)` makes, with any other sizes it takes.

    It tries 1 to 8 ranks, 1 to 12 microbatches, any costs, and the chain or any graph. A schedule written for one graph
    is tried with that one alone: the one `graph(schedule)` returns, or its own (`schedules.connect`). The test checks:

    - `check` accepts the schedule, and its `repr` and its pickle reproduce it;
    - on every channel of its program, both ends post the same messages in the same order;
    - run on formulas, it computes the whole model, as is and lowered, with tags and without (`interpreter.prove`);
    - its simulated makespan is at least the busiest rank's work, and the latency of one microbatch;
    - the simulation runs every action at the same time as the lowered program.

    >>> from schedules import one_f_one_b, split_backward
    >>> test_one_f_one_b = conformance(one_f_one_b)
    >>> test_split = conformance(lambda ranks, microbatches: split_backward(one_f_one_b(ranks, microbatches)))
    """

    @settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
    @given(case=_cases(factory, graph))
    def conforms(case: tuple[Schedule, Graph, Costs]) -> None:
        schedule, graph, times = case
        with _draw_on_failure(schedule, graph):
            check(schedule, graph)
            require_round_trip(schedule)
            require_matching_ends(lower(schedule, graph))
            prove(schedule, graph)
            require_bounds(schedule, graph, times)
            require_same_times(schedule, graph, times)

    conforms.__doc__ = f"{factory!r} makes schedules that conform."
    return conforms


def require_round_trip(schedule: Schedule) -> None:
    """Assert that the schedule equals its evaluated `repr`, and its pickled copy if its factories can be imported."""
    again = eval(repr(schedule), {**vars(package), "table": table, **_factories(schedule)})
    assert again == schedule, f"repr gives {again!r}, expected {schedule!r}. Give the arguments a repr that evaluates."
    if all(_is_importable(factory) for factory in _factories(schedule).values()):
        copy = pickle.loads(pickle.dumps(schedule))
        assert copy == schedule, f"pickle gives {copy!r}, expected {schedule!r}. Give the arguments an equality."


def _factories(schedule: Schedule) -> dict[str, Factory[...]]:
    """Return, by name, the schedule's factory and those of the schedules among its arguments."""
    inner = [value for _, value in schedule.arguments if isinstance(value, Schedule)]
    found = {name: factory for one in inner for name, factory in _factories(one).items()}
    return {**found, schedule.factory.__name__: schedule.factory}


def _is_importable(factory: Factory[...]) -> bool:
    return getattr(sys.modules.get(factory.__module__), factory.__qualname__, None) is factory


def require_matching_ends(program: LoweredProgram) -> None:
    """Assert that on each channel, the receives posted at one end are the sends posted at the other, in order."""
    placement = program.schedule.placement
    sends: dict[Edge, list[Action]] = defaultdict(list)
    receives: dict[Edge, list[Action]] = defaultdict(list)
    for rank in range(program.schedule.ranks):
        for action in program.actions(rank):
            does = KINDS[action.kind].does
            if does == "SEND":
                sends[rank, target_of(action, placement)].append(receive_of(action))
            if does == "RECV":
                message = message_of(action)
                receives[placement.home(message.stage, message.microbatch), rank].append(action)
    assert receives == sends, f"got the receives {receives}, expected {sends}. Post them in the sender's order."


def require_bounds(schedule: Schedule, graph: Graph, times: Costs) -> None:
    """Assert that the makespan is at least the work of any rank, and the latency of one microbatch."""
    makespan = simulate(schedule, times, graph).makespan
    share = {kind: schedule.slices if word.after else 1 for kind, word in KINDS.items()}
    work = [
        sum(times.time(a.kind, a.stage) / share[a.kind] for a in schedule.actions(rank) if a.kind not in COLLECTIVES)
        for rank in range(schedule.ranks)
    ]
    way = _latency(schedule, graph, times)
    assert makespan >= max(work) - TOLERANCE, (
        f"makespan {makespan} is less than the work {max(work)} of rank {work.index(max(work))}."
    )
    assert makespan >= way - TOLERANCE, f"makespan {makespan} is less than the {way} that one microbatch takes."


def _latency(schedule: Schedule, graph: Graph, times: Costs) -> float:
    """Return the time of microbatch 0, or of its last slice, through all stages and back, if it never waits."""
    home, done = schedule.placement.homes, dict[tuple[str, int, int], float]()
    each = (action for rank in range(schedule.ranks) for action in schedule.actions(rank))
    mine = [a for a in each if a.microbatch == 0 and a.slice in (None, schedule.slices - 1) and KINDS[a.kind].after]
    rising = sorted((a for a in mine if KINDS[a.kind].crosses == "F"), key=lambda a: a.stage)
    falling = sorted((a for a in mine if KINDS[a.kind].crosses == "B"), key=lambda a: -a.stage)
    recomputed = [a for a in mine if a.kind == "R"]
    for action in (*rising, *recomputed, *falling, *(a for a in mine if a.kind == "W")):
        s = action.stage
        ready = (
            done[token] + times.transfer(token[0], token[1], home[token[1]], home[s])
            for token in inputs_of(action, graph)
        )
        done[output_of(action)] = max(ready, default=0) + times.time(action.kind, s) / schedule.slices
    return max(done.values())


@contextmanager
def _draw_on_failure(schedule: Schedule, graph: Graph) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        violation = error if isinstance(error, ScheduleError) else None
        error.add_note(f"{schedule!r}\n{text(schedule, graph=graph, error=violation)}")
        raise
