# SPDX-License-Identifier: Apache-2.0
"""Check before each step that what a plan assumed at capture still holds.

A step uses the parameters and buffers that it is passed, and the batch with its numbers and flags. With the front ends
"trace" and "modules" and `backward="autograd"`, modules within a single stage run as Python, and so does the loss; what
they read outside the model (globals, variables that they close over, class attributes, attributes of the loss) is
current, too.

Everything else is recorded when the pipeline is built: the model (its modules, their attributes and flags, which
parameters are trained) and, for code that doesn't run as Python, everything that it read outside the model. If anything
that a capture has read changes, the next step raises an error.

Changes are not detected in values that code looks up by a computed name, in the state of iterators, generators and C
extensions, in the elements of large containers, in tensors that share memory with a constant, and in a model that no
longer exists.

Runs when a plan is made, to make a `Watch`, and in every step, to check it.
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
from fpipe.watching.attribute_reads import Reads
from fpipe.watching.code_names import CodeNames, find_names
from fpipe.watching.containers import ExpectedEntries
from fpipe.watching.expectation import Difference, ExpectedValue
from fpipe.watching.model_state import ModelState, ModuleState
from fpipe.watching.namespaces import Namespace, find_namespaces, is_relevant
from fpipe.watching.quick_check import QuickCheck
from fpipe.watching.reachable_code import ReachableCode, is_users

MAX_SHOWN = 5
"""The number of differences that one error lists."""


@dataclass(frozen=True)
class Watch:
    """The expected states of the model's modules, its number of parameters, and what code reads outside of it."""

    modules: tuple[ModuleState, ...] = ()
    parameters: int = 0
    outside: tuple[Namespace, ...] = ()

    @classmethod
    def union(cls, watches: Iterable[Watch]) -> Watch:
        """Return the union of several, each module state once."""
        modules, outside, counts = dict[Any, ModuleState](), list[Namespace](), list[int]()
        for watch in watches:
            modules.update({state.key: state for state in watch.modules})
            outside += watch.outside
            counts.append(watch.parameters)
        return cls(tuple(modules.values()), max([0, *counts]), tuple(outside))

    def require_unchanged(self) -> None:
        """Raise `InputError`, naming modules and attributes, if anything has changed."""
        is_same = self._quick_check.passes() or self._holds()
        if is_same and all(namespace.holds() for namespace in self.outside):
            return
        inside = [one for state in self.modules for one in state.differences()]
        if not is_same and not inside:
            inside = [Difference("parameters", f"{len(self._parameters())} different ones", f"{self.parameters}")]
        if inside:
            _raise_changed(inside, "when the pipeline was built: it runs a copy of the model. Restore it")
        outside = list(dict.fromkeys(one for namespace in self.outside for one in namespace.differences()))
        if outside:
            _raise_changed(
                outside,
                "when it was captured: recorded code does not read it again. Restore it, pass it with the batch if it "
                "changes from step to step",
            )

    @cached_property
    def _quick_check(self) -> QuickCheck:
        """A check that the model looks as it did at the first step, if nothing had changed by then."""
        return QuickCheck.of(self.modules if self._holds() else ())

    def _holds(self) -> bool:
        """Return whether all modules that exist are unchanged and, if all exist, have as many parameters in total."""
        if not all(state.holds() for state in self.modules):
            return False
        return len(self._parameters()) == self.parameters or any(state.ref() is None for state in self.modules)

    def _parameters(self) -> set[int]:
        """Return the ids of the distinct parameters that exist now."""
        modules = [module for state in self.modules if (module := state.ref()) is not None]
        return {id(p) for module in modules for p in module._parameters.values() if p is not None}


def _raise_changed(found: Sequence[Difference], when: str) -> None:
    first, *others = found[:MAX_SHOWN]
    more = "".join(f"; {one.where}: got {one.got}, expected {one.expected}" for one in others)
    more += f"; and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
    raise InputError(
        f"{first.where}: got {first.got}, expected {first.expected}{more}, as {when}, or make a new pipeline with "
        "pipe.rebuilt(model)."
    )


@dataclass(frozen=True)
class Watcher:
    """A factory of watches for the model that a pipeline was built from, and its loss.

    - `recorded`: True if the stages are recorded as graphs, and no module runs as Python in a step.
    - `codes`: a cache of the names in code objects.
    """

    origin: ModelState
    loss: Any
    recorded: bool
    codes: dict[CodeType, CodeNames] = field(default_factory=dict)

    def shared_attributes(self) -> frozenset[str]:
        """Return the attributes of the model whose contents the loss reaches other than through the model."""
        model = self.origin.modules[""][0].ref()
        return frozenset() if model is None else shared_attributes(model, self.loss)

    def watch(self, reads: Reads, training: bool, replayed: Sequence[Call] | None) -> Watch:
        """Return the watch over what a capture with these `reads` assumed.

        `replayed`: the calls whose code doesn't run as Python in a step; `None` for all.
        """
        code = _CapturedCode(self, reads)
        modules = self.origin.select(reads, code.is_relevant, training)
        if self.recorded or replayed is None:
            outside = code.namespaces(None, True)
        else:
            outside = code.namespaces({call.kind for call in replayed}, any(call.path == "loss" for call in replayed))
        settings = _torch_settings(self.recorded)
        return Watch(modules, self.origin.parameters, (*outside, settings))


class _CapturedCode:
    """The code that ran during a capture, and what it reads."""

    def __init__(self, watcher: Watcher, reads: Reads) -> None:
        self.watcher, self.reads = watcher, reads

    @cached_property
    def reachable(self) -> ReachableCode:
        """The code and objects that any of the code reaches."""
        return ReachableCode([*self._roots(None), self.watcher.loss], self._names)

    def is_relevant(self, name: str, is_attribute: bool) -> bool:
        """Return whether any code reads an attribute, or a key, of that name."""
        return is_relevant(self.reachable, name, is_attribute)

    def namespaces(self, kinds: set[type] | None, loss: bool) -> tuple[Namespace, ...]:
        """Return what is read outside the model by modules of these `kinds` (all, if `None`), and by the `loss`."""
        losses = [self.watcher.loss] if loss and self.watcher.loss is not None else []
        roots = [*self._roots(kinds), *losses]
        return find_namespaces(losses, self.reads, ReachableCode(roots, self._names)) if roots else ()

    def _roots(self, kinds: set[type] | None) -> Iterator[Any]:
        """Yield the classes of modules that were read, and the attributes that were read from these classes."""
        for kind, names in self.reads.read.items():
            if (kinds is None or kind in kinds) and is_users(kind):
                yield kind
                for base in kind.__mro__:
                    yield from [vars(base)[name] for name in names & vars(base).keys()] if is_users(base) else ()

    def _names(self, code: CodeType) -> CodeNames:
        codes = self.watcher.codes
        if code not in codes:
            codes[code] = find_names(code)
        return codes[code]


def _torch_settings(recorded: bool) -> Namespace:
    """Return the namespace of torch's settings that must stay as they were at capture."""
    now = partial(captured_settings, recorded)
    values = {name: ExpectedValue(value) for name, value in now().items()}
    return Namespace(now, ExpectedEntries.of(values, None, "{}"), "torch: ")


def find_replayed_calls(calls: Sequence[Call], positions: Sequence[int]) -> list[Call]:
    """Return the calls that don't run as Python if the model is cut at `positions`, outer calls before inner ones."""
    replayed: list[Call] = []
    around: list[Call] = []
    for call in calls:
        while around and around[-1].stop <= call.start:
            around.pop()
        is_reachable = not around or around[-1] in replayed  # not inside a call that runs as Python
        if is_reachable and (not call.python or any(call.start < position < call.stop for position in positions)):
            replayed.append(call)
        around.append(call)
    return replayed
