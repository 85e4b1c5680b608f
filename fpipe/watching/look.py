# SPDX-License-Identifier: Apache-2.0
"""All modules of a model at one glance.

Problem. There are thousands of modules, and to compare each with its row takes microseconds, most of them to fetch what
lies scattered in memory.

Idea. What modules look like is a few long lists, filled in one sweep each. While they equal those of a moment at which
all rows held, all rows hold. If they do not, the rows say what differs, or that it does not count.
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
    """What modules looked like once; `was` is `None` if there are none, or one was gone.

    - `modules`: weakly. `empty`, `absent`: which attributes of each were empty, or not there; `tables`: by position,
      what the others held, where there are any.
    """

    modules: Sequence[Callable[[], nn.Module | None]]
    empty: Sequence[tuple[str, ...]]
    absent: Sequence[tuple[str, ...]]
    tables: Sequence[tuple[int, Table]]
    was: Lists | None = None

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Look:
        """Return what the modules of these rows look like now; all rows must hold."""
        known = [(k, row.attributes) for k, row in enumerate(rows) if row.attributes.keys or row.attributes.inner]
        look = cls(
            modules=[row.ref for row in rows],
            empty=[row.attributes.empty for row in rows],
            absent=[row.attributes.absent for row in rows],
            tables=[(k, replace(table, empty=(), kinds=(), absent=())) for k, table in known],
        )
        return replace(look, was=look._seen())

    def is_same(self) -> bool:
        """Whether all of them are still there, and look as they did."""
        return self.was is not None and self.was == self._seen()

    def _seen(self) -> Lists | None:
        """What they look like now; `None` if one is gone, or its attributes hold something else."""
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
    """The names of parameters and buffers, which are there, and what is to become of gradients."""
    found = [*flat(map(dict.values, parameters))]
    flags = [flag(p) for p in found if p is not None]
    missing = [(name, one is None) for table in buffers for name, one in table.items()]
    return [*flat(parameters)], [*map(id, found)], flags, missing
