# SPDX-License-Identifier: Apache-2.0
"""What a schedule does compute: schedules and programs run on formulas, without torch.

Problem. Only a run shows that every value reaches its user and that the ranks finish; a run on machines shows it for
their buffers and their timing.

Idea. Everything that waits to be used is a *parcel* on some rank: a value, a cotangent, what a stage keeps for later.
An action takes the parcels that it uses, waiting for them, and makes others. Sends and receives are posted and never
block; `WAIT` waits for its send. What comes out is compared with `schedules.meaning.whole`.

Invariants. A parcel is used once. At the end no parcel, no send and no receive is left.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple, TypeAlias

from schedules.actions import Action
from schedules.authoring import Schedule
from schedules.errors import ProgramError
from schedules.graph import Graph
from schedules.lowering import Program, lower
from schedules.meaning import Formula, Meaning, formula
from schedules.networks import Links, Network, fifo, rendezvous, send_of
from schedules.wiring import graph_of


def ideal(schedule: Schedule, graph: Graph | None = None) -> Meaning:
    """Run a schedule as it is, every value being at once where it is needed. Raises as `interpret` does.

    >>> from schedules import chain, gpipe
    >>> from schedules.meaning import whole
    >>> ideal(gpipe(ranks=2, microbatches=3)) == whole(chain(2), microbatches=3)
    True
    """
    streams = [schedule.actions(rank) for rank in range(schedule.ranks)]
    return _Run(schedule, graph_of(schedule, graph), streams, None).finish()


def interpret(program: Program, network: Network) -> Meaning:
    """Run a lowered program. Raises `ProgramError` where it cannot go on, or ends with something left over."""
    streams = [program.actions(rank) for rank in range(program.schedule.ranks)]
    return _Run(program.schedule, program.graph, streams, Links(network)).finish()


def prove(schedule: Schedule, graph: Graph | None = None) -> None:
    """Raise `ProgramError` unless the schedule, and its program over either network, computes the whole model.

    >>> from schedules import one_f_one_b
    >>> prove(one_f_one_b(ranks=4, microbatches=8))
    """
    program = lower(schedule, graph)
    for meaning in (ideal(schedule, graph), interpret(program, rendezvous), interpret(program, fifo)):
        meaning.require(program.graph, schedule.microbatches)


class _Parcel(NamedTuple):
    """Made by stage `source`, to be used once by stage `target`, which is the same for what a stage keeps for later."""

    kind: str
    source: int
    target: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} {self.source}>{self.target} of microbatch {self.microbatch}"


Steps: TypeAlias = Iterator[_Parcel]  # yields the parcel that it waits for, again and again until it is there


class _Run:
    """One run of all ranks in turn. Without links, a parcel is at once on the rank of its target."""

    def __init__(self, schedule: Schedule, graph: Graph, streams: list[Iterator[Action]], links: Links | None) -> None:
        self.graph, self.streams, self.links = graph, streams, links
        self.homes, self.final = schedule.placement.homes, schedule.microbatches - 1
        self.held: list[dict[_Parcel, Formula]] = [{} for _ in streams]
        self.sent: list[dict[Action, None]] = [{} for _ in streams]  # invariant: those that have not had their WAIT
        self.outputs: list[list[Formula]] = [[] for _ in self.homes]
        self.gradients: list[list[Formula]] = [[] for _ in self.homes]
        self.at = [""] * len(streams)

    def finish(self) -> Meaning:
        """Step the ranks in turn until all have ended; a round in which none moves is a deadlock."""
        running = {rank: self._rank(rank) for rank in range(len(self.streams))}
        while running:
            before = [*self.at]
            needed = {rank: next(steps, None) for rank, steps in running.items()}
            if all(needed.values()) and self.at == before:
                where = "; ".join(f"rank {rank} at {self.at[rank]} needs {parcel}" for rank, parcel in needed.items())
                raise ProgramError(f"nobody can go on: {where}. Reorder the actions, or add what is missing.")
            running = {rank: steps for rank, steps in running.items() if needed[rank]}
        copies = {edge: self._copy(*edge) for edge in sorted(self.graph.gradients)}
        self._require_nothing_left()
        return Meaning(tuple(map(tuple, self.outputs)), tuple(map(tuple, self.gradients)), copies)

    def _require_nothing_left(self) -> None:
        left = [str(parcel) for held in self.held for parcel in held]
        left += [str(message) for sent in self.sent for message in sent]
        left += [str(message) for message in (self.links.left() if self.links else ())]
        if left:
            raise ProgramError(f"left over at the end: {', '.join(left)}. Use everything that is made, once.")

    def _rank(self, rank: int) -> Steps:
        handlers = {"F": self._forward, "B": self._backward, "I": self._input_half, "W": self._weight_half}
        transfers = {"SEND": self._send, "RECV": self._receive, "WAIT": self._wait}
        for position, action in enumerate(self.streams[rank]):
            self.at[rank] = f"position {position}, {action}"
            handler = (handlers | transfers if self.links else handlers).get(action.kind.partition("_")[0])
            if handler is None or action.stage >= len(self.homes) or self.homes[action.stage] != rank:
                raise ProgramError(f"rank {rank} cannot run {self.at[rank]}. Give it actions on stages that it holds.")
            yield from handler(rank, action)

    def _forward(self, rank: int, action: Action) -> Steps:
        _, s, i, _, _ = action
        inputs = yield from self._take(rank, *(_Parcel("F", p, s, i) for p in self.graph.fed_by[s]))
        output = formula("F", s, i, *inputs)
        self.outputs[s].append(output)
        self._put(rank, output, _Parcel("residuals", s, s, i), *(_Parcel("F", s, t, i) for t in self.graph.feeds[s]))

    def _pull(self, rank: int, action: Action) -> Generator[_Parcel, None, Formula]:
        """Make the cotangents; returns the term that is left to add to the gradient."""
        _, s, i, _, _ = action
        cotangents = (_Parcel("B", t, s, i) for t in self.graph.pulled_by[s])
        kept = yield from self._take(rank, _Parcel("residuals", s, s, i), *cotangents)
        self._put(rank, formula("B", *kept), *(_Parcel("B", s, p, i) for p in self.graph.pulls[s]))
        return formula("W", *kept)

    def _backward(self, rank: int, action: Action) -> Steps:
        term = yield from self._pull(rank, action)
        self.gradients[action.stage].append(term)

    def _input_half(self, rank: int, action: Action) -> Steps:
        term = yield from self._pull(rank, action)
        self._put(rank, term, _Parcel("deferred", action.stage, action.stage, action.microbatch))

    def _weight_half(self, rank: int, action: Action) -> Steps:
        terms = yield from self._take(rank, _Parcel("deferred", action.stage, action.stage, action.microbatch))
        self.gradients[action.stage] += terms

    def _send(self, rank: int, action: Action) -> Steps:
        parcel = _parcel(action)
        if parcel.kind == "G":
            self._put(rank, formula("sum", *self.gradients[parcel.source]), parcel)
        if parcel not in self.held[rank] or action in self.sent[rank]:
            raise ProgramError(f"rank {rank} cannot run {self.at[rank]}. Send what has been made, once.")
        self.sent[rank][action] = None
        self._deliver(self._links.send((rank, self.homes[parcel.target]), action, self.held[rank].pop(parcel)))
        yield from ()

    def _receive(self, rank: int, action: Action) -> Steps:
        message = send_of(action)
        self._deliver(self._links.receive((self.homes[message.stage], rank), message))
        yield from ()

    def _wait(self, rank: int, action: Action) -> Steps:
        message = send_of(action)
        if message not in self.sent[rank]:
            raise ProgramError(f"rank {rank} cannot run {self.at[rank]}. Wait once, after the send.")
        while self._links.pending(message):
            yield _parcel(message)
        del self.sent[rank][message]

    @property
    def _links(self) -> Links:
        assert self.links is not None, "there are no transfers without a network"
        return self.links

    def _deliver(self, passing: Iterator[tuple[Action, Formula]]) -> None:
        for message, value in passing:
            parcel = _parcel(message)
            self._put(self.homes[parcel.target], value, parcel)

    def _take(self, rank: int, *parcels: _Parcel) -> Generator[_Parcel, None, list[Formula]]:
        for parcel in parcels:
            while parcel not in self.held[rank]:
                yield parcel
        return [self.held[rank].pop(parcel) for parcel in parcels]

    def _put(self, rank: int, value: Formula, *parcels: _Parcel) -> None:
        for parcel in parcels:
            held = self.held[rank if self.links else self.homes[parcel.target]]
            if parcel in held:
                raise ProgramError(f"{parcel} is made again by rank {rank} at {self.at[rank]}. Make it once.")
            held[parcel] = value

    def _copy(self, s: int, t: int) -> Formula:
        """The gradient of the parameters of `s` on the rank of `t`, received or there anyway."""
        if self.links is None or self.homes[s] == self.homes[t]:
            return formula("sum", *self.gradients[s])
        parcel = _Parcel("G", s, t, self.final)
        if parcel not in self.held[self.homes[t]]:
            raise ProgramError(f"{parcel} never arrives. Send it after the last backward of stage {s}.")
        return self.held[self.homes[t]].pop(parcel)


def _parcel(message: Action) -> _Parcel:
    assert message.peer is not None, "a message has a peer stage"
    return _Parcel(message.kind.partition("_")[2], message.stage, message.peer, message.microbatch)
