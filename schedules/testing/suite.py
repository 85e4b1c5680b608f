# SPDX-License-Identifier: Apache-2.0
"""A suite of properties for one factory of schedules."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from types import MappingProxyType

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

import schedules as package
from schedules.analysis.simulation import simulate
from schedules.arguments import require_types
from schedules.checking.channels import LoweredProgram
from schedules.checking.rules import check
from schedules.drawing import text
from schedules.errors import ArgumentError, ScheduleError, SizeError
from schedules.files.csv import table
from schedules.language.actions import BESIDE, KINDS, Action, message_of, receive_of
from schedules.language.graph import Edge, Graph, chain
from schedules.language.schedule import Factory, Schedule
from schedules.lowering.program import lower
from schedules.lowering.turns import target_of
from schedules.playing.costs import Costs
from schedules.playing.outputs import inputs_of, output_of
from schedules.proof.interpreter import prove
from schedules.testing.strategies import costs, graphs, grid_of
from schedules.testing.timing import TOLERANCE, require_same_times
from schedules.transforms.connect import connect
from schedules.transforms.transform import transform


@st.composite
def _cases(draw: st.DrawFn, found: Sequence[Schedule]) -> tuple[Schedule, Graph, Costs]:
    schedule = draw(st.sampled_from(found))
    if schedule.graph is not None:
        return schedule, schedule.graph, draw(costs())
    graph = draw(st.just(chain(schedule.stages)) | graphs(schedule.stages))
    if any(action.kind == "U" for rank in range(schedule.ranks) for action in schedule.actions(rank)):
        graph = replace(graph, gradients=frozenset())  # shared parameters cannot be updated as often as others
    return schedule, graph, draw(costs())


def conformance(
    factory: Callable[..., Schedule],
    graph: Callable[[Schedule], Graph] | None = None,
    *,
    sizes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    settings: hypothesis.settings | None = None,
) -> Callable[[], None]:
    """Return a pytest test of the schedules that `factory(ranks=, microbatches=)` makes, with any other sizes it takes.

    First, `check` must accept the schedule of every combination of sizes: 1 to 8 ranks, 1 to 12 microbatches, and 1 to
    4 of anything else that is an integer, or what `sizes` says for a parameter. Combinations for which the factory
    raises `SizeError` are left out. Then Hypothesis draws from these schedules, with any costs, and the chain or any
    graph, with Hypothesis' `settings`, by default those of the profile without a deadline. A schedule written for one
    graph is tried with that one alone: the one `graph(schedule)` returns, or its own (`schedules.connect`). The test
    checks:

    - `check` accepts the schedule, on any device, and its `repr` and its pickle reproduce it;
    - on every channel of its program, both ends post the same messages in the same order;
    - run on formulas, it computes the whole model, as is and lowered, with tags and without (`interpreter.prove`);
    - its simulated makespan is at least the busiest rank's work, and the latency of one microbatch;
    - the simulation runs every action at the same time as the lowered program.

    What fails, or raises, is shown with its sizes and a picture; Hypothesis saves it for the next run of this test.

    Raise `ArgumentError` for `sizes` of a parameter that the factory does not have. The test raises it if the factory
    refuses all sizes.

    >>> from schedules import kfkb, one_f_one_b, split_backward
    >>> test_one_f_one_b = conformance(one_f_one_b)
    >>> test_split = conformance(lambda ranks, microbatches: split_backward(one_f_one_b(ranks, microbatches)))
    >>> test_large = conformance(kfkb, sizes={"ranks": [16], "microbatches": range(1, 40), "k": [3]})
    """
    require_types(conformance, locals())
    grid = grid_of(factory, sizes)

    def conforms(case: tuple[Schedule, Graph, Costs]) -> None:
        schedule, graph, times = case
        with _draw_on_failure(schedule, graph):
            check(schedule, graph, device=True)
            require_round_trip(schedule)
            require_matching_ends(lower(schedule, graph))
            prove(schedule, graph)
            require_bounds(schedule, graph, times)
            require_same_times(schedule, graph, times)

    _set_database_key(conforms, f"{_name(factory)} {_name(graph)} {dict(grid)}")

    def suite() -> None:
        found = _check_all(factory, graph, grid)
        (settings or hypothesis.settings(deadline=None))(given(case=_cases(found))(conforms))()

    suite.__doc__ = f"{factory!r} makes schedules that conform."
    return suite


def _check_all(
    factory: Callable[..., Schedule], along: Callable[[Schedule], Graph] | None, grid: Mapping[str, Sequence[int]]
) -> list[Schedule]:
    """Return the schedules of all sizes, small ones first; raise what `check` raises for one, with its picture."""
    found = list[Schedule]()
    for values in product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        try:
            schedule = factory(**chosen)
            if along is not None:
                schedule = connect(schedule, along(schedule))
        except SizeError:
            continue
        except Exception as error:
            error.add_note(f"{_name(factory)} with {', '.join(f'{name}={size}' for name, size in chosen.items())}")
            raise
        with _draw_on_failure(schedule, schedule.graph):
            check(schedule)
        found.append(schedule)
    if not found:
        tried = ", ".join(f"{name} from {min(row)} to {max(row)}" for name, row in grid.items())
        raise ArgumentError(
            f"conformance: got SizeError from {_name(factory)} for {tried}, expected a schedule for some of them. "
            "Pass sizes= that it supports."
        )
    return found


def _name(function: Callable[..., object] | None) -> str:
    """Return a name that differs between functions, and is the same in every run."""
    code = getattr(function, "__code__", None)
    if function is not None and code is not None:
        return f"{function.__qualname__}, line {code.co_firstlineno} of {function.__module__}"
    return repr(function)


def _set_database_key(test: Callable[..., None], key: str) -> None:
    """Give a test a place of its own in Hypothesis' database, which tells tests apart by their source and signature."""
    case = inspect.Parameter("case", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=key)
    test.__signature__ = inspect.Signature([case])  # type: ignore[attr-defined]


def require_round_trip(schedule: Schedule) -> None:
    """Assert that the schedule equals its evaluated `repr`, and its pickled copy if its factories can be imported."""
    require_types(require_round_trip, locals())
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
    require_types(require_matching_ends, locals())
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
    require_types(require_bounds, locals())
    makespan = simulate(schedule, times, graph).makespan
    work = [
        sum(
            times.time(a.kind, a.stage) / (schedule.slices if KINDS[a.kind].after else 1)
            for a in schedule.actions(rank)
            if a.kind not in BESIDE
        )
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
def _draw_on_failure(schedule: Schedule, graph: Graph | None) -> Iterator[None]:
    """Add the schedule and its picture to any error."""
    try:
        yield
    except Exception as error:
        violation = error if isinstance(error, ScheduleError) else _find_crash(schedule)
        error.add_note(f"{schedule!r}\n{text(_end_at_crash(schedule), graph=graph, error=violation)}")
        raise


def _find_crash(schedule: Schedule) -> ScheduleError | None:
    """Return where the generator of a rank raises, as a violation that can be drawn; `None` if none does."""
    for rank in range(schedule.ranks):
        position = 0
        try:
            for _ in schedule.actions(rank):
                position += 1
        except Exception as error:
            problem = f"the generator raised {error!r}"
            return ScheduleError("generated", rank, position, None, problem, "Correct it for these sizes.")
    return None


@transform
def _end_at_crash(rank: int, schedule: Schedule) -> Iterator[Action]:
    """End a rank's actions where its generator raises."""
    with suppress(Exception):
        yield from schedule.actions(rank)
