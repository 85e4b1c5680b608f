# SPDX-License-Identifier: Apache-2.0
"""Functions that hold tensors, as pytrees: replace the tensors, and call the function again.

A function consists of its code and the contents of its cells; a `functools.partial`, of a function and its arguments.
Functions without tensors stay leaves.

Runs when a pipeline is built; in every step, functions are rebuilt around the step's tensors.
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
    """The pytree node of a function. Its children are the contents of the cells, or the parts of a `partial`.

    Unflattening returns a function, not a `Closure`.
    """

    def __init__(self, function: Any, held: tuple[Any, ...]) -> None:
        self.function, self.held = function, held

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


def flatten_closures(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves and treespec of a tree, in which functions that hold tensors are subtrees."""
    leaves, spec = flatten_all(tree)
    if not any(issubclass(kind, (partial, FunctionType)) for kind in set(map(type, leaves))):  # nearly always
        return leaves, spec
    return flatten_all(open_closures(tree))


def open_closures(tree: Any, inside: tuple[Any, ...] = ()) -> Any:
    """Return a tree with a `Closure` for each function that holds tensors; `inside`: the functions being opened."""
    leaves, spec = flatten_all(tree)
    return optree.tree_unflatten(spec, [_open_leaf(leaf, inside) for leaf in leaves])


def _open_leaf(leaf: Any, inside: tuple[Any, ...]) -> Any:
    inner = closure_contents(leaf)
    if not inner or any(leaf is function for function in inside):
        return leaf
    children = tuple(open_closures(child, (*inside, leaf)) for child in inner)
    leaves = flatten_all(children)[0]
    tensors, again = any(isinstance(one, Tensor) for one in leaves), any(one is leaf for one in leaves)
    return Closure(leaf, children) if tensors and not again else leaf  # a recursive function stays a leaf


def closure_contents(leaf: Any) -> tuple[Any, ...]:
    """Return the contents of a function's cells, or the parts of a `partial`; empty for others, or if a cell is."""
    if isinstance(leaf, partial):
        return leaf.func, leaf.args, leaf.keywords
    if not isinstance(leaf, FunctionType):
        return ()
    try:
        return tuple(cell.cell_contents for cell in leaf.__closure__ or ())
    except ValueError:  # a cell is empty
        return ()


def closure_variables(function: FunctionType) -> dict[str, Any]:
    """Return the variables that a function closes over, by name, without those that are not set yet."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def _rebuild(function: Any, held: Iterable[Any]) -> Any:
    """Return the function with these values in its cells, or as the parts of a `partial`."""
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
