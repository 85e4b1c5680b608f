# SPDX-License-Identifier: Apache-2.0
"""The prologue of a stage: computes values before its forwards that it would otherwise receive.

Problem. Masks and rotary tables follow from the batch, from constants and from buffers. Every stage that needs them
can make them itself, and those that are the same for all microbatches only once in a step.

Idea. They enter the stage's function between its leaves of the batch and what it receives, so nothing else differs:
neither the backward nor the messages. They are computed when a forward asks for its microbatch, and again when it is
recomputed.

Invariant: the same torch calls run as in the model, in the same order and modes, so the bits are the same.

Runs in every step; `build_prologue` runs when a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fpipe.cutting.repetition import Repetition
from fpipe.cutting.routing import Section
from fpipe.record.captured import BatchLeaf, Captured, Constant, Tensors, Unit
from fpipe.tensors.spec import Spec


@dataclass(frozen=True, eq=False)
class Prologue:
    """The values that a stage computes before its forwards; a stage that computes none has an empty prologue.

    - `specs`: their specs, in the order in which the stage's function takes them; `places`: the modules that make them
      in the model.
    - `kept`: those that are the same for all microbatches, by position.
    - `own`: the number of the stage's leaves that its function takes, too; the others are for the prologue alone.
    - `reads`: the leaves that the prologue reads, by position among the stage's.
    - `once`: computes, from the stage's buffers, what all microbatches of a step share.
    - `each`: computes the values of one microbatch, from what is shared, the buffers, and the leaves that it reads.
    """

    specs: tuple[Spec, ...] = ()
    places: tuple[str, ...] = ()
    kept: frozenset[int] = frozenset()
    own: int = 0
    reads: tuple[int, ...] = ()
    once: Callable[[Tensors], Tensors] = lambda buffers: ()
    each: Callable[[Tensors, Tensors, Tensors], Tensors] = lambda shared, buffers, leaves: ()

    def __str__(self) -> str:
        often = ["once" if k in self.kept else "each" for k in range(len(self.specs))]
        return ", ".join(f"{spec} {how}" for spec, how in zip(self.specs, often, strict=True))

    def share(self, buffers: Tensors) -> Tensors:
        """Return what all microbatches of a step share."""
        with torch.no_grad():
            return self.once(buffers)

    def enter(self, shared: Tensors, buffers: Tensors, leaves: Tensors) -> Tensors:
        """Return what the stage's function takes for a microbatch, apart from what it receives, given its leaves."""
        if not self.specs:
            return leaves
        with torch.no_grad():
            return (*leaves[: self.own], *self.each(shared, buffers, tuple([leaves[k] for k in self.reads])))


class Feed:
    """The inputs of a stage in one step, apart from what it receives: `feed(i)` returns those of microbatch `i`.

    - `rows`: the stage's leaves of each microbatch; empty if it reads none. `buffers`: its buffers.
    """

    def __init__(self, prologue: Prologue, rows: Sequence[Tensors], buffers: Tensors) -> None:
        self.prologue, self.rows, self.buffers = prologue, rows, buffers
        self.shared = prologue.share(buffers)

    def __call__(self, i: int) -> Tensors:
        """Return the stage's own leaves, and what its prologue computes."""
        return self.prologue.enter(self.shared, self.buffers, self.rows[i] if self.rows else ())


def build_prologue(captured: Captured, section: Section, repetition: Repetition) -> tuple[Prologue, tuple[int, ...]]:
    """Return the prologue of a stage, and the numbers of the leaves that are for it alone."""
    shared, buffers, values = repetition.shared, section.buffers, tuple(repetition.values)
    constants = {v: one.tensor for v, one in _sources(captured, (*repetition.once, *repetition.each), Constant).items()}
    leaves = _sources(captured, repetition.each, BatchLeaf)
    known = [*section.batch, *[value for value in leaves if value not in section.batch]]
    places = {value: unit.path or "the model itself" for unit in captured.units for value in unit.makes}
    once = captured.fuse(repetition.once, {}, (*buffers, *constants), shared)
    each = captured.fuse(repetition.each, {}, (*shared, *buffers, *constants, *leaves), values)
    held = tuple(constants.values())
    prologue = Prologue(
        tuple(map(Spec.of, repetition.values.values())),
        tuple(places[value] for value in values),
        frozenset(k for k, value in enumerate(values) if value in shared),
        len(section.batch),
        tuple(known.index(value) for value in leaves),
        lambda buffers: once(0, *buffers, *held),
        lambda shared, buffers, leaves: each(0, *[one.detach() for one in shared], *buffers, *held, *leaves),
    )
    return prologue, tuple(leaves[value].leaf for value in known[len(section.batch) :])


def _sources(captured: Captured, units: Sequence[Unit], kind: type) -> dict[Any, Any]:
    """Return the sources of one kind that units read, by value, in order."""
    reads = dict.fromkeys(value for unit in units for value in unit.reads)
    return {v: captured.sources[v] for v in reads if isinstance(captured.sources.get(v), kind)}
