# SPDX-License-Identifier: Apache-2.0
"""The interface of a stage's functions, whatever differentiates the stage, and the roles of their tensors.

Tensors are identified by position. Each kind of position has its own type, so that they can't be mixed up.

Runs when a plan is made; the `Wiring` is read in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol

from fpipe.record.captured import Tensors
from fpipe.stages.accumulation import Grads
from fpipe.tensors.spec import Spec

ArgumentIndex = NewType("ArgumentIndex", int)
"""A position among the arguments of a stage's function: parameters, buffers, constants, batch, received values."""
OutputIndex = NewType("OutputIndex", int)
"""A position among the outputs of a stage's function, followed by the arguments that `Wiring.passed` lists."""
BufferIndex = NewType("BufferIndex", int)
"""A position among a stage's buffers."""
WeightIndex = NewType("WeightIndex", int)
"""A position among the parameters whose gradients a stage computes."""


@dataclass(frozen=True)
class Wiring:
    """The role of every tensor inside a stage: positions among the arguments and outputs of its function.

    - `parameters`, `buffers`: the number of each.
    - `trained`: the parameters that need a gradient; `differentiated`: the received values that need one.
    - `inner`: received values that the function must not see as leaves, since they aren't leaves on one device:
      autocast caches its casts of leaves, so their gradients would be summed before they are cast back.
    - `modified`: arguments that the function modifies in place; they are cloned first.
    - `reassigned`: buffers that are reassigned, each with the output that replaces it.
    - `passed`: arguments that are still needed after the function returns: values passed on, shared parameters.
    - `outputs`: the outputs that leave the stage, in order, each with its spec.
    - `loss`: the output at which the backward starts, on the stage that computes the loss; else `None`.
    - `roots`: the outputs at which cotangents enter, in the order in which these are received.
    - `leaves`: arguments whose gradients the backward returns: first the cotangents for earlier stages, laid out as
      `cotangents`, then the gradients of the stage's own parameters.
    """

    parameters: int
    buffers: int
    trained: frozenset[ArgumentIndex]
    differentiated: tuple[ArgumentIndex, ...]
    inner: tuple[ArgumentIndex, ...]
    modified: tuple[ArgumentIndex, ...]
    reassigned: tuple[tuple[BufferIndex, OutputIndex], ...]
    passed: tuple[ArgumentIndex, ...]
    outputs: tuple[tuple[OutputIndex, Spec], ...]
    loss: OutputIndex | None
    roots: tuple[OutputIndex, ...]
    leaves: tuple[ArgumentIndex, ...]
    cotangents: tuple[Spec, ...]

    @property
    def modified_buffers(self) -> frozenset[BufferIndex]:
        """The buffers that a forward changes."""
        first, stop = self.parameters, self.parameters + self.buffers
        modified = {BufferIndex(k - first) for k in self.modified if first <= k < stop}
        return frozenset(modified | {buffer for buffer, _ in self.reassigned})


class StageFunctions(Protocol):
    """The functions of a stage, as described in `fpipe.stages.stage`. They modify no argument but `onto`."""

    @property
    def undeferred(self) -> Mapping[WeightIndex, str]:
        """The weights whose gradients the input half computes, each with the reason."""

    @property
    def movable(self) -> Sequence[int]:
        """The positions in the residuals, a list, of tensors that can be moved off the device."""

    @property
    def remark(self) -> str:
        """A note for users on how this stage is differentiated; may be empty."""

    @property
    def below_autograd(self) -> bool:
        """True if none of the functions uses autograd."""

    @property
    def eager(self) -> StageFunctions:
        """The same functions, computed by autograd."""

    def leaves(self, params: Tensors) -> Tensors:
        """Return the parameters in the form that `forward` takes."""

    def forward(
        self, params: Tensors, buffers: Tensors, inputs: Tensors, key: int
    ) -> tuple[Tensors, Tensors, Any | None]:
        """Return outputs, new buffers, and residuals, which are `None` if nothing needs a gradient."""

    def evaluate(self, params: Tensors, buffers: Tensors, inputs: Tensors, key: int) -> tuple[Tensors, Tensors]:
        """Return the same outputs and buffers as `forward`, bit for bit, but no residuals."""

    def backward(self, residuals: Any, cotangents: Grads, onto: Grads = ()) -> tuple[Grads, Grads]:
        """Return the cotangents for earlier stages, and the gradients, added in place to `onto` if that is given."""

    def backward_input(self, residuals: Any, cotangents: Grads) -> tuple[Grads, Any]:
        """Return the cotangents for earlier stages, and the state that the weight half needs."""

    def backward_weight(self, deferred: Any, onto: Grads = ()) -> Grads:
        """Return the gradients, added in place to `onto` if that is given."""
