# SPDX-License-Identifier: Apache-2.0
"""Functions with tensors in their closures as pytrees, so that they can be called again with other tensors.

A function is its code and the contents of its cells; a `functools.partial` is a function and its arguments. Functions
without tensors stay leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import CellType, FunctionType
from typing import Any

import optree
from torch import Tensor

from fpipe.tensors.tree import NAMESPACE, flatten_all


class Closure:
    """A function whose cells, or arguments, are children in a pytree; unflattening makes a function again."""

    def __init__(self, function: Any, held: tuple[Any, ...]) -> None:
        self.function, self.held = function, held

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


def flatten_closures(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves and treespec of a tree; functions that hold tensors are subtrees."""
    leaves, spec = flatten_all(tree)
    if not any(issubclass(kind, (partial, FunctionType)) for kind in set(map(type, leaves))):  # nearly always
        return leaves, spec
    return flatten_all(open_closures(tree))


def open_closures(tree: Any, inside: tuple[Any, ...] = ()) -> Any:
    """Return a tree in which functions that hold tensors are subtrees; `inside` are those being opened."""
    leaves, spec = flatten_all(tree)
    return optree.tree_unflatten(spec, [_open_leaf(leaf, inside) for leaf in leaves])


def _open_leaf(leaf: Any, inside: tuple[Any, ...]) -> Any:
    inner = closure_contents(leaf)
    if not inner or any(leaf is function for function in inside):
        return leaf
    children = tuple(open_closures(child, (*inside, leaf)) for child in inner)
    leaves = flatten_all(children)[0]
    tensors, again = any(isinstance(one, Tensor) for one in leaves), any(one is leaf for one in leaves)
    return Closure(leaf, children) if tensors and not again else leaf  # a recursive one stays a leaf


def closure_contents(leaf: Any) -> tuple[Any, ...]:
    """Return what a function holds; nothing if unknown."""
    if isinstance(leaf, partial):
        return leaf.func, leaf.args, leaf.keywords
    if not isinstance(leaf, FunctionType):
        return ()
    try:
        return tuple(cell.cell_contents for cell in leaf.__closure__ or ())
    except ValueError:  # a cell is empty
        return ()


def _rebuild(function: Any, held: Iterable[Any]) -> Any:
    """Return the function with these values in its cells, or as its arguments."""
    held = tuple(held)
    if isinstance(function, partial):
        return partial(held[0], *held[1], **held[2])
    cells = tuple(CellType(content) for content in held)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(vars(function))
    return made


register: Any = optree.register_pytree_node
register(Closure, lambda one: (one.held, one.function), _rebuild, namespace=NAMESPACE)
