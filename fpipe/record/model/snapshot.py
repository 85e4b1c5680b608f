# SPDX-License-Identifier: Apache-2.0
"""A snapshot of the Python state around a model, so that a run on fake tensors leaves no trace.

Problem. A forward changes more than module attributes. On its first call it may install hooks and buffers, and fill
dicts and lists in modules, helper objects, closures and globals; in a capture, it fills them with fake tensors.

Idea. Walk everything that the model's code reaches: the tables of modules, the containers and objects in them, the
cells and defaults of functions (hooks and losses included), and the globals that those functions use. Record the
contents of each container, one level deep, so that they can be compared and restored.

Invariant: a container belongs to the model's copy if the copy reaches it without going through a function and the
original does not reach it. All others are `outside`: they belong to the user.

Runs when a plan is made; `restore_containers` and `restore_attributes` run in every step, `restore_model` in `verify`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import is_not
from types import CellType
from typing import Any, NamedTuple

from torch import Tensor, nn

from fpipe.record.model.walk import CACHED, NOT_SET, AssignedGlobals, ClassAttributes, Walk, contents
from fpipe.tensors.torch_private import FakeTensor


class ContainerState(NamedTuple):
    """A container, its recorded contents, and whether it is outside the model's copy."""

    container: Any
    contents: tuple[Any, ...]
    outside: bool

    @property
    def has_changed(self) -> bool:
        """True if it no longer holds the recorded objects."""
        now = contents(self.container)
        return len(now) != len(self.contents) or any(map(is_not, now, self.contents))

    def restore(self) -> None:
        """Restore the recorded contents."""
        if self.has_changed:
            fill(self.container, self.contents)


@dataclass(frozen=True)
class Snapshot:
    """The containers that a model and its loss reach, and their contents, by the container's identity."""

    containers: Mapping[object, ContainerState]

    @classmethod
    def of(cls, copied: nn.Module, shared: Collection[object], *others: object) -> Snapshot:
        """Record the containers reached from a model's copy, from other roots, and through functions.

        `shared` are the keys of the containers that the original model reaches.
        """
        walk = Walk()
        walk.follow([copied])
        mine = walk.containers.keys() - shared
        walk.enter()
        walk.follow(others)
        return cls({key: ContainerState(one, contents(one), key not in mine) for key, one in walk.containers.items()})

    def restore(self) -> None:
        """Restore the recorded contents of all containers."""
        for one in self.containers.values():
            one.restore()


@contextmanager
def restore_containers(
    written: Sequence[ContainerState], tensors: Sequence[Tensor], inside: AbstractContextManager[None]
) -> Iterator[None]:
    """Enter `inside`, and restore these containers on exit.

    Those of the model's copy get their contents of the capture. Those `outside` get their contents on entry, but only
    if some of `tensors` are fake.
    """
    fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
    before = [one._replace(contents=contents(one.container)) if one.outside else one for one in written]
    try:
        with inside:
            yield
    finally:
        for one in before:
            if fake or not one.outside:
                one.restore()


@contextmanager
def restore_attributes(touched: Sequence[tuple[nn.Module, str]]) -> Iterator[None]:
    """Restore these module attributes on exit, so that every call finds the same and no tensor stays alive."""
    missing = object()
    before = [(vars(module), name, vars(module).get(name, missing)) for module, name in touched]
    try:
        yield
    finally:
        for table, name, old in before:
            if old is missing:
                table.pop(name, None)
            else:
                table[name] = old


@contextmanager
def restore_model(model: nn.Module) -> Iterator[None]:
    """On exit, restore all containers that a model reaches, including its modules' tables and attributes."""
    walk = Walk()
    walk.follow([model])
    before = [ContainerState(one, contents(one), True) for one in walk.containers.values()]
    try:
        yield
    finally:
        for one in before:
            one.restore()


def fill(container: Any, parts: tuple[Any, ...]) -> None:
    """Replace the contents of a container with `parts`, as `contents` returns them; clear a cache."""
    if isinstance(container, AssignedGlobals):
        _assign(container.table, zip(container.names, parts, strict=True))
    elif isinstance(container, ClassAttributes):
        for name, value in zip(container.names, parts, strict=True):
            delattr(container.kind, name) if value is NOT_SET else setattr(container.kind, name, value)
    elif isinstance(container, dict):
        kept = dict(zip(parts[::2], parts[1::2], strict=True))
        _assign(container, [*kept.items(), *((key, NOT_SET) for key in dict.keys(container) if key not in kept)])
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), parts)
    elif isinstance(container, CACHED):
        container.cache_clear()
    elif isinstance(container, CellType):
        _refill(container, parts)
    else:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(parts)


def _assign(table: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> None:
    kind = OrderedDict if isinstance(table, OrderedDict) else dict
    for key, value in list(items):
        if value is not NOT_SET:
            kind.__setitem__(table, key, value)
        elif dict.__contains__(table, key):
            kind.__delitem__(table, key)


def _refill(cell: CellType, parts: tuple[Any, ...]) -> None:
    if parts:
        (cell.cell_contents,) = parts
    else:
        del cell.cell_contents
