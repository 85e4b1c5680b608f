# SPDX-License-Identifier: Apache-2.0
"""Apply a program to stages.

The executor is an interpreter with one handler per kind of action (`fpipe.runtime.handlers`). It is a generator that
yields the handles it must wait for; a driver decides how to wait. It knows actions, stages and messages, but neither
torch.distributed nor models. It is generic over the stages: given symbolic stages, it computes formulas.

Every microbatch pays for the overhead between two stage calls, on every stage. So programs are linked beforehand
(`fpipe.runtime.instructions`): folded into instructions, each a compute action with the transfers around it.

All state is in the running `Execution`. Messages are identified by number; a message between stages of the same rank is
kept locally and never posted. What the processes that hold the same stages do together (`StageGroup`) is posted and
waited for in the same way.

Invariant: each entry is used once and removed when it is, so a microbatch's memory is freed right after its use.

Runs in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

from fpipe.runtime.contract import StageLike
from fpipe.runtime.transport import Handle, Payload, Route, Transport
from schedules.language.actions import Action, Message


class Milestone(NamedTuple):
    """Nothing to wait for: an execution that never ends yields it in place of a handle, so that others have a turn."""


class ByStage(Protocol):
    """Something that a microbatch has of each stage."""

    def __getitem__(self, stage: int, /) -> Any:
        """Return what it has of this stage."""


class Inputs(NamedTuple):
    """The arguments of one rank for one step.

    A unit is a microbatch, or a slice of one; slices are numbered across microbatches.

    - `params`: per unit and stage of the rank, in the form that the stage's functions take.
    - `buffers`: per unit and stage. Units with the same mapping pass its buffers on from one to the next.
    - `batch`: `batch(stage, unit)` returns the stage's part of the batch.
    - `keys`: the random key of each unit.
    - `deliver`: `deliver(unit, values)` is called with what leaves the pipeline, as soon as it does; `None` to keep
      that for the outcome.
    - `skips`: the units that count for nothing, so that they have no backward.
    - `starts`: per stage and unit, cotangents that come from outside of the pipeline, before those of later stages.
    - `onto`: per rank and stage, the sum of gradients to add to, in memory that the step may write.
    - `group`: the `StageGroup` that executes collectives; `None` for a program without any.
    - `update`: `update(stage, microbatch, grads, shared)` returns the new version of the weights that a `U` completes,
      and modifies none of its arguments; `grads` and `shared` are the rank's, as in `Outcome`. An update in flight also
      takes the gradients that it applies out of `grads`, so that the next sum begins anew.
    """

    params: Sequence[ByStage]
    buffers: Sequence[Mapping[int, Any]]
    batch: Callable[[int, int], Payload]
    keys: Sequence[int]
    deliver: Callable[[int, Payload], None] | None = None
    skips: Collection[int] = ()
    starts: Mapping[tuple[int, int], Payload] = MappingProxyType({})
    onto: Mapping[tuple[int, int], Any] = MappingProxyType({})
    group: Any = None
    update: Any = None


class Outcome(NamedTuple):
    """The results of one rank.

    - `buffers`: per unit and stage of the rank, after all of them, shared as in the inputs.
    - `grads`: per stage, after all microbatches; the gradients of a stage without any are `()`.
    - `shared`: per (owner, holder), the gradients of parameters that a stage of another rank computed.
    - `results`: per unit, the values that leave the pipeline on this rank, unless they were delivered.
    - `updates`: per stage of the rank, what `Inputs.update` returned; empty for a program without updates.
    """

    buffers: list[dict[int, Any]]
    grads: dict[int, Any]
    shared: dict[tuple[int, int], Payload]
    results: dict[int, Payload]
    updates: dict[int, Any]


class Transfer(NamedTuple):
    """A message between ranks: its number, its channel's number, and the specs of its values."""

    number: int
    channel: int
    message: Message
    specs: tuple[Any, ...]


class Instruction(NamedTuple):
    """At most one compute action, linked to its stage, and the transfers around it.

    - `position`, `action`: the compute action and its position in the program; without one, those of the last transfer.
    - `unit`: the stage of the action, and the number of its microbatch, or slice of one.
    - `receives`: receives to post first.
    - `waits`: numbers of the sends to wait for and free. `awaited`: numbers of the messages, and the
      collectives, to wait for, in the order of the handler's arguments.
    - `outputs`: the number of each outgoing message, and its slice of the handler's return value.
    - `sends`: sends to post last.
    """

    position: int
    action: Action
    unit: tuple[int, int]
    stage: StageLike
    handler: ActionHandler
    receives: tuple[Transfer, ...]
    waits: tuple[int, ...]
    awaited: tuple[int | Action, ...]
    outputs: tuple[tuple[int, slice], ...]
    sends: tuple[Transfer, ...]


class LinkedProgram(NamedTuple):
    """One rank's program, linked to its stages."""

    stages: tuple[int, ...]
    channels: tuple[Route, ...]
    instructions: tuple[Instruction, ...]


ActionHandler: TypeAlias = Callable[["Execution", Action, StageLike, Payload], Payload]


class Execution:
    """One rank's run of one program: its state, its current instruction, `at`, and the `unit` of that.

    - `kept`: payloads that this rank computed, until they are sent or used here.
    - `posted`: handles of receives and of collectives until their payload is used, and of sends until the rank has
      waited for them.
    - `residuals`, `deferred`: what a forward, or input half, keeps for its backward, or weight half, by stage and unit.
    - `checkpoints`: what a recomputation starts from: the buffers before the first run, and the inputs that arrived.
    """

    at: Instruction | None = None
    unit: tuple[int, int]

    def __init__(self, rank: int, program: LinkedProgram, transport: Transport, inputs: Inputs) -> None:
        self.rank, self.program, self.transport, self.inputs = rank, program, transport, inputs
        # Units that share a mapping must go on sharing it here: each leaves its buffers to the next.
        held = {id(shared): {s: shared[s] for s in program.stages} for shared in inputs.buffers}
        self.buffers = [held[id(shared)] for shared in inputs.buffers]
        self.grads: dict[int, Any] = {s: inputs.onto.get((rank, s), ()) for s in program.stages}
        self.shared: dict[tuple[int, int], Payload] = {}
        self.results: dict[int, Payload] = {}
        self.deliver = inputs.deliver or self.results.__setitem__
        self.updates: dict[int, Any] = {}
        self.residuals: dict[tuple[int, int], Any] = {}
        self.deferred: dict[tuple[int, int], Any] = {}
        self.checkpoints: dict[tuple[int, int], tuple[Any, Payload]] = {}
        self.kept: dict[int | Action, Payload] = {}
        self.posted: dict[int | Action, Handle] = {}

    def run(self) -> Generator[Any, None, Outcome]:
        """Interpret the program: yield each handle that must be waited for, then return the outcome."""
        kept, posted = self.kept, self.posted
        channels = [self.transport.channel(source, target) for source, target in self.program.channels]
        for instruction in self.program.instructions:
            self.at = instruction
            _, action, self.unit, stage, handler, receives, waits, awaited, outputs, sends = instruction
            # Post receives, then free the buffers of finished sends.
            for number, channel, message, specs in receives:
                posted[number] = channels[channel].receive(message, specs)
            for number in waits:
                handle = posted.pop(number)
                if not handle.is_done:
                    yield handle
            # Collect the handler's arguments: from other ranks, or kept here.
            arrived: Payload = ()
            for key in awaited:
                if key in posted:  # a message from another rank, or a collective
                    handle = posted.pop(key)
                    if not handle.is_done:
                        yield handle
                    arrived += handle.take()
                else:
                    arrived += kept.pop(key)
            # Compute. Drop the arguments at once, so that only the messages stay alive.
            values = handler(self, action, stage, arrived)
            for number, part in outputs:
                kept[number] = values[part]
            del arrived, values
            for number, channel, message, specs in sends:
                posted[number] = channels[channel].send(message, kept.pop(number), specs)
        return Outcome(self.buffers, self.grads, self.shared, self.results, self.updates)
