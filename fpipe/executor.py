# SPDX-License-Identifier: Apache-2.0
"""Applies a program to stages.

One interpreter with one handler per kind of action (`fpipe.handlers`). It is a generator that yields the handle that it
must wait for; how to wait is the driver's business. It knows actions, stages and posting, neither torch.distributed nor
models, and is parametric in the stages: given symbolic ones it computes formulas.

What stands between two calls of stage functions is paid for every microbatch on every stage. So the program comes
linked (`fpipe.linking`): folded into instructions, each a compute action with the transfers around it.

All state lives in the running `Execution`. Messages are known by number; one between stages of the same rank is kept
and never posted.

Invariant: an entry is removed by its one use, so what a microbatch held is freed as soon as it was used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from fpipe.transport.contract import Handle, Message, Payload, Route, Transport
from schedules import Action


class Port(NamedTuple):
    """One end of an edge: the stage at the other end, and the specs of the values that cross, in order."""

    peer: int
    specs: tuple[Any, ...]


class StageLike(Protocol):
    """What the executor asks of a stage; `fpipe.stage.Stage` says what each is."""

    @property
    def results(self) -> Sequence[Any]:
        """What leaves the pipeline here."""

    @property
    def gets(self) -> Sequence[Port]:
        """Values from earlier stages."""

    @property
    def gives(self) -> Sequence[Port]:
        """Values for later stages."""

    @property
    def pulls(self) -> Sequence[Port]:
        """Cotangents for earlier stages."""

    @property
    def pulled_by(self) -> Sequence[Port]:
        """Cotangents from later stages."""

    @property
    def totals(self) -> Sequence[Any]:
        """Specs of this stage's gradients."""

    @property
    def shares(self) -> Sequence[Port]:
        """Gradients for other stages that hold the same parameters."""

    @property
    def shared_by(self) -> Sequence[Port]:
        """Gradients from other stages that hold the same parameters."""

    def forward(self, params: Any, buffers: Any, inputs: Payload, key: int) -> tuple[Payload, Any, Any]:
        """Outputs, buffers, and residuals or `None`."""

    def evaluate(self, params: Any, buffers: Any, inputs: Payload, key: int) -> tuple[Payload, Any]:
        """Outputs and buffers, the same as those of `forward`."""

    def backward(self, residuals: Any, cotangents: Payload, onto: Any) -> tuple[Payload, Any]:
        """Cotangents and gradients; or the sum `onto`, if it is not `()`, to which they were added."""

    def backward_input(self, residuals: Any, cotangents: Payload) -> tuple[Payload, Any]:
        """Cotangents, and what the weight half needs."""

    def backward_weight(self, deferred: Any, onto: Any) -> Any:
        """Gradients; or the sum `onto`, if it is not `()`, to which they were added."""

    def accumulate(self, total: Any, grads: Any, count: int) -> Any:
        """The sum of `total`, of `count` gradients, and one more; at first it is `()`. May be passed as `onto`."""

    def finished(self, total: Any) -> Any:
        """The sum of all gradients."""

    def shared(self, total: Any, peer: int) -> Payload:
        """What stage `peer` needs of the summed gradients."""


class Inputs(NamedTuple):
    """What one rank is given for one step.

    - `params`: per microbatch and stage of the rank, in the form that its functions take; `buffers`: per stage.
    - `batch`: `batch(stage, microbatch)` is the stage's part of the batch.
    - `keys`: per microbatch, the key of its randomness.
    """

    params: Sequence[Mapping[int, Any]]
    buffers: Mapping[int, Any]
    batch: Callable[[int, int], Payload]
    keys: Sequence[int]


class Outcome(NamedTuple):
    """What one rank has computed.

    - `buffers`, `grads`: per stage of the rank, after all microbatches; a stage without gradients has an empty sum.
    - `shared`: per (owner, holder), gradients of parameters that a stage of another rank has computed.
    - `results`: per microbatch, what leaves the pipeline on this rank.
    """

    buffers: dict[int, Any]
    grads: dict[int, Any]
    shared: dict[tuple[int, int], Payload]
    results: dict[int, Payload]


class Transfer(NamedTuple):
    """A message that crosses ranks: its number, that of its channel, and the specs of what it carries."""

    number: int
    channel: int
    message: Message
    specs: tuple[Any, ...]


class Instruction(NamedTuple):
    """At most one compute action, linked to its stage, and the transfers around it.

    - `position`, `action`: the compute action and where it stands in the program; if there is none, the last transfer.
    - `receives`: posted first.
    - `waits`: numbers of sends to let go of. `awaited`: numbers of arrivals, in the order of the handler's arguments.
    - `made`: which part of what the handler returns is which message.
    - `sends`: posted last.
    """

    position: int
    action: Action
    stage: StageLike
    handler: Handler
    receives: tuple[Transfer, ...]
    waits: tuple[int, ...]
    awaited: tuple[int, ...]
    made: tuple[tuple[int, slice], ...]
    sends: tuple[Transfer, ...]


class Linked(NamedTuple):
    """One rank's program, linked to its stages."""

    stages: tuple[int, ...]
    channels: tuple[Route, ...]
    instructions: tuple[Instruction, ...]


Handler: TypeAlias = Callable[["Execution", Action, StageLike, Payload], Payload]


class Execution:
    """One rank's run of one program: its state, and where it stands (`at`).

    - `kept`: payloads made on this rank, until they are sent or used here.
    - `posted`: handles of receives, until their payload is used, and of sends, until they are waited for.
    - `residuals`, `deferred`: what a stage's forward, or input half, keeps for what follows.
    - `checkpoints`: what a forward is run again from: buffers as they were, and what had arrived.
    """

    at: Instruction | None = None

    def __init__(self, program: Linked, transport: Transport, inputs: Inputs) -> None:
        self.program, self.transport, self.inputs = program, transport, inputs
        self.buffers = {s: inputs.buffers[s] for s in program.stages}
        self.grads: dict[int, Any] = dict.fromkeys(self.buffers, ())
        self.shared: dict[tuple[int, int], Payload] = {}
        self.results: dict[int, Payload] = {}
        self.residuals: dict[tuple[int, int], Any] = {}
        self.deferred: dict[tuple[int, int], Any] = {}
        self.checkpoints: dict[tuple[int, int], tuple[Any, Payload]] = {}
        self.kept: dict[int, Payload] = {}
        self.posted: dict[int, Handle] = {}

    def run(self) -> Generator[Handle, None, Outcome]:
        """Interpret the program: yields handles that are not done, returns the outcome."""
        kept, posted = self.kept, self.posted
        channels = [self.transport.channel(source, target) for source, target in self.program.channels]
        for instruction in self.program.instructions:
            self.at = instruction
            _, action, stage, handler, receives, waits, awaited, made, sends = instruction
            for number, channel, message, specs in receives:
                posted[number] = channels[channel].receive(message, specs)
            for number in waits:
                handle = posted.pop(number)
                if not handle.done:
                    yield handle
            arrived: Payload = ()
            for number in awaited:
                if number in posted:
                    handle = posted.pop(number)
                    if not handle.done:
                        yield handle
                    arrived += handle.take()
                else:
                    arrived += kept.pop(number)
            values = handler(self, action, stage, arrived)
            for number, part in made:
                kept[number] = values[part]
            del arrived, values
            for number, channel, message, specs in sends:
                posted[number] = channels[channel].send(message, kept.pop(number), specs)
        return Outcome(self.buffers, self.grads, self.shared, self.results)
