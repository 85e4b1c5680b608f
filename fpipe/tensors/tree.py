# SPDX-License-Identifier: Apache-2.0
"""Pytrees, built on optree: flatten trees into tensors and structure, name the leaves, and compare structures.

Dataclasses, and any type that is registered as a pytree with torch (such as the outputs of Hugging Face models), are
trees too: their types are registered with optree when first seen, in fpipe's own namespace.

Functions that hold tensors are trees where `flatten_closures` is called: the tensors can be replaced, and the function
called again. A function consists of its code and the contents of its cells; a `functools.partial`, of a function and
its arguments. Functions without tensors stay leaves.

Runs when a pipeline is built and in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cached_property, partial
from types import CellType, FunctionType
from typing import Any, Final, TypeAlias

import optree
import torch
from torch import Tensor, nn

from fpipe.errors import InputError
from fpipe.tensors.spec import as_bytes
from fpipe.tensors.torch_private import FakeTensor, torch_pytree

Tree: TypeAlias = Any
MOST_LEAVES: Final = 5
"""The most places that an error lists."""
NAMESPACE = "fpipe"


@dataclass(frozen=True)
class Structure:
    """A tree without its tensors: the treespec, and the non-tensor leaves.

    >>> tensors, structure = flatten({"x": torch.ones(2), "flag": True, "none": None})
    >>> len(tensors), structure.names
    (1, ("['x']",))
    >>> structure.unflatten([torch.zeros(1)])
    {'x': tensor([0.]), 'flag': True, 'none': None}
    """

    spec: optree.PyTreeSpec
    constants: tuple[tuple[int, Any], ...]

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The paths of all leaves."""
        return tuple(accessor.codify("") for accessor in optree.treespec_accessors(self.spec))

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of the tensor leaves, in order."""
        constant = dict(self.constants)
        return tuple(path for leaf, path in enumerate(self.paths) if leaf not in constant)

    @property
    def opaque(self) -> tuple[tuple[str, str], ...]:
        """The paths and type names of the leaves that may contain tensors."""
        return tuple((self.paths[leaf], type(x).__name__) for leaf, x in self.constants if not isinstance(x, PLAIN))

    @property
    def numbers(self) -> tuple[tuple[int, int | float], ...]:
        """The leaves that are numbers, which may differ from step to step: leaf numbers and values."""
        return tuple((leaf, value) for leaf, value in self.constants if is_plain_number(value))

    def with_numbers(self, numbers: Iterable[Any]) -> Structure:
        """Return the structure with other numbers in place of its own, in order."""
        new = dict(zip((leaf for leaf, _ in self.numbers), numbers, strict=True))
        return Structure(self.spec, tuple((leaf, new.get(leaf, value)) for leaf, value in self.constants))

    def unflatten(self, tensors: list[Any] | tuple[Any, ...]) -> Tree:
        """Return the tree with `tensors` as its tensor leaves, in order."""
        leaves = list(tensors)
        for leaf, value in self.constants:
            leaves.insert(leaf, value)
        return optree.tree_unflatten(self.spec, leaves)


def is_plain_number(leaf: object) -> bool:
    """Return whether a leaf is a number that a tensor can hold: an int or a float.

    >>> [is_plain_number(leaf) for leaf in (3, 2.5, True, 2**70, "3")]
    [True, True, False, False, False]
    """
    return type(leaf) is float or (type(leaf) is int and -(2**63) <= leaf < 2**63)


PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
COMMON_TYPES = frozenset({Tensor, nn.Parameter, FakeTensor, *PLAIN})  # the types of most leaves


def flatten(tree: Tree, opaque: bool = False) -> tuple[list[Tensor], Structure]:
    """Return the tensors of `tree`, and its structure.

    Raise `InputError` for a leaf that may contain tensors, unless `opaque` leaves are allowed.
    """
    leaves, spec = flatten_all(tree)
    constants = tuple([(i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)])
    structure = Structure(spec, constants)
    if not opaque:
        require_transparent("a tree", structure)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], structure


def list_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples and lists, in order; faster than `flatten`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from list_tensors(one)


def require_transparent(what: str, structure: Structure) -> None:
    """Raise `InputError`, naming the leaf, if a leaf that is not a tensor may contain some."""
    for path, kind in structure.opaque[:1]:
        raise InputError(
            f"{what}, at {path or 'the root'}: got {kind}, expected tensors, numbers, strings, flags or None in "
            "tuples, lists, dicts and dataclasses. Convert it, as by torch.as_tensor; leave it out (use_cache=False, "
            "where a model returns a cache), or "
            'register its type with optree.register_pytree_node(..., namespace="fpipe").'
        )


def flatten_all(tree: Tree) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return all leaves of `tree`, and its treespec."""
    leaves, spec = optree.tree_flatten(tree, namespace=NAMESPACE)
    others = set(map(type, leaves)) - COMMON_TYPES
    if others and _register(others):
        return flatten_all(tree)
    return leaves, spec


def _register(types: set[Any]) -> bool:
    """Register the `types` that are known to be trees; return whether there were any."""
    other = [t for t in types if not issubclass(t, (Tensor, *PLAIN))]
    known: list[Any] = [t for t in other if t in torch_pytree.SUPPORTED_NODES or is_dataclass(t)]
    register: Any = optree.register_pytree_node
    for t in known:
        node = torch_pytree.SUPPORTED_NODES.get(t)
        if node is None:
            register(
                t, _flatten_dataclass, lambda names, values, t=t: _make_dataclass(t, names, values), namespace=NAMESPACE
            )
        else:
            register(
                t,
                _adapt(node.flatten_fn),
                lambda context, values, node=node: node.unflatten_fn(list(values), context),
                namespace=NAMESPACE,
            )
    return bool(known)


def _flatten_dataclass(value: Any) -> tuple[tuple[Any, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the values of the fields that are set, and their names twice: as optree's metadata and path entries.

    Values are read as stored, bypassing any attribute access that the class defines.
    """
    held = {}
    for one in fields(value):
        with suppress(AttributeError):
            held[one.name] = object.__getattribute__(value, one.name)
    return tuple(held.values()), tuple(held), tuple(held)


def _make_dataclass(kind: type, names: tuple[str, ...], values: Any) -> Any:
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _adapt(flat: Any) -> Any:
    """Adapt torch's flatten function of a type to optree, naming the children of mappings by their keys."""

    def flattened(value: Any) -> tuple[Any, Any, Any]:
        children, context = flat(value)
        names = tuple(value) if isinstance(value, Mapping) and len(value) == len(children) else range(len(children))
        return tuple(children), context, tuple(names)

    return flattened


def broadcast(what: str, prefix: Tree, structure: Structure) -> list[Any]:
    """Return the value in `prefix` for each tensor of a tree; in the prefix, `None` is a leaf.

    Raise `InputError` if it is not a prefix of the tree. `what` names the argument in errors.

    >>> _, structure = flatten(({"x": torch.ones(1), "y": [torch.ones(2), None]}, torch.ones(3), 4))
    >>> broadcast("dims", ({"x": 1, "y": None}, 0, 0), structure)
    [1, None, 0]
    """
    tensor = object()
    tree = structure.unflatten([tensor] * len(structure.names))
    leaves = optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)
    try:
        said = optree.broadcast_prefix(prefix, tree, none_is_leaf=True, namespace=NAMESPACE)
    except ValueError as error:
        raise InputError(
            f"{what}: got {prefix!r}, expected one value for all, or a tree such as {_show(structure, '0')}: one value "
            "for each tensor, or for all tensors of a branch. Pass a value for each argument, and one for the targets."
        ) from error
    return [value for leaf, value in zip(leaves, said, strict=True) if leaf is tensor]


def number_leaves(prefix: Tree) -> Tree:
    """Return the tree with its leaves numbered; as in `broadcast`, `None` is a leaf.

    >>> number_leaves(({"x": 1, "y": None}, 0))
    ({'x': 0, 'y': 1}, 2)
    """
    leaves, spec = optree.tree_flatten(prefix, none_is_leaf=True, namespace=NAMESPACE)
    return optree.tree_unflatten(spec, list(range(len(leaves))))


def require_same_tree(what: str, got: Structure, expected: Structure) -> None:
    """Raise `InputError` unless two trees differ only in their leaves, with tensors at the same places."""
    if got.spec == expected.spec and [i for i, _ in got.constants] == [i for i, _ in expected.constants]:
        return
    mine, theirs = _list_leaves(got), _list_leaves(expected)
    apart = [path for path in {**theirs, **mine} if mine.get(path) != theirs.get(path)]
    more = f", and so on, at {len(apart)} places in all" if len(apart) > MOST_LEAVES else ""
    has, lacks = (
        ", ".join(f"{one.get(path, 'nothing')} at {path}" for path in apart[:MOST_LEAVES]) + more or _show(structure)
        for one, structure in ((mine, got), (theirs, expected))
    )
    targets = what == "inputs" and apart and not any(path in theirs for path in apart)
    raise InputError(
        f"{what}: got {has}, expected {lacks}, as in the example that pipeline() was given. Pass tensors and None at "
        f"the same places in every batch.{' Pass targets apart from inputs, as targets.' if targets else ''} For "
        "batches of another structure, build another pipeline."
    )


def list_lacking(got: Structure, expected: Structure) -> frozenset[int]:
    """Return the numbers of those tensors of a tree that another lacks, if there is no other difference.

    >>> def tree(**leaves):
    ...     return flatten({name: torch.ones(1) if leaf else leaf for name, leaf in leaves.items()})[1]
    >>> list_lacking(tree(b=1), tree(a=1, b=1, c=1)), list_lacking(tree(a=None, b=1), tree(a=1, b=1))
    (frozenset({0, 2}), frozenset({0}))
    >>> list_lacking(tree(d=1), tree(a=1, b=1)), list_lacking(tree(a=1), tree(a=1))
    (frozenset(), frozenset())
    """
    mine, theirs = _list_leaves(got), _list_leaves(expected)
    apart = {path for path in {**theirs, **mine} if mine.get(path) != theirs.get(path)}
    absent = {path for path in apart if path in expected.names and mine.get(path, "None") == "None"}
    return frozenset([k for k, path in enumerate(expected.names) if path in absent]) if absent == apart else frozenset()


class _Shown:
    """A leaf that is shown as a word."""

    def __init__(self, word: str) -> None:
        self.word = word

    def __repr__(self) -> str:
        return self.word


def _show(structure: Structure, word: str = "a tensor") -> str:
    """Return a tree as Python shows it, with a word for each tensor."""
    return repr(structure.unflatten([_Shown(word)] * len(structure.names)))


def _list_leaves(structure: Structure) -> dict[str, str]:
    """Return for the path of each leaf, and of each `None`, what is there."""
    tree = structure.unflatten([_Shown("a tensor")] * len(structure.names))
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    paths = [accessor.codify("") or "the root" for accessor in optree.treespec_accessors(spec)]
    words = [repr(x) if isinstance(x, _Shown | None) else "a value that is no tensor" for x in leaves]
    return dict(zip(paths, words, strict=True))


def first_names(module: nn.Module, kind: str) -> dict[str, str]:
    """Map every name of every parameter or buffer (`kind`) to the first name of the same tensor.

    >>> tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> tied[1].weight = tied[0].weight
    >>> first_names(tied, "parameters")
    {'0.weight': '0.weight', '1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    listing = module.named_parameters if kind == "parameters" else module.named_buffers
    for name, tensor in listing(remove_duplicate=False):
        found[name] = first.setdefault(id(tensor), name)
    return found


def stored_values(tensor: Tensor) -> Tensor:
    """Return a tensor's elements; of a sparse one, those that it stores, with entries of the same index added up."""
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether shape, dtype and bits are equal; unlike in `torch.equal`, nan equals nan, and 0 is not -0.

    A sparse tensor equals one that is sparse, too, if their sums over entries of the same index do.
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.is_sparse:
        a, b = a.detach().coalesce(), b.detach().coalesce()
        return torch.equal(a.indices(), b.indices()) and same_bits(a.values(), b.values())
    return torch.equal(as_bytes(a.detach()), as_bytes(b.detach()))


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
    others = set(map(type, leaves)) - COMMON_TYPES
    if not any(issubclass(kind, (partial, FunctionType)) for kind in others):  # nearly always
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


_register_node: Any = optree.register_pytree_node  # whose types are narrower than what it takes
_register_node(Closure, lambda one: (one.held, one.function), _rebuild, namespace=NAMESPACE)
