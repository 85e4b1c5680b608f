# SPDX-License-Identifier: Apache-2.0
"""The origins of a recording's values, and how to compute the values for real.

Problem. A model running on fake tensors reads a value, which they do not have.

Idea. The recorder knows every call that led to it. If they read constants alone, run them for real there and then; if
they read the batch too, run them on each batch at the start of its step. A value that depends on parameters, buffers or
random numbers is unknown before the step runs.

Invariant. The same calls run, in the same order and modes, as in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe.capture.advice import advise_on_values
from fpipe.errors import CaptureError
from fpipe.ir.captured import BatchLeaf, Constant, Source, Unit, Value, compose, single
from fpipe.ir.modes import Modes, apply_modes
from fpipe.ir.questions import GUESSES, Answer, Question
from fpipe.ir.tape import Invocation
from fpipe.torch_private import without_modes


@dataclass
class History:
    """How the values of a recording were computed so far.

    - `units`: the torch calls so far; `modes`, `written`, `random`: facts about each.
    - `sources`, `storage`: facts about the values.
    """

    units: Sequence[Unit]
    modes: Mapping[Unit, Modes]
    written: Mapping[Unit, frozenset[int]]
    random: Mapping[Unit, Any]
    sources: Mapping[Value, Source]
    storage: Mapping[Value, int]

    def origin(self, values: Iterable[Value]) -> Origin:
        """Return the calls and sources that `values` were computed from."""
        needed, used = set(values), list[Unit]()
        memories = {self.storage[value] for value in needed}
        for unit in reversed(self.units):
            if needed.isdisjoint(unit.makes) and memories.isdisjoint(self.written[unit]):
                continue
            used.append(unit)
            needed.update(unit.reads)
            memories.update(self.storage[value] for value in unit.reads)
        sources = {value: self.sources[value] for value in sorted(needed) if value in self.sources}
        return Origin(self, tuple(reversed(used)), sources)


@dataclass(frozen=True)
class Origin:
    """The calls that produced some values, in order, and the sources that they read."""

    history: History
    units: tuple[Unit, ...]
    sources: Mapping[Value, Source]

    @property
    def leaves(self) -> dict[Value, int]:
        """The leaves of the batch among the sources."""
        return {value: source.leaf for value, source in self.sources.items() if isinstance(source, BatchLeaf)}

    @property
    def obstacle(self) -> str:
        """A dependency that is unknown before the step runs; empty if there is none."""
        for source in self.sources.values():
            if not isinstance(source, BatchLeaf | Constant):
                return f"the {type(source).__name__.lower()} {source.name!r}"
        return "random numbers" if any(unit in self.history.random for unit in self.units) else ""

    def computed(self, outputs: tuple[Value, ...]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        """Return a function that computes `outputs` from the batch's leaves without modifying them."""
        constants = {v: source.tensor for v, source in self.sources.items() if isinstance(source, Constant)}
        inputs = (*self.leaves, *constants)
        items = [(self.history.modes[unit], single(unit, None)) for unit in self.units]
        run = compose(apply_modes(items, outputs), inputs, outputs)
        changed = frozenset().union(*(self.history.written[unit] for unit in self.units))
        copied = [self.history.storage[value] in changed for value in inputs]

        def compute(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
            given = [t.clone() if copy else t for t, copy in zip((*leaves, *constants.values()), copied, strict=True)]
            return run(0, *given)

        return compute

    def question(self, invocation: Invocation, where: str) -> Question:
        """Return the question asked by a call that reads values of this origin.

        Raise `CaptureError` if it depends on more than constants and the batch.
        """
        function = invocation.function
        asks = f"{where}, {getattr(function, '__name__', function)}"
        if self.obstacle:
            raise CaptureError(
                f"{asks}: got a question about values that depend on {self.obstacle}, expected one that constants or "
                f"the batch alone decide: nobody knows these values before the step runs. {advise_on_values(where)}"
            )
        computed = self.computed(invocation.reads)

        def compute(leaves: Sequence[Tensor]) -> Answer:
            with for_real():
                return Answer.of(invocation(computed(leaves)))

        return Question(asks, tuple(self.leaves.values()), compute, GUESSES.get(function))


@contextmanager
def for_real() -> Iterator[None]:
    """Compute eagerly inside, as if nothing were recorded, without gradients and outside of any autocast."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        with without_modes(), torch.no_grad():
            yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
