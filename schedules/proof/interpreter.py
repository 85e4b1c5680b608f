# SPDX-License-Identifier: Apache-2.0
"""Interpret schedules and programs on formulas, without torch, to see what they compute.

Problem. Only a run shows that every value reaches its consumer and that the ranks finish, and a run on real machines
shows it only for their buffers and their timing.

Idea. Everything that waits to be used is a *parcel* on some rank: a value, a cotangent, a stage's saved state. An
action takes the parcels it uses, waiting for them, and makes others. Sends and receives are posted and never block;
`WAIT` waits for its send and may be left out. The result is compared with `schedules.proof.formulas.whole_model`.

It shares no logic with the rules, the replay or the lowering: they are tested against it.

Invariants. A parcel is used once. At the end no parcel, no send and no receive is left.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

from schedules.checking.channels import LoweredProgram, streams_of
from schedules.errors import ProgramError
from schedules.language.actions import KINDS, Action
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule, graph_of
from schedules.lowering.program import lower
from schedules.own_kinds import OwnKind
from schedules.proof.formulas import Formula, Meaning, formula
from schedules.proof.gatherings import Gatherings
from schedules.proof.gradients import Sums
from schedules.proof.inflight import Parcel, parcels_for
from schedules.proof.networks import Links, Network, fifo, rendezvous
from schedules.proof.store import Store, Waits
from schedules.proof.transfers import Transfers


def ideal(schedule: Schedule, graph: Graph | None = None) -> Meaning:
    """Run a schedule without transfers: every value is at once where it is needed. Raise what `interpret` raises.

    >>> from schedules import chain, gpipe
    >>> from schedules.proof.formulas import whole_model
    >>> ideal(gpipe(ranks=2, microbatches=3)) == whole_model(chain(2), microbatches=3)
    True
    """
    streams = [schedule.actions(rank) for rank in range(schedule.ranks)]
    return Interpreter(schedule, graph_of(schedule, graph), streams, None).run()


def interpret(program: LoweredProgram, network: Network) -> Meaning:
    """Run a lowered program. Raise `ProgramError` if it gets stuck or ends with anything left over."""
    return Interpreter(program.schedule, program.graph, streams_of(program), Links(network)).run()


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


class Interpreter:
    """One run of all ranks, in turn. Without links, a parcel is at once on its target's rank.

    `copied` holds the gradients of shared parameters that an update has used, until the end.
    """

    def __init__(self, schedule: Schedule, graph: Graph, streams: list[Iterator[Action]], links: Links | None) -> None:
        self.schedule, self.graph, self.streams, self.links = schedule, graph, streams, links
        self.placement = schedule.placement
        self.store = Store(schedule.placement, direct=links is None)
        self.sums = Sums(schedule, graph.stages)
        self.weights = Gatherings(self.store)
        self.transfers = None if links is None else Transfers(schedule.placement, self.store, self.sums, links)
        self.outputs: list[list[Formula]] = [[] for _ in range(graph.stages)]
        self.copied: dict[Parcel, Formula] = {}
        self.own = set[Action]()

    def run(self) -> Meaning:
        """Step the ranks in turn until all have ended. Return the outcome; a round without progress is a deadlock."""
        running = {rank: self.run_rank(rank) for rank in range(len(self.streams))}
        while running:
            before = [*self.store.at]
            awaited = {rank: next(waits, None) for rank, waits in running.items()}
            if all(awaited.values()) and self.store.at == before:
                where = "; ".join(f"rank {r} at {self.store.at[r]} needs {parcel}" for r, parcel in awaited.items())
                raise ProgramError(f"deadlock: {where}. Reorder the actions, or add what is missing.")
            running = {rank: waits for rank, waits in running.items() if awaited[rank]}
        return self._finish()

    def _finish(self) -> Meaning:
        gradients, sums = self.sums.gradients(), self.sums.full_gradients()
        shared = sorted(self.graph.gradients) if self.schedule.backward else []
        copies = {edge: self._copies(*edge) for edge in shared}
        self._require_nothing_left()
        self.sums.require_all_applied()
        self.sums.require_equal_copies(self.graph)
        self.sums.require_sums_last()
        self.sums.require_all_reduced()
        updates = self.sums.gradients_updated_with()
        return Meaning(tuple(map(tuple, self.outputs)), gradients, sums, copies, updates)

    def _require_nothing_left(self) -> None:
        left = [str(parcel) for parcels in self.store.parcels for parcel in parcels]
        left += [str(message) for message in (self.links.list_unmatched() if self.links else ())]
        if left:
            raise ProgramError(
                f"left over at the end: {', '.join(left)}. Use each value once, and match each send with a receive."
            )

    def run_rank(self, rank: int) -> Waits:
        """Run all actions of one rank, yielding any parcel it waits for until that arrives."""
        stream = enumerate(self.streams[rank])
        for position, action in stream:
            self.store.at[rank] = f"position {position}, {action}"
            if not self._can_run(rank, action):
                problem = "is not an action on a stage that this rank holds"
                raise self.store.error(rank, problem, "Run it on the rank that holds the stage.")
            if isinstance(action.kind, OwnKind):
                yield from self._run_own(rank, action, action.kind)
            elif self.transfers is not None and action.kind not in _HANDLERS:
                yield from self.transfers.run(rank, action)
            elif action.kind == "OVERLAP_F":
                yield from self._run_pair(rank, action, next(stream, (position, None))[1])
            else:
                yield from _HANDLERS[action.kind](self, rank, action)

    def _can_run(self, rank: int, action: Action) -> bool:
        is_compute = action.kind in _HANDLERS or isinstance(action.kind, OwnKind)
        if not is_compute and (self.links is None or action.kind not in KINDS):
            return False
        if not all(0 <= stage < self.graph.stages for stage in (action.stage, action.peer) if stage is not None):
            return False
        word = KINDS[action.kind]
        is_whole = not word.after and word.carries in ("", "G")
        replicas = self.placement.replicas(action.stage) if action.peer == action.stage else ()
        if len(replicas) > 2:  # the slice says which of the others gets its part of the gradient
            return action.slice is not None and action.slice < len(replicas)
        if (action.slice is None) != (self.schedule.slices == 1 or is_whole):
            return False
        is_home = action.peer is not None or self.placement.home(action.stage, action.microbatch) == rank
        return is_home and rank in self.placement.replicas(action.stage)

    def _parcels_for(self, action: Action) -> list[Parcel]:
        return parcels_for(action, self.graph, self.schedule.slices)

    def _run_pair(self, rank: int, first: Action, second: Action | None) -> Waits:
        """Run a fused pair: the inputs of both must be there before either begins."""
        if second is None or not self._can_run(rank, second) or KINDS[second.kind].crosses != "B":
            repair = "Put the B or I that it overlaps with right after it."
            raise self.store.error(rank, "overlaps with no backward", repair)
        yield from self.store.wait_for(rank, *self._parcels_for(first), *self._parcels_for(second))
        yield from self._forward(rank, first)
        yield from _HANDLERS[second.kind](self, rank, second)

    def _forward(self, rank: int, action: Action) -> Waits:
        kind, s, i, _, part = action
        if kind == "C" and not self.schedule.backward:
            raise self.store.error(rank, "is checkpointed, and the schedule has no backwards", "Use F.")
        inputs = yield from self.store.take(rank, *self._parcels_for(action))
        self.weights.read(rank, s)
        if not self.sums.begin(s, rank, i):
            repair = "Update weights before the first slice of a microbatch or after its last; first make what it uses."
            raise self.store.error(rank, "uses other weights than an earlier slice, or some not made yet", repair)
        output = formula("F", s, (i, part or 0), *inputs)
        self.outputs[s].append(output)
        kept = [Parcel("inputs" if kind == "C" else "residuals", s, s, i, part)] * self.schedule.backward
        if part is not None and part < self.schedule.slices - 1:
            kept.append(Parcel("cache", s, s, i, part))
        self.store.put(rank, output, *kept, *(Parcel("F", s, t, i, part) for t in self.graph.feeds[s]))

    def _recompute(self, rank: int, action: Action) -> Waits:
        _, s, i, _, part = action
        (output,) = yield from self.store.take(rank, Parcel("inputs", s, s, i, part))
        self.weights.read(rank, s)
        self.store.put(rank, output, Parcel("residuals", s, s, i, part))

    def _run_own(self, rank: int, action: Action, kind: OwnKind) -> Waits:
        """Run an action of a user's own kind: once, from one state of what the stage keeps to another."""
        if action in self.own:
            raise self.store.error(rank, "runs again", "Run it once.")
        self.own.add(action)
        if kind.after:
            yield from self._move(rank, action, _KEPT.get(kind.before, kind.before), _KEPT.get(kind.after, kind.after))

    def _offload(self, rank: int, action: Action) -> Waits:
        yield from self._move(rank, action, "residuals", "hosted")

    def _reload(self, rank: int, action: Action) -> Waits:
        yield from self._move(rank, action, "hosted", "residuals")

    def _move(self, rank: int, action: Action, before: str, after: str) -> Waits:
        _, s, i, _, part = action
        (kept,) = yield from self.store.take(rank, Parcel(before, s, s, i, part))
        self.store.put(rank, kept, Parcel(after, s, s, i, part))

    def _pull_back(self, rank: int, action: Action) -> Generator[Parcel, None, Formula]:
        """Make the cotangents and return the term to add to the weight gradient."""
        _, s, i, _, part = action
        operands = yield from self.store.take(rank, *self._parcels_for(action))
        self.weights.read(rank, s)
        later = [Parcel("later", s, s, i, part)] if part else []
        cotangents = (Parcel("B", s, p, i, part) for p in self.graph.pulls[s])
        self.store.put(rank, formula("B", *operands), *later, *cotangents)
        return formula("W", *operands)

    def _backward(self, rank: int, action: Action) -> Waits:
        term = yield from self._pull_back(rank, action)
        self.sums.add(action.stage, rank, (action.microbatch, action.slice), term)

    def _input_half(self, rank: int, action: Action) -> Waits:
        _, s, i, _, part = action
        term = yield from self._pull_back(rank, action)
        self.store.put(rank, term, Parcel("deferred", s, s, i, part))

    def _weight_half(self, rank: int, action: Action) -> Waits:
        _, s, i, _, part = action
        (term,) = yield from self.store.take(rank, Parcel("deferred", s, s, i, part))
        self.sums.add(action.stage, rank, (action.microbatch, action.slice), term)

    def _sum_replicas(self, rank: int, action: Action) -> Waits:
        s, sums = action.stage, self.sums
        others = sums.other_replicas(s, rank)
        if not others or (s, rank) in sums.totals or action.microbatch != sums.last_microbatch(s, rank):
            problem = "is not the one sum over the stage's replicas"
            repair = "Sum their gradients once, named by the last microbatch that this rank runs."
            raise self.store.error(rank, problem, repair)
        partials = {rank: sums.partial_sum(s, rank)}
        for other in others:
            part = self.placement.replicas(s).index(rank) if len(others) > 1 else None
            partial = Parcel("G", s, s, sums.last_microbatch(s, other), part)
            if self.links is not None:
                (partials[other],) = yield from self.store.take(rank, partial)
            while self.links is None and not sums.is_complete(s, other):
                yield partial
            partials.setdefault(other, sums.partial_sum(s, other))
        sums.settle(s, rank, partials)

    def _update(self, rank: int, action: Action) -> Waits:
        """Update a stage's weights once the gradients of the parameters it shares with other stages are complete."""
        t = action.stage
        for homes in self.placement.routes:
            for s in self.graph.shared_by[t] if homes[t] == rank and self.schedule.backward else ():
                parcel = Parcel("G", s, t, self._last_microbatch(s, homes[s], t, rank))
                if self.links is not None and homes[s] != rank and parcel not in self.copied:
                    (self.copied[parcel],) = yield from self.store.take(rank, parcel)
                while not self.sums.is_final(s, homes[s]):
                    yield parcel
        self.weights.write(rank, t)
        if not self.sums.update(action.stage, rank, action.microbatch):
            problem = (
                "applies gradients that do not exist, a part of a reduced sum, or gradients that were already applied"
            )
            repair = "Update once, after the backwards of these microbatches; once, with all, if they are reduced."
            raise self.store.error(rank, problem, repair)

    def _gather(self, rank: int, action: Action) -> Waits:
        self.weights.gather(rank, action)
        yield from ()

    def _free(self, rank: int, action: Action) -> Waits:
        self.weights.free(rank, action)
        yield from ()

    def _reduce(self, rank: int, action: Action) -> Waits:
        yield from ()
        if not self.sums.reduce(action.stage, rank, action.microbatch):
            repair = "Reduce once, after the last gradient and before the update, named by the last microbatch."
            raise self.store.error(rank, "does not reduce a whole gradient, or comes too late", repair)

    def _copies(self, s: int, t: int) -> tuple[Formula, ...]:
        """Return, for each route, the gradient of `s`'s parameters on the rank of `t`, received or local."""
        return tuple(self._copy(s, t, route) for route in range(len(self.placement.routes)))

    def _copy(self, s: int, t: int, route: int) -> Formula:
        owner, holder = (self.placement.routes[route][stage] for stage in (s, t))
        if self.links is None or owner == holder:
            return self.sums.full_gradient(s, owner)
        parcel = Parcel("G", s, t, self._last_microbatch(s, owner, t, holder))
        if parcel not in self.copied:
            if parcel not in self.store.parcels[holder]:
                raise ProgramError(f"{parcel} never arrives. Send it after the last backward of stage {s}.")
            self.copied[parcel] = self.store.parcels[holder].pop(parcel)
        return self.copied[parcel]

    def _last_microbatch(self, s: int, owner: int, t: int, holder: int) -> int:
        """Return the last microbatch that runs these stages on these ranks: it names what one sends the other."""
        home, microbatches = self.placement.home, range(self.schedule.microbatches)
        return max(i for i in microbatches if (home(s, i), home(t, i)) == (owner, holder))


_KEPT: Mapping[str, str] = MappingProxyType({"kept": "inputs", "forward": "residuals", "halved": "deferred"})
"""The parcel that a unit has in some states; in others, it is named after the state."""
_Handler: TypeAlias = Callable[[Interpreter, int, Action], Waits]
_HANDLERS: Mapping[str, _Handler] = MappingProxyType(
    {
        "F": Interpreter._forward,
        "C": Interpreter._forward,
        "OVERLAP_F": Interpreter._forward,
        "R": Interpreter._recompute,
        "B": Interpreter._backward,
        "I": Interpreter._input_half,
        "W": Interpreter._weight_half,
        "OFFLOAD": Interpreter._offload,
        "RELOAD": Interpreter._reload,
        "G": Interpreter._sum_replicas,
        "U": Interpreter._update,
        "UNSHARD": Interpreter._gather,
        "RESHARD": Interpreter._free,
        "REDUCE_GRAD": Interpreter._reduce,
    }
)
