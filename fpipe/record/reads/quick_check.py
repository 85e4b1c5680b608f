# SPDX-License-Identifier: Apache-2.0
"""A quick check of all modules of a model at once.

Problem. There are thousands of modules, and comparing each with its `ModuleState` takes microseconds, most of them
spent on scattered memory reads.

Idea. Collect the state of all modules in a few long lists, each filled in one sweep. If the lists equal those collected
when all module states held, all of them still hold. If not, the module states tell what differs, or that the difference
doesn't matter.

Runs in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from operator import is_, itemgetter
from typing import Any, TypeAlias

from torch import Tensor, nn

from fpipe.record.model.walk import NOT_SET
from fpipe.record.reads.containers import ExpectedContainer, ExpectedEntries
from fpipe.record.reads.expectation import Expectation
from fpipe.record.reads.model_state import ModuleState, gradient_flag
from fpipe.record.reads.namespaces import Namespace

Lists: TypeAlias = tuple[list[Any], ...]

_flatten, _parts = chain.from_iterable, itemgetter("_modules", "_parameters", "_buffers")


@dataclass(frozen=True, eq=False)
class QuickCheck:
    """A comparison with lists that were collected when all module states held.

    - `modules`: weak references.
    - `empty`, `absent`: for each module, the names of attributes that were empty, or did not exist.
    - `tables`: the expected values of the other attributes, for modules that have any, with the module's position.
    - `lists`: the lists; `None` if there were no modules, or one no longer existed.
    """

    modules: Sequence[Callable[[], nn.Module | None]]
    empty: Sequence[tuple[str, ...]]
    absent: Sequence[tuple[str, ...]]
    tables: Sequence[tuple[int, ExpectedEntries]]
    lists: Lists | None = None

    @classmethod
    def of(cls, states: Sequence[ModuleState]) -> QuickCheck:
        """Return a check of the modules with these states, all of which must hold now."""
        known = [
            (k, state.attributes) for k, state in enumerate(states) if state.attributes.keys or state.attributes.inner
        ]
        check = cls(
            modules=[state.ref for state in states],
            empty=[state.attributes.empty for state in states],
            absent=[state.attributes.absent for state in states],
            tables=[(k, replace(table, empty=(), kinds=(), absent=())) for k, table in known],
        )
        return replace(check, lists=check._collect())

    def passes(self) -> bool:
        """Return whether all modules still exist and look the same."""
        return self.lists is not None and self.lists == self._collect()

    def _collect(self) -> Lists | None:
        """Return the lists as they are now; `None` if a module no longer exists or its attributes have changed."""
        modules = [ref() for ref in self.modules]
        kinds = [*map(type, modules)]
        if not modules or type(None) in kinds:
            return None
        attributes = [*map(vars, modules)]
        if not all(table.holds(attributes[k]) for k, table in self.tables):
            return None
        inside, parameters, buffers = zip(*map(_parts, attributes), strict=True)
        empty = [one.get(key) for one, keys in zip(attributes, self.empty, strict=True) for key in keys]
        exists = [key in one for one, keys in zip(attributes, self.absent, strict=True) for key in keys]
        children = [*_flatten(inside)], [*map(id, _flatten(map(dict.values, inside)))]
        return kinds, [*map(type, empty)], [*map(bool, empty)], exists, *children, *_tensor_lists(parameters, buffers)


def _tensor_lists(parameters: Sequence[dict[str, Tensor | None]], buffers: Sequence[dict[str, Tensor | None]]) -> Lists:
    """Return the names, ids and gradient flags of parameters, and the names of buffers and which of them are `None`."""
    found = [*_flatten(map(dict.values, parameters))]
    flags = [gradient_flag(p) for p in found if p is not None]
    missing = [(name, one is None) for table in buffers for name, one in table.items()]
    return [*_flatten(parameters)], [*map(id, found)], flags, missing


@dataclass(frozen=True, eq=False)
class QuickNamespaces:
    """A comparison of many namespaces in one sweep; all of the values must be the expected objects.

    - `now`: the functions that return the namespaces. `keys`: of plain values, for each. `values`: these, in one list.
    - `inner`: the expectations of the other values, with the position of the namespace and the key.
    """

    now: Sequence[Callable[[], Mapping[str, Any] | None]]
    keys: Sequence[tuple[Any, ...]]
    values: Sequence[Any]
    inner: Sequence[tuple[int, Any, Expectation]]

    @classmethod
    def of(cls, namespaces: Sequence[Namespace]) -> QuickNamespaces:
        """Return a check of these namespaces."""
        tables = [one.expected for one in namespaces]
        found = [(k, key, child) for k, table in enumerate(tables) for key, child in table.inner]
        found += [
            (k, key, ExpectedContainer.of(kind, {}, 0, None, 0))
            for k, table in enumerate(tables)
            for key, kind in zip(table.empty, table.kinds, strict=True)
        ]
        values = [*_flatten(table.values for table in tables)]
        return cls([one.now for one in namespaces], [table.keys for table in tables], values, found)

    def passes(self) -> bool:
        """Return whether all namespaces still exist and hold the same."""
        tables = [now() for now in self.now]
        known = [table for table in tables if table is not None]
        if len(known) < len(tables):
            return False
        missing = repeat(NOT_SET)
        now = [value for table, keys in zip(known, self.keys, strict=True) for value in map(table.get, keys, missing)]
        return all(map(is_, now, self.values)) and all(child.holds(known[k].get(key)) for k, key, child in self.inner)
