# SPDX-License-Identifier: Apache-2.0
"""A stage differentiated as a graph, recorded once: the functions of `autograd`, without autograd.

What is kept between functions is a list of tensors, which the one function that it is for empties.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from fpipe.capture.contract import Tensors
from fpipe.differentiation.code import Run
from fpipe.differentiation.contract import Wiring

Kept: TypeAlias = list[Any]


@dataclass(frozen=True)
class Recorded:
    """The functions of a stage, as phases of a graph.

    - `run_forward`, `run_backward`, `run_input`, `run_weight`: the phases.
    - `undeferred`: the gradients that the input half computes, and why.
    - `remark`: how the phases are run.
    """

    wiring: Wiring
    constants: Tensors
    run_forward: Run
    run_backward: Run
    run_input: Run
    run_weight: Run
    undeferred: Mapping[int, str]
    remark: str

    def leaves(self, params: Tensors) -> Tensors:
        """The parameters, without a graph."""
        return tuple([tensor.detach() for tensor in params])

    def forward(
        self, params: Tensors, buffers: Tensors, inputs: Tensors, key: int
    ) -> tuple[Tensors, Tensors, Kept | None]:
        """Run the stage on one microbatch."""
        wiring = self.wiring
        outputs, new, kept = self.run_forward([key, *params, *buffers, *self.constants, *inputs])
        outputs = tuple([spec.like(tensor) for (_, spec), tensor in zip(wiring.outputs, outputs, strict=True)])
        return outputs, new, list(kept) if wiring.leaves else None

    def evaluate(self, params: Tensors, buffers: Tensors, inputs: Tensors, key: int) -> tuple[Tensors, Tensors]:
        """The outputs and buffers of `forward`, and nothing kept."""
        outputs, new, _ = self.forward(params, buffers, inputs, key)
        return outputs, new

    def backward(self, residuals: Kept | None, cotangents: Tensors) -> tuple[Tensors, Tensors]:
        """All gradients of one microbatch; empties the residuals."""
        if residuals is None:
            return (), ()
        residuals.extend(cotangents)
        outgoing, grads = self.run_backward(residuals)
        return self._outgoing(outgoing), grads

    def backward_input(self, residuals: Kept | None, cotangents: Tensors) -> tuple[Tensors, Kept | None]:
        """The cotangents for earlier stages, and what is needed for the rest; empties the residuals."""
        if residuals is None:
            return (), None
        residuals.extend(cotangents)
        outgoing, rest = self.run_input(residuals)
        return self._outgoing(outgoing), list(rest)

    def backward_weight(self, deferred: Kept | None) -> Tensors:
        """The gradients of this stage's parameters; empties what was kept for them."""
        if deferred is None:
            return ()
        (grads,) = self.run_weight(deferred)
        return grads

    def _outgoing(self, found: tuple[Tensor, ...]) -> Tensors:
        return tuple([spec.like(cotangent) for spec, cotangent in zip(self.wiring.cotangents, found, strict=True)])
