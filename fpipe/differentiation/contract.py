# SPDX-License-Identifier: Apache-2.0
"""What a way of differentiating a stage is: its pure functions, on tuples of tensors.

Which tensor is which is said once, by `Wiring`, for all ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fpipe.capture.contract import Tensors
from fpipe.differentiation.sums import Gradients
from fpipe.spec import Spec


@dataclass(frozen=True)
class Wiring:
    """Which tensor goes where inside a stage.

    Arguments are counted in the order parameters, buffers, constants, batch, received values; values are the outputs of
    the function, then the arguments named by `passed`.

    - `parameters`, `buffers`: how many of them there are.
    - `trained`: arguments that are parameters and want a gradient; `differentiated`: received values that do.
    - `inner`: those of them that the function must not see as leaves, which they are not on one device: autocast
      remembers what it has cast of leaves, and then their gradients are summed before they are cast back.
    - `modified`: arguments that the function modifies in place, cloned first.
    - `reassigned`: pairs of the number of a buffer and of the value that it has afterwards.
    - `passed`: arguments that are needed behind the function: values passed on, shared parameters.
    - `outputs`: the values that leave, in order, and their layouts.
    - `loss`: the value from which the backward begins, on the stage that computes the loss.
    - `roots`: the values at which cotangents enter, in the order in which they are received.
    - `leaves`: arguments at which gradients come out: for earlier stages, laid out as `cotangents`, then own ones.
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
    """The functions of a stage, which `fpipe.stage` explains; nothing that is passed in is modified."""

    @property
    def undeferred(self) -> Mapping[int, str]:
        """The gradients that the input half computes, by their number among the stage's own, and why."""

    @property
    def remark(self) -> str:
        """What users may want to know of how this stage is differentiated; empty if there is nothing."""

    @property
    def below_autograd(self) -> bool:
        """Whether autograd has nothing to do in any of them."""

    def leaves(self, params: Tensors) -> Tensors:
        """Parameters in the form that `forward` takes."""

    def forward(
        self, params: Tensors, buffers: Tensors, inputs: Tensors, key: int
    ) -> tuple[Tensors, Tensors, Any | None]:
        """Outputs, buffers, and residuals; `None` where nothing wants a gradient."""

    def evaluate(self, params: Tensors, buffers: Tensors, inputs: Tensors, key: int) -> tuple[Tensors, Tensors]:
        """The outputs and buffers of `forward`, bit for bit, and nothing kept."""

    def backward(self, residuals: Any, cotangents: Gradients, onto: Gradients = ()) -> tuple[Gradients, Gradients]:
        """Cotangents for earlier stages, and gradients; or the sum `onto`, to which they were added in place."""

    def backward_input(self, residuals: Any, cotangents: Gradients) -> tuple[Gradients, Any]:
        """Cotangents for earlier stages, and what is needed for the rest."""

    def backward_weight(self, deferred: Any, onto: Gradients = ()) -> Gradients:
        """Gradients; or the sum `onto`, to which they were added in place."""
