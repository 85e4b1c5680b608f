# SPDX-License-Identifier: Apache-2.0
"""A stage differentiated by autograd, microbatch by microbatch. Runs in every step.

Invariant: a tensor that a later stage also uses is both a root and a leaf of the backward, so autograd adds the stage's
own contribution to the incoming cotangent in the same order as on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from fpipe.autodiff.accumulation import Gradients, add_all, own_all
from fpipe.autodiff.interface import ArgumentIndex, WeightIndex, Wiring
from fpipe.autodiff.split_backward import Half, Splitter
from fpipe.autodiff.trail import AutogradGraph
from fpipe.errors import InputError
from fpipe.ir.captured import Function, Hook, Tensors
from fpipe.tensors.spec import OptionalSpec, Spec
from fpipe.torch_private import FakeTensor, count_nodes, run_backward


class Residuals(NamedTuple):
    """The forward's state for the backward: where cotangents enter, and the leaves whose gradients are returned.

    A root is `None` if no gradient can enter there: the branch taken on data produced a value without one. `start` is
    the number of the graph's first node; `foreign` is true if the graph may reach leaves of the user's.
    """

    start: int
    roots: tuple[Tensor | GradientEdge | None, ...]
    leaves: Tensors
    foreign: bool
    arguments: Tensors


class Deferred(NamedTuple):
    """The input half's state for the weight half: `half`, and the gradients that it `requested`."""

    weights: Tensors
    half: Half
    requested: Gradients


@dataclass(frozen=True)
class Autograd:
    """The functions of a stage, by autograd. The input half frees what it can; see `split_backward`.

    - `undeferred`: the gradients that the input half computes, and why.
    - `fresh`: the weights whose gradients are fresh, as `accumulation` defines it.
    - `varying`: whether the stage's operations may depend on the values of tensors.
    - `unrecordable`: why no graph can do the same; empty if one may.
    - `hooks`: per parameter, the hooks to call with the gradient of each microbatch.
    - `remark`: why the stage is left to autograd, if something else was requested.
    """

    function: Function
    wiring: Wiring
    constants: Tensors
    undeferred: Mapping[WeightIndex, str]
    fresh: frozenset[WeightIndex]
    varying: bool
    unrecordable: str = ""
    hooks: Mapping[ArgumentIndex, tuple[Hook, ...]] = field(default_factory=dict)
    remark: str = ""

    @property
    def below_autograd(self) -> bool:
        """False: autograd does the work."""
        return False

    @cached_property
    def splitter(self) -> Splitter:
        """The splitter of the backward; it caches the graph of the last microbatch."""
        return Splitter(self.undeferred, not self.varying)

    def leaves(self, params: Tensors) -> Tensors:
        """Return fresh leaves for this step. They are `nn.Parameter`s; those that need a gradient require it."""
        wanted = self.wiring.trained
        leaves = tuple([nn.Parameter(tensor.detach(), k in wanted) for k, tensor in enumerate(params)])
        for k, hooks in self.hooks.items():
            for hook in hooks if not isinstance(leaves[k], FakeTensor) else ():
                leaves[k].register_hook(hook)  # type: ignore[no-untyped-call]
        return leaves

    def forward(
        self, params: Tensors, buffers: Tensors, inputs: Tensors, key: int
    ) -> tuple[Tensors, Tensors, Residuals | None]:
        """Run the stage on one microbatch."""
        wiring = self.wiring
        arguments = [*params, *buffers, *self.constants, *inputs]
        start, foreign = count_nodes(), any(one.requires_grad for one in arguments[len(params) :])
        for k in wiring.differentiated:
            arguments[k] = arguments[k].detach().requires_grad_()
        given = tuple(arguments)
        for k in wiring.inner:
            arguments[k] = arguments[k].view_as(arguments[k])
        for k in wiring.modified:
            arguments[k] = arguments[k].clone()
        before = [tensor._version for tensor in arguments] if self.varying else []
        with torch.set_grad_enabled(bool(wiring.leaves)):
            made = self.function.run(key, *arguments)
        if before:
            self._require_unwritten(arguments, before)
        values = (*made, *[arguments[k] for k in wiring.passed])
        new = arguments[len(params) : len(params) + len(buffers)] if wiring.modified else [*buffers]
        for buffer, value in wiring.reassigned:
            new[buffer] = _new_buffer(values[value], buffers[buffer])
        outputs = tuple([spec.like(values[k].detach()) for k, spec in wiring.outputs])
        scoped = (*given[: len(params)], *new, *given[len(params) + len(buffers) :])
        return outputs, tuple(new), self._residuals(start, values, given, scoped, foreign) if wiring.leaves else None

    def evaluate(self, params: Tensors, buffers: Tensors, inputs: Tensors, key: int) -> tuple[Tensors, Tensors]:
        """Return the outputs and buffers of `forward`, bit for bit, and keep nothing.

        Some operators choose their kernel by whether an argument requires a gradient, so autograd records here too; but
        whatever it would save is dropped at once.
        """
        with saved_tensors_hooks(_pack_nothing, _unpack_nothing):
            outputs, new, _ = self.forward(params, buffers, inputs, key)
        return outputs, new

    def _residuals(self, start: int, values: Tensors, given: Tensors, scoped: Tensors, foreign: bool) -> Residuals:
        wiring = self.wiring
        roots = [_edge(values[k]) for k in wiring.roots]
        if wiring.loss is not None:
            loss = values[wiring.loss]
            roots.insert(0, loss if loss.requires_grad else None)
        scoped = scoped if self.function.scope is not None else ()
        return Residuals(start, tuple(roots), tuple([given[k] for k in wiring.leaves]), foreign, scoped)

    def _require_unwritten(self, arguments: Sequence[Tensor], before: Sequence[int]) -> None:
        """Raise `InputError` if a branch modified in place what no branch did at capture: other code may read it."""
        modified = self.wiring.modified
        for k, (tensor, version) in enumerate(zip(arguments, before, strict=True)):
            if tensor._version != version and k not in modified:
                raise InputError(
                    f"a module that branches on data: got an in-place change of an argument, {Spec.of(tensor)}, "
                    "expected none, as in the branch that was captured. Compute a new tensor instead."
                )

    def _enter(self, residuals: Residuals, cotangents: Gradients) -> tuple[Residuals, Tensors]:
        """Return the roots at which a cotangent enters, and those cotangents; the loss's is one."""
        roots = residuals.roots
        if self.wiring.loss is not None:
            start: Any = roots[0]
            cotangents = (None if start is None else torch.ones_like(start), *cotangents)
        pairs = [(r, c) for r, c in zip(roots, cotangents, strict=True) if r is not None and c is not None]
        return residuals._replace(roots=tuple([root for root, _ in pairs])), tuple([given for _, given in pairs])

    def backward(
        self, residuals: Residuals | None, cotangents: Gradients, onto: Gradients = ()
    ) -> tuple[Gradients, Gradients]:
        """Return one microbatch's gradients: cotangents for earlier stages, and those of this stage's parameters."""
        if residuals is None:
            return (), ()
        if not onto:
            outgoing, grads = self.differentiate(residuals, cotangents)
            return outgoing, own_all(grads, self.fresh)
        if self._has_layouts(residuals.leaves):
            return self._accumulate(residuals, cotangents, onto)
        outgoing, grads = self.differentiate(residuals, cotangents)
        return outgoing, add_all(onto, tuple(grads))

    def differentiate(
        self, residuals: Residuals | None, cotangents: Gradients
    ) -> tuple[Gradients, list[Tensor | None]]:
        """Return cotangents and gradients as autograd returns them: they may share memory with anything."""
        if residuals is None:
            return (), []
        residuals, cotangents = self._enter(residuals, cotangents)
        split, found = len(self.wiring.cotangents), self._grad(residuals, residuals.leaves, cotangents)
        return self._lay_out(found[:split]), [*found[split:]]

    def _has_layouts(self, leaves: Tensors) -> bool:
        """Return whether cotangents have the layout of their values; autograd would copy them into any other."""
        pairs = zip(self.wiring.cotangents, leaves, strict=False)
        return all(spec.stride == leaf.stride() for spec, leaf in pairs)

    def _accumulate(self, residuals: Residuals, cotangents: Gradients, onto: Gradients) -> tuple[Gradients, Gradients]:
        """Let autograd add each gradient to its sum right away, while it is in the processor's caches.

        Autograd adds to `.grad` in place if that is set. The weights are leaves of this step only, so theirs can stay.
        """
        residuals, cotangents = self._enter(residuals, cotangents)
        split = len(self.wiring.cotangents)
        inputs, weights = residuals.leaves[:split], residuals.leaves[split:]
        for weight, total in zip(weights, onto, strict=True):
            weight.grad = total
        if residuals.roots:
            # Name the leaves only if the graph might reach others: autograd looks them up at every node.
            self._walk(residuals, residuals.leaves if residuals.foreign else (), cotangents, into_leaves=True)
        sums = [weight.grad for weight in weights]
        # A first gradient may share its memory; sparse + dense makes a new tensor.
        kept = {k for k, (total, one) in enumerate(zip(onto, sums, strict=True)) if one is total}
        outgoing = self._lay_out([leaf.grad for leaf in inputs])
        for leaf in inputs:  # one may be a parameter, whose `.grad` would be there in the next microbatch
            leaf.grad = None
        return outgoing, own_all(sums, kept)

    def backward_input(self, residuals: Residuals | None, cotangents: Gradients) -> tuple[Gradients, Deferred | None]:
        """Return the cotangents for earlier stages, and what the weight half needs."""
        if residuals is None:
            return (), None
        residuals, cotangents = self._enter(residuals, cotangents)
        split = len(self.wiring.cotangents)
        inputs, weights = residuals.leaves[:split], residuals.leaves[split:]
        roots: Any = residuals.roots
        edges, half = self.splitter.half(AutogradGraph(roots, residuals.start), weights)
        found = self._grad(residuals, (*inputs, *[weights[k] for k in half.split.now], *edges), cotangents)
        return self._lay_out(found[:split]), Deferred(weights, half, found[split:])

    def backward_weight(self, deferred: Deferred | None, onto: Gradients = ()) -> Gradients:
        """Return the gradients of this stage's parameters."""
        if deferred is None:
            return ()
        weights, half, requested = deferred
        return half.grads(requested, weights, onto)

    def _lay_out(self, found: Sequence[Tensor | None]) -> Gradients:
        """Return the cotangents as they are sent; autograd has checked their shapes and dtypes."""
        return tuple([_with_layout(spec, one) for spec, one in zip(self.wiring.cotangents, found, strict=True)])

    def _grad(
        self, residuals: Residuals, leaves: tuple[Tensor | GradientEdge, ...], cotangents: Gradients
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients at `leaves`, `None` if no cotangent enters; free the graph."""
        if not leaves or not residuals.roots:
            return (None,) * len(leaves)
        return self._walk(residuals, leaves, cotangents, into_leaves=False)

    def _walk(
        self, residuals: Residuals, ends: tuple[Tensor | GradientEdge, ...], cotangents: Gradients, into_leaves: bool
    ) -> tuple[Any, ...]:
        """Call the engine as `torch.autograd.grad` or, into leaves, `backward` do, but without their checks.

        The checks cost as much as a layer.
        """
        roots: tuple[Any, ...] = residuals.roots
        with self._backward_scope(residuals.arguments):
            return run_backward(roots, cotangents, False, False, ends, True, accumulate_grad=into_leaves)

    def _backward_scope(self, given: Tensors) -> AbstractContextManager[None]:
        """Return the context for a backward that may rerun parts of the forward; what they modify is cloned first.

        As on one device, they find the buffers as the forward left them.
        """
        if self.function.scope is None:
            return nullcontext()
        modified = self.wiring.modified
        return self.function.scope(tuple([t.clone() if k in modified else t for k, t in enumerate(given)]))


def _new_buffer(new: Tensor, old: Tensor) -> Tensor:
    """Return a copy of what is assigned to a buffer, since that may share memory with the batch."""
    if new.requires_grad or (new.shape, new.dtype) != (old.shape, old.dtype):
        got = f"{Spec.of(new)}{' that requires a gradient' if new.requires_grad else ''}"
        raise InputError(
            f"an assignment to a buffer: got {got}, expected {Spec.of(old)} that requires no gradient, as at capture. "
            "Assign a detached tensor of the same shape and dtype in every branch."
        )
    return new.detach().clone()


def _pack_nothing(saved: object) -> None:
    """Pack a saved tensor as nothing."""


def _unpack_nothing(saved: object) -> Tensor:
    raise AssertionError("no backward follows")


def _edge(tensor: Tensor) -> Tensor | GradientEdge | None:
    """Return where a cotangent enters, if one can, without keeping the tensor's data; a leaf is returned itself."""
    if not tensor.requires_grad:
        return None
    return tensor if tensor.is_leaf else get_gradient_edge(tensor)


def _with_layout(spec: Spec, cotangent: Tensor | None) -> Tensor | None:
    """Return a cotangent in the layout of its spec; raise `InputError` if it is missing and must not be."""
    if cotangent is not None:
        return cotangent if cotangent.stride() == spec.stride else spec.like(cotangent)
    if isinstance(spec, OptionalSpec):
        return None
    raise InputError(
        f"a stage's backward: got no gradient for an input {spec}, expected one, as at capture. If a custom autograd "
        "function returns None for some data, return zeros instead."
    )
