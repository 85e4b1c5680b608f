# SPDX-License-Identifier: Apache-2.0
"""An execution inside transforms of torch.func: `grad`, `vjp` and `jacrev` of its loss, and `vmap`.

Idea. An execution computes its gradients itself. So for a transform it is one function: its backward scales the
gradients that the forward returned, and its vmap executes the program once for each element. Stages never see a
transform, so their bits are those of plain calls.

Runs only inside a transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.functional.bound import Executed
from fpipe.tensors.torch_private import count_gradients, has_dual_level, is_transformed, transform_level
from fpipe.tensors.tree import flatten_all

StepArguments: TypeAlias = tuple[Any, Any, Any, Any, Any]
"""Parameters, buffers, inputs, targets and seed: what may be inside a transform."""
TREES: Final = ("params", "buffers", "inputs", "targets", "seed")
Run: TypeAlias = Callable[..., tuple[Executed, Any]]
LeafPath: TypeAlias = tuple[Any, ...]
"""The path of a leaf of the arguments."""


def is_inside(given: StepArguments) -> bool:
    """Return whether any leaf is a tensor inside a transform; without one around, look at none."""
    if transform_level() is None:
        return False
    return any(isinstance(leaf, Tensor) and is_transformed(leaf) for leaf in flatten_all(given)[0])


def execute_inside(run: Run, given: StepArguments) -> tuple[Executed, Any]:
    """Return the results of `run(*given)` to the transforms around it; only the loss has derivatives.

    Raise `InputError` for derivatives other than those of the loss with respect to parameters, and for higher ones.
    """
    call = _Call(run, *_flatten(given))
    if has_dual_level():
        raise InputError(
            "execute: got forward-mode differentiation around it (jvp, jacfwd, hessian), expected none: an execution "
            "differentiates backward. Use vjp, grad or jacrev."
        )
    tracked = {place: count for place, tensor in call.tensors.items() if (count := count_gradients(tensor))}
    for place, count in tracked.items():
        if place[0] or count > 1:
            raise InputError(
                f"{_name(place)}: got a tensor inside {count} gradient{'s' * (count > 1)} of torch.func, expected "
                f"{'none' if place[0] else 'one'}: an execution returns the first derivatives of its loss with respect "
                "to parameters. Differentiate with respect to params, once."
            )
    made = _Execution.apply(call, *call.tensors.values())  # type: ignore[no-untyped-call]
    done, grads = call.assemble(made)
    if done.loss is None and tracked:
        raise InputError(
            "program: got one of forwards only inside a gradient of torch.func, expected one with backwards: outputs "
            "have no derivatives here. Return a loss from the last stage, and pass a schedule for training."
        )
    return done, grads


def _flatten(tree: Any) -> tuple[dict[LeafPath, Any], Any]:
    """Return the leaves of a tree by path, and its structure."""
    leaves, structure = flatten_all(tree)
    return dict(zip(structure.paths(), leaves, strict=True)), structure


def _name(place: LeafPath) -> str:
    what, *path = place
    return TREES[what] + "".join([f"[{step!r}]" for step in path])


@dataclass(eq=False)
class _Call:
    """An execution: the leaves of its arguments by path, and their structure.

    `results`: the leaves of what it returned last, by path, and their structure.
    """

    run: Run
    leaves: dict[LeafPath, Any]
    structure: Any
    results: dict[LeafPath, Any] = field(default_factory=dict)
    results_structure: Any = None

    @property
    def tensors(self) -> dict[LeafPath, Tensor]:
        """The leaves that are tensors."""
        return {place: leaf for place, leaf in self.leaves.items() if isinstance(leaf, Tensor)}

    def execute(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Execute with these tensors; return those of the results."""
        given = {**self.leaves, **dict(zip(self.tensors, tensors, strict=True))}
        *trees, seed = self.structure.unflatten(given.values())
        done = self.run(*trees, int(seed) if isinstance(seed, Tensor) else seed)
        self.results, self.results_structure = _flatten(done)
        made = [leaf for leaf in self.results.values() if isinstance(leaf, Tensor)]
        return tuple([leaf.clone() if any(leaf is one for one in tensors) else leaf for leaf in made])

    def assemble(self, made: Sequence[Tensor]) -> tuple[Executed, Any]:
        """Return the results with these tensors."""
        tensors = iter(made)
        leaves = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self.results.values()]
        found: tuple[Executed, Any] = self.results_structure.unflatten(leaves)
        return found

    def select(self, made: Sequence[Tensor]) -> tuple[list[Tensor], list[LeafPath]]:
        """Return the gradients among the tensors of the results, and the paths of their parameters."""
        places = [place for place, leaf in self.results.items() if isinstance(leaf, Tensor)]
        chosen = {(0, *place[1:]): one for place, one in zip(places, made, strict=True) if place[0] == 1}
        return [*chosen.values()], [*chosen]


class _Execution(torch.autograd.Function):
    """An execution as torch.func sees it. All results but the loss, the first, are constants."""

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        return call.execute(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call, *_ = inputs
        gradients, ctx.places = call.select(output)
        ctx.wanted = [*call.tensors]
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradients = dict(zip(ctx.places, ctx.saved_tensors, strict=True))
        return None, *[cotangent * gradients[place] if place in gradients else None for place in ctx.wanted]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: Tensor) -> tuple[Any, Any]:
        rows = [
            [one if dim is None else one.select(dim, k) for one, dim in zip(tensors, in_dims[1:], strict=True)]
            for k in range(info.batch_size)
        ]
        made = [_Execution.apply(call, *row) for row in rows]  # type: ignore[no-untyped-call]
        stacked = tuple([torch.stack(column) for column in zip(*made, strict=True)])
        return stacked, (0,) * len(stacked)
