# SPDX-License-Identifier: Apache-2.0
"""The history of a run: its units, facts about each, and how to compute their values on real tensors.

Problem. A model that runs on fake tensors reads a value, and fake tensors have none.

Idea. The history contains every call that led to the value. If these read constants alone, run them on real tensors at
once; if they also read the batch, run them on each batch at the start of its step. A value that depends on parameters,
buffers or random numbers cannot be known before the step runs.

Invariant: the same calls run as in the model, in the same order and modes.

Runs when a plan is made; the questions about the batch that it returns are answered at the start of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fpipe.errors import CaptureError
from fpipe.record.capture.advice import advise_on_values
from fpipe.record.captured import BatchLeaf, Constant, Source, Unit, Value, compose, single
from fpipe.record.modes import Modes, apply_modes
from fpipe.record.questions import GUESSES, Answer, Question
from fpipe.record.trace.tape import Invocation
from fpipe.record.trace.values import Values
from fpipe.tensors.torch_private import without_modes


class Facts(NamedTuple):
    """Facts about a unit.

    - `invocation`, `modes`: its function and arguments, and the modes it ran under.
    - `ticks`: the range of torch calls that it consists of.
    - `written`: the memory that it modifies in place. `casts`: the values read that it casts to another dtype.
    - `draw`: the tick at which it last draws random numbers; `None` if it does not.
    - `communicates`: whether it exchanges something with other processes.
    """

    invocation: Invocation
    modes: Modes
    ticks: tuple[int, int]
    written: frozenset[int]
    casts: frozenset[Value]
    draw: int | None
    communicates: bool


class Constants(NamedTuple):
    """The values of a run that depend on constants alone, and the units that make or change them, in order."""

    values: set[Value]
    units: list[Unit]


class History:
    """The `units` of a run so far, in order, and the `facts` about each; `values` are those that they read and make."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.units: list[Unit] = []
        self.facts: dict[Unit, Facts] = {}

    def add(self, unit: Unit, facts: Facts) -> None:
        """Append a unit and its facts."""
        self.units.append(unit)
        self.facts[unit] = facts

    def made_since(self, start: int) -> set[Value]:
        """Return the values that units make, from position `start` on."""
        return {value for unit in self.units[start:] for value in unit.makes}

    def existing_at(self, position: int) -> set[Value]:
        """Return the values of the sources and those made before a position."""
        return {*self.values.sources, *(value for unit in self.units[:position] for value in unit.makes)}

    @property
    def written(self) -> frozenset[int]:
        """All memory that units modify in place."""
        return frozenset().union(*(facts.written for facts in self.facts.values()))

    def provenance(self, values: Iterable[Value]) -> Provenance:
        """Return the units and sources that `values` were computed from."""
        storage, sources = self.values.storage, self.values.sources
        needed, used = set(values), list[Unit]()
        memories = {storage[value] for value in needed}
        for unit in reversed(self.units):
            if needed.isdisjoint(unit.makes) and memories.isdisjoint(self.facts[unit].written):
                continue
            used.append(unit)
            needed.update(unit.reads)
            memories.update(storage[value] for value in unit.reads)
        found = {value: sources[value] for value in sorted(needed) if value in sources}
        return Provenance(self, tuple(reversed(used)), found)

    def constants(self) -> Constants:
        """Return the values and units that depend on neither parameters, buffers, the batch nor random numbers."""
        storage = self.values.storage
        constant = {value for value, source in self.values.sources.items() if isinstance(source, Constant)}
        units: list[Unit] = []
        for unit, facts in self.facts.items():
            if facts.draw is None and constant.issuperset(unit.reads):
                constant.update(unit.makes)
                units.append(unit)
            elif facts.written:  # this memory is no longer constant
                constant -= {value for value in constant if storage[value] in facts.written}
        return Constants(constant, units)

    def compute_constant(self, value: Value) -> Tensor:
        """Return the real tensor of a constant value."""
        compute = self.provenance((value,)).function((value,))
        with for_real():
            return compute(())[0]


@dataclass(frozen=True)
class Provenance:
    """The units that computed some values, in order, and the sources that they read."""

    history: History
    units: tuple[Unit, ...]
    sources: Mapping[Value, Source]

    @property
    def leaves(self) -> dict[Value, int]:
        """The batch leaves among the sources: their numbers, by value."""
        return {value: source.leaf for value, source in self.sources.items() if isinstance(source, BatchLeaf)}

    @property
    def obstacle(self) -> str:
        """The name of a dependency that is unknown before the step runs; empty if there is none."""
        for source in self.sources.values():
            if not isinstance(source, BatchLeaf | Constant):
                return f"the {type(source).__name__.lower()} {source.name!r}"
        return "random numbers" if self.is_random else ""

    @property
    def is_random(self) -> bool:
        """True if one of the units draws random numbers."""
        return any(self.history.facts[unit].draw is not None for unit in self.units)

    def function(self, outputs: tuple[Value, ...]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        """Return a function that computes `outputs` from the batch's leaves without modifying them."""
        facts = self.history.facts
        constants = {v: source.tensor for v, source in self.sources.items() if isinstance(source, Constant)}
        inputs = (*self.leaves, *constants)
        items = [(facts[unit].modes, single(unit, None)) for unit in self.units]
        run = compose(apply_modes(items, outputs), inputs, outputs)
        changed = frozenset().union(*(facts[unit].written for unit in self.units))
        copied = [self.history.values.storage[value] in changed for value in inputs]

        def compute(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
            given = [t.clone() if copy else t for t, copy in zip((*leaves, *constants.values()), copied, strict=True)]
            return run(0, *given)

        return compute

    def question(self, invocation: Invocation, where: str) -> Question:
        """Return the question that a call asks by reading values with this provenance.

        Raise `CaptureError` if it depends on more than constants and the batch.
        """
        function = invocation.function
        asks = f"{where}, {getattr(function, '__name__', function)}"
        if self.obstacle:
            raise CaptureError(
                f"{asks}: got a question about values that depend on {self.obstacle}, expected one that constants or "
                f"the batch alone decide. Other values are not known before the step runs. {advise_on_values(where)}"
            )
        compute_reads = self.function(invocation.reads)

        def compute(leaves: Sequence[Tensor]) -> Answer:
            with for_real():
                return Answer.of(invocation(compute_reads(leaves)))

        return Question(asks, tuple(self.leaves.values()), compute, GUESSES.get(function))


@contextmanager
def for_real() -> Iterator[None]:
    """Run eagerly inside: without recording, gradients or autocast."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        with without_modes(), torch.no_grad():
            yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
