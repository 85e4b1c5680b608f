# SPDX-License-Identifier: Apache-2.0
"""The assumptions of a plan, made when it was captured, that must still hold when it runs.

Live in every step: the parameters and buffers that are passed, and the batch with its numbers and flags. With the front
ends "trace" and "modules" and `backward="autograd"`, modules that lie wholly within one stage run as Python, and so
does the loss. Everything these read outside the model (globals, variables that they close over, class attributes,
attributes of the loss) is then live, too.

Everything else is a snapshot, taken when the pipeline was built: the model (its modules, their attributes and flags,
which parameters are trained) and, if code doesn't run as Python, everything that it read outside the model. A change of
anything that a capture has read is an error at the next step.

Not detected: values that code looks up by a computed name, state in iterators, generators and C extensions, the
elements of large containers, tensors that share memory with a constant, and a model that no longer exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import CodeType
from typing import Any

from fpipe.capture.originals import shared_attributes
from fpipe.errors import InputError
from fpipe.ir.captured import Call
from fpipe.tensors.settings import captured_settings
from fpipe.watching.handle import Difference, Plain, Table
from fpipe.watching.look import Look
from fpipe.watching.names import Names
from fpipe.watching.names import names as names_in
from fpipe.watching.origin import Origin, Row
from fpipe.watching.reached import Reached, is_ours
from fpipe.watching.reads import Reads
from fpipe.watching.surroundings import Outside, keep, surroundings

SHOWN = 5  # differences in one error


@dataclass(frozen=True)
class Watch:
    """Snapshots of the model's modules, of its number of parameters, and of what code reads outside it."""

    rows: tuple[Row, ...] = ()
    parameters: int = 0
    outside: tuple[Outside, ...] = ()

    @classmethod
    def all(cls, watches: Iterable[Watch]) -> Watch:
        """Return the union of several, each row once."""
        rows, outside, counts = dict[Any, Row](), list[Outside](), list[int]()
        for watch in watches:
            rows.update({row.key: row for row in watch.rows})
            outside += watch.outside
            counts.append(watch.parameters)
        return cls(tuple(rows.values()), max([0, *counts]), tuple(outside))

    def require_unchanged(self) -> None:
        """Raise `InputError`, naming modules and attributes, if anything has changed."""
        same = self._look.is_same() or self._same()
        if same and all(one.holds() for one in self.outside):
            return
        inside = [one for row in self.rows for one in row.differences()]
        if not same and not inside:
            inside = [Difference("parameters", f"{len(self._parameters())} different ones", f"{self.parameters}")]
        if inside:
            _refuse(inside, "when the pipeline was built, which holds a copy of the model. Put it back")
        outside = list(dict.fromkeys(one for row in self.outside for one in row.differences()))
        if outside:
            _refuse(
                outside,
                "when it was captured: code that was recorded does not look again. Put it back, pass it with the batch "
                "if it is to change from step to step",
            )

    @cached_property
    def _look(self) -> Look:
        """How the model looked at the first step, if nothing had changed by then."""
        return Look.of(self.rows if self._same() else ())

    def _same(self) -> bool:
        """Return whether no existing module has changed and, if all exist, the number of parameters is the same."""
        if not all(row.holds() for row in self.rows):
            return False
        return len(self._parameters()) == self.parameters or any(row.ref() is None for row in self.rows)

    def _parameters(self) -> set[int]:
        """Return the ids of the distinct parameters that exist now."""
        modules = [module for row in self.rows if (module := row.ref()) is not None]
        return {id(p) for module in modules for p in module._parameters.values() if p is not None}


def _refuse(found: Sequence[Difference], when: str) -> None:
    first, *others = found[:SHOWN]
    more = "".join(f"; {one.where}: got {one.got}, expected {one.expected}" for one in others)
    more += f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    raise InputError(
        f"{first.where}: got {first.got}, expected {first.expected}{more}, as {when}, or make a new pipeline with "
        "pipe.rebuilt(model)."
    )


@dataclass(frozen=True)
class Watching:
    """The inputs of a watch: the model that a pipeline was built from, its loss, and whether stages are `recorded`.

    - `codes`: a cache of the names in code objects.
    """

    origin: Origin
    loss: Any
    recorded: bool
    codes: dict[CodeType, Names] = field(default_factory=dict)

    def shared(self) -> frozenset[str]:
        """Return the attributes of the model whose contents the loss reaches by itself."""
        model = self.origin.modules[""][0].ref()
        return frozenset() if model is None else shared_attributes(model, self.loss)

    def watch(self, reads: Reads, training: bool, opened: Sequence[Call] | None) -> Watch:
        """Return what a capture with these `reads` assumed; code of `opened` calls (of all, if `None`) was recorded."""
        found = _Found(self, reads)
        rows = self.origin.select(reads, found.keep, training)
        if self.recorded or opened is None:
            return Watch(rows, self.origin.parameters, (*found.outside(None, True), _of_torch(recorded=True)))
        kinds = {call.kind for call in opened}
        outside = found.outside(kinds, any(call.path == "loss" for call in opened))
        return Watch(rows, self.origin.parameters, (*outside, _of_torch(recorded=False)))


class _Found:
    """The names and values that the code of a capture reaches."""

    def __init__(self, watching: Watching, reads: Reads) -> None:
        self.watching, self.reads = watching, reads

    @cached_property
    def every(self) -> Reached:
        """All that any of the code reaches."""
        return Reached([*self._roots(None), self.watching.loss], self._names)

    def keep(self, name: str, attribute: bool) -> bool:
        """Return whether any code reads an attribute, or a key, of that name."""
        return keep(self.every, name, attribute)

    def outside(self, kinds: set[type] | None, loss: bool) -> tuple[Outside, ...]:
        """Return what code reads outside the model: of modules of these kinds (all, if `None`), and of the `loss`."""
        losses = [self.watching.loss] if loss and self.watching.loss is not None else []
        roots = [*self._roots(kinds), *losses]
        return surroundings(losses, self.reads, Reached(roots, self._names)) if roots else ()

    def _roots(self, kinds: set[type] | None) -> Iterator[Any]:
        """Yield the classes of modules that were read, and the attributes that were read from these classes."""
        for kind, names in self.reads.read.items():
            if (kinds is None or kind in kinds) and is_ours(kind):
                yield kind
                for base in kind.__mro__:
                    yield from [vars(base)[name] for name in names & vars(base).keys()] if is_ours(base) else ()

    def _names(self, code: CodeType) -> Names:
        codes = self.watching.codes
        if code not in codes:
            codes[code] = names_in(code)
        return codes[code]


def _of_torch(recorded: bool) -> Outside:
    """Return torch's settings, as far as steps take them from the capture."""
    now = partial(captured_settings, recorded)
    return Outside(now, Table.of({name: Plain(value) for name, value in now().items()}, None, "{}"), "torch: ")


def opened(calls: Sequence[Call], positions: Sequence[int]) -> list[Call]:
    """Return the calls that don't run as Python, outer calls before inner ones."""
    found: list[Call] = []
    around: list[Call] = []
    for call in calls:
        while around and around[-1].stop <= call.start:
            around.pop()
        inside = not around or around[-1] in found
        if inside and (call.apart or any(call.start < position < call.stop for position in positions)):
            found.append(call)
        around.append(call)
    return found
