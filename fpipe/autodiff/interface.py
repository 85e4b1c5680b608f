# SPDX-License-Identifier: Apache-2.0
"""The functions of a stage, whatever differentiates it, and which of their tensors is which.

A tensor is known here by its position. Each kind of position has its own type, so that one cannot be taken for another.
`Wiring` is made when a pipeline is built, and read in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NewType, Protocol

from fpipe.autodiff.accumulation import Gradients
from fpipe.ir.captured import Tensors
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

    - `parameters`, `buffers`: how many there are.
    - `trained`: arguments that are parameters and need a gradient; `differentiated`: received values that need one.
    - `inner`: those of them that the function must not see as leaves, since they aren't leaves on one device: autocast
      caches its casts of leaves, and then their gradients are summed before they are cast back.
    - `modified`: arguments that the function modifies in place; they are cloned first.
    - `reassigned`: buffers that are assigned anew, and the outputs that they become.
    - `passed`: arguments that are needed after the function: values passed on, shared parameters.
    - `outputs`: what leaves the stage, in order, and its layout.
    - `loss`: where the backward starts, on the stage that computes the loss.
    - `roots`: where cotangents enter, in the order in which they are received.
    - `leaves`: arguments whose gradients are returned: first those for earlier stages, laid out as `cotangents`, then
      the stage's own.
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
    """The functions of a stage, as described in `fpipe.stages.stage`. They don't modify their arguments."""

    @property
    def undeferred(self) -> Mapping[WeightIndex, str]:
        """The gradients that the input half computes, and why."""

    @property
    def remark(self) -> str:
        """A note for users on how this stage is differentiated; may be empty."""

    @property
    def below_autograd(self) -> bool:
        """True if autograd has nothing to do in any of the functions."""

    def leaves(self, params: Tensors) -> Tensors:
        """Return the parameters in the form that `forward` takes."""

    def forward(
        self, params: Tensors, buffers: Tensors, inputs: Tensors, key: int
    ) -> tuple[Tensors, Tensors, Any | None]:
        """Return outputs, buffers, and residuals, which are `None` if nothing needs a gradient."""

    def evaluate(self, params: Tensors, buffers: Tensors, inputs: Tensors, key: int) -> tuple[Tensors, Tensors]:
        """Return the outputs and buffers of `forward`, bit for bit, and keep nothing."""

    def backward(self, residuals: Any, cotangents: Gradients, onto: Gradients = ()) -> tuple[Gradients, Gradients]:
        """Return cotangents for earlier stages, and gradients; or `onto`, with the gradients added to it in place."""

    def backward_input(self, residuals: Any, cotangents: Gradients) -> tuple[Gradients, Any]:
        """Return cotangents for earlier stages, and what the weight half needs."""

    def backward_weight(self, deferred: Any, onto: Gradients = ()) -> Gradients:
        """Return gradients; or `onto`, with the gradients added to it in place."""
