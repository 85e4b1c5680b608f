# SPDX-License-Identifier: Apache-2.0
"""Trees of tensors whose paths are names: `tree["blocks"][3]["weight"]` is `blocks.3.weight`.

Problem. Parameters, buffers and gradients are dicts by the model's own names, all through fpipe. In the manner of JAX
they are nested dicts, lists, tuples and dataclasses, which users build, map over and pass on.

Idea. Functions that users call take either. `accept_trees` turns trees into dicts by name before the function sees
them, and what it returns into trees of the same structure. A leaf that a result lacks, such as the gradient of a frozen
parameter, or what other ranks hold, is `None` there, which is no leaf: a tree with it is accepted again.

Invariant: a dict by name is passed on as it is. Nothing is refused here, where only one rank would hear of it: of two
leaves with one name, the second gets a name that no model has, and what follows refuses that.

Runs in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import optree
from torch import Tensor, nn

from fpipe.tensors.tree import NAMESPACE, Tree, flatten_all

P = ParamSpec("P")
Result = TypeVar("Result")
Restore: TypeAlias = Callable[[Any, Mapping[str, "NamedShape"]], Any]
"""Returns a result with trees in place of dicts by name, given the shapes of those arguments that were trees."""


class NamedShape(NamedTuple):
    """A tree without its leaves, and their names, in order."""

    names: tuple[str, ...]
    spec: optree.PyTreeSpec

    def fill(self, values: Mapping[str, Any]) -> Tree:
        """Return the tree with these leaves; `None` where there is none."""
        return optree.tree_unflatten(self.spec, [values.get(name) for name in self.names])


def by_name(tree: Tree) -> dict[str, Tensor]:
    """Return the leaves of a tree by name: a leaf's path, joined by dots.

    The inverse is `as_tree`. All functions of fpipe that take parameters, buffers or gradients take trees, too.

    >>> import torch, fpipe
    >>> tree = {"blocks": [{"weight": torch.ones(2)}, {"weight": torch.zeros(2)}], "scale": torch.tensor(3.0)}
    >>> list(fpipe.by_name(tree))
    ['blocks.0.weight', 'blocks.1.weight', 'scale']
    """
    return name_leaves(tree)[0]


def as_tree(values: Mapping[str, Any], like: Tree) -> Tree:
    """Return values by name as a tree with the structure of `like`, with `None` for missing values.

    >>> import torch, fpipe
    >>> params = {"layer": {"weight": torch.ones(2), "bias": torch.zeros(1)}}
    >>> fpipe.as_tree({"layer.bias": torch.tensor([4.0])}, like=params)
    {'layer': {'weight': None, 'bias': tensor([4.])}}
    """
    return name_leaves(like)[1].fill(values)


def name_leaves(tree: Tree) -> tuple[dict[str, Any], NamedShape]:
    """Return the leaves of a tree by name, and the rest of it."""
    leaves, spec = flatten_all(tree)
    found, names = dict[str, Any](), list[str]()
    for accessor, leaf in zip(optree.treespec_accessors(spec), leaves, strict=True):
        name = ".".join(str(_key(entry)) for entry in accessor)
        while name in found:
            name += " (again)"
        found[name] = leaf
        names.append(name)
    return found, NamedShape(tuple(names), spec)


def _key(entry: optree.PyTreeEntry) -> object:
    """Return the key, index or attribute of one step of a path."""
    return entry.field if isinstance(entry, optree.NamedTupleEntry) else entry.entry


def is_nested(tree: object) -> bool:
    """Return whether a value is a tree of containers, and not a dict by name, or no tree at all."""
    if isinstance(tree, dict):
        return any(_is_container(leaf) for leaf in tree.values())
    return _is_container(tree) and not isinstance(tree, Mapping)  # such as weights that are read one by one


def _is_container(value: Any) -> bool:
    if value is None or isinstance(value, Tensor | nn.Module | type):
        return False
    return is_dataclass(value) or not optree.tree_is_leaf(value, namespace=NAMESPACE)


def accept_trees(
    *arguments: str, restore: Restore = lambda result, shapes: result
) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Return a decorator for a function whose `arguments` are dicts by name, which makes it take trees as well.

    What it returns is restored, if any of them was a tree.
    """

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        order = [*signature(function).parameters]
        places = [(name, order.index(name)) for name in arguments]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            given, named, shapes = list[Any](args), dict[str, Any](kwargs), dict[str, NamedShape]()
            for name, k in places:
                tree = given[k] if k < len(given) else named.get(name)
                if is_nested(tree):
                    values, shapes[name] = name_leaves(tree)
                    if k < len(given):
                        given[k] = values
                    else:
                        named[name] = values
            again: Any = function
            result: Result = again(*given, **named)
            return restore(result, shapes) if shapes else result

        return call

    return decorate


def restore_like(argument: str) -> Restore:
    """Return the `restore` of a function that returns a dict by name like its `argument`, alone or first of a tuple."""

    def restore(result: Any, shapes: Mapping[str, NamedShape]) -> Any:
        if argument not in shapes:
            return result
        if isinstance(result, tuple):
            return (shapes[argument].fill(result[0]), *result[1:])
        return shapes[argument].fill(result)

    return restore
