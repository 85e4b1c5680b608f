# SPDX-License-Identifier: Apache-2.0
"""A stage differentiated by autograd, microbatch by microbatch.

Invariant: a tensor that a later stage also uses is both a root and a leaf of the backward, so autograd adds the stage's
own contribution to the incoming cotangent in the same order as on one device.

Runs in every step; also on fake tensors, to record a stage or to measure its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from fpipe.errors import InputError
from fpipe.record.captured import Function, Hook, Tensors
from fpipe.stages.accumulation import Grads, add_all, own_all
from fpipe.stages.interface import ArgumentIndex, WeightIndex, Wiring
from fpipe.tensors.spec import OptionalSpec, Spec
from fpipe.tensors.torch_private import FakeTensor, finish_collective, run_backward


class Residuals(NamedTuple):
    """The forward's state for the backward: where cotangents enter, and the leaves whose gradients are returned.

    A root is `None` if no gradient can enter there: the branch that was taken made a value that requires none.
    `foreign` is true if the graph may reach leaves that belong to the user.
    """

    roots: tuple[Tensor | GradientEdge | None, ...]
    leaves: Tensors
    foreign: bool
    arguments: Tensors


@dataclass(frozen=True)
class Autograd:
    """The functions of a stage, computed by autograd, whose backward can't be split.

    Under a schedule with halves, the input half is the whole backward, and the weight half adds its gradients to the
    sums. So gradients are added in the order that the schedule states.

    - `varying`: whether the stage's operations may depend on the values of tensors.
    - `hooks`: per parameter, the hooks to call with the gradient of each microbatch.
    - `remark`: why the stage isn't recorded, if that was requested.
    - `in_place`: whether autograd may add to the sums itself: they have the dtypes of the parameters.
    - `enabled`: whether the model runs with gradients enabled, even if this stage has none.
    """

    function: Function
    wiring: Wiring
    constants: Tensors
    varying: bool
    hooks: Mapping[ArgumentIndex, tuple[Hook, ...]] = field(default_factory=dict)
    remark: str = ""
    in_place: bool = True
    enabled: bool = True

    @property
    def eager(self) -> Autograd:
        """These functions."""
        return self

    @property
    def below_autograd(self) -> bool:
        """False: autograd does the work."""
        return False

    @property
    def undeferred(self) -> Mapping[WeightIndex, str]:
        """All weights: the input half is the whole backward."""
        count = len(self.wiring.leaves) - len(self.wiring.cotangents)
        return {WeightIndex(k): "its stage isn't recorded, so the backward isn't split" for k in range(count)}

    @property
    def movable(self) -> Sequence[int]:
        """Nothing: autograd's graph holds what it saved."""
        return ()

    def leaves(self, params: Tensors) -> Tensors:
        """Return new leaves for this step: `nn.Parameter`s, with hooks, that require a gradient if they are trained."""
        wanted = self.wiring.trained
        leaves = tuple([nn.Parameter(tensor.detach(), k in wanted) for k, tensor in enumerate(params)])
        for k, hooks in self.hooks.items():
            for hook in hooks if not isinstance(leaves[k], FakeTensor) else ():
                leaves[k].register_hook(hook)  # type: ignore[no-untyped-call]
        return leaves

    def forward(
        self, params: Tensors, buffers: Tensors, inputs: Tensors, key: int
    ) -> tuple[Tensors, Tensors, Residuals | None]:
        """Return a microbatch's outputs, new buffers, and residuals, which are `None` if nothing needs a gradient."""
        wiring = self.wiring
        arguments = [*params, *buffers, *self.constants, *inputs]
        foreign = any(one.requires_grad for one in arguments[len(params) :])
        for k in wiring.differentiated:
            arguments[k] = arguments[k].detach().requires_grad_()
        given = tuple(arguments)
        for k in wiring.inner:
            arguments[k] = arguments[k].view_as(arguments[k])
        for k in wiring.modified:
            arguments[k] = arguments[k].clone()
        before = [tensor._version for tensor in arguments] if self.varying else []
        with torch.set_grad_enabled(self.enabled):
            made = self.function.run(key, *arguments)
        if before:
            self._require_unwritten(arguments, before)
        values = (*made, *[arguments[k] for k in wiring.passed])
        new = arguments[len(params) : len(params) + len(buffers)] if wiring.modified else [*buffers]
        for buffer, value in wiring.reassigned:
            new[buffer] = _new_buffer(values[value], buffers[buffer])
        outputs = tuple([spec.like(values[k].detach()) for k, spec in wiring.outputs])
        scoped = (*given[: len(params)], *new, *given[len(params) + len(buffers) :])
        return outputs, tuple(new), self._residuals(values, given, scoped, foreign) if wiring.leaves else None

    def evaluate(self, params: Tensors, buffers: Tensors, inputs: Tensors, key: int) -> tuple[Tensors, Tensors]:
        """Return the same outputs and buffers as `forward`, bit for bit, but no residuals.

        Some operators choose their kernel by whether an argument requires a gradient, so autograd records here, too,
        but the tensors that it saves are dropped at once.
        """
        with saved_tensors_hooks(_pack_nothing, _unpack_nothing):
            outputs, new, _ = self.forward(params, buffers, inputs, key)
        return outputs, new

    def _residuals(self, values: Tensors, given: Tensors, scoped: Tensors, foreign: bool) -> Residuals:
        wiring = self.wiring
        roots = [_edge(values[k]) for k in wiring.roots]
        if wiring.loss is not None:
            loss = values[wiring.loss]
            roots.insert(0, loss if loss.requires_grad else None)
        scoped = scoped if self.function.scope is not None else ()
        return Residuals(tuple(roots), tuple([given[k] for k in wiring.leaves]), foreign, scoped)

    def _require_unwritten(self, arguments: Sequence[Tensor], before: Sequence[int]) -> None:
        """Raise `InputError` for an in-place change of an argument unmodified at capture: other code may read it."""
        modified = self.wiring.modified
        for k, (tensor, version) in enumerate(zip(arguments, before, strict=True)):
            if tensor._version != version and k not in modified:
                raise InputError(
                    f"a module that branches on data: got an in-place change of an argument, {Spec.of(tensor)}, "
                    "expected none, as in the branch that was captured. Compute a new tensor instead."
                )

    def _enter(self, residuals: Residuals, cotangents: Grads) -> tuple[Residuals, Tensors]:
        """Return the residuals, with only the roots at which cotangents enter, and those cotangents: 1 for the loss."""
        roots = residuals.roots
        if self.wiring.loss is not None:
            start: Any = roots[0]
            cotangents = (None if start is None else torch.ones_like(start), *cotangents)
        pairs = [(r, c) for r, c in zip(roots, cotangents, strict=True) if r is not None and c is not None]
        return residuals._replace(roots=tuple([root for root, _ in pairs])), tuple([given for _, given in pairs])

    def backward(self, residuals: Residuals | None, cotangents: Grads, onto: Grads = ()) -> tuple[Grads, Grads]:
        """Return a microbatch's cotangents for earlier stages, and its gradients, added in place to `onto` if given."""
        if residuals is None:
            return (), ()
        if not onto:
            outgoing, grads = self.differentiate(residuals, cotangents)
            return outgoing, own_all(grads, (), residuals.leaves[len(self.wiring.cotangents) :])
        if self.in_place and self._has_layouts(residuals.leaves):
            return self._accumulate(residuals, cotangents, onto)
        outgoing, grads = self.differentiate(residuals, cotangents)
        return outgoing, add_all(onto, tuple(grads))

    def differentiate(self, residuals: Residuals | None, cotangents: Grads) -> tuple[Grads, list[Tensor | None]]:
        """Return cotangents and gradients as autograd returns them: they may share memory with other tensors."""
        if residuals is None:
            return (), []
        residuals, cotangents = self._enter(residuals, cotangents)
        leaves, split = residuals.leaves, len(self.wiring.cotangents)
        found: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if leaves and residuals.roots:
            found = self._walk(residuals, leaves, cotangents, into_leaves=False)
        return self._lay_out(found[:split]), [*found[split:]]

    def _has_layouts(self, leaves: Tensors) -> bool:
        """Return whether all cotangents are sent in the layouts of their values, which autograd gives to `.grad`."""
        pairs = zip(self.wiring.cotangents, leaves, strict=False)
        return all(spec.stride == leaf.stride() for spec, leaf in pairs)

    def _accumulate(self, residuals: Residuals, cotangents: Grads, onto: Grads) -> tuple[Grads, Grads]:
        """Return the cotangents, and the sums, to which autograd adds each gradient while that is in the CPU's caches.

        Autograd adds to `.grad` in place if that is set. The weights are leaves of this step only, so it can stay set.
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
        # The first gradient of a sum may share memory; sparse + dense makes a new tensor.
        kept = {k for k, (total, one) in enumerate(zip(onto, sums, strict=True)) if one is total}
        outgoing = self._lay_out([leaf.grad for leaf in inputs])
        for leaf in inputs:  # it may be a parameter, whose `.grad` would still be set in the next microbatch
            leaf.grad = None
        return outgoing, own_all(sums, kept)

    def backward_input(self, residuals: Residuals | None, cotangents: Grads) -> tuple[Grads, Grads]:
        """Return the cotangents for earlier stages, and the microbatch's gradients, for the weight half."""
        return self.backward(residuals, cotangents)

    def backward_weight(self, deferred: Grads, onto: Grads = ()) -> Grads:
        """Return the gradients of this stage's parameters, added in place to `onto` if that is given."""
        return add_all(onto, deferred) if onto else deferred

    def _lay_out(self, found: Sequence[Tensor | None]) -> Grads:
        """Return the cotangents in the layouts in which they are sent; autograd has checked shapes and dtypes."""
        return tuple([_with_layout(spec, one) for spec, one in zip(self.wiring.cotangents, found, strict=True)])

    def _walk(self, residuals: Residuals, ends: Tensors, cotangents: Grads, into_leaves: bool) -> tuple[Any, ...]:
        """Call autograd's engine as `grad` or, with `into_leaves`, `backward` does, without their costly checks."""
        roots: tuple[Any, ...] = residuals.roots
        with self._backward_scope(residuals.arguments):
            return run_backward(roots, cotangents, False, False, ends, True, accumulate_grad=into_leaves)

    def _backward_scope(self, given: Tensors) -> AbstractContextManager[None]:
        """Return the context for a backward that may rerun parts of the forward; what these modify is cloned first.

        As on one device, reruns read the buffers as the forward left them.
        """
        if self.function.scope is None:
            return nullcontext()
        modified = self.wiring.modified
        return self.function.scope(tuple([t.clone() if k in modified else t for k, t in enumerate(given)]))


def _new_buffer(new: Tensor, old: Tensor) -> Tensor:
    """Return a copy of a buffer's new value; raise `InputError` if it has another shape or dtype, or requires grad."""
    if new.requires_grad or (new.shape, new.dtype) != (old.shape, old.dtype):
        got = f"{Spec.of(new)}{' that requires a gradient' if new.requires_grad else ''}"
        raise InputError(
            f"an assignment to a buffer: got {got}, expected {Spec.of(old)} that requires no gradient, as at capture. "
            "Assign a detached tensor of the same shape and dtype in every branch."
        )
    return new.detach().clone()  # it may share memory with the batch


def _pack_nothing(saved: object) -> None:
    """Drop a tensor that autograd would save."""


def _unpack_nothing(saved: object) -> Tensor:
    raise AssertionError("no backward follows")


def _edge(tensor: Tensor) -> Tensor | GradientEdge | None:
    """Return where a cotangent can enter: an edge, which keeps no data, or the leaf itself; `None` if it can't."""
    if not tensor.requires_grad:
        return None
    return tensor if tensor.is_leaf else get_gradient_edge(tensor)


def _with_layout(spec: Spec, cotangent: Tensor | None) -> Tensor | None:
    """Return a cotangent in the layout of its spec; raise `InputError` if it is missing, unless it is optional."""
    if cotangent is not None:
        return spec.like(finish_collective(cotangent))
    if isinstance(spec, OptionalSpec):
        return None
    raise InputError(
        f"a stage's backward: got no gradient for an input {spec}, expected one, as at capture. If a custom autograd "
        "function returns None for some data, return zeros instead."
    )
