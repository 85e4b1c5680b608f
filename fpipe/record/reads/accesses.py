# SPDX-License-Identifier: Apache-2.0
"""The reads and assignments of the code that a model and its loss reach, and those that a capture made.

Reads count by name, for every object that has the attribute. Assignments count by owner and name: that some code
assigns `scale` to one object hides no change of another one's.

A pipeline runs a copy of the model, but a loss or a hook may close over the original. So for reads from the original's
modules, the module is recorded, too.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from fpipe.record.model.walk import (
    MAX_SIZE,
    NOT_SET,
    PLAIN_VALUES,
    Walk,
    code_names,
    entries,
    has_entries,
    held,
    is_container,
    is_library,
    is_users,
)
from fpipe.record.reads.code_names import UNKNOWN, CodeNames, Lookup, find_names
from fpipe.tensors.patching import current, replace
from fpipe.tensors.tree import closure_variables

MAX_OBJECTS: Final = 2000
"""The number of objects that `Reach` opens."""
DEFERRED: Final = ("forward", "backward", "setup_context")
"""The methods of an autograd function, which `apply` calls, or the backward."""
IMPLIED: Final = frozenset({"training"})
"""Attributes of modules that count as read only where a capture, or the module's own code, reads them."""


REGISTRATIONS = {
    "register_buffer": "_buffers",
    "register_forward_hook": "_forward_hooks",
    "register_forward_pre_hook": "_forward_pre_hooks",
    "register_full_backward_hook": "_backward_hooks",
    "register_full_backward_pre_hook": "_backward_pre_hooks",
}
"""Methods of modules, and the attribute that each writes without assigning to it."""


class Reach(Walk):
    """The code that can be reached from some values: functions through what they close over and the globals that their
    code names, classes through the members that some code names.

    - `functions`, `classes`, `files` (Python modules), `objects` (also modules of torch): each once.
    - `methods`: the class in which a function was found.
    """

    LEAVES = (Tensor, *PLAIN_VALUES, BuiltinFunctionType, CodeType)

    def __init__(self, roots: Iterable[Any]) -> None:
        super().__init__()
        self.classes: list[type] = []
        self.files: list[ModuleType] = []
        self.objects: list[Any] = []
        self.methods: dict[FunctionType, type] = {}
        self.names = {"__call__"}
        self.follow(roots)
        count = -1
        while count != len(self.seen):  # new functions add names, which lead to new functions
            count = len(self.seen)
            holders: list[type | ModuleType] = [*self.classes, *self.files]
            for holder in holders:
                self.follow_members(holder, self.names)

    def follow_members(self, holder: type | ModuleType, names: Iterable[str]) -> None:
        """Walk from the members of these names of a class and its users' base classes, or of a Python module."""
        for base in holder.__mro__ if isinstance(holder, type) else (holder,):
            table = vars(base)
            for one in [table[name] for name in table.keys() & names]:
                self._note_method(base, one)
                self.follow([one])

    def _note_method(self, holder: Any, member: Any) -> None:
        member = member.fget if isinstance(member, property) else member
        if isinstance(holder, type) and isinstance(member, FunctionType):
            self.methods.setdefault(member, holder)

    def visit(self, one: Any) -> Iterable[Any]:
        """Record an object, and return the objects to visit next."""
        if isinstance(one, FunctionType):
            return self._code(one) if is_users(one) else ()
        if isinstance(one, ModuleType):
            self.files += [] if is_library(one.__name__) else [one]
            return ()
        if isinstance(one, type):
            return self._class(one) if is_users(one) else ()
        if isinstance(one, nn.Module):
            self.objects.append(one)
            return type(one), *one._modules.values(), *vars(one).values()
        if not has_entries(one):
            return held(one)
        if not is_container(type(one)):
            self.objects.append(one)
        inside = entries(one)
        is_open = len(inside) <= MAX_SIZE and len(self.objects) < MAX_OBJECTS
        return type(one), *(inside.values() if is_open else ())

    def _class(self, kind: type) -> Sequence[Any]:
        self.classes.append(kind)
        if issubclass(kind, torch.autograd.Function):
            self.follow_members(kind, DEFERRED)
        return ()

    def _code(self, function: FunctionType) -> list[Any]:
        self.functions.append(function)
        self.names |= code_names(function)
        table = function.__globals__
        return [*held(function), *[table[name] for name in find_names(function.__code__).outer & table.keys()]]


class Accesses:
    """The reads and assignments of reached code.

    - `names`: the names in the code of all functions.
    - `own`: by class, the attributes that its methods read of their first argument.
    - `assigned`: the id of an owner, and the name that is assigned: an object's attribute, a table's global; for a
      closed-over variable, the id of its cell, and no name. `growing`: the ids of containers that get new elements.
    """

    def __init__(self, reach: Reach) -> None:
        self.reach, self.names = reach, CodeNames()
        self.own = defaultdict[type, set[str]](set)
        self.assigned, self.growing = set[tuple[int, str]](), set[int]()
        for function in reach.functions:
            found = find_names(function.__code__)
            self.names.update(found)
            if function in reach.methods:
                self.own[reach.methods[function]] |= found.own
            self.assigned.update(key for lookup, name in found.stored for key in self._owners(function, lookup, name))
            self.growing.update(id(one) for lookup in found.grown for one in self._find(function, lookup))

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

    def _owners(self, function: FunctionType, lookup: Lookup, name: str) -> Iterator[tuple[int, str]]:
        """Yield the key of each owner to which an assignment in a function goes, as far as it can be told."""
        if lookup.root == "global" and not lookup.variable:
            yield id(function.__globals__), name
        elif lookup.root == "free" and not lookup.variable:
            yield id(_cell(function, name)), ""
        else:
            yield from [(id(one), name) for one in self._find(function, lookup)]

    def _find(self, function: FunctionType, lookup: Lookup) -> list[Any]:
        """Return the objects that a lookup may lead to."""
        found: Iterable[Any] = ()
        if lookup.root == "global":
            found = [function.__globals__.get(lookup.variable, NOT_SET)]
        elif lookup.root == "free":
            found = [closure_variables(function).get(lookup.variable, NOT_SET)]
        elif lookup.root == "first" and function in self.reach.methods:
            kind = self.reach.methods[function]
            found = [kind, *(one for one in self.reach.objects if isinstance(one, kind))]
        elif lookup.attributes and lookup.root in ("", "first"):
            found = [one for one in self.reach.objects if lookup.attributes[0] in _attributes(one)]
        for name in lookup.attributes if lookup != UNKNOWN else ():
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


@dataclass(frozen=True)
class Reads:
    """The names of the attributes that were read and written; if `read` is empty, everything counts as read.

    - `read`: by class of module. `written`: by the module's name; in a loss, prefixed by `loss`.
    - `original`: the attributes read from the original model's modules, as text.
    """

    read: Mapping[type, set[str]] = field(default_factory=dict)
    written: Mapping[str, set[str]] = field(default_factory=dict)
    original: Collection[str] = ()

    def of(self, path: str, kind: type, attributes: Iterable[str]) -> set[str]:
        """Return the names that are read and not written, for a module of this class with these `attributes`."""
        names = self.read.get(kind, set()) if self.read else set(attributes)
        return {name for name in names if not name.startswith("__")} - self.written.get(path, set())


@contextmanager
def record_reads(model: nn.Module, loss: object, originals: Mapping[int, str]) -> Iterator[Reads]:
    """Record the attributes of modules that are read and written while copies of `model` run inside; yield the record.

    The record is complete on exit. `originals`: the names, for errors, of the original model's modules, by id.
    """
    read, original = defaultdict[type, set[str]](set), set[str]()
    written: dict[int, tuple[dict[str, Any], set[str]]] = {}  # also keeps the modules' tables alive, and ids unique
    roots: dict[int, nn.Module] = {id(vars(model)): model}
    get: Any = current(nn.Module, "__getattribute__")

    def get_and_record(module: nn.Module, name: str) -> Any:
        read[type(module)].add(name)
        if type(module) is type(model):
            roots.setdefault(id(get(module, "__dict__")), module)
        if id(module) in originals:
            original.add(f"{originals[id(module)]}, attribute {name!r}")
        return get(module, name)

    def record_writes(method: str, function: Any, name: str | None) -> Any:
        def call_and_record(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            table = get(module, "__dict__")
            written.setdefault(id(table), (table, set()))[1].add(args[0] if name is None else name)
            return function(module, *args, **kwargs)

        return replace(nn.Module, method, call_and_record)

    found = Reads(read, defaultdict(set), original)
    with ExitStack() as stack:
        stack.enter_context(replace(nn.Module, "__getattribute__", get_and_record))
        for method in ("__setattr__", "__delattr__"):
            stack.enter_context(record_writes(method, current(nn.Module, method), None))
        for method, name in REGISTRATIONS.items():
            stack.enter_context(record_writes(method, current(nn.Module, method), name))
        yield found
    copies = [*roots.values(), *([loss] if isinstance(loss, nn.Module) else [])]
    for path, module in [pair for one in copies for pair in one.named_modules(prefix="loss" if one is loss else "")]:
        if id(vars(module)) in written:
            found.written[path].update(written[id(vars(module))][1])
