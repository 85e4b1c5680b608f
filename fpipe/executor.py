# SPDX-License-Identifier: Apache-2.0
"""Applies a program to stages.

One interpreter with one handler per kind of action, written as a generator: it yields the handle that it must wait for
and is sent what arrived; how to wait is the driver's business. It knows actions, stages and posting, neither
torch.distributed nor models, and is parametric in the stages: given symbolic ones it computes formulas.

All state lives in the running `Execution`. Tables of what waits to be used are keyed by `Message`, on
every rank that it concerns; a message between stages of one rank is kept and never posted.

Invariant: an entry is removed by its one use, so what a microbatch held is freed as soon as it was used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
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


Compute: TypeAlias = Callable[..., Any]


def plainly(action: Action, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a stage function for an action, and nothing else."""
    return function(*arguments)


class Instruction(NamedTuple):
    """An action linked to its stage: the messages that it waits for, and those that it makes or posts, with their "
    "specs."""

    action: Action
    awaited: tuple[Message, ...] = ()
    carried: tuple[tuple[Message, tuple[Any, ...]], ...] = ()


def link(actions: Iterable[Action], stages: Mapping[int, StageLike]) -> tuple[Instruction, ...]:
    """One rank's program, linked to its stages; it depends on neither parameters nor data."""
    specs = {edge: specs for s, stage in stages.items() for edge, specs in _edges(s, stage)}
    return tuple(_linked(action, stages[action.stage], specs) for action in actions)


def _linked(action: Action, stage: StageLike, specs: Mapping[tuple[str, int, int], tuple[Any, ...]]) -> Instruction:
    kind, s, i, _ = action
    if kind == "W":
        return Instruction(action)
    if kind in ("F", "B", "I"):
        sources, targets = (stage.gets, stage.gives) if kind == "F" else (stage.pulled_by, stage.pulls)
        what = "F" if kind == "F" else "B"
        made = tuple(((what, s, i, peer), specs) for peer, specs in targets)
        return Instruction(action, tuple((what, peer, i, s) for peer, _ in sources), made)
    name = what, source, _, target = message(action)
    return Instruction(action, (name,) * kind.startswith("WAIT"), ((name, specs[what, source, target]),))


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

    `compute(action, function, *arguments)` calls the stage functions; give another than `plainly` to measure them.

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
        compute: Compute = plainly,
    ) -> None:
        self.program, self.stages, self.transport, self.inputs = program, stages, transport, inputs
        self.compute = compute
        self.position = -1
        self.buffers = {s: inputs.buffers[s] for s in stages}
        self.grads: dict[int, Any] = dict.fromkeys(stages, ())
        self.counts = dict.fromkeys(stages, 0)
        self.results: dict[int, Payload] = {}
        self.residuals: dict[tuple[int, int], Any] = {}
        self.deferred: dict[tuple[int, int], Any] = {}
        self.kept: dict[Message, Payload] = {}
        self.posted: dict[Message, Handle] = {}

    def run(self) -> Generator[Handle, Payload, Outcome]:
        """Interpret the program: yields handles to wait for, returns the outcome."""
        handlers: Mapping[str, Callable[[Instruction, Payload], None]] = {
            "F": self._forward, "B": self._backward, "I": self._backward_input, "W": self._backward_weight,
            "SEND_F": self._send, "SEND_B": self._send, "SEND_G": self._send_gradient,
            "RECV_F": self._receive, "RECV_B": self._receive, "RECV_G": self._receive,
            "WAIT_F": self._done, "WAIT_B": self._done, "WAIT_G": self._done,
        }  # fmt: skip
        kept, posted = self.kept, self.posted
        for position, instruction in enumerate(self.program):
            self.position = position
            arrived: Payload = ()
            for name in instruction.awaited:
                arrived += kept.pop(name) if name in kept else (yield posted.pop(name))
            handlers[instruction.action.kind](instruction, arrived)
        shared = {}
        for name in list(posted):
            shared[name[1], name[3]] = yield posted.pop(name)
        return Outcome(self.buffers, self.grads, shared, self.results)

    def _forward(self, instruction: Instruction, arrived: Payload) -> None:
        action = instruction.action
        _, s, i, _ = action
        stage, inputs = self.stages[s], self.inputs
        outputs, self.buffers[s], residuals = self.compute(
            action, stage.forward, inputs.params[s], self.buffers[s], inputs.batch(s, i) + arrived, inputs.keys[i]
        )
        if residuals is not None:
            self.residuals[s, i] = residuals
        results = len(stage.results)
        if results:
            self.results[i] = outputs[:results]
        self._keep(instruction, outputs, results)

    def _backward(self, instruction: Instruction, arrived: Payload) -> None:
        action = instruction.action
        _, s, i, _ = action
        residuals = self.residuals.pop((s, i), None)
        outgoing, grads = self.compute(action, self.stages[s].backward, residuals, arrived)
        self._keep(instruction, outgoing)
        self._accumulate(s, grads)

    def _backward_input(self, instruction: Instruction, arrived: Payload) -> None:
        action = instruction.action
        _, s, i, _ = action
        residuals = self.residuals.pop((s, i), None)
        outgoing, self.deferred[s, i] = self.compute(action, self.stages[s].backward_input, residuals, arrived)
        self._keep(instruction, outgoing)

    def _backward_weight(self, instruction: Instruction, arrived: Payload) -> None:
        action = instruction.action
        _, s, i, _ = action
        self._accumulate(s, self.compute(action, self.stages[s].backward_weight, self.deferred.pop((s, i))))

    def _send(self, instruction: Instruction, arrived: Payload) -> None:
        ((name, specs),) = instruction.carried
        self.posted[name] = self.transport.send(name, self.kept.pop(name), specs)

    def _send_gradient(self, instruction: Instruction, arrived: Payload) -> None:
        ((name, _),) = instruction.carried
        _, s, _, t = name
        self.kept[name] = self.stages[s].shared(self.grads[s], t)
        self._send(instruction, arrived)

    def _receive(self, instruction: Instruction, arrived: Payload) -> None:
        ((name, specs),) = instruction.carried
        self.posted[name] = self.transport.receive(name, specs)

    def _done(self, instruction: Instruction, arrived: Payload) -> None:
        """A sent message has been waited for, and with its handle its payload is gone."""

    def _keep(self, instruction: Instruction, values: Payload, start: int = 0) -> None:
        """Keep each message's part of `values`, from `start` on, until it is sent or used here."""
        for name, specs in instruction.carried:
            self.kept[name] = values[start : start + len(specs)]
            start += len(specs)

    def _accumulate(self, s: int, grads: Any) -> None:
        self.grads[s] = self.stages[s].accumulate(self.grads[s], grads, self.counts[s])
        self.counts[s] += 1
