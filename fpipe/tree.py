# SPDX-License-Identifier: Apache-2.0
"""Pytrees, on optree: which leaves are tensors, what they are called, and how two trees differ."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor, nn

from fpipe.errors import InputError
from fpipe.spec import as_bytes

Tree: TypeAlias = Any


@dataclass(frozen=True)
class Structure:
    """A tree without its tensors: the treespec, the paths of all leaves, and the leaves that are no tensors.

    >>> tensors, structure = flatten({"x": torch.ones(2), "flag": True, "none": None})
    >>> len(tensors), structure.names
    (1, ("['x']",))
    >>> structure.unflatten([torch.zeros(1)])
    {'x': tensor([0.]), 'flag': True, 'none': None}
    """

    spec: optree.PyTreeSpec
    paths: tuple[str, ...]
    constants: tuple[tuple[int, Any], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of the tensor leaves, in order."""
        constant = dict(self.constants)
        return tuple(path for leaf, path in enumerate(self.paths) if leaf not in constant)

    def unflatten(self, tensors: list[Any] | tuple[Any, ...]) -> Tree:
        """The tree with these in place of its tensors."""
        leaves = list(tensors)
        for leaf, value in self.constants:
            leaves.insert(leaf, value)
        return optree.tree_unflatten(self.spec, leaves)


PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)


def flatten(tree: Tree, opaque: bool = False) -> tuple[list[Tensor], Structure]:
    """The tensors of `tree`, and the rest of it.

    Raises `InputError` for a leaf in which tensors may hide, unless `opaque` leaves are welcome.
    """
    leaves, spec = optree.tree_flatten(tree)
    paths = tuple(accessor.codify("") for accessor in optree.treespec_accessors(spec))
    for path, leaf in zip(paths, leaves, strict=True):
        if not opaque and not isinstance(leaf, (Tensor, *PLAIN)):
            raise InputError(
                f"a tree, at {path or 'its root'}: got {type(leaf).__name__}, expected tensors, numbers, strings, "
                "flags or None in tuples, lists and dicts. Convert it, or register its type with "
                'optree.register_pytree_node(..., namespace="").'
            )
    constants = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], Structure(spec, paths, constants)


def require_same(what: str, got: Structure, expected: Structure) -> None:
    """Raise `InputError`, naming the leaf, unless two trees differ in nothing but their tensors."""
    if got.spec != expected.spec or [i for i, _ in got.constants] != [i for i, _ in expected.constants]:
        missing = [path for path in expected.names if path not in got.names]
        surplus = [path for path in got.names if path not in expected.names]
        raise InputError(
            f"{what}: got the tree {got.spec} with tensors at {list(got.names)}, expected {expected.spec} with tensors "
            f"at {list(expected.names)} (missing {missing}, unexpected {surplus}). Pass the structure that "
            "pipeline() was given as its example."
        )
    for (leaf, value), (_, wanted) in zip(got.constants, expected.constants, strict=True):
        if type(value) is not type(wanted) or (value != wanted and repr(value) != repr(wanted)):  # nan equals nan
            raise InputError(
                f"{what}{expected.paths[leaf]}: got {value!r}, expected {wanted!r}, the value at capture. Values that "
                "are no tensors are part of the program: build another pipeline for another value."
            )


def names(module: nn.Module, kind: str) -> dict[str, str]:
    """Every name of every parameter or buffer (`kind`), mapped to the first name of the same tensor.

    >>> tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> tied[1].weight = tied[0].weight
    >>> names(tied, "parameters")
    {'0.weight': '0.weight', '1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    listing = module.named_parameters if kind == "parameters" else module.named_buffers
    for name, tensor in listing(remove_duplicate=False):
        found[name] = first.setdefault(id(tensor), name)
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; unlike `torch.equal`, nan equals itself, 0 not -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(as_bytes(a.detach()), as_bytes(b.detach()))
