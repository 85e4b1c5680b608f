# SPDX-License-Identifier: Apache-2.0
"""The calls of modules in a captured model, and how users refer to them: by name, class, pattern, or index.

The front end supplies the calls; if it does not, they are derived from the paths of units. A position is the index of a
unit before which a stage may begin. The calls that begin or end there (`Mark`) identify it too, so it can be found in
another capture of the same model: in eval mode, say, where dropout runs nothing.

A pattern matches like a file name, one dotted component at a time: the star in "blocks.*" matches one component, so the
pattern matches "blocks.3" and not "blocks.3.norm".

Runs when a plan is made, and when a pipeline is printed.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

from torch import nn

from fpipe.errors import CutError
from fpipe.record.captured import Call, Captured, Unit
from fpipe.record.front_ends.parts import Chain, ModuleGraph

Selector: TypeAlias = str | type
WILDCARDS = "*?["
FUSED_MODULES = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules that torch may run as a single operator where gradients are disabled."""


class Mark(NamedTuple):
    """The beginning of the `ordinal`-th call of the module `path`, or its end."""

    path: str
    ordinal: int
    end: bool

    def __str__(self) -> str:
        return f"{'the end of ' if self.end else ''}{call_name(self.path, self.ordinal)!r}"


def call_name(path: str, ordinal: int) -> str:
    """Return the name of a call: `blocks.0`, and `blocks.0@1` for the second one."""
    return f"{path}@{ordinal}" if ordinal else path


def is_pattern(selector: object) -> bool:
    """Return whether a selector may match several modules: a class, or a string with a wildcard."""
    return isinstance(selector, type) or (isinstance(selector, str) and any(c in selector for c in WILDCARDS))


def matches(path: str, pattern: str) -> bool:
    """Return whether a dotted name matches a pattern.

    >>> matches("blocks.3", "blocks.*"), matches("blocks.3.norm", "blocks.*"), matches("blocks.12", "blocks.1?")
    (True, False, True)
    """
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def selects(selector: Selector, name: str, kind: type) -> bool:
    """Return whether a module of this name and class is selected: by its class, its name, or a pattern.

    >>> selects("blocks.*", "blocks.3", nn.Linear), selects(nn.Conv2d, "blocks.3", nn.Linear)
    (True, False)
    """
    if isinstance(selector, type):
        return issubclass(kind, selector)
    return matches(name, selector) if is_pattern(selector) else name == selector.partition("@")[0]


@dataclass(frozen=True)
class Calls:
    """The calls of modules that run at least one operation, each before those inside it.

    - `idle`: the calls that run none; a stage may begin at one too, if the user names it.
    - `sealed`: the calls inside which no stage may begin, including calls of functions that are not modules.
    - `known`: the class of every module, by all its names; `first`: the first of its names.
    - `parts`: for a sequence, the name of each part's call; a part that appears twice is called twice.
    """

    listed: tuple[Call, ...]
    idle: tuple[Call, ...]
    sealed: tuple[Call, ...]
    units: tuple[Unit, ...]
    known: Mapping[str, type]
    first: Mapping[str, str]
    parts: Mapping[str, str]

    @classmethod
    def of(cls, captured: Captured, model: nn.Module) -> Calls:
        """Return the calls that the front end supplies, or else those derived from the paths of units."""
        units = tuple(captured.units)
        modules = dict(model.named_modules(remove_duplicate=False))
        known = {name: type(module) for name, module in modules.items()}
        names = {id(module): name for name, module in reversed(modules.items())}
        first = {name: names[id(module)] for name, module in modules.items()}
        listed = tuple(captured.calls) or tuple(_by_paths(units, known))
        sealed = tuple(call for call in listed if call.sealed)
        idle = tuple(call for call in listed if call.start == call.stop)
        return cls(tuple(_of_modules(listed)), idle, sealed, units, known, first, _sequence_parts(model, first))

    @property
    def fused(self) -> list[Call]:
        """The calls that torch may run as a single operator where gradients are disabled."""
        return [call for call in self.listed if issubclass(call.kind, FUSED_MODULES)]

    def outside_fused(self, places: Iterable[int]) -> list[int]:
        """Return the places that are not inside a call that torch may run as a single operator."""
        fused = self.fused
        return [k for k in places if not any(call.start < k < call.stop for call in fused)]

    def advise_on_fused(self, marks: Iterable[Mark]) -> str:
        """Return what helps if a mark is inside a call that torch runs as a single operator here; else nothing."""
        inside = [call for call in self.fused if any(mark.path.startswith(f"{call.path}.") for mark in marks)]
        return "".join(
            f" Without gradients, torch runs {call.path!r} ({call.kind.__name__}) as one operator: cut outside it, or "
            "call torch.backends.mha.set_fastpath_enabled(False) before you build the pipeline."
            for call in inside[:1]
        )

    def calls_of(self, name: str) -> tuple[Call, ...]:
        """Return the calls of the module `name`; a container that is not called itself spans its first to last."""
        found = tuple(call for call in self.listed if call.path == name)
        found = found or tuple(call for call in self.idle if call.path == name)
        if found:
            return found
        path = name.split("@", maxsplit=1)[0]
        inside = [k for k, unit in enumerate(self.units) if f"{unit.path.split('@')[0]}.".startswith(f"{path}.")]
        return (Call(name, self.known.get(name, object), inside[0], inside[-1] + 1),) if inside and path == name else ()

    def call(self, name: str) -> Call:
        """Return a module's first call, or with `name@1` the second; raise `CutError` if there is none."""
        path, _, ordinal = name.partition("@")
        self.require_known("cuts", path)
        found = self.calls_of(path)
        if not found and self.parts.get(name, name) != name:
            return self.call(self.parts[name])
        if found and (not ordinal or (ordinal.isdecimal() and int(ordinal) < len(found))):
            return found[int(ordinal or 0)]
        if found:
            raise CutError(
                f"cuts: got {name!r}, expected a call that happens. {path!r} is called {len(found)} times; "
                f"{call_name(path, 1)!r} is the second call."
            )
        if self.first.get(path, path) != path:
            first = self.first[path]
            raise CutError(
                f"cuts: got {name!r}, expected {first!r}, the module's first name. Write {first!r}, or "
                f"{call_name(first, 1)!r} for the second call."
            )
        raise CutError(
            f"cuts: got {name!r}, a module that runs no operations itself, expected one that does. (A no_grad or "
            "autocast region is one operation of the module around it.) Name the module that runs next."
        )

    def require_known(self, where: str, name: str) -> None:
        """Raise `CutError`, with suggestions, unless there is a module or a unit of this name."""
        known = dict.fromkeys([*self.known, *[unit.path.split("@")[0] for unit in self.units]])
        known.pop("", None)
        if name not in known:
            close = difflib.get_close_matches(str(name), list(known), n=3) or list(known)[:8]
            raise CutError(f"{where}: got {name!r}, expected the name of a module. Did you mean one of {close}?")

    def at(self, index: int) -> Call:
        """Return call number `index`, from zero, that the model itself makes; in a sequence, the call of that part."""
        root = [call for call in self.listed if not call.path]
        direct = outermost(call for call in self.listed if call.path and (not root or call.stop <= root[0].stop))
        names = list(self.parts) or [call.path for call in direct]
        if not 0 <= index < len(names):
            raise CutError(
                f"cuts: got {index}, expected an index below {len(names)}, counted from zero: the model itself calls "
                f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}. Choose one of them."
            )
        return self.call(names[index]) if self.parts else direct[index]

    def select(self, where: str, selector: Selector) -> tuple[Call, ...]:
        """Return the calls of a module, of the modules of a class, or of those whose name matches a pattern.

        Raise `CutError`, blaming the argument `where`, if there are none.
        """
        if isinstance(selector, type):
            found = tuple(call for call in self.listed if issubclass(call.kind, selector))
        elif is_pattern(selector):
            found = tuple(call for call in self.listed if call.path and matches(call.path, selector))
        else:
            path, _, ordinal = selector.partition("@")
            self.require_known(where, path)
            found = (self.call(selector),) if ordinal else self.calls_of(path)
        if not found:
            kinds = ", ".join(dict.fromkeys(call.kind.__name__ for call in self.listed if call.path))
            raise CutError(
                f"{where}: got {describe_selector(selector)}, which no call of a module matches, expected at least "
                f"one. The model calls modules of these classes: {kinds or 'none'}. A wildcard matches one name "
                "between dots."
            )
        return found

    def marks(self, position: int) -> tuple[Mark, ...]:
        """Return all marks at a position: the calls that begin there and those that end there."""
        found: list[Mark] = []
        for call, ordinal in self.ordinals():
            found += [Mark(call.path, ordinal, False)] * (call.start == position)
            found += [Mark(call.path, ordinal, True)] * (call.stop == position)
        return tuple(found)

    def position_of(self, marks: Sequence[Mark]) -> int | None:
        """Return the position of the first of these marks that exists; `None` if none does."""
        places = {(call.path, ordinal): call for call, ordinal in self.ordinals()}
        for path, ordinal, end in marks:
            if (path, ordinal) in places:
                call = places[path, ordinal]
                return call.stop if end else call.start
        return None

    def ordinals(self) -> Iterator[tuple[Call, int]]:
        """Yield every call, and its ordinal among the calls of the same module."""
        count: Counter[str] = Counter()
        for call in self.listed:
            yield call, count[call.path]
            count[call.path] += 1


def describe_selector(selector: Selector) -> str:
    """Return a selector as the user wrote it."""
    return f"the class {selector.__name__}" if isinstance(selector, type) else repr(selector)


def outermost(calls: Iterable[Call]) -> tuple[Call, ...]:
    """Return those of `calls` that are not inside another."""
    found: list[Call] = []
    for call in calls:
        if not found or call.start >= found[-1].stop:
            found.append(call)
    return tuple(found)


def _sequence_parts(model: nn.Module, first: Mapping[str, str]) -> Mapping[str, str]:
    count: Counter[str] = Counter()
    found: dict[str, str] = {}
    for name in model._modules if isinstance(model, Chain | ModuleGraph | nn.Sequential) else ():
        found[name] = call_name(first[name], count[first[name]])
        count[first[name]] += 1
    return found


def _of_modules(calls: Iterable[Call]) -> Iterator[Call]:
    """Yield calls that run something; skip those inside a call of the same path, such as checkpointed functions."""
    around: dict[str, Call] = {}
    for call in calls:
        if call.start < call.stop and (call.path not in around or call.start >= around[call.path].stop):
            around[call.path] = call
            yield call


def _by_paths(units: Sequence[Unit], known: Mapping[str, type]) -> list[Call]:
    """Derive calls from the paths of units: one for each run of units under a name; containers are not called.

    An ordinal numbers the call of the innermost module only, not those around it.
    """
    found: list[Call] = []
    running: dict[str, tuple[int, str | None]] = {}
    for position, unit in enumerate(units):
        path, _, ordinal = unit.path.partition("@")
        names = path.split(".")
        stack = {".".join(names[:k]): None for k in range(1, len(names))} | {path: ordinal}
        was, running = running, {}
        for name, number in stack.items():
            kind = known.get(name, object)
            if not name or issubclass(kind, nn.ModuleList | nn.ModuleDict):
                continue
            index, before = was.get(name, (len(found), number))
            if number is not None and before is not None and number != before:
                index = len(found)
            if index == len(found):
                found.append(Call(name, kind, position, position))
            found[index] = found[index]._replace(stop=position + 1)
            running[name] = index, before if number is None else number
    return found
