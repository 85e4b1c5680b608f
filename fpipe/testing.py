# SPDX-License-Identifier: Apache-2.0
"""Tests of a stage of your own: is it pure, do its halves add up, are its gradients right?

Runs on request, in your tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fpipe.functional.graph import as_stage
from fpipe.functional.stage import Stage
from fpipe.tensors.tree import NAMESPACE, same_bits

__all__ = ["check_stage"]

STEP = 1e-6
"""How far a finite difference goes to either side, in float64."""


def check_stage(
    stage: Stage | Callable[..., Any],
    params: Any,
    buffers: Any,
    inputs: tuple[Any, ...],
    key: int = 0,
    *,
    tolerance: float = 1e-5,
) -> None:
    """Raise `AssertionError` unless a stage fulfills the contract, for these arguments.

    - It is pure: no argument is modified, and what it returns is the same bit for bit when it runs again, as in a
      recomputation; its gradients are, too.
    - New buffers, cotangents and gradients have the structures of buffers, inputs and parameters.
    - Both halves of its backward compute the bits of the unsplit backward.
    - In float64, gradients and cotangents agree with a finite difference of the outputs, up to the relative
      `tolerance`, in a random direction from a separate generator. So pass arguments at which it is smooth.

    The error names the first leaf that is wrong, with got and expected.

    >>> import torch, fpipe
    >>> from fpipe.testing import check_stage
    >>> def forward(weight, buffers, inputs, key):
    ...     (x,) = inputs
    ...     return weight * x, buffers, (weight, x)
    >>> def backward(residuals, cotangent):
    ...     weight, x = residuals
    ...     return (weight * cotangent,), weight * cotangent  # the gradient is x * cotangent
    >>> check_stage(fpipe.Stage(forward, backward), torch.tensor(3.0), (), (torch.tensor(2.0),))
    Traceback (most recent call last):
    AssertionError: stage 'forward', gradients and cotangents: got a slope of ..., expected ..., by a finite ...
    """
    checked = _Checked(as_stage(stage), (params, buffers, inputs), key)
    checked.require_pure()
    if checked.stage.is_differentiable:
        checked.require_halves()
        checked.require_slope(tolerance)


class _Checked:
    """A stage with the arguments that it is checked for; `cotangents` are those of its outputs, drawn once."""

    def __init__(self, stage: Stage, arguments: tuple[Any, Any, Any], key: int) -> None:
        self.stage, self.arguments, self.key = stage, arguments, key
        self.draw = torch.Generator().manual_seed(0)

    def forward(self, arguments: Any = None) -> tuple[Any, Any, Any]:
        """Run the forward, on copies of the arguments."""
        params, buffers, inputs = _map(torch.clone, self.arguments if arguments is None else arguments)
        return self.stage.forward(params, buffers, inputs, self.key)

    def whole(self, residuals: Any, cotangents: Any) -> tuple[Any, Any]:
        """Run the whole backward; if there is none, both halves."""
        if self.stage.backward is not None:
            return self.stage.backward(residuals, cotangents)
        return self.halves(residuals, cotangents)

    def halves(self, residuals: Any, cotangents: Any) -> tuple[Any, Any]:
        """Run both halves of the backward."""
        assert self.stage.backward_input is not None
        assert self.stage.backward_weight is not None
        outgoing, deferred = self.stage.backward_input(residuals, cotangents)
        return outgoing, self.stage.backward_weight(deferred)

    def require_pure(self) -> None:
        """Raise `AssertionError` if it modifies an argument, or returns something else when it runs again."""
        given = _map(torch.clone, self.arguments)
        params, state, inputs = given
        outputs, buffers, residuals = self.stage.forward(params, state, inputs, self.key)
        self._same("its arguments after the forward", given, self.arguments, "Compute new tensors.")
        again, new, _ = self.forward()
        repair = "A forward may depend only on its arguments: keep no state, and draw from the key."
        self._same("outputs and buffers of a second run", (again, new), (outputs, buffers), repair)
        self._like("new buffers", buffers, self.arguments[1], "Return all of them, changed or not.")
        if not self.stage.is_differentiable:
            return
        cotangents = self._directions(outputs)
        kept = _map(torch.clone, cotangents)
        outgoing, grads = self.whole(residuals, cotangents)
        self._same("cotangents after the backward", cotangents, kept, "Compute new tensors.")
        self._same("its arguments after the backward", given, self.arguments, "Compute new tensors.")
        self._like("cotangents of the inputs", outgoing, self.arguments[2], "Return a tuple, with one for each input.")
        self._like("gradients", grads, self.arguments[0], "Return one for each parameter, or None.")
        self._same("a second backward", self.whole(self.forward()[2], kept), (outgoing, grads), repair)

    def require_halves(self) -> None:
        """Raise `AssertionError` unless both halves of the backward give what the whole gives."""
        if self.stage.backward is None or self.stage.backward_input is None:
            return
        outputs, _, residuals = self.forward()
        cotangents = self._directions(outputs)
        whole = self.whole(residuals, cotangents)
        halves = self.halves(self.forward()[2], cotangents)
        self._same("both halves of the backward", halves, whole, "The halves must add up to the unsplit backward.")

    def require_slope(self, tolerance: float) -> None:
        """Raise `AssertionError` unless the backward agrees with a finite difference."""
        params, buffers, inputs = _map(_double, self.arguments)
        start: Any = params, inputs
        moved = self._directions(start)

        def outputs(step: float) -> list[Tensor]:
            at, to = optree.tree_map(
                lambda one, way: one if way is None else one + step * way if isinstance(one, Tensor) else one,
                start,
                moved,
                none_is_leaf=True,
                namespace=NAMESPACE,
            )
            return _floating(self.forward((at, buffers, to))[0])

        made, _, residuals = self.forward((params, buffers, inputs))
        cotangents = self._directions(made)
        outgoing, grads = self.whole(residuals, cotangents)
        slope = _dot((grads, outgoing), moved)
        pairs = zip(outputs(STEP), outputs(-STEP), _floating(cotangents), strict=True)
        expected = sum(float(((a - b) / (2 * STEP) * way).sum()) for a, b, way in pairs)
        if abs(slope - expected) > tolerance * max(1.0, abs(expected)):
            raise AssertionError(
                f"{self.stage}, gradients and cotangents: got a slope of {slope:.8g}, expected {expected:.8g}, by a "
                "finite difference in float64. Check the formula of the backward, or pass arguments at which the stage "
                "is smooth."
            )

    def _directions(self, tree: Any) -> Any:
        """Return a tensor drawn for each floating-point tensor of a tree, and `None` for other leaves."""

        def drawn(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return None
            return torch.randn(leaf.shape, generator=self.draw, dtype=torch.float64).to(leaf.device, leaf.dtype)

        return optree.tree_map(drawn, tree, namespace=NAMESPACE)

    def _like(self, what: str, got: Any, expected: Any, repair: str) -> None:
        shapes = [optree.tree_structure(one, none_is_leaf=True, namespace=NAMESPACE) for one in (got, expected)]
        if shapes[0] != shapes[1]:
            raise AssertionError(f"{self.stage}, {what}: got {shapes[0]}, expected {shapes[1]}. {repair}")

    def _same(self, what: str, got: Any, expected: Any, repair: str) -> None:
        """Raise `AssertionError`, naming the first leaf that differs."""
        self._like(what, got, expected, repair)
        paths = optree.tree_paths(got, none_is_leaf=True, namespace=NAMESPACE)
        for path, one, other in zip(paths, *map(_leaves, (got, expected)), strict=True):
            both = isinstance(one, Tensor) and isinstance(other, Tensor)
            if (both and not same_bits(one, other)) or (not both and one is not other and one != other):
                where = ".".join(map(str, path))
                raise AssertionError(f"{self.stage}, {what}, leaf {where}: got {one}, expected {other}. {repair}")


def _map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return optree.tree_map(lambda one: function(one) if isinstance(one, Tensor) else one, tree, namespace=NAMESPACE)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _leaves(tree: Any) -> Sequence[Any]:
    return optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)


def _floating(tree: Any) -> list[Tensor]:
    return [one for one in _leaves(tree) if isinstance(one, Tensor) and one.is_floating_point()]


def _dot(first: Any, second: Any) -> float:
    pairs = zip(_leaves(first), _leaves(second), strict=True)
    return sum(float((a * b).sum()) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))
