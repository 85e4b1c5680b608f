# SPDX-License-Identifier: Apache-2.0
"""Batches: what the pipeline was built for, and how one is cut into microbatches.

A batch is (inputs, targets). Every tensor leaf is cut on dimension 0 into equal parts; everything else in the trees is
part of the program and must be what it was at capture. A rank needs only the leaves that its stages read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.spec import Spec
from fpipe.tree import Structure, flatten, require_same


@dataclass(frozen=True)
class BatchSpec:
    """The batch that a pipeline takes.

    `structure` is the tree of (inputs, targets); `halves` are the trees of inputs and of targets alone; `specs` are
    those of the whole batch's leaves.
    """

    structure: Structure
    halves: tuple[Structure, Structure]
    specs: tuple[Spec, ...]
    microbatches: int

    @classmethod
    def of(cls, inputs: Any, targets: Any, microbatches: int) -> BatchSpec:
        """The batch of an example; raises `InputError` if it cannot be cut."""
        leaves, structure = flatten((inputs, targets))
        for path, leaf in zip(structure.names, leaves, strict=True):
            if not leaf.dim() or leaf.shape[0] % microbatches or not leaf.shape[0]:
                raise InputError(
                    f"{_named(path)}: got shape {list(leaf.shape)}, expected dimension 0 to be divisible by "
                    f"{microbatches}, the number of microbatches. Pad or cut the batch, or choose another number."
                )
        halves = (flatten(inputs)[1], flatten(targets)[1])
        return cls(structure, halves, tuple(Spec.of(leaf) for leaf in leaves), microbatches)

    def microbatch(self, inputs: Any, targets: Any) -> list[Tensor]:
        """The leaves of the first microbatch."""
        leaves, _ = flatten((inputs, targets))
        return [leaf.narrow(0, 0, len(leaf) // self.microbatches) for leaf in leaves]

    def take(self, inputs: Any, targets: Any, needed: Iterable[int]) -> dict[int, Sequence[Tensor]]:
        """The microbatches of the `needed` leaves.

        Pass `None` for inputs or targets of which this rank needs nothing. A leaf with other strides than the example's
        is copied into those. Raises `InputError`, naming the leaf, for
        what is missing or not as in the example.
        """
        given: list[Tensor | None] = []
        for what, tree, expected in zip(("inputs", "targets"), (inputs, targets), self.halves, strict=True):
            if tree is None:
                given += [None] * len(expected.names)
                continue
            leaves, structure = flatten(tree)
            require_same(what, structure, expected)
            given += leaves
        return {leaf: self._split(leaf, given[leaf]) for leaf in sorted(set(needed))}

    def _split(self, leaf: int, tensor: Tensor | None) -> Sequence[Tensor]:
        name, spec = _named(self.structure.names[leaf]), self.specs[leaf]
        if tensor is None:
            raise InputError(
                f"{name}: got nothing, expected {spec}: a stage of this rank reads it. Pass the batch on this rank."
            )
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype or tensor.device != spec.device:
            raise InputError(
                f"{name}: got {Spec.of(tensor)} on {tensor.device}, expected {spec} on {spec.device}, as in the "
                "example that pipeline() was given. Convert it, or build another pipeline for this batch."
            )
        return torch.split(spec.like(tensor.detach()), spec.shape[0] // self.microbatches)


def join(parts: Sequence[Tensor]) -> Tensor:
    """A leaf of all microbatches: joined along dimension 0, stacked if it has none."""
    return torch.cat(tuple(parts)) if parts[0].dim() else torch.stack(tuple(parts))


def _named(path: str) -> str:
    """`[0][1]` in the tree (inputs, targets) is `inputs[1]`."""
    return ("inputs" if path.startswith("[0]") else "targets") + path[3:]
