# SPDX-License-Identifier: Apache-2.0
"""Interpret schedules and programs on formulas, without torch, to see what they compute.

Problem. Only a run shows that every value reaches its consumer and that the ranks finish, and a run on real machines
shows it only for their buffers and their timing.

Idea. Everything that waits to be used is a *parcel* on some rank: a value, a cotangent, a stage's saved state. An
action takes the parcels it uses, waiting for them, and makes others. Sends and receives are posted and never block;
`WAIT` waits for its send and may be left out. The result is compared with `schedules.proof.formulas.whole`.

It shares no logic with the rules, the replay or the lowering: they are tested against it.

Invariants. A parcel is used once. At the end no parcel, no send and no receive is left.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

from schedules.checking.channels import Lowered
from schedules.errors import ProgramError
from schedules.language.actions import Action
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule
from schedules.lowering.program import lower
from schedules.proof.formulas import Formula, Meaning, formula
from schedules.proof.gradients import Sums
from schedules.proof.inflight import Parcel, carried, needed
from schedules.proof.networks import Links, Network, fifo, rendezvous, send_of
from schedules.replay.dependencies import graph_of


def ideal(schedule: Schedule, graph: Graph | None = None) -> Meaning:
    """Run a schedule without transfers: every value is at once where it is needed. Raise what `interpret` raises.

    >>> from schedules import chain, gpipe
    >>> from schedules.proof.formulas import whole
    >>> ideal(gpipe(ranks=2, microbatches=3)) == whole(chain(2), microbatches=3)
    True
    """
    streams = [schedule.actions(rank) for rank in range(schedule.ranks)]
    return _Run(schedule, graph_of(schedule, graph), streams, None).finish()


def interpret(program: Lowered, network: Network) -> Meaning:
    """Run a lowered program. Raise `ProgramError` if it gets stuck or ends with anything left over."""
    streams = [program.actions(rank) for rank in range(program.schedule.ranks)]
    return _Run(program.schedule, program.graph, streams, Links(network)).finish()


def prove(schedule: Schedule, graph: Graph | None = None) -> None:
    """Raise `ProgramError` unless the schedule, and its program over both networks, computes the whole model.

    >>> from schedules import one_f_one_b
    >>> prove(one_f_one_b(ranks=4, microbatches=8))
    """
    program = lower(schedule, graph)
    for meaning in (ideal(schedule, graph), interpret(program, rendezvous), interpret(program, fifo)):
        require_whole(meaning, schedule, program.graph)


def require_whole(meaning: Meaning, schedule: Schedule, graph: Graph) -> None:
    """Raise `ProgramError` unless `meaning` is what the whole model computes in a step of the schedule's sizes."""
    meaning.require(graph, schedule.microbatches, schedule.slices, schedule.backward)


Steps: TypeAlias = Generator[Parcel, None, None]  # yields the parcel it waits for until that arrives


class _Run:
    """One run of all ranks, in turn. Without links, a parcel is at once on its target's rank."""

    def __init__(self, schedule: Schedule, graph: Graph, streams: list[Iterator[Action]], links: Links | None) -> None:
        self.schedule, self.graph, self.streams, self.links = schedule, graph, streams, links
        self.placement = schedule.placement
        self.held: list[dict[Parcel, Formula]] = [{} for _ in streams]
        self.sent: list[dict[Action, None]] = [{} for _ in streams]  # invariant: sends without their WAIT so far
        self.outputs: list[list[Formula]] = [[] for _ in range(graph.stages)]
        self.sums = Sums(schedule, graph.stages)
        self.copied: dict[Parcel, Formula] = {}  # gradients of tied parameters that an update took
        self.at = [""] * len(streams)

    def finish(self) -> Meaning:
        """Step the ranks in turn until all have ended. Return the outcome; a round without progress is a deadlock."""
        running = {rank: self._rank(rank) for rank in range(len(self.streams))}
        while running:
            before = [*self.at]
            awaited = {rank: next(steps, None) for rank, steps in running.items()}
            if all(awaited.values()) and self.at == before:
                where = "; ".join(f"rank {rank} at {self.at[rank]} needs {parcel}" for rank, parcel in awaited.items())
                raise ProgramError(f"nobody can go on: {where}. Reorder the actions, or add what is missing.")
            running = {rank: steps for rank, steps in running.items() if awaited[rank]}
        return self._outcome()

    def _outcome(self) -> Meaning:
        gradients, wholes = self.sums.gradients(), self.sums.wholes()
        tied = sorted(self.graph.gradients) if self.schedule.backward else []
        copies = {edge: self._copies(*edge) for edge in tied}
        self._require_nothing_left()
        self.sums.require_updated()
        self.sums.require_alike(self.graph)
        self.sums.require_late()
        return Meaning(tuple(map(tuple, self.outputs)), gradients, wholes, copies)

    def _require_nothing_left(self) -> None:
        left = [str(parcel) for held in self.held for parcel in held]
        left += [str(message) for message in (self.links.left() if self.links else ())]
        if left:
            raise ProgramError(f"left over at the end: {', '.join(left)}. Use everything that is made, once.")

    def _rank(self, rank: int) -> Steps:
        handlers = _HANDLERS if self.links is None else {**_HANDLERS, **_TRANSFERS}
        stream = enumerate(self.streams[rank])
        for position, action in stream:
            self.at[rank] = f"position {position}, {action}"
            handler = handlers.get(action.kind)
            if handler is None or not self._holds(rank, action):
                raise ProgramError(f"rank {rank} cannot run {self.at[rank]}. Give it actions on stages that it holds.")
            if action.kind == "OVERLAP_F":
                yield from self._pair(rank, action, next(stream, (position, None))[1])
            else:
                yield from handler(self, rank, action)

    def _holds(self, rank: int, action: Action) -> bool:
        if not all(0 <= stage < self.graph.stages for stage in (action.stage, action.peer) if stage is not None):
            return False
        if (action.slice is None) != (self.schedule.slices == 1 or action.kind[-1] in "GU"):
            return False
        ends = self.placement.replicas(action.stage)
        return rank in ends and (
            action.peer is not None or self.placement.home(action.stage, action.microbatch) == rank
        )

    def _cannot(self, rank: int, repair: str) -> ProgramError:
        return ProgramError(f"rank {rank} cannot run {self.at[rank]}. {repair}")

    def _needed(self, action: Action) -> list[Parcel]:
        return needed(action, self.graph, self.schedule.slices)

    def _pair(self, rank: int, first: Action, second: Action | None) -> Steps:
        """Run a fused pair: the inputs of both must be there before either begins."""
        if second is None or second.kind not in ("B", "I") or not self._holds(rank, second):
            raise self._cannot(rank, "Put the B or I that it overlaps with directly behind it.")
        for parcel in (*self._needed(first), *self._needed(second)):
            while parcel not in self.held[rank]:
                yield parcel
        yield from self._forward(rank, first)
        yield from _HANDLERS[second.kind](self, rank, second)

    def _forward(self, rank: int, action: Action) -> Steps:
        kind, s, i, _, part = action
        if kind == "C" and not self.schedule.backward:
            raise self._cannot(rank, "Checkpoint what comes back.")
        inputs = yield from self._take(rank, *self._needed(action))
        if not self.sums.begin(s, rank, i):
            raise self._cannot(rank, "Update weights before the first slice of a microbatch, or after its last.")
        output = formula("F", s, (i, part or 0), *inputs)
        self.outputs[s].append(output)
        kept = [Parcel("inputs" if kind == "C" else "residuals", s, s, i, part)] * self.schedule.backward
        if part is not None and part < self.schedule.slices - 1:
            kept.append(Parcel("cache", s, s, i, part))
        self._put(rank, output, *kept, *(Parcel("F", s, t, i, part) for t in self.graph.feeds[s]))

    def _recompute(self, rank: int, action: Action) -> Steps:
        _, s, i, _, part = action
        (output,) = yield from self._take(rank, Parcel("inputs", s, s, i, part))
        self._put(rank, output, Parcel("residuals", s, s, i, part))

    def _pull(self, rank: int, action: Action) -> Generator[Parcel, None, Formula]:
        """Make the cotangents and return the term to add to the weight gradient."""
        _, s, i, _, part = action
        kept = yield from self._take(rank, *self._needed(action))
        later = [Parcel("later", s, s, i, part)] if part else []
        self._put(rank, formula("B", *kept), *later, *(Parcel("B", s, p, i, part) for p in self.graph.pulls[s]))
        return formula("W", *kept)

    def _backward(self, rank: int, action: Action) -> Steps:
        term = yield from self._pull(rank, action)
        self.sums.add(action.stage, rank, (action.microbatch, action.slice), term)

    def _input_half(self, rank: int, action: Action) -> Steps:
        _, s, i, _, part = action
        term = yield from self._pull(rank, action)
        self._put(rank, term, Parcel("deferred", s, s, i, part))

    def _weight_half(self, rank: int, action: Action) -> Steps:
        _, s, i, _, part = action
        (term,) = yield from self._take(rank, Parcel("deferred", s, s, i, part))
        self.sums.add(action.stage, rank, (action.microbatch, action.slice), term)

    def _sum_replicas(self, rank: int, action: Action) -> Steps:
        s, sums = action.stage, self.sums
        others = sums.others(s, rank)
        if not others or (s, rank) in sums.totals or action.microbatch != sums.last(s, rank):
            raise self._cannot(rank, "Sum the gradients of replicas once, named by this one's last microbatch.")
        partials = {rank: sums.partial(s, rank)}
        for other in others:
            partial = Parcel("G", s, s, sums.last(s, other))
            if self.links is not None:
                (partials[other],) = yield from self._take(rank, partial)
            while self.links is None and not sums.complete(s, other):
                yield partial
            partials.setdefault(other, sums.partial(s, other))
        sums.settle(s, rank, partials)

    def _update(self, rank: int, action: Action) -> Steps:
        """Update a stage's weights once the gradients of the parameters it shares with other stages are complete."""
        t = action.stage
        for route, homes in enumerate(self.placement.routes):
            for s in self.graph.shared_by[t] if homes[t] == rank and self.schedule.backward else ():
                parcel = Parcel("G", s, t, range(route, self.schedule.microbatches, len(self.placement.routes))[-1])
                if self.links is not None and homes[s] != rank and parcel not in self.copied:
                    (self.copied[parcel],) = yield from self._take(rank, parcel)
                while not self.sums.settled(s, homes[s]):
                    yield parcel
        if not self.sums.update(action.stage, rank, action.microbatch):
            raise self._cannot(rank, "Update with gradients that are there, each once.")

    def _send(self, rank: int, action: Action) -> Steps:
        parcel = carried(action)
        if parcel.kind == "G":
            s, t = parcel.source, parcel.target
            self._put(rank, self.sums.partial(s, rank) if s == t else self.sums.whole(s, rank), parcel)
        if parcel not in self.held[rank] or action in self.sent[rank]:
            raise self._cannot(rank, "Send what has been made, once.")
        self.sent[rank][action] = None
        self._deliver(self._links.send((rank, self._other_end(rank, parcel)), action, self.held[rank].pop(parcel)))
        yield from ()

    def _receive(self, rank: int, action: Action) -> Steps:
        message = send_of(action)
        parcel = carried(message)
        source = self.placement.home(message.stage, message.microbatch)
        if rank != self._other_end(source, parcel):
            raise self._cannot(rank, "Receive where the stage is that needs it.")
        self._deliver(self._links.receive((source, rank), message))
        yield from ()

    def _other_end(self, source: int, parcel: Parcel) -> int:
        """Return the rank a parcel from rank `source` goes to: the target stage's, or that of the other replica."""
        if parcel.source != parcel.target:
            return self.placement.home(parcel.target, parcel.microbatch)
        return next((rank for rank in self.placement.replicas(parcel.source) if rank != source), source)

    def _wait(self, rank: int, action: Action) -> Steps:
        message = send_of(action)
        if message not in self.sent[rank]:
            raise self._cannot(rank, "Wait once, after the send.")
        while self._links.pending(message):
            yield carried(message)
        del self.sent[rank][message]

    @property
    def _links(self) -> Links:
        assert self.links is not None, "there are no transfers without a network"
        return self.links

    def _deliver(self, passing: Iterator[tuple[Action, Formula]]) -> None:
        for message, value in passing:
            parcel = carried(message)
            source = self.placement.home(message.stage, message.microbatch)
            self._put(self._other_end(source, parcel), value, parcel)

    def _take(self, rank: int, *parcels: Parcel) -> Generator[Parcel, None, list[Formula]]:
        for parcel in parcels:
            while parcel not in self.held[rank]:
                yield parcel
        return [self.held[rank].pop(parcel) for parcel in parcels]

    def _put(self, rank: int, value: Formula, *parcels: Parcel) -> None:
        for parcel in parcels:
            held = self.held[rank if self.links else self.placement.home(parcel.target, parcel.microbatch)]
            if parcel in held:
                raise ProgramError(f"{parcel} is made again by rank {rank} at {self.at[rank]}. Make it once.")
            held[parcel] = value

    def _copies(self, s: int, t: int) -> tuple[Formula, ...]:
        """Return, for each route, the gradient of `s`'s parameters on the rank of `t`, received or local."""
        return tuple(self._copy(s, t, route) for route in range(len(self.placement.routes)))

    def _copy(self, s: int, t: int, route: int) -> Formula:
        owner, holder = (self.placement.routes[route][stage] for stage in (s, t))
        if self.links is None or owner == holder:
            return self.sums.whole(s, owner)
        parcel = Parcel("G", s, t, range(route, self.schedule.microbatches, len(self.placement.routes))[-1])
        if parcel in self.copied:
            return self.copied[parcel]
        if parcel not in self.held[holder]:
            raise ProgramError(f"{parcel} never arrives. Send it after the last backward of stage {s}.")
        return self.held[holder].pop(parcel)


Handler: TypeAlias = Callable[[_Run, int, Action], Steps]
_HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        "F": _Run._forward,
        "C": _Run._forward,
        "OVERLAP_F": _Run._forward,
        "R": _Run._recompute,
        "B": _Run._backward,
        "I": _Run._input_half,
        "W": _Run._weight_half,
        "G": _Run._sum_replicas,
        "U": _Run._update,
    }
)
_TRANSFERS: Mapping[str, Handler] = MappingProxyType(
    {
        f"{word}_{what}": handler
        for what in "FBG"
        for word, handler in (("SEND", _Run._send), ("RECV", _Run._receive), ("WAIT", _Run._wait))
    }
)
