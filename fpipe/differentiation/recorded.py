# SPDX-License-Identifier: Apache-2.0
"""A stage differentiated as a graph, recorded once: the functions of `autograd`, without autograd.

What is kept between functions is a list of tensors, which the one function that it is for empties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from fpipe.capture.contract import Tensors
from fpipe.differentiation.code import Run
from fpipe.differentiation.contract import Wiring
from fpipe.differentiation.sums import Gradients
from fpipe.spec import Spec

Kept: TypeAlias = list[Any]
Layouts: TypeAlias = tuple[tuple[tuple[int, ...], Spec], ...]


@dataclass(frozen=True)
class Recorded:
    """The functions of a stage, as phases of a graph.

    - `run_forward`, `run_backward`, `run_input`, `run_weight`: the phases; `evaluation` is made at its first use.
    - `add_backward`, `add_weight`: the same as without `add`, but gradients are added to sums that are taken, too.
    - `undeferred`: the gradients that the input half computes, and why.
    - `remark`: how the phases are run.
    """

    wiring: Wiring
    constants: Tensors
    run_forward: Run
    run_backward: Run
    run_input: Run
    run_weight: Run
    add_backward: Run
    add_weight: Run
    evaluation: Callable[[], Run]
    undeferred: Mapping[int, str]
    remark: str

    @cached_property
    def outputs(self) -> Layouts:
        """Those of the outputs."""
        return tuple((spec.stride, spec) for _, spec in self.wiring.outputs)

    @cached_property
    def cotangents(self) -> Layouts:
        """Those of the outgoing cotangents."""
        return tuple((spec.stride, spec) for spec in self.wiring.cotangents)

    @cached_property
    def run_evaluation(self) -> Run:
        """The forward that keeps nothing."""
        return self.evaluation()

    def leaves(self, params: Tensors) -> Tensors:
        """The parameters, without a graph."""
        return tuple([tensor.detach() for tensor in params])

    def forward(
        self, params: Tensors, buffers: Tensors, inputs: Tensors, key: int
    ) -> tuple[Tensors, Tensors, Kept | None]:
        """Run the stage on one microbatch."""
        wiring = self.wiring
        outputs, new, kept = self.run_forward([key, *params, *buffers, *self.constants, *inputs])
        return _laid_out(self.outputs, outputs), new, kept if wiring.leaves else None

    def evaluate(self, params: Tensors, buffers: Tensors, inputs: Tensors, key: int) -> tuple[Tensors, Tensors]:
        """The outputs and buffers of `forward`, and nothing kept."""
        outputs, new = self.run_evaluation([key, *params, *buffers, *self.constants, *inputs])
        return _laid_out(self.outputs, outputs), new

    def backward(self, residuals: Kept | None, cotangents: Tensors, onto: Gradients = ()) -> tuple[Tensors, Gradients]:
        """All gradients of one microbatch; empties the residuals."""
        if residuals is None:
            return (), ()
        residuals.extend(cotangents)
        residuals.extend(onto)
        outgoing, grads = self.add_backward(residuals) if onto else self.run_backward(residuals)
        return _laid_out(self.cotangents, outgoing), grads

    def backward_input(self, residuals: Kept | None, cotangents: Tensors) -> tuple[Tensors, Kept | None]:
        """The cotangents for earlier stages, and what is needed for the rest; empties the residuals."""
        if residuals is None:
            return (), None
        residuals.extend(cotangents)
        outgoing, rest = self.run_input(residuals)
        return _laid_out(self.cotangents, outgoing), rest

    def backward_weight(self, deferred: Kept | None, onto: Gradients = ()) -> Gradients:
        """The gradients of this stage's parameters; empties what was kept for them."""
        if deferred is None:
            return ()
        deferred.extend(onto)
        grads: Gradients
        (grads,) = self.add_weight(deferred) if onto else self.run_weight(deferred)
        return grads


def _laid_out(layouts: Layouts, tensors: Tensors) -> Tensors:
    """The tensors, copied where they are not laid out as was inferred: fake tensors can be wrong in that."""
    pairs = zip(layouts, tensors, strict=True)
    return tuple([tensor if tensor.stride() == stride else spec.like(tensor) for (stride, spec), tensor in pairs])
