# SPDX-License-Identifier: Apache-2.0
"""The interface of a way to differentiate a stage: its pure functions, on tuples of tensors.

`Wiring` defines once, for all ways, which tensor is which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fpipe.autodiff.accumulation import Gradients
from fpipe.ir.captured import Tensors
from fpipe.tensors.spec import Spec


@dataclass(frozen=True)
class Wiring:
    """The role of every tensor inside a stage.

    Arguments are numbered in the order parameters, buffers, constants, batch, received values; values are the
    function's outputs, then the arguments listed in `passed`.

    - `parameters`, `buffers`: how many there are.
    - `trained`: arguments that are parameters and need a gradient; `differentiated`: received values that need one.
    - `inner`: those of them that the function must not see as leaves, since they aren't leaves on one device: autocast
      caches its casts of leaves, and then their gradients are summed before they are cast back.
    - `modified`: arguments that the function modifies in place; they are cloned first.
    - `reassigned`: pairs of a buffer's number and the number of the value it has afterwards.
    - `passed`: arguments that are needed after the function: values passed on, shared parameters.
    - `outputs`: the values that leave, in order, and their layouts.
    - `loss`: the value at which the backward starts, on the stage that computes the loss.
    - `roots`: the values at which cotangents enter, in the order in which they are received.
    - `leaves`: arguments whose gradients are returned: first those for earlier stages, laid out as `cotangents`, then
      the stage's own.
    """

    parameters: int
    buffers: int
    trained: frozenset[int]
    differentiated: tuple[int, ...]
    inner: tuple[int, ...]
    modified: tuple[int, ...]
    reassigned: tuple[tuple[int, int], ...]
    passed: tuple[int, ...]
    outputs: tuple[tuple[int, Spec], ...]
    loss: int | None
    roots: tuple[int, ...]
    leaves: tuple[int, ...]
    cotangents: tuple[Spec, ...]

    @property
    def changed(self) -> frozenset[int]:
        """The numbers of the buffers that a forward changes."""
        modified = {k - self.parameters for k in self.modified} & {*range(self.buffers)}
        return frozenset(modified | {buffer for buffer, _ in self.reassigned})


class Functions(Protocol):
    """The functions of a stage, as described in `fpipe.stages.stage`. They don't modify their arguments."""

    @property
    def undeferred(self) -> Mapping[int, str]:
        """The gradients that the input half computes, by their number among the stage's own, and why."""

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
