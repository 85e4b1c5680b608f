# SPDX-License-Identifier: Apache-2.0
"""The globals, closed-over variables and class attributes that code reads, besides its arguments and the model.

Code that runs as Python in every step sees their current values. Code that was recorded, in a graph or because a cut
goes through it, doesn't look again; so for that code they are noted here and compared before each step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from fpipe.capture.eager_types import STAND_INS
from fpipe.watching.handle import Container, Difference, Handle, Handles, Plain, Table, selected
from fpipe.watching.reached import Reached, cells, is_ours
from fpipe.watching.reads import Reads

OTHERS = (ModuleType, logging.Logger, logging.LoggerAdapter)  # their contents don't affect results


class Outside(NamedTuple):
    """A namespace that code reads: how to get it now, what it held, and its name in errors."""

    now: Callable[[], Mapping[str, Any]]
    was: Table
    where: str

    def holds(self) -> bool:
        """Return whether it is unchanged."""
        return self.was.holds(self.now())

    def differences(self) -> Iterator[Difference]:
        """Yield what has changed."""
        return self.was.differences(self.now(), self.where)


def surroundings(roots: Iterable[Any], reads: Reads, reached: Reached) -> tuple[Outside, ...]:
    """Return the namespaces, as they are now, that code `reached` from `roots` reads."""
    return tuple(_Making(reads, reached).outside(roots))


class _Making:
    """Makes tables of the namespaces that were reached."""

    def __init__(self, reads: Reads, reached: Reached) -> None:
        self.reads, self.reached, self.handles, self.met = reads, reached, Handles(), set[int]()

    def outside(self, roots: Iterable[Any]) -> Iterator[Outside]:
        """Yield all namespaces of which something is read."""
        for function in self.reached.functions:
            held = {name: one for name, one in cells(function).items() if not isinstance(one, FunctionType | type)}
            where = f"{function.__module__}.{function.__qualname__}, which closes over "
            yield from self._of(partial(cells, function), held, where)
        for table, found in self._globals():
            held = {name: table[name] for name in sorted(found)}
            yield from self._of(partial(_itself, table), held, f"module {table.get('__name__')}, global ")
        for holder, names in self._holders():
            held = {name: vars(holder)[name] for name in vars(holder) if name in names and not name.startswith("__")}
            kind = "class" if isinstance(holder, type) else "module"
            yield from self._of(partial(vars, holder), held, f"{kind} {holder.__name__}, attribute ")
        for root in roots:
            yield from self._root(root)

    def _globals(self) -> Iterable[tuple[dict[str, Any], set[str]]]:
        """Return the global namespaces, and which of their names are read."""
        found: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for function in self.reached.functions:
            table = function.__globals__
            read = self.reached.names_of(function.__code__).outer & table.keys()
            found.setdefault(id(table), (table, set()))[1].update(read)
        return found.values()

    def _holders(self) -> Iterator[tuple[type | ModuleType, Collection[str]]]:
        """Yield classes and Python modules, and which of their names are read."""
        names = self.reached.names.attributes
        for kind in self.reached.classes:
            read = names | self.reads.read.get(kind, set())
            yield from [(base, read) for base in kind.__mro__ if is_ours(base)]
        yield from [(module, names) for module in self.reached.modules]

    def _root(self, root: Any) -> Iterator[Outside]:
        """Yield the namespaces of a loss that is a module or another object with attributes."""
        if isinstance(root, nn.Module):
            for path, module in root.named_modules():
                table = vars(module)
                held = {name: table[name] for name in self.reads.of(type(module), table) if name in table}
                where = f"module {path or '(root)'} ({type(module).__name__}) of the loss, attribute "
                yield from self._of(partial(vars, module), held, where)
        elif not isinstance(root, FunctionType):
            yield from self._of(partial(dict, loss=root), {"loss": root}, "the ")

    def _of(self, now: Callable[[], Mapping[str, Any]], held: Mapping[str, Any], where: str) -> Iterator[Outside]:
        """Yield what the names in `held` refer to, if any of it can be compared."""
        children: dict[str, Handle] = {}
        for name, one in held.items():
            if any(one is stand_in for stand_in in STAND_INS):  # a capture is in progress
                continue
            code = isinstance(one, type) or (callable(one) and type(one).__module__ in ("builtins", "functools"))
            handle = Plain(one) if code else self.handles.of(one)
            if handle is not None and name not in self.reached.names.stored and not isinstance(one, OTHERS):
                children[name] = handle
        chosen = selected(children, partial(keep, self.reached), self.met)
        chosen = {n: one for n, one in chosen.items() if not (isinstance(one, Container) and not one.children)}
        if chosen:
            yield Outside(now, Table.of(chosen, None, "{!r}"), where)


def keep(reached: Reached, name: str, attribute: bool) -> bool:
    """Return whether the reached code reads an attribute, or a key, of that name, and does not set it itself."""
    names = reached.names
    if attribute:
        return name in names.attributes and name not in names.stored
    return name in names.keys or name in names.attributes


def _itself(table: Mapping[str, Any]) -> Mapping[str, Any]:
    return table
