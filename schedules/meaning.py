# SPDX-License-Identifier: Apache-2.0
"""What a schedule should compute, written down as formulas.

Problem. That a schedule obeys rules, or that its lowering looks right, says nothing about what is computed in the end.

Idea. Make every stage symbolic: its forward makes a formula of its inputs, its backward one of what the forward kept
and of the cotangents. Here are the formulas of the whole model; `schedules.interpreter` finds those of a schedule.

A formula is a digest of what it was made of, so two are equal exactly when they were made alike, and stay small however
often a graph forks and joins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

from schedules.errors import ProgramError
from schedules.graph import Edge, Graph

Formula: TypeAlias = str
Formulas: TypeAlias = tuple[tuple[Formula, ...], ...]


def formula(*parts: object) -> Formula:
    """The name of what is made of `parts`, in this order."""
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Meaning:
    """What comes out of a step.

    - `outputs`: per stage, what its forwards made, in the order of `F`.
    - `gradients`: per stage, the terms of its gradient, in the order in which they are added.
    - `copies`: per edge of shared parameters, the gradient that reached the later stage.
    """

    outputs: Formulas
    gradients: Formulas
    copies: Mapping[Edge, Formula]

    def require(self, graph: Graph, microbatches: int) -> None:
        """Raise `ProgramError` unless this is the whole model, each microbatch exactly once, in any order."""
        model = whole(graph, microbatches)
        _require("outputs", self.outputs, model.outputs)
        _require("gradient terms", self.gradients, model.gradients)
        for (s, t), copy in self.copies.items():
            complete = formula("sum", *self.gradients[s])
            if copy != complete:
                raise ProgramError(
                    f"stage {t}: got {copy} as gradient of stage {s}'s parameters, expected {complete}. "
                    f"Send it after the last backward of stage {s}."
                )


def _require(what: str, got: Formulas, expected: Formulas) -> None:
    for stage, (some, all_of_them) in enumerate(zip(got, expected, strict=True)):
        if sorted(some) != sorted(all_of_them):
            raise ProgramError(
                f"stage {stage}: got the {what} {', '.join(some)}, expected {', '.join(all_of_them)} in any order. "
                "Run each microbatch once, forward and backward."
            )


def whole(graph: Graph, microbatches: int) -> Meaning:
    """The model itself: one microbatch after the other, through all stages and back.

    >>> from schedules import chain
    >>> whole(chain(1), microbatches=1).outputs[0][0] == formula("F", 0, 0)
    True
    """
    outputs: list[list[Formula]] = [[] for _ in range(graph.stages)]
    gradients: list[list[Formula]] = [[] for _ in range(graph.stages)]
    for i in range(microbatches):
        cotangents: dict[int, Formula] = {}
        for s in range(graph.stages):
            outputs[s].append(formula("F", s, i, *(outputs[p][i] for p in graph.fed_by[s])))
        for s in reversed(range(graph.stages)):
            kept = (outputs[s][i], *(cotangents[t] for t in graph.pulled_by[s]))
            cotangents[s] = formula("B", *kept)
            gradients[s].append(formula("W", *kept))
    copies = {(s, t): formula("sum", *gradients[s]) for s, t in graph.gradients}
    return Meaning(tuple(map(tuple, outputs)), tuple(map(tuple, gradients)), copies)
