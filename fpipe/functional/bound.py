# SPDX-License-Identifier: Apache-2.0
"""Stages, bound to the arguments of one step: what the executor runs, and how its outcome becomes results.

Runs in every step of `execute`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.runtime.executor import Inputs, LinkedProgram, Outcome
from fpipe.tensors.tree import NAMESPACE

Split: TypeAlias = Callable[[Any, int], Sequence[Any]]
"""`split(tree, M)` returns the M microbatches of the inputs or of the targets."""


class Executed(NamedTuple):
    """The results of one execution, on the ranks that have them.

    A unit is a microbatch or, if they are cut into slices, a slice of one.

    - `loss`: the mean over units, on the rank of the last stage; `None` on others, and for forwards only.
    - `aux`: per unit, what the last stage returned beside the loss.
    - `outputs`: per unit, the output of the last stage, for a program of forwards only.
    - `buffers`: as they were passed, after all microbatches.
    """

    loss: Any
    aux: tuple[Any, ...]
    outputs: tuple[Any, ...]
    buffers: Any


class BoundStages(NamedTuple):
    """Stages, bound to the arguments of one step.

    - `inputs`: those of the executor. `link`: links the program of a rank. `context`: to run in.
    - `finish`: returns the results, given the outcome of each rank. `lines`: what all ranks must have alike, as text.
    """

    inputs: Inputs
    link: Callable[[int], LinkedProgram]
    context: Callable[[], AbstractContextManager[Any]]
    finish: Callable[[Mapping[int, Outcome]], tuple[Executed, Any]]
    lines: Callable[[], Sequence[str]]


def mean_of(losses: Sequence[Any], count: int) -> Any:
    """Return the sum of `loss / count`, in order."""
    total = losses[0] / count
    for one in losses[1:]:
        total = total + one / count
    return total


def split_rows(tree: Any, microbatches: int) -> Sequence[Any]:
    """Return the microbatches of a tree: tensors split along their first dimension, all other leaves the same.

    >>> [one["x"].tolist() for one in split_rows({"x": torch.arange(3), "scale": 2}, 2)]
    [[0, 1], [2]]
    """
    return _split(tree, microbatches, 0, "rows", "microbatch. Pass a larger batch, or split=.")


def split_columns(tree: Any, slices: int) -> Sequence[Any]:
    """Return the slices of a microbatch: tensors split along their second dimension, all other leaves the same.

    >>> [one["x"].tolist() for one in split_columns({"x": torch.arange(6).view(2, 3), "scale": 2}, 2)]
    [[[0, 1], [3, 4]], [[2], [5]]]
    """
    if slices == 1:
        return [tree]
    repair = "slice. Pass longer sequences, a schedule with fewer slices, or slicing=."
    return _split(tree, slices, 1, "columns", repair)


def _split(tree: Any, count: int, dim: int, what: str, repair: str) -> Sequence[Any]:
    """Return so many parts of a tree, cut along dimension `dim`; columns of tensors that have them."""
    columns, structure = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    is_cut = [isinstance(one, Tensor) and (dim == 0 or one.dim() > dim) for one in columns]
    for path, leaf, cut in zip(structure.paths(), columns, is_cut, strict=True):
        if cut and (leaf.dim() == 0 or leaf.shape[dim] < count):
            raise InputError(
                f"batch, leaf {'.'.join(map(str, path))}: got shape {list(leaf.shape)}, expected at least {count} "
                f"{what}, one for each {repair}"
            )
    parts = [torch.tensor_split(c, count, dim) if cut else [c] * count for c, cut in zip(columns, is_cut, strict=True)]
    return [optree.tree_unflatten(structure, [part[k] for part in parts]) for k in range(count)]
