# SPDX-License-Identifier: Apache-2.0
"""The values that a schedule should compute, as formulas.

Problem. A schedule that obeys the rules, with a lowering that looks right, may still compute the wrong thing.

Idea. Make every stage symbolic: its forward makes a formula from its inputs, its backward one from the residuals and
the cotangents. This module has the formulas of the whole model; `schedules.proof.interpreter` finds those of a
schedule.

A formula is a digest of its operands, so two are equal exactly if they were computed the same way, and a formula stays
small however often a graph forks and joins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

from schedules.errors import ProgramError
from schedules.language.graph import Edge, Graph

Formula: TypeAlias = str
Formulas: TypeAlias = tuple[tuple[Formula, ...], ...]


def formula(*parts: object) -> Formula:
    """Return the formula made from `parts`, in this order."""
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Meaning:
    """The results of a step.

    - `outputs`: per stage, the outputs of its forwards, in the order of `F`.
    - `gradients`: per stage, the terms of its gradient, in the order they are added: replica by replica.
    - `sums`: per stage, its gradient on each rank that holds it.
    - `copies`: per edge of tied parameters, the gradients that reached the other stage, one for each route.
    - `updates`: per stage, the gradient that its one update applied, on each rank that holds it; empty for a stage that
      is updated on no rank, or several times.
    """

    outputs: Formulas
    gradients: Formulas
    sums: Formulas
    copies: Mapping[Edge, tuple[Formula, ...]]
    updates: Formulas

    def require(self, graph: Graph, microbatches: int, slices: int = 1, backward: bool = True) -> None:
        """Raise `ProgramError` unless this is the whole model's, with each microbatch exactly once, in any order."""
        model = whole_model(graph, microbatches, slices, backward)
        _require("outputs", self.outputs, model.outputs)
        _require("gradient terms", self.gradients, model.gradients)
        for s, sums in enumerate(self.sums):
            _require_same(f"stage {s}", s, sums, "Add up all replicas' gradients, in the order of routes, on each.")
        for s, seen in enumerate(self.updates):
            _require_same(f"the update of stage {s}", s, (self.sums[s][0], *seen), "Update after the last gradient.")
        for (s, t), copies in self.copies.items():
            repair = f"Send it after the last backward of stage {s}."
            _require_same(f"stage {t}", s, (self.sums[s][0], *copies), repair)


def _require_same(where: str, stage: int, got: tuple[Formula, ...], repair: str) -> None:
    different = next((one for one in got if one != got[0]), None)
    if different is not None:
        raise ProgramError(
            f"{where}: got {different} as gradient of stage {stage}'s parameters, expected {got[0]}. {repair}"
        )


def _require(what: str, got: Formulas, expected: Formulas) -> None:
    for stage, (some, all_of_them) in enumerate(zip(got, expected, strict=True)):
        if sorted(some) != sorted(all_of_them):
            raise ProgramError(
                f"stage {stage}: got the {what} {', '.join(some)}, expected {', '.join(all_of_them)} in any order. "
                "Run each microbatch once, forward and backward."
            )


def total(replicas: Sequence[Sequence[Formula]]) -> Formula:
    """Return the gradient summed from these terms: within each replica in order, then over the replicas."""
    sums = [formula("sum", *terms) for terms in replicas]
    return sums[0] if len(sums) == 1 else formula("total", *sums)


def whole_model(graph: Graph, microbatches: int, slices: int = 1, backward: bool = True) -> Meaning:
    """Return what the model itself computes: one microbatch at a time, slice by slice, through all stages and back.

    >>> from schedules import chain
    >>> whole_model(chain(1), microbatches=1).outputs[0][0] == formula("F", 0, (0, 0))
    True
    """
    S = graph.stages
    outputs: list[list[Formula]] = [[] for _ in range(S)]
    gradients: list[list[Formula]] = [[] for _ in range(S)]
    for i in range(microbatches):
        first = i * slices
        for unit in range(first, first + slices):
            for s in range(S):
                cache = outputs[s][first:unit][-1:]
                outputs[s].append(
                    formula("F", s, divmod(unit, slices), *cache, *(outputs[p][unit] for p in graph.fed_by[s]))
                )
        later: dict[int, Formula] = {}
        for unit in reversed(range(first, first + slices) if backward else ()):
            cotangents: dict[int, Formula] = {}
            for s in reversed(range(S)):
                kept = (
                    outputs[s][unit],
                    *([later[s]] if s in later else []),
                    *(cotangents[t] for t in graph.pulled_by[s]),
                )
                cotangents[s] = formula("B", *kept)
                gradients[s].append(formula("W", *kept))
            later = cotangents
    sums = tuple((total([terms]),) for terms in gradients)
    return Meaning(
        tuple(map(tuple, outputs)),
        tuple(map(tuple, gradients)),
        sums,
        {(s, t): (sums[s][0],) for s, t in graph.gradients},
        ((),) * S,
    )
