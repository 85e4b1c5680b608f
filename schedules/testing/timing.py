# SPDX-License-Identifier: Apache-2.0
"""Time a lowered program by its own transfers.

Problem. A schedule is simulated before it has any transfers, but what runs is its program. If the two disagree about
when a value leaves, the simulation describes something that nobody runs.

Idea. Give every rank a clock and execute its program as written. A message leaves at its `SEND` and arrives one
transfer time later. A compute action starts once its rank is free, its receives are posted and its messages have
arrived; the two actions of a fused pair start together. `WAIT` lasts until the message has arrived. Collectives have a
clock of their own, and so have moves off the device and back. This shares no logic with the replay or the wiring, which
are tested against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from schedules.analysis.simulation import spans
from schedules.arguments import require_types
from schedules.checking.channels import LoweredProgram
from schedules.language.actions import BESIDE, KINDS, Action, message_of
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule
from schedules.lowering.program import lower
from schedules.lowering.turns import target_of
from schedules.playing.costs import Costs
from schedules.playing.engine import Span
from schedules.playing.outputs import unit_of
from schedules.playing.rows import edit
from schedules.proof.inflight import Parcel, parcel_of, parcels_for

TOLERANCE = 1e-6  # sums of thirds and the like are not exact


def time_program(program: LoweredProgram, costs: Costs) -> list[Span]:
    """Return the spans of a correct program's compute actions, rank by rank in order.

    >>> from schedules import gpipe
    >>> [f"{span.action} {span.start}" for span in time_program(lower(gpipe(ranks=2, microbatches=1)), Costs(comm=2))]
    ['0F0 0.0', '0B0 8.0', '1F0 3.0', '1B0 4.0']
    """
    require_types(time_program, locals())
    arrived = dict[Parcel, float]()
    clocks = [_Clock(program, rank, costs, arrived) for rank in range(program.schedule.ranks)]
    running = {clock.rank: clock.run() for clock in clocks}
    while running:
        before = len(arrived), len(running)
        running = {rank: steps for rank, steps in running.items() if next(steps, None)}
        assert (len(arrived), len(running)) != before, f"ranks {sorted(running)} wait for each other"
    return [span for clock in clocks for span in clock.spans]


def require_same_times(schedule: Schedule, graph: Graph, costs: Costs) -> None:
    """Assert that the simulation runs every action at the same time as the lowered program."""
    require_types(require_same_times, locals())
    kept = edit(schedule, map(schedule.actions, range(schedule.ranks)))
    got = {span.action: span for span in spans(kept, costs, graph)}
    for want in time_program(lower(kept, graph), costs):
        start, end = got[want.action].start, got[want.action].end
        assert abs(start - want.start) < TOLERANCE and abs(end - want.end) < TOLERANCE, (  # noqa: PT018 - one fact
            f"rank {want.rank}: {want.action} is simulated from {start} to {end}, and its program runs it from "
            f"{want.start} to {want.end}."
        )


class _Clock:
    """One rank's clock and the receives it has posted; all ranks share `arrived`, the arrival time of each message."""

    def __init__(self, program: LoweredProgram, rank: int, costs: Costs, arrived: dict[Parcel, float]) -> None:
        self.program, self.rank, self.costs, self.arrived = program, rank, costs, arrived
        self.schedule, self.placement = program.schedule, program.schedule.placement
        self.draw = Random(f"{costs.seed}/{rank}").uniform
        self.now, self.posted, self.spans = 0.0, set[Parcel](), list[Span]()
        self.free = {"group": 0.0, "out": 0.0, "back": 0.0}  # when the last one of each lane ends
        self.results = dict[tuple[str, int], float]()  # when each collective ends
        self.moved = dict[tuple[int, int, int | None], float]()  # when the last move of a unit's memory ends

    def run(self) -> Iterator[Parcel]:
        """Execute the program, yielding any message it waits for until that has been sent."""
        stream = self.program.actions(self.rank)
        for action in stream:
            if action.peer is not None:
                yield from self._transfer(action)
            elif action.kind in BESIDE:
                self._run_beside(action)
            elif action.kind == "OVERLAP_F":
                yield from self._compute(action, next(stream))
            else:
                yield from self._compute(action)

    def _transfer(self, action: Action) -> Iterator[Parcel]:
        word, s = KINDS[action.kind], action.stage
        message = parcel_of(message_of(action))
        if word.does == "RECV":
            self.posted.add(message)
        elif word.does == "WAIT":
            if not getattr(
                self.program, "waits_early", False
            ):  # that bounds what evaluation holds; a simulation holds no buffers
                yield from self._await(message)
        else:
            target, what = target_of(action, self.placement), word.carries
            made = max(self.now, self.results.get(("REDUCE_GRAD", s), 0)) if what == "G" else self.now
            self.arrived[message] = made + self.costs.transfer(what, s, self.rank, target)

    def _await(self, message: Parcel) -> Iterator[Parcel]:
        while message not in self.arrived:
            yield message
        self.now = max(self.now, self.arrived[message])

    def _compute(self, *step: Action) -> Iterator[Parcel]:
        for message in (message for action in step for message in self._messages_for(action)):
            assert message in self.posted, f"{step[0]} takes {message}, whose receive is not posted"
            yield from self._await(message)
        for result in (result for action in step for result in self._results_for(action)):
            self.now = max(self.now, self.results.get(result, 0))
        for _, s, i, _, part in step:
            self.now = max(self.now, self.moved.get((s, i, part), 0))
        for action in step:
            share = self.schedule.slices if KINDS[action.kind].after else 1
            start, self.now = self.now, self.now + self._time(action) / share
            self.spans.append(Span(self.rank, action, start, self.now))

    def _run_beside(self, action: Action) -> None:
        kind, s, i, _, part = action
        moves = kind in ("OFFLOAD", "RELOAD")
        before = self.moved.get((s, i, part), 0) if moves else 0
        start = self.now if kind == "RESHARD" else max(self.now, self.free[BESIDE[kind]], before)
        end = start + self._time(action) / (self.schedule.slices if moves else 1)
        if moves:
            self.moved[s, i, part] = self.free[BESIDE[kind]] = end
        elif kind != "RESHARD":
            self.free["group"] = self.results[kind, s] = end
        self.spans.append(Span(self.rank, action, start, end))

    def _time(self, action: Action) -> float:
        jitter = self.draw(1 - self.costs.jitter, 1 + self.costs.jitter) if self.costs.jitter else 1
        factors = self.costs.factors(self.schedule.microbatches, self.schedule.slices)
        factor = factors[unit_of(action, self.schedule.slices)] if factors and KINDS[action.kind].after else 1
        return self.costs.time(action.kind, action.stage) * factor * jitter

    def _results_for(self, action: Action) -> Iterator[tuple[str, int]]:
        """Yield the collectives of this rank, by kind and stage, whose results an action takes if they are there."""
        kind, s, *_ = action
        if kind == "U":
            here = [homes for homes in self.placement.routes if homes[s] == self.rank]
            owners = [t for homes in here for t in self.program.graph.shared_by[s] if homes[t] == self.rank]
            yield from (("REDUCE_GRAD", t) for t in (s, *owners))
        elif KINDS[kind].reads:
            yield "UNSHARD", s

    def _messages_for(self, action: Action) -> Iterator[Parcel]:
        """Yield the messages from other ranks that an action takes."""
        s, graph = action.stage, self.program.graph
        if action.kind == "G":
            replicas = self.placement.replicas(s)
            for other in (other for other in replicas if other != self.rank):
                part = replicas.index(self.rank) if len(replicas) > 2 else None
                yield Parcel("G", s, s, self._last_microbatch([(s, other)]), part)
        elif action.kind == "U":
            for owner in graph.shared_by[s]:
                for rank in dict.fromkeys(homes[owner] for homes in self.placement.routes if homes[s] == self.rank):
                    if rank != self.rank:
                        yield Parcel("G", owner, s, self._last_microbatch([(s, self.rank), (owner, rank)]))
        elif KINDS[action.kind].crosses:
            for parcel in parcels_for(action, graph, self.schedule.slices):
                if self.placement.home(parcel.source, parcel.microbatch) != self.rank:
                    yield parcel

    def _last_microbatch(self, places: Sequence[tuple[int, int]]) -> int:
        """Return the last microbatch that goes through all these stages on these ranks."""
        microbatches = reversed(range(self.schedule.microbatches))
        return next(i for i in microbatches if all(self.placement.home(s, i) == rank for s, rank in places))
