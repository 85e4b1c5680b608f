# SPDX-License-Identifier: Apache-2.0
"""A program without an end: what each rank does between its updates, for as many batches as come.

Problem. A schedule that updates weights in flight never drains between batches. It is a generator for a given number of
microbatches, and nobody knows how many will come.

Idea. A window is what a rank does up to the update of a batch. Windows are all alike but for the first ones, which fill
the pipeline, and the last ones, which drain it. So programs of some batches, and of one and two more, tell all windows
of any number: those that they begin with alike, the one that repeats, and those that they end with alike. If ranks post
messages in turns, some windows in a row repeat.

Stages that share parameters need each other's gradients of every batch. All of them use the same version of what they
share: the oldest that one of them has at its forward. So nothing waits for these gradients that would not wait anyway.
They travel as values do, between stages that are added for that: of S stages, stage `s` gives those of a batch as stage
`S + s`, after its update, and takes those of others as stage `2S + s`, before the first forward that uses the new
version. A rank that sends to another one, and gets nothing from it, would wait for its sends at the end only. So it
gets an answer with every batch, in the same way.

Invariant: the windows of a rank, put together, are its lowered program for that number of batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from schedules.arguments import is_size
from schedules.checking.rules import check
from schedules.errors import ScheduleError, SizeError
from schedules.language.actions import KINDS, Action, F
from schedules.language.graph import Edge, Graph
from schedules.language.placement import Placement
from schedules.language.schedule import Schedule
from schedules.lowering.program import Program, lower
from schedules.playing.rows import edit, from_rows

Window = tuple[Action, ...]
LONGEST_PERIOD = 4
"""The longest period that is looked for, in batches."""


def lengthen(schedule: Schedule, batches: int) -> Schedule:
    """Return the schedule for so many times as many microbatches, made by the same factories from the same arguments.

    Raise `SizeError` for a schedule that is not made from a number of microbatches, as by `from_rows`.

    >>> from schedules import pipedream, split_backward
    >>> lengthen(split_backward(pipedream(ranks=2, microbatches=1)), batches=3)
    split_backward(schedule=pipedream(ranks=2, microbatches=3))
    """
    given = dict(schedule.arguments)
    inner = given.get("schedule")
    if isinstance(inner, Schedule):
        given["schedule"] = lengthen(inner, batches)
    elif "rows" not in given and is_size(given.get("microbatches")):
        given["microbatches"] = batches * schedule.microbatches
    made = schedule.factory.make(tuple(given.items()))
    if made.microbatches != batches * schedule.microbatches:
        expected = "one whose factory takes the number of microbatches"
        raise SizeError.of("lengthen", "schedule", schedule, expected, "Write it as a generator, with @schedule.")
    return made


@dataclass(frozen=True)
class EndlessProgram:
    """The windows of every rank, for a schedule of one batch, repeated without a flush.

    - `schedule`: of one batch; every stage updates once, after its last microbatch. `graph`: the stage graph.
    - `tied`: the stages that hold a parameter of another one, beyond those that the graph names.
    - `reduces`: whether gradients are reduced over a data-parallel group before each update. `gathers`: whether weights
      are gathered from shards after each, and before the first batch.

    >>> from schedules import chain, pipedream
    >>> program = EndlessProgram(pipedream(ranks=2, microbatches=1), chain(2))
    >>> [" ".join(map(str, program.window(1, k))) for k in (2, 7)]
    ['1F2 1WAIT_B0>0 1B2 1SEND_B2>0 1RECV_F3<0 1U2', '1F7 1WAIT_B5>0 1B7 1SEND_B7>0 1RECV_F8<0 1U7']
    >>> program.reach
    (2, 1)
    """

    schedule: Schedule
    graph: Graph
    tied: frozenset[int] = frozenset()
    reduces: bool = False
    gathers: bool = False

    @cached_property
    def sharing(self) -> frozenset[int]:
        """The stages that hold a parameter of another one, too."""
        return self.tied | {s for edge in self.graph.gradients for s in edge}

    @property
    def known(self) -> int:
        """The number of batches whose windows tell all others.

        Raise `ScheduleError` for an incorrect schedule, and for one whose windows do not repeat.
        """
        return self._pattern[0]

    @property
    def period(self) -> int:
        """After how many batches windows repeat: more than one if ranks post messages in turns."""
        return self._pattern[1]

    @cached_property
    def _pattern(self) -> tuple[int, int]:
        values = replace(self.graph, gradients=frozenset())
        check(lengthen(self.schedule, 2), values)
        most = 4 * self.schedule.stages + 8
        count = 2
        while count <= most:
            for period in range(1, min(LONGEST_PERIOD, count) + 1):
                if all(self._repeats(rank, count, period) for rank in range(self.schedule.ranks)):
                    longest = lengthen(self.schedule, count + 2 * period)
                    check(longest, values)
                    _require_ascending(longest)
                    return count, period
            count *= 2
        check(lengthen(self.schedule, most), values)
        problem = f"is not the same for every batch, in {most} batches"
        repair = "With more microbatches, a rank's order must begin with its order for fewer."
        raise ScheduleError("repeating", 0, 0, None, problem, repair)

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Per rank, how many batches after its own a window touches: if one of them does not exist, it is another."""
        return tuple([max(unlike, self._look_ahead(rank)) for rank, unlike in enumerate(self._unlike)])

    def _look_ahead(self, rank: int) -> int:
        """Return how many batches after its own a window names; the first ones may name more than those that repeat."""
        windows, each = self._windows(self.known)[rank], self.schedule.microbatches
        return max(action.microbatch // each - k for k, window in enumerate(windows) for action in window)

    @cached_property
    def _unlike(self) -> tuple[int, ...]:
        """Per rank, how many of the last windows of many batches are others than with more batches."""
        return tuple([self._count_unlike(rank, *self._pattern) for rank in range(self.schedule.ranks)])

    @cached_property
    def program(self) -> Program:
        """The program for the known number of batches."""
        return self.lower(self.known)

    def shared_version(self, microbatch: int) -> int:
        """Return the version of shared parameters that a microbatch uses, on all stages: the number of updates."""
        each, known = self.schedule.microbatches, self._shared_versions
        beyond = max(0, microbatch // each - (len(known) // each - 1))
        return known[microbatch - beyond * each] + beyond

    @cached_property
    def _shared_versions(self) -> tuple[int, ...]:
        """The versions for the batches whose windows tell all others."""
        found = list_shared_versions(lengthen(self.schedule, 2 * self.known), self.sharing)
        return found[: self.known * self.schedule.microbatches]

    def window(self, rank: int, k: int, batches: int | None = None) -> Window:
        """Return what `rank` does after update `k - 1`, up to update `k`, of so many batches.

        Without `batches`, there are more than the window touches.
        """
        known, period, unlike = self.known, self.period, self._unlike[rank]
        if batches is not None and batches < known:
            return self._windows(batches)[rank][k]
        if batches is not None and k >= batches - unlike:
            alike = known + (batches - known) % period
            return self._shift(self._windows(alike)[rank][k - (batches - alike)], batches - alike)
        last = known - unlike - period + (k - known + unlike) % period if k >= known - unlike else k
        return self._shift(self._windows(known)[rank][last], k - last)

    def _repeats(self, rank: int, count: int, period: int) -> bool:
        """Return whether a period of batches more adds its windows to the program of so many batches, and again."""
        unlike = self._count_unlike(rank, count, period)
        counts = range(count, count + period + 1)
        return count - unlike >= period and all(self._grows(rank, more, more - unlike, period) for more in counts)

    def _grows(self, rank: int, count: int, alike: int, period: int) -> bool:
        """Return whether the program of a period more has repeated windows after those that are alike."""
        shorter, longer = (self._windows(batches)[rank] for batches in (count, count + period))
        repeated = [self._shift(window, period) for window in shorter[alike - period :]]
        return longer[:alike] == shorter[:alike] and list(longer[alike:]) == repeated

    def _count_unlike(self, rank: int, count: int, period: int) -> int:
        """Return in how many of its last windows a program of at least so many batches differs from a longer one."""
        return max(self._count_last(rank, more, period) for more in range(count, count + period))

    def _count_last(self, rank: int, count: int, period: int) -> int:
        pairs = zip(self._windows(count)[rank], self._windows(count + period)[rank], strict=False)
        return count - next((k for k, (one, other) in enumerate(pairs) if one != other), count)

    def _reduce_each(self, schedule: Schedule, rank: int) -> Iterator[Action]:
        """Yield the actions of a rank, each update after the reduction of its gradients."""
        for s in schedule.placement.stages_on(rank) if self.gathers else ():
            yield from (Action("UNSHARD", s, 0), Action("RESHARD", s, 0))
        for action in schedule.actions(rank):
            if action.kind == "U":
                yield action._replace(kind="REDUCE_GRAD")
            yield action
            if action.kind == "U" and self.gathers:  # nothing is freed: a stream keeps whole versions
                yield from (action._replace(kind="UNSHARD"), action._replace(kind="RESHARD"))

    def _windows(self, batches: int) -> tuple[tuple[Window, ...], ...]:
        return _list_windows(self.lower(batches), self.schedule)

    def lower(self, batches: int) -> Program:
        """Return the program for so many batches, with the stages that are added to exchange something."""
        schedule, graph, each = lengthen(self.schedule, batches), self.graph, self.schedule.microbatches
        if self.reduces:
            schedule = edit(schedule, [self._reduce_each(schedule, rank) for rank in range(schedule.ranks)])
        if self.sharing:
            schedule, graph = exchange(schedule, graph, self.sharing, graph.gradients, each)
        if answers := list_answers(schedule.placement, graph, self.schedule.stages):
            schedule, graph = exchange(schedule, graph, {s for edge in answers for s in edge}, answers, each)
        return lower(schedule, graph)

    def _shift(self, window: Window, batches: int) -> Window:
        by = batches * self.schedule.microbatches
        return tuple([action._replace(microbatch=action.microbatch + by) for action in window]) if by else window


def list_shared_versions(schedule: Schedule, tied: Collection[int]) -> tuple[int, ...]:
    """Return the version of shared parameters that each microbatch uses, on all of the stages that share any.

    It is the newest that all of these stages could have at their forwards, or what the schedule declares, if that is
    older; it does not descend.

    >>> from schedules import pipedream
    >>> list_shared_versions(pipedream(ranks=3, microbatches=6), tied={0, 2})
    (0, 0, 0, 1, 2, 3)
    """
    count = schedule.microbatches
    found = [count if schedule.version is None else schedule.version(i) for i in range(count)]
    for rank in range(schedule.ranks):
        made, seen = {s: 0 for s in schedule.placement.stages_on(rank) if s in tied}, set[int]()
        for kind, s, i, _, _ in schedule.actions(rank):
            if s in made and kind == "U":
                made[s] += 1
            elif s in made and KINDS[kind].crosses == "F" and i not in seen:
                seen.add(i)
                found[i] = min(found[i], *made.values())
    return tuple(accumulate(reversed(found), min))[::-1]


def exchange(
    schedule: Schedule, graph: Graph, stages: Collection[int], edges: Collection[Edge], each: int
) -> tuple[Schedule, Graph]:
    """Return the schedule and its graph with stages that give and take something along these edges with every batch.

    - `stages`: those that take part, with the ends of all edges. `each`: the number of microbatches of a batch.
    """
    S, versions, placement = schedule.stages, list_shared_versions(schedule, stages), schedule.placement
    rows = [tuple(_exchange(schedule, rank, versions, stages, each)) for rank in range(schedule.ranks)]
    threefold = Placement(placement.ranks, 3 * placement.homes, tuple([3 * homes for homes in placement.mirrors]))
    wider = Graph(3 * S, graph.values | {(S + s, 2 * S + t) for s, t in edges}, graph.cotangents)
    return from_rows(tuple(rows), threefold, schedule.microbatches, backward=schedule.backward), wider


def _exchange(
    schedule: Schedule, rank: int, versions: tuple[int, ...], stages: Collection[int], each: int
) -> Iterator[Action]:
    """Yield the actions of a rank: its own, and those that give and take."""
    S, taken = schedule.stages, 0
    own = [s for s in schedule.placement.stages_on(rank) if s in stages]
    for action in schedule.actions(rank):
        kind, s, i, _, _ = action
        if s in own and KINDS[kind].crosses == "F":
            while taken < versions[i]:
                taken += 1
                yield from (F(2 * S + t, taken * each - 1) for t in own)
        yield action
        if s in own and kind == "U":
            yield F(S + s, i)
    for b in range(taken, schedule.microbatches // each):
        yield from (F(2 * S + t, (b + 1) * each - 1) for t in own)


def list_answers(placement: Placement, graph: Graph, stages: int) -> frozenset[Edge]:
    """Return edges from a stage to one whose rank sends to its own rank, and would get nothing from it.

    - `stages`: the number of stages that are not there to exchange something.

    >>> from schedules import linear
    >>> list_answers(linear(ranks=2), Graph(2, values=frozenset({(0, 1)}), cotangents=frozenset()), stages=2)
    frozenset({(1, 0)})
    """
    found: dict[tuple[int, int], Edge] = {}
    for homes in placement.routes:
        for s, t in sorted(graph.values | {(t, s) for s, t in graph.cotangents}):
            found.setdefault((homes[s], homes[t]), (t % stages, s % stages))
    return frozenset(edge for (a, b), edge in found.items() if a != b and (b, a) not in found)


def _require_ascending(schedule: Schedule) -> None:
    """Raise `ScheduleError` if a microbatch uses an older version of the weights than one before it."""
    versions = [] if schedule.version is None else [schedule.version(i) for i in range(schedule.microbatches)]
    for i, (before, version) in enumerate(pairwise(versions), 1):
        if version < before:
            problem = f"declares version {version} for microbatch {i} after {before}, so no version could ever be freed"
            raise ScheduleError("repeating", 0, 0, None, problem, "Declare versions that do not descend.")


@lru_cache(maxsize=64)
def _list_windows(program: Program, schedule: Schedule) -> tuple[tuple[Window, ...], ...]:
    """Return the windows of all ranks; `schedule` is that of one batch."""
    ranks, batches = range(schedule.ranks), program.schedule.microbatches // schedule.microbatches
    streams = zip(ranks, program.streams(ranks), strict=True)
    return tuple(_split(rank, stream, batches, schedule) for rank, stream in streams)


def _split(rank: int, actions: Iterable[Action], batches: int, schedule: Schedule) -> tuple[Window, ...]:
    """Return the windows of one rank. Raise `ScheduleError` unless every stage updates once per batch, at its end."""
    stages, each = schedule.placement.stages_on(rank), schedule.microbatches
    windows, window, position, updated = list[Window](), list[Action](), -1, set[int]()
    for position, action in enumerate(actions):
        if len(updated) == len(stages) and KINDS[action.kind].does != "SEND" and len(windows) < batches - 1:
            windows.append(tuple(window))
            window, updated = [], set()
        window.append(action)
        if action.kind == "U":
            expected = (len(windows) + 1) * each - 1
            if action.microbatch != expected or action.stage in updated:
                problem = f"is not the one update of a batch of {each} microbatches, after microbatch {expected}"
                repair = "Each update must apply one batch: choose as many microbatches as come before it."
                raise ScheduleError("repeating", rank, position, action, problem, repair)
            updated.add(action.stage)
    windows.append(tuple(window))
    if len(windows) != batches or len(updated) != len(stages):
        problem = (
            f"ends in window {len(windows)} of {batches}, with updates of {len(updated)} of its {len(stages)} stages"
        )
        repair = "Update every stage once per batch, after its last backward."
        raise ScheduleError("repeating", rank, position, None, problem, repair)
    return tuple(windows)
