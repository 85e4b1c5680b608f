# SPDX-License-Identifier: Apache-2.0
"""Merge the outputs of microbatches: the inverse of splitting, in `fpipe.pipelines.batch`.

Runs when a plan is made, and in every step that returns outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.tensors.arguments import describe_argument
from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import NAMESPACE, Structure, broadcast, flatten_all
from schedules.arguments import takes

MergeTrees: TypeAlias = Callable[[Sequence[Any]], Any]
MergeDim: TypeAlias = int | Callable[[Sequence[Tensor]], Any] | None
"""A dimension, `None` to take the first microbatch's, or a function of those of all microbatches."""


@dataclass(frozen=True)
class Merge:
    """The rules for merging a tree of outputs; `dims` has one entry for each tensor.

    If microbatches are cut into slices, the tree is a tuple with the outputs of each of them.
    """

    structure: Structure
    dims: tuple[MergeDim, ...]
    slices: int = 1

    @classmethod
    def of(cls, structure: Structure, dims: Any, parts: Sequence[Sequence[Spec]], slices: int = 1) -> Merge:
        """Return the rules for outputs whose microbatches have the specs `parts`; `dims` is a prefix of their tree.

        Raise `InputError` for a dimension along which they can't be merged.
        """
        found = broadcast("output_dims", dims if slices == 1 else (dims,) * slices, structure)
        for path, dim, specs in zip(structure.names, found, parts, strict=True):
            _require_joinable(f"outputs{path}", dim, specs)
        return cls(structure, tuple(found), slices)

    def apply(self, columns: Sequence[Sequence[Tensor]]) -> Any:
        """Return the tree of merged outputs, given the microbatches of each tensor."""
        merged = self.structure.unflatten([merge(column, dim) for column, dim in zip(columns, self.dims, strict=True)])
        return merged if self.slices == 1 else join_slices(merged)


def merge(parts: Sequence[Tensor], dim: MergeDim = 0) -> Any:
    """Return a leaf: its microbatches concatenated along `dim` (scalars stacked), the first of them, or `dim(parts)`.

    >>> merge([torch.zeros(2, 1), torch.ones(1, 1)]).tolist(), merge([torch.tensor(1), torch.tensor(2)]).tolist()
    ([[0.0], [0.0], [1.0]], [1, 2])
    """
    if dim is None:
        return parts[0]
    if callable(dim):
        return dim(parts)
    return torch.cat(tuple(parts), dim) if parts[0].dim() else torch.stack(tuple(parts))


def join_slices(parts: Sequence[Any]) -> Any:
    """Return the outputs of a sequence, given those of its slices: tensors are concatenated along their dimension 1.

    Of what has no such dimension, and of other leaves, that of the last slice is returned.
    """

    def join(*leaves: Any) -> Any:
        is_cut = isinstance(leaves[0], Tensor) and leaves[0].dim() > 1
        return torch.cat(leaves, 1) if is_cut else leaves[-1]

    return optree.tree_map(join, *parts, none_is_leaf=True, namespace=NAMESPACE)


def stack(parts: Sequence[Any]) -> Any:
    """Return the tree of all microbatches of a tree: its tensors and numbers stacked along a new first dimension.

    Other leaves are those of the first microbatch. Raise `InputError` for tensors that differ in shape.

    >>> stack([{"loss": torch.zeros(2), "rows": 3, "name": "a"}, {"loss": torch.ones(2), "rows": 2, "name": "a"}])
    {'loss': tensor([[0., 0.],
            [1., 1.]]), 'rows': tensor([3, 2]), 'name': 'a'}
    """
    columns, structure = list(zip(*[flatten_all(one)[0] for one in parts], strict=True)), flatten_all(parts[0])[1]
    paths = optree.treespec_accessors(structure)
    return optree.tree_unflatten(structure, list(map(_stack_leaf, (path.codify("") for path in paths), columns)))


def _stack_leaf(path: str, leaves: Sequence[Any]) -> Any:
    if not isinstance(leaves[0], Tensor):
        return torch.tensor(leaves) if isinstance(leaves[0], int | float) else leaves[0]
    shapes = list(dict.fromkeys(tuple(leaf.shape) for leaf in leaves))
    if len(shapes) > 1:
        raise InputError(
            f"aux{path}: got shapes {[list(shape) for shape in shapes]} in different microbatches, expected one to "
            "stack them. Pass aux=f, a function of the sequence of all microbatches' trees, such as aux=list."
        )
    return torch.stack(tuple(leaves))


class Aux(NamedTuple):
    """The treatment of what the loss returns beside itself.

    `merge`: the function of all microbatches' trees that makes `Step.aux`; `None` if this process does not ask for it.
    `is_sent`: whether the ranks that have it send it to the others, because one of these asks.
    """

    merge: MergeTrees | None = None
    is_sent: bool = False

    @classmethod
    def of(cls, asked: bool | MergeTrees, is_sent: bool = False) -> Aux:
        """Return what becomes of it where a process asks with a function, with `True` for `stack`, or doesn't ask."""
        return cls(stack if asked is True else asked or None, is_sent)

    def finish(self, parts: Sequence[Any] | None) -> Any:
        """Return the merged trees; `None` if there are none here, or none are requested."""
        return None if parts is None or self.merge is None else self.merge(parts)


NO_AUX: Final = Aux()


def _require_joinable(name: str, dim: object, specs: Sequence[Spec]) -> None:
    if dim is None or takes(dim, 1):
        return
    if callable(dim):
        raise InputError(
            f"{name}: got {describe_argument(dim)} in output_dims, expected a function of one argument, the sequence "
            "of all microbatches. Write it as f(parts)."
        )
    shapes = list(dict.fromkeys(spec.shape for spec in specs))
    rank = len(shapes[0])
    if not isinstance(dim, int) or isinstance(dim, bool) or (rank and not -rank <= dim < rank):
        raise InputError(
            f"{name}: got shape {list(shapes[0])} to merge along dimension {dim!r}, expected one of its {rank} "
            "dimensions. Pass one in output_dims, None to take the first microbatch's, or a function of all."
        )
    rest = {tuple(size for k, size in enumerate(shape) if not rank or k != dim % rank) for shape in shapes}
    if len(rest) > 1:
        raise InputError(
            f"{name}: got shapes {[list(shape) for shape in shapes]} in different microbatches, expected them to "
            f"differ in dimension {dim} only, along which they are merged. Say in output_dims how to merge them: "
            "another dimension, None to take the first microbatch's, or a function of all of them, such as tuple."
        )
