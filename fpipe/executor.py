# SPDX-License-Identifier: Apache-2.0
"""Applies a program to stages.

One interpreter with one handler per kind of action, written as a generator: it yields the handle that it must wait for;
how to wait is the driver's business. It knows actions, stages and posting, neither
torch.distributed nor models, and is parametric in the stages: given symbolic ones it computes formulas.

All state lives in the running `Execution`. Tables of what waits to be used are keyed by `Message`, on
every rank that it concerns; a message between stages of one rank is kept and never posted.

Invariant: an entry is removed by its one use, so what a microbatch held is freed as soon as it was used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

from fpipe.transport.contract import Handle, Message, Payload, Transport, message
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
    def shares(self) -> Sequence[Port]:
        """Gradients for later stages that hold copies of parameters."""

    @property
    def shared_by(self) -> Sequence[Port]:
        """Gradients from earlier stages that own parameters."""

    def forward(self, params: Any, buffers: Any, inputs: Payload, key: int) -> tuple[Payload, Any, Any]:
        """Outputs, buffers, and residuals or `None`."""

    def backward(self, residuals: Any, cotangents: Payload) -> tuple[Payload, Any]:
        """Cotangents and gradients."""

    def backward_input(self, residuals: Any, cotangents: Payload) -> tuple[Payload, Any]:
        """Cotangents, and what the weight half needs."""

    def backward_weight(self, deferred: Any) -> Any:
        """Gradients."""

    def accumulate(self, total: Any, grads: Any, count: int) -> Any:
        """The sum of `count` gradients and one more; `total` is `()` at first."""

    def shared(self, total: Any, peer: int) -> Payload:
        """What stage `peer` needs of the summed gradients."""


class Inputs(NamedTuple):
    """What one rank is given for one step.

    - `params`, `buffers`: per stage of the rank, in the form that its functions take.
    - `batch`: `batch(stage, microbatch)` is the stage's part of the batch.
    - `keys`: per microbatch, the key of its randomness.
    """

    params: Mapping[int, Any]
    buffers: Mapping[int, Any]
    batch: Callable[[int, int], Payload]
    keys: Sequence[int]


class Outcome(NamedTuple):
    """What one rank has computed.

    - `buffers`, `grads`: per stage of the rank, after all microbatches; a stage without gradients has an empty sum.
    - `shared`: per (owner, holder), gradients of parameters that a stage of another rank owns.
    - `results`: per microbatch, what leaves the pipeline on this rank.
    """

    buffers: dict[int, Any]
    grads: dict[int, Any]
    shared: dict[tuple[int, int], Payload]
    results: dict[int, Payload]


class Instruction(NamedTuple):
    """An action linked to its stages: its handler, the messages it awaits, those it carries with their specs."""

    action: Action
    handler: Handler
    awaited: tuple[Message, ...] = ()
    carried: tuple[tuple[Message, tuple[Any, ...]], ...] = ()


Handler: TypeAlias = Callable[["Execution", Instruction, Payload], None]


def link(actions: Iterable[Action], stages: Mapping[int, StageLike]) -> tuple[Instruction, ...]:
    """One rank's program, linked to its stages; it depends on neither parameters nor data."""
    specs = {edge: specs for s, stage in stages.items() for edge, specs in _edges(s, stage)}
    return tuple(_linked(action, stages[action.stage], specs) for action in actions)


def _linked(action: Action, stage: StageLike, specs: Mapping[tuple[str, int, int], tuple[Any, ...]]) -> Instruction:
    kind, s, i, _, _ = action
    handler = HANDLERS[kind]
    if kind == "W":
        return Instruction(action, handler)
    if kind in ("F", "B", "I"):
        sources, targets = (stage.gets, stage.gives) if kind == "F" else (stage.pulled_by, stage.pulls)
        what = "F" if kind == "F" else "B"
        made = tuple(((what, s, i, peer), specs) for peer, specs in targets)
        return Instruction(action, handler, tuple((what, peer, i, s) for peer, _ in sources), made)
    name = what, source, _, target = message(action)
    return Instruction(action, handler, (name,) * kind.startswith("WAIT"), ((name, specs[what, source, target]),))


def _edges(s: int, stage: StageLike) -> Iterator[tuple[tuple[str, int, int], tuple[Any, ...]]]:
    """What crosses each edge of a stage: by what, the stage that makes it, and the other stage."""
    for what, outgoing, incoming in (
        ("F", stage.gives, stage.gets),
        ("B", stage.pulls, stage.pulled_by),
        ("G", stage.shares, stage.shared_by),
    ):
        yield from (((what, s, peer), specs) for peer, specs in outgoing)
        yield from (((what, peer, s), specs) for peer, specs in incoming)


class Execution:
    """One rank's run of one program: its state, and where it stands (`position`).

    `record`, if given, is called with each action, and when its handler began and ended; waiting is outside.

    - `kept`: payloads made on this rank, until they are sent or used here.
    - `posted`: handles of receives, until their payload is used, and of sends, until they are waited for.
    - `residuals`, `deferred`: what a stage's forward, or input half, keeps for what follows.
    """

    def __init__(
        self,
        program: Sequence[Instruction],
        stages: Mapping[int, StageLike],
        transport: Transport,
        inputs: Inputs,
        record: Callable[[Action, float, float], None] | None = None,
    ) -> None:
        self.program, self.stages, self.transport, self.inputs = program, stages, transport, inputs
        self.record = record
        self.position = -1
        self.buffers = {s: inputs.buffers[s] for s in stages}
        self.grads: dict[int, Any] = dict.fromkeys(stages, ())
        self.counts = dict.fromkeys(stages, 0)
        self.results: dict[int, Payload] = {}
        self.residuals: dict[tuple[int, int], Any] = {}
        self.deferred: dict[tuple[int, int], Any] = {}
        self.kept: dict[Message, Payload] = {}
        self.posted: dict[Message, Handle] = {}

    def run(self) -> Generator[Handle, None, Outcome]:
        """Interpret the program: yields handles that are not done, returns the outcome."""
        kept, posted = self.kept, self.posted
        for self.position, instruction in enumerate(self.program):  # noqa: B020 - the program stays as it is
            arrived: Payload = ()
            for name in instruction.awaited:
                if name in kept:
                    arrived += kept.pop(name)
                else:
                    handle = posted.pop(name)
                    if not handle.done:
                        yield handle
                    arrived += handle.take()
            if self.record is None:
                instruction.handler(self, instruction, arrived)
            else:
                start = perf_counter()
                instruction.handler(self, instruction, arrived)
                self.record(instruction.action, start, perf_counter())
        return Outcome(self.buffers, self.grads, (yield from self._shared()), self.results)

    def _shared(self) -> Generator[Handle, None, dict[tuple[int, int], Payload]]:
        """What is still posted at the end: gradients of shared parameters."""
        shared = {}
        for name in list(self.posted):
            handle = self.posted.pop(name)
            if not handle.done:
                yield handle
            shared[name[1], name[3]] = handle.take()
        return shared


def _forward(run: Execution, instruction: Instruction, arrived: Payload) -> None:
    _, s, i, _, _ = instruction.action
    stage, inputs = run.stages[s], run.inputs
    arguments = inputs.batch(s, i) + arrived
    outputs, run.buffers[s], residuals = stage.forward(inputs.params[s], run.buffers[s], arguments, inputs.keys[i])
    if residuals is not None:
        run.residuals[s, i] = residuals
    results = len(stage.results)
    if results:
        run.results[i] = outputs[:results]
    _keep(run, instruction, outputs, results)


def _backward(run: Execution, instruction: Instruction, arrived: Payload) -> None:
    _, s, i, _, _ = instruction.action
    outgoing, grads = run.stages[s].backward(run.residuals.pop((s, i), None), arrived)
    _keep(run, instruction, outgoing)
    _accumulate(run, s, grads)


def _backward_input(run: Execution, instruction: Instruction, arrived: Payload) -> None:
    _, s, i, _, _ = instruction.action
    outgoing, run.deferred[s, i] = run.stages[s].backward_input(run.residuals.pop((s, i), None), arrived)
    _keep(run, instruction, outgoing)


def _backward_weight(run: Execution, instruction: Instruction, arrived: Payload) -> None:
    _, s, i, _, _ = instruction.action
    _accumulate(run, s, run.stages[s].backward_weight(run.deferred.pop((s, i))))


def _send(run: Execution, instruction: Instruction, arrived: Payload) -> None:
    ((name, specs),) = instruction.carried
    run.posted[name] = run.transport.send(name, run.kept.pop(name), specs)


def _send_gradient(run: Execution, instruction: Instruction, arrived: Payload) -> None:
    (((_, s, _, t), _specs),) = instruction.carried
    run.kept[instruction.carried[0][0]] = run.stages[s].shared(run.grads[s], t)
    _send(run, instruction, arrived)


def _receive(run: Execution, instruction: Instruction, arrived: Payload) -> None:
    ((name, specs),) = instruction.carried
    run.posted[name] = run.transport.receive(name, specs)


def _let_go(run: Execution, instruction: Instruction, arrived: Payload) -> None:
    """A sent message has been waited for, and with its handle its payload is gone."""


def _keep(run: Execution, instruction: Instruction, values: Payload, start: int = 0) -> None:
    """Keep each message's part of `values`, from `start` on, until it is sent or used on this rank."""
    for name, specs in instruction.carried:
        run.kept[name] = values[start : start + len(specs)]
        start += len(specs)


def _accumulate(run: Execution, s: int, grads: Any) -> None:
    run.grads[s] = run.stages[s].accumulate(run.grads[s], grads, run.counts[s])
    run.counts[s] += 1


HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        "F": _forward,
        "B": _backward,
        "I": _backward_input,
        "W": _backward_weight,
        "SEND_F": _send,
        "SEND_B": _send,
        "SEND_G": _send_gradient,
        "RECV_F": _receive,
        "RECV_B": _receive,
        "RECV_G": _receive,
        "WAIT_F": _let_go,
        "WAIT_B": _let_go,
        "WAIT_G": _let_go,
    }
)
