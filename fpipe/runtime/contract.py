# SPDX-License-Identifier: Apache-2.0
"""The contract of a stage: what the executor requires of the stages that it runs, and of the processes that hold them.

A stage is pure functions on tuples of tensors:

    forward(params, buffers, inputs, key)  -> outputs, buffers', residuals
    evaluate(params, buffers, inputs, key) -> outputs, buffers'
    backward(residuals, cotangents, onto)  -> input_cotangents, grads
    backward_input(residuals, cotangents)  -> input_cotangents, deferred
    backward_weight(deferred, onto)        -> grads
    offload(residuals)                     -> residuals

`inputs` are the stage's part of the batch, then what it gets from earlier stages. `outputs` are its results, then what
it gives to later stages, including values that it only passes on. No argument is modified except `onto`; residuals and
deferred state are consumed by their single use. `onto` is the sum of the gradients so far, in memory that the stage
owns, or `()`. The microbatch's gradients are added to it, and the sum is returned. A stage in which nothing needs a
gradient keeps nothing: its residuals are `None`.

If microbatches have slices, each has stages of its own. What one slice leaves for the next on the same stage, its
carry, is a crossing whose source and target are that stage, and so are the carry's cotangents; it is never sent.

The executor treats parameters, buffers, residuals and gradients as opaque, so a stage may as well compute formulas.
`fpipe.stages` implements stages on tensors, `fpipe.meshes` implements the group.

Runs in every step, in the classes that implement it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from fpipe.runtime.transport import Handle, Payload
from schedules.language.actions import Action


class StageCrossing(NamedTuple):
    """The tensors that one stage sends to another, in order: values, their cotangents, or gradients.

    Both stages hold the same record.

    - `values`: which values these are, or whose cotangents; for gradients, the names of the parameters.
    - `specs`: the metadata of each.
    """

    source: int
    target: int
    values: tuple[Any, ...]
    specs: tuple[Any, ...]


class StageLike(Protocol):
    """The part of a stage that the executor uses."""

    @property
    def results(self) -> Sequence[Any]:
        """The values that leave the pipeline here."""

    @property
    def gets(self) -> Sequence[StageCrossing]:
        """Values from earlier stages."""

    @property
    def gives(self) -> Sequence[StageCrossing]:
        """Values for later stages."""

    @property
    def pulls(self) -> Sequence[StageCrossing]:
        """Cotangents for earlier stages."""

    @property
    def pulled_by(self) -> Sequence[StageCrossing]:
        """Cotangents from later stages."""

    @property
    def totals(self) -> Sequence[Any]:
        """Specs of this stage's gradients."""

    @property
    def shares(self) -> Sequence[StageCrossing]:
        """Gradients for other stages that hold the same parameters."""

    @property
    def shared_by(self) -> Sequence[StageCrossing]:
        """Gradients from other stages that hold the same parameters."""

    def forward(self, params: Any, buffers: Any, inputs: Payload, key: int) -> tuple[Payload, Any, Any]:
        """Return the outputs, the new buffers, and the residuals or `None`."""

    def evaluate(self, params: Any, buffers: Any, inputs: Payload, key: int) -> tuple[Payload, Any]:
        """Return the same outputs and buffers as `forward`, and keep nothing."""

    def backward(self, residuals: Any, cotangents: Payload, onto: Any) -> tuple[Payload, Any]:
        """Return cotangents, and the sum of gradients so far, `onto` (at first `()`), plus this microbatch's."""

    def backward_input(self, residuals: Any, cotangents: Payload) -> tuple[Payload, Any]:
        """Return cotangents, and the state that the weight half needs."""

    def backward_weight(self, deferred: Any, onto: Any) -> Any:
        """Return the sum of gradients so far, `onto` (at first `()`), plus this microbatch's."""

    def offload(self, residuals: Any) -> Any:
        """Return residuals that are moved off the device, as far as they can be."""

    def reload(self, action: Action, residuals: Any) -> Handle:
        """Post the move back, which `action` is; the handle's payload are the residuals."""

    def zero_cotangents(self) -> Payload:
        """Return cotangents for a microbatch that counts for nothing; they are sent, but not used."""

    def add(self, first: Any, second: Any) -> Any:
        """Return the sum of the complete gradients of the stage's two replicas."""

    def complete(self, total: Any) -> Any:
        """Return the stage's complete gradients, given the sum that its last microbatch returned."""

    def gradients_for(self, peer: int, total: Any) -> Payload:
        """Return the part of the summed gradients that stage `peer` needs."""


class StageGroup(Protocol):
    """The processes that hold the same stages, in copies of the pipeline that train on other rows.

    They keep the weights whole or in shards, and reduce their gradients. Each posts the same collectives in the same
    order. `fpipe.meshes` implements it.
    """

    def unshard(self, stage: int, number: int) -> Handle:
        """Post gathering number `number` of the stage's weights."""

    def enter(self, stage: int, weights: Payload) -> None:
        """Put the gathered weights into the parameters of the stage."""

    def reshard(self, stage: int) -> None:
        """Remove the gathered weights from the parameters of the stage."""

    def reduce(self, stage: int, microbatch: int, phase: int, values: Payload) -> Handle:
        """Post a phase of the reduction of the stage's gradients; the first takes these, others what the last gave."""

    def reduced(self, stage: int, values: Payload) -> Any:
        """Return the reduced gradients of the stage, given what the last phase gave."""
