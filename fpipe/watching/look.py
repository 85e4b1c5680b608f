# SPDX-License-Identifier: Apache-2.0
"""A quick look at all modules of a model at once.

Problem. There are thousands of modules, and comparing each with its row takes microseconds, most of them spent on
scattered memory reads.

Idea. The state of all modules is collected into a few long lists, each filled in one sweep. As long as they equal those
of a time at which all rows held, all rows hold. If they don't, the rows tell what differs, or that it doesn't matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import Any, TypeAlias

from torch import Tensor, nn

from fpipe.watching.handle import Table
from fpipe.watching.origin import Row, flag

Lists: TypeAlias = tuple[list[Any], ...]

flat, parts = chain.from_iterable, itemgetter("_modules", "_parameters", "_buffers")


@dataclass(frozen=True, eq=False)
class Look:
    """How modules looked once; `was` is `None` if there were none or one no longer existed.

    - `modules`: weak references. `empty`, `absent`: which attributes of each were empty, or did not exist; `tables`:
      what the others held, by the module's position, for modules that have any.
    """

    modules: Sequence[Callable[[], nn.Module | None]]
    empty: Sequence[tuple[str, ...]]
    absent: Sequence[tuple[str, ...]]
    tables: Sequence[tuple[int, Table]]
    was: Lists | None = None

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Look:
        """Return how the modules of these rows look now; all rows must hold."""
        known = [(k, row.attributes) for k, row in enumerate(rows) if row.attributes.keys or row.attributes.inner]
        look = cls(
            modules=[row.ref for row in rows],
            empty=[row.attributes.empty for row in rows],
            absent=[row.attributes.absent for row in rows],
            tables=[(k, replace(table, empty=(), kinds=(), absent=())) for k, table in known],
        )
        return replace(look, was=look._seen())

    def is_same(self) -> bool:
        """Return whether all modules still exist and look the same."""
        return self.was is not None and self.was == self._seen()

    def _seen(self) -> Lists | None:
        """Return how the modules look now; `None` if one no longer exists or its attributes have changed."""
        modules = [ref() for ref in self.modules]
        kinds = [*map(type, modules)]
        if not modules or type(None) in kinds:
            return None
        attributes = [*map(vars, modules)]
        if not all(table.holds(attributes[k]) for k, table in self.tables):
            return None
        inside, parameters, buffers = zip(*map(parts, attributes), strict=True)
        empty = [one.get(key) for one, keys in zip(attributes, self.empty, strict=True) for key in keys]
        there = [key in one for one, keys in zip(attributes, self.absent, strict=True) for key in keys]
        children = [*flat(inside)], [*map(id, flat(map(dict.values, inside)))]
        return kinds, [*map(type, empty)], [*map(bool, empty)], there, *children, *_tensors(parameters, buffers)


def _tensors(parameters: Sequence[dict[str, Tensor | None]], buffers: Sequence[dict[str, Tensor | None]]) -> Lists:
    """Return the names of parameters and buffers, which of them exist, and the flags and hooks of gradients."""
    found = [*flat(map(dict.values, parameters))]
    flags = [flag(p) for p in found if p is not None]
    missing = [(name, one is None) for table in buffers for name, one in table.items()]
    return [*flat(parameters)], [*map(id, found)], flags, missing
