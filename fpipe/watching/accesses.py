# SPDX-License-Identifier: Apache-2.0
"""What the code reached from a model and its loss reads, and what it assigns.

Reads count by name, for every object that has the attribute. Assignments count by owner and name: that some code
assigns `scale` to one object hides no change of another one's.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

from fpipe.model.reach import NOT_SET, Reach, entries, is_users
from fpipe.tensors.closures import closure_variables
from fpipe.watching.code_names import UNKNOWN, Chain, CodeNames

IMPLIED = frozenset({"training"})
"""Attributes of modules that count as read only where a capture, or the module's own code, reads them."""


class Accesses:
    """The reads and assignments of reached code.

    - `names`: the names in the code of all functions.
    - `own`: by class, the attributes that its methods read of their first argument.
    - `assigned`: the id of an owner, and the name that is assigned: an object's attribute, a table's global; for a
      closed-over variable, the id of its cell, and no name. `growing`: the ids of containers that get new elements.
    """

    def __init__(self, reach: Reach, names_of: Callable[[CodeType], CodeNames]) -> None:
        self.reach, self.names_of, self.names = reach, names_of, CodeNames()
        self.own = defaultdict[type, set[str]](set)
        self.assigned, self.growing = set[tuple[int, str]](), set[int]()
        for function in reach.functions:
            found = names_of(function.__code__)
            self.names |= found
            if function in reach.methods:
                self.own[reach.methods[function]] |= found.own
            self.assigned.update(key for chain, name in found.stored for key in self._owners(function, chain, name))
            self.growing.update(id(one) for chain in found.grown for one in self._find(function, chain))

    def is_relevant(self, owner: object, name: str, is_attribute: bool) -> bool:
        """Return whether code reads a key of that name, or an attribute of it that no code assigns to this `owner`."""
        names = self.names
        if is_attribute:
            return name in names.attributes and not self.is_assigned(owner, name)
        return name in names.keys or name in names.attributes

    def is_assigned(self, owner: object, name: str) -> bool:
        """Return whether code assigns this attribute, global, or closed-over variable of a function."""
        if isinstance(owner, FunctionType):
            return (id(_cell(owner, name)), "") in self.assigned
        return (id(owner), name) in self.assigned

    def of_module(self, module: nn.Module) -> Iterator[str]:
        """Yield the attributes of a module that code reads, run or not: also in hooks, and in the backward."""
        table, kind = vars(module), type(module)
        own = {name for base in kind.__mro__ for name in self.own.get(base, ())}
        by_class = {
            name for base in kind.__mro__ if is_users(base) for name in vars(base) if _is_data(vars(base)[name])
        }
        named = (self.names.attributes - IMPLIED) & (table.keys() | by_class)
        yield from [name for name in own | named if not self.is_assigned(module, name)]

    def _owners(self, function: FunctionType, chain: Chain, name: str) -> Iterator[tuple[int, str]]:
        """Yield the key of each owner to which an assignment in a function goes, as far as it can be told."""
        if chain.root == "global" and not chain.variable:
            yield id(function.__globals__), name
        elif chain.root == "free" and not chain.variable:
            yield id(_cell(function, name)), ""
        else:
            yield from [(id(one), name) for one in self._find(function, chain)]

    def _find(self, function: FunctionType, chain: Chain) -> list[Any]:
        """Return the objects that a chain may lead to."""
        found: Iterable[Any] = ()
        if chain.root == "global":
            found = [function.__globals__.get(chain.variable, NOT_SET)]
        elif chain.root == "free":
            found = [closure_variables(function).get(chain.variable, NOT_SET)]
        elif chain.root == "first" and function in self.reach.methods:
            kind = self.reach.methods[function]
            found = [kind, *(one for one in self.reach.objects if isinstance(one, kind))]
        elif chain.attributes and chain.root in ("", "first"):
            found = [one for one in self.reach.objects if chain.attributes[0] in _attributes(one)]
        for name in chain.attributes if chain != UNKNOWN else ():
            found = [_attribute(one, name) for one in found]
        return [one for one in found if one is not NOT_SET]


def _cell(function: FunctionType, name: str) -> CellType | None:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells.get(name)


def _attributes(one: Any) -> Any:
    return vars(one) if isinstance(one, nn.Module) else entries(one)


def _attribute(one: Any, name: str) -> Any:
    """Return an attribute as it is stored, in the object, its submodules or its class; else `NOT_SET`."""
    if name == "__class__":
        return type(one)
    tables = [
        getattr(one, "__dict__", {}),
        _attributes(one) if not isinstance(one, type) and one is not NOT_SET else {},
    ]
    tables += [one._modules] if isinstance(one, nn.Module) else []
    tables += [vars(base) for base in (one if isinstance(one, type) else type(one)).__mro__]
    return next((table[name] for table in tables if name in table), NOT_SET)


def _is_data(value: Any) -> bool:
    """Return whether a member of a class is a value rather than a method or a descriptor."""
    return not callable(value) and not hasattr(type(value), "__get__")
