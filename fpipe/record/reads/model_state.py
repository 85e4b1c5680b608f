# SPDX-License-Identifier: Apache-2.0
"""The state of the model that a pipeline was built from, recorded to detect later changes.

Problem. A pipeline runs a copy of the model. A user who freezes a parameter of the original, or changes a dropout rate,
expects the next step to reflect that.

Idea. When the pipeline is built, record every module's attributes, flags and submodules. Before each step, compare
those that the capture read with the original's.

Invariant: modules, and the tensors and objects in them, are held by weak reference. Those that no longer exist are not
compared.

Runs when a pipeline is built or a plan is made, to record state, and in every step, to compare it.
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

from fpipe.record.capture.places import module_place
from fpipe.record.reads.accesses import Accesses
from fpipe.record.reads.attribute_reads import Reads
from fpipe.record.reads.containers import Expectations, ExpectedEntries, select_relevant
from fpipe.record.reads.expectation import Difference, Expectation, ExpectedObject

NOT_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl")
NO_MODULE = ExpectedObject(lambda: None, "none")
MODULE_NAMES = frozenset(dir(nn.Module)) - {"forward"}


@dataclass(frozen=True, eq=False)
class ModuleState:
    """The relevant state of one module.

    - `ref`: a weak reference to the module. `where`: its name in errors. `kind`: its class.
    - `attributes`: the attributes that the capture read.
    - `parameters`: by name, whether it requires a gradient and its number of hooks; `None` if irrelevant.
    - `buffers`: by name, whether it is a tensor rather than `None`; `None` if irrelevant.
    - `modules`: the submodules by name.
    """

    ref: Callable[[], nn.Module | None]
    where: str
    kind: type
    attributes: ExpectedEntries
    parameters: Mapping[str, tuple[bool, int] | None] | None
    buffers: Mapping[str, bool] | None
    modules: Mapping[str, ExpectedObject]

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is unique among the module states of one model."""
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
            and (self.parameters is None or self.parameters == (parameters and gradient_flags(parameters)))
            and (self.buffers is None or self.buffers == (buffers and which_exist(buffers)))
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
            found = gradient_flags(table["_parameters"])
            yield from self._differences_by_name("parameter", found, self.parameters, _flag_text)
        if self.buffers is not None:
            yield from self._differences_by_name("buffer", which_exist(table["_buffers"]), self.buffers, _presence_text)
        for name in {**self.modules, **table["_modules"]}:
            old, new = self.modules.get(name, NO_MODULE), table["_modules"].get(name)
            if old.ref() is not new or (name in self.modules) is not (name in table["_modules"]):
                got = "none" if new is None else f"another {type(new).__name__}"
                yield Difference(f"{self.where}, submodule {name!r}", got, old.text)

    def _differences_by_name(
        self, what: str, got: Mapping[str, Any], expected: Mapping[str, Any], said: Callable[[Any], str]
    ) -> Iterator[Difference]:
        for name in {**expected, **got}:
            if got.get(name) != expected.get(name):
                where = f"{self.where}, {what} {name!r}"
                yield Difference(where, said(got.get(name)), said(expected.get(name)))


def gradient_flags(parameters: Mapping[str, Any]) -> dict[str, tuple[bool, int] | None]:
    """Return the `gradient_flag` of each parameter, by name; `None` for one that is `None`."""
    return {name: None if p is None else gradient_flag(p) for name, p in parameters.items()}


def gradient_flag(parameter: Any) -> tuple[bool, int]:
    """Return whether a parameter requires a gradient, and the number of hooks on its gradient."""
    return parameter.requires_grad, len(parameter._backward_hooks or ())


def _flag_text(flag: tuple[bool, int] | None) -> str:
    if flag is None:
        return "none"
    return f"requires_grad={flag[0]}" + (f" and {flag[1]} hooks on its gradient" if flag[1] else "")


def which_exist(buffers: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether each buffer is a tensor rather than `None`, by name."""
    return {name: one is not None for name, one in buffers.items()}


def _presence_text(there: bool | None) -> str:
    return "none" if there is None else "a tensor" if there else "None"


@dataclass(frozen=True, eq=False)
class ModelState:
    """The states of a model's modules, by name, each with all attributes; and the number of distinct parameters."""

    modules: Mapping[str, tuple[ModuleState, Mapping[str, Expectation | None]]]
    parameters: int

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Return the current state of the modules of `model`."""
        expectations, found = Expectations(), {}
        for path, module in model.named_modules():
            table = vars(module)
            attributes = {n: None if n in NOT_ATTRIBUTES else expectations.expect(one) for n, one in table.items()}
            found[path] = _module_state(path, module), attributes
        return cls(found, len(list(model.parameters())))

    @property
    def model(self) -> nn.Module | None:
        """The model, if it still exists."""
        return self.modules[""][0].ref()

    @property
    def places(self) -> dict[int, str]:
        """The names, for errors, of the modules that still exist, by id."""
        found = ((state.ref(), state.where) for state, _ in self.modules.values())
        return {id(module): where for module, where in found if module is not None}

    def select(self, reads: Reads, accesses: Accesses, training: bool) -> tuple[ModuleState, ...]:
        """Return the states, reduced to what a capture or reached code reads.

        In evaluation, without training and gradient flags.
        """
        seen: set[int] = set()

        def select_read(path: str, state: ModuleState, known: Mapping[str, Expectation | None]) -> ModuleState:
            module = state.ref()
            names = {*reads.of(path, state.kind, known), *(() if module is None else accesses.of_module(module))}
            names -= {"training"} if not training else set()
            elsewhere = MODULE_NAMES | state.modules.keys() | {*(state.parameters or ()), *(state.buffers or ())}
            absent = [n for n in names if n not in known and n not in elsewhere and not _is_cached(state.kind, n)]
            children = {name: child for name in names if (child := known.get(name)) is not None}
            relevant = select_relevant(children, accesses, seen)
            return replace(
                state,
                attributes=ExpectedEntries.of(relevant, None, "{!r}", tuple(absent)),
                parameters=state.parameters if training else None,
                buffers=None if "_buffers" in reads.written.get(path, ()) else state.buffers,
            )

        return tuple(select_read(path, *one) for path, one in self.modules.items())


def _is_cached(kind: type, name: str) -> bool:
    """Return whether an attribute is a `cached_property`, which exists only once it has been read."""
    return isinstance(getattr_static(kind, name, None), cached_property)


def _module_state(path: str, module: nn.Module) -> ModuleState:
    table = vars(module)
    inside = table["_modules"]
    return ModuleState(
        ref=weakref.ref(module),
        where=module_place(path, module),
        kind=type(module),
        attributes=ExpectedEntries.of({}, None, "{!r}"),
        parameters=gradient_flags(table["_parameters"]),
        buffers=which_exist(table["_buffers"]),
        modules={
            n: NO_MODULE if m is None else ExpectedObject(weakref.ref(m), type(m).__name__) for n, m in inside.items()
        },
    )
