# SPDX-License-Identifier: Apache-2.0
"""Check before each step that what a plan assumed at capture still holds.

A step uses the parameters and buffers that it is passed, and the batch with its numbers and flags. Everything else is a
snapshot: the model (its modules, their attributes and flags, which parameters are trained), and the globals, closures,
class attributes and helper objects that code reads, in forwards, losses, hooks and backwards alike. If any of it
changes, the next step raises an error.

Changes are not detected in values that code looks up by a computed name, in the state of iterators, generators and C
extensions, in the elements of large containers, in tensors that share memory with a constant, and in a model that no
longer exists. `fpipe.pipelines.recheck` finds those by capturing the model again.

Runs when a plan is made, to make a `Watch`, and in every step, to check it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn

from fpipe.errors import InputError
from fpipe.record.model.state import shared_attributes
from fpipe.record.model.walk import is_users
from fpipe.record.reads.accesses import Accesses, Reach, Reads
from fpipe.record.reads.expectations import Difference
from fpipe.record.reads.namespaces import ModelState, Namespace, NamespaceFinder, read_tables, torch_settings

MAX_SHOWN: Final = 5
"""The number of differences that one error lists."""
REBUILD: Final = "make a new pipeline with pipe.rebuilt(model)"


@dataclass(frozen=True, eq=False)
class Watch:
    """The expected state of a model, and of what its code reads elsewhere.

    - `modules`, `tables`: the attributes of the model's modules; and their parameters, buffers and submodules.
    - `parameters`: the number of distinct parameters. `outside`: what code reads outside of the model.
    - `reads`: what the captures read, and whether they were for training: enough to watch another module alike.
    - `repair`: what to do about a change, for errors.
    """

    modules: tuple[Namespace, ...] = ()
    tables: tuple[Namespace, ...] = ()
    parameters: int = 0
    outside: tuple[Namespace, ...] = ()
    reads: tuple[tuple[Reads, bool], ...] = ()
    repair: str = REBUILD

    @classmethod
    def union(cls, watches: Iterable[Watch]) -> Watch:
        """Return the union of several, each module once."""
        watches = [*watches]
        modules, tables = (
            tuple({one.key: one for one in namespaces}.values())
            for namespaces in (chain(*[one.modules for one in watches]), chain(*[one.tables for one in watches]))
        )
        parameters = max([0, *[one.parameters for one in watches]])
        outside, reads = chain(*[one.outside for one in watches]), chain(*[one.reads for one in watches])
        repair = next((one.repair for one in watches), REBUILD)
        return cls(modules, tables, parameters, tuple(outside), tuple(reads), repair)

    def has_same_model(self) -> bool:
        """Return whether the model is unchanged, whatever else has changed."""
        return _hold(self.modules) and (self._looks_the_same() or self._tables_hold())

    def require_unchanged(self) -> None:
        """Raise `InputError`, naming modules and attributes, if anything has changed."""
        if not self.has_same_model():
            inside = _differences((*self.modules, *self.tables))
            count = Difference("parameters", f"{len(self._parameters())} different ones", f"{self.parameters}")
            when = f"when the pipeline was built: it runs a copy of the model. Restore it, or {self.repair}."
            _raise_changed(inside or [count], when)
        if not _hold(self.outside):
            _raise_changed(
                _differences(self.outside),
                "when it was captured: recorded code does not read it again. Restore it, pass it with the batch if it "
                f"changes from step to step, or {self.repair}.",
            )

    @cached_property
    def _lists(self) -> tuple[list[Any], ...] | None:
        """The tables of all modules as they were at the first step, if nothing had changed by then."""
        modules = self._existing()
        return read_tables(modules) if modules and self._tables_hold() else None

    def _looks_the_same(self) -> bool:
        """Return whether all modules have the same tables, compared in one sweep, since most steps change nothing."""
        modules = self._existing()
        return self._lists is not None and len(modules) == len(self.tables) and self._lists == read_tables(modules)

    def _tables_hold(self) -> bool:
        """Return whether the tables of existing modules hold and, if all exist, they have as many parameters."""
        if not _hold(self.tables):
            return False
        return len(self._parameters()) == self.parameters or len(self._existing()) < len(self.tables)

    def _existing(self) -> list[nn.Module]:
        return [module for one in self.tables if (module := one.owner()) is not None]

    def _parameters(self) -> set[int]:
        """Return the ids of the distinct parameters that exist now."""
        return {id(p) for module in self._existing() for p in module._parameters.values() if p is not None}


def _hold(namespaces: Iterable[Namespace]) -> bool:
    return all(one.holds() for one in namespaces)


def _differences(namespaces: Iterable[Namespace]) -> list[Difference]:
    return list(dict.fromkeys(one for namespace in namespaces for one in namespace.differences()))


def _raise_changed(found: Sequence[Difference], when: str) -> None:
    first, *others = found[:MAX_SHOWN]
    more = "".join(f"; {one.where}: got {one.got}, expected {one.expected}" for one in others)
    more += f"; and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
    raise InputError(f"{first.where}: got {first.got}, expected {first.expected}{more}, as {when}")


@dataclass(frozen=True)
class Watcher:
    """A factory of watches for the model that a pipeline was built from, and its loss.

    `repair`: what to do about a change, for errors.
    """

    origin: ModelState
    loss: Any
    repair: str = REBUILD

    def shared_attributes(self) -> frozenset[str]:
        """Return the attributes of the model whose contents the loss reaches other than through the model."""
        model = self.origin.model
        return frozenset() if model is None else shared_attributes(model, self.loss)

    def watch(self, reads: Reads, training: bool) -> Watch:
        """Return the watch over what a capture with these `reads` assumed."""
        accesses = Accesses(Reach(self._roots(reads)))
        outside = NamespaceFinder(reads, accesses).find(self.loss)
        modules = self.origin.attributes(reads, accesses, training)
        tables = self.origin.tables(reads, training)
        elsewhere = (*outside, torch_settings())
        return Watch(modules, tables, self.origin.parameters, elsewhere, ((reads, training),), self.repair)

    def _roots(self, reads: Reads) -> Iterator[Any]:
        """Yield the model, the loss, and of each class of module the members that a capture read."""
        model = self.origin.model
        parameters = () if model is None else model.parameters()
        yield from (self.loss, model, *(hook for p in parameters for hook in (p._backward_hooks or {}).values()))
        for kind in {*reads.read, *(state.kind for state in self.origin.modules.values())}:
            if is_users(kind):
                yield kind
                for base in kind.__mro__:
                    read = {*reads.read.get(kind, ()), "forward"} & vars(base).keys() if is_users(base) else set()
                    yield from [vars(base)[name] for name in read]


@dataclass(frozen=True, eq=False)
class Twin:
    """Another module with the model's tree, watched as the model is: one that a script may change in its place.

    `known`: its watches, by those on the model for the same captures.
    """

    watcher: Watcher
    known: WeakKeyDictionary[Watch, Watch] = field(default_factory=WeakKeyDictionary)

    def watch(self, original: Watch) -> Watch:
        """Return the watch on this module for the captures of a watch on the model."""
        if original not in self.known:
            self.known[original] = self.watch_all([original])
        return self.known[original]

    def watch_all(self, originals: Iterable[Watch], training: bool = True) -> Watch:
        """Return one watch for several captures; without `training`, only over what counts in eval mode."""
        reads = [pair for one in originals for pair in one.reads]
        return Watch.union([self.watcher.watch(read, trains and training) for read, trains in reads])
