# SPDX-License-Identifier: Apache-2.0
"""The model that a pipeline was built from, and its state at that time.

Problem. A pipeline runs a copy of the model. A user who freezes a parameter of the original, or changes a dropout rate,
expects the next step to follow.

Idea. When the pipeline is built, every module's attributes, flags and submodules are recorded. Before each step, those
that a capture has read are compared with the original.

Invariant: modules, and the tensors and objects in them, are held by weak reference. Those that no longer exist are not
compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import getattr_static
from operator import is_
from typing import Any

from torch import nn

from fpipe.watching.handle import Difference, Handle, Handles, Keep, Same, Table, selected
from fpipe.watching.reads import Reads

APART = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl")
NOTHING = Same(lambda: None, "none")
TORCHS = frozenset(dir(nn.Module)) - {"forward"}


@dataclass(frozen=True, eq=False)
class Row:
    """The relevant state of one module.

    - `ref`: the module. `where`: its name in errors. `kind`: its class. `attributes`: those that were read.
    - `parameters`: which require a gradient, by name; `buffers`: which are not `None`. Each is `None` if irrelevant.
    - `modules`: the submodules by name.
    """

    ref: Callable[[], nn.Module | None]
    where: str
    kind: type
    attributes: Table
    parameters: Mapping[str, tuple[bool, int] | None] | None
    buffers: Mapping[str, bool] | None
    modules: Mapping[str, Same]

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is unique among the rows of one model."""
        table = self.attributes
        return self.where, table.keys, table.empty, tuple([key for key, _ in table.inner]), self.parameters is None

    def holds(self) -> bool:
        """Return whether the module, if it still exists, is unchanged."""
        module = self.ref()
        if module is None:
            return True
        table = vars(module)
        inside, parameters, buffers = table["_modules"], table["_parameters"], table["_buffers"]
        return (
            type(module) is self.kind
            and len(inside) == len(self.modules)
            and (not inside or all(map(is_, inside.values(), [one.ref() for one in self.modules.values()])))
            and self.attributes.holds(table)
            and (self.parameters is None or self.parameters == (parameters and flags(parameters)))
            and (self.buffers is None or self.buffers == (buffers and present(buffers)))
        )

    def differences(self) -> Iterator[Difference]:
        """Yield what has changed."""
        module = self.ref()
        if module is None:
            return
        table = vars(module)
        if type(module) is not self.kind:
            yield Difference(self.where, type(module).__name__, self.kind.__name__)
        yield from self.attributes.differences(table, f"{self.where}, attribute ")
        if self.parameters is not None:
            found = flags(table["_parameters"])
            yield from self._named("parameter", found, self.parameters, _flag)
        if self.buffers is not None:
            yield from self._named("buffer", present(table["_buffers"]), self.buffers, _presence)
        for name in {**self.modules, **table["_modules"]}:
            old, new = self.modules.get(name, NOTHING), table["_modules"].get(name)
            if old.ref() is not new or (name in self.modules) is not (name in table["_modules"]):
                got = "none" if new is None else f"another {type(new).__name__}"
                yield Difference(f"{self.where}, submodule {name!r}", got, old.said)

    def _named(
        self, what: str, got: Mapping[str, Any], expected: Mapping[str, Any], said: Callable[[Any], str]
    ) -> Iterator[Difference]:
        for name in {**expected, **got}:
            if got.get(name) != expected.get(name):
                where = f"{self.where}, {what} {name!r}"
                yield Difference(where, said(got.get(name)), said(expected.get(name)))


def flags(parameters: Mapping[str, Any]) -> dict[str, tuple[bool, int] | None]:
    """Return whether each parameter requires a gradient, and the number of hooks on it, by name."""
    return {name: None if p is None else flag(p) for name, p in parameters.items()}


def flag(parameter: Any) -> tuple[bool, int]:
    """Return whether a parameter requires a gradient, and the number of hooks on its gradient."""
    return parameter.requires_grad, len(parameter._backward_hooks or ())


def _flag(flag: tuple[bool, int] | None) -> str:
    if flag is None:
        return "none"
    return f"requires_grad={flag[0]}" + (f" and {flag[1]} hooks on its gradient" if flag[1] else "")


def present(buffers: Mapping[str, Any]) -> dict[str, bool]:
    """Return which buffers are tensors, by name."""
    return {name: one is not None for name, one in buffers.items()}


def _presence(there: bool | None) -> str:
    return "none" if there is None else "a tensor" if there else "None"


@dataclass(frozen=True, eq=False)
class Origin:
    """The modules of a model, by name, with the attributes that each had; and the number of distinct parameters."""

    modules: Mapping[str, tuple[Row, Mapping[str, Handle | None]]]
    parameters: int

    @classmethod
    def of(cls, model: nn.Module) -> Origin:
        """Return the current state of the modules of `model`."""
        handles, found = Handles(), {}
        for path, module in model.named_modules():
            attributes = {n: None if n in APART else handles.of(one) for n, one in vars(module).items()}
            found[path] = _row(path, module), attributes
        return cls(found, len(list(model.parameters())))

    @property
    def places(self) -> dict[int, str]:
        """The ids of the modules that still exist, and what to call them."""
        found = ((row.ref(), row.where) for row, _ in self.modules.values())
        return {id(module): where for module, where in found if module is not None}

    def select(self, reads: Reads, keep: Keep, training: bool) -> tuple[Row, ...]:
        """Return the rows, restricted to what `reads` covers; what only training depends on is ignored elsewhere."""
        met: set[int] = set()

        def chosen(row: Row, known: Mapping[str, Handle | None]) -> Row:
            names = reads.of(row.kind, known) - ({"training"} if not training else set())
            elsewhere = TORCHS | row.modules.keys() | {*(row.parameters or ()), *(row.buffers or ())}
            absent = [n for n in names if n not in known and n not in elsewhere and not _is_cached(row.kind, n)]
            children = {name: child for name in names if (child := known.get(name)) is not None}
            return replace(
                row,
                attributes=Table.of(selected(children, keep, met), None, "{!r}", tuple(absent)),
                parameters=row.parameters if training else None,
                buffers=None if reads.is_written(row.kind, "_buffers") else row.buffers,
            )

        return tuple(chosen(row, known) for row, known in self.modules.values())


def _is_cached(kind: type, name: str) -> bool:
    """Return whether a name is a property that is computed once, when it is first read."""
    return isinstance(getattr_static(kind, name, None), cached_property)


def _row(path: str, module: nn.Module) -> Row:
    table = vars(module)
    inside = table["_modules"]
    return Row(
        ref=weakref.ref(module),
        where=f"module {path or '(root)'} ({type(module).__name__})",
        kind=type(module),
        attributes=Table.of({}, None, "{!r}"),
        parameters=flags(table["_parameters"]),
        buffers=present(table["_buffers"]),
        modules={n: NOTHING if m is None else Same(weakref.ref(m), type(m).__name__) for n, m in inside.items()},
    )
