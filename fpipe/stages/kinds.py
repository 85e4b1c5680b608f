# SPDX-License-Identifier: Apache-2.0
"""Microbatches of different kinds: captured and cut separately, and driven by one program.

They may differ in what their stages compute and in what crosses, but not in what a rank holds, sums, and exchanges at
the end of a step. If a value crosses for some microbatches only (a mask that an unpadded one doesn't need), the others
send nothing along that edge.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce

from fpipe.errors import InputError
from fpipe.runtime.contract import StageCrossing
from fpipe.stages.assembly import Assembly
from fpipe.stages.stage import ModelStage
from schedules import Graph


def widen(assemblies: Sequence[Assembly]) -> tuple[Assembly, ...]:
    """Return the assemblies, each with the edges of all of them, so that one program can drive them all."""
    graph = reduce(_union, dict.fromkeys(one.graph for one in assemblies))
    wide = {one: one if one.graph == graph else _widen(one, graph) for one in dict.fromkeys(assemblies)}
    return tuple(wide[one] for one in assemblies)


def _union(a: Graph, b: Graph) -> Graph:
    return Graph(a.stages, a.values | b.values, a.cotangents | b.cotangents, a.gradients | b.gradients)


def _widen(assembly: Assembly, graph: Graph) -> Assembly:
    stages = [
        replace(
            stage,
            gets=(*_carry(stage.gets), *_widen_crossings(stage.gets, [(p, s) for p in graph.fed_by[s]])),
            gives=(*_widen_crossings(stage.gives, [(s, t) for t in graph.feeds[s]]), *_carry(stage.gives)),
            pulls=(*_carry(stage.pulls), *_widen_crossings(stage.pulls, [(s, p) for p in graph.pulls[s]])),
            pulled_by=(
                *_widen_crossings(stage.pulled_by, [(t, s) for t in graph.pulled_by[s]]),
                *_carry(stage.pulled_by),
            ),
        )
        for s, stage in enumerate(assembly.stages)
    ]
    return replace(assembly, stages=tuple(stages), graph=graph)


def _carry(crossings: Iterable[StageCrossing]) -> list[StageCrossing]:
    """Return the carry between slices among these crossings: earlier slices come first, and later ones last."""
    return [one for one in crossings if one.source == one.target]


def _widen_crossings(crossings: Iterable[StageCrossing], edges: Iterable[tuple[int, int]]) -> tuple[StageCrossing, ...]:
    """Return a crossing for each edge, an empty one where there was none."""
    there = {(one.source, one.target): one for one in crossings}
    return tuple(there.get(edge, StageCrossing(*edge, (), ())) for edge in edges)


def require_alike(assemblies: Sequence[Assembly]) -> None:
    """Raise `InputError` unless one program can drive these assemblies, one for each microbatch or slice."""
    first = assemblies[0]
    for i, other in enumerate(assemblies):
        if other is first:
            continue
        for what in ("structure", "aux_structure"):
            mine, theirs = (getattr(one.captured, what).spec for one in (other, first))
            if mine != theirs:
                raise _unlike(i, "outputs" if what == "structure" else "the loss's aux", mine, theirs)
        if other.placed_gradients != first.placed_gradients:
            raise _unlike(i, "placements of gradients", other.placed_gradients, first.placed_gradients)
        for mine, theirs in zip(other.stages, first.stages, strict=True):
            if _holds(mine) != _holds(theirs):
                raise _unlike(i, f"parameters and buffers in stage {mine.index}", _holds(mine), _holds(theirs))


def require_alike_uncut(assemblies: Sequence[Assembly]) -> None:
    """Raise `InputError` unless the uncut models of these assemblies take and return the same leaves.

    They are built for this, which takes as long as building all stages.
    """
    first = assemblies[0]
    for i, other in enumerate(assemblies):
        if other is not first and _holds(other.whole) != _holds(first.whole):
            raise _unlike(i, "parameters and buffers", _holds(other.whole), _holds(first.whole))


def _holds(stage: ModelStage) -> tuple[object, ...]:
    trained = tuple(stage.parameters[k] for k in sorted(stage.wiring.trained))
    return (
        stage.parameters,
        stage.buffers,
        stage.grads,
        trained,
        stage.unused,
        {c.target: c.values for c in stage.shares},
    )


def _unlike(i: int, what: str, got: object, expected: object) -> InputError:
    return InputError(
        f"microbatch {i}: got other {what} than for microbatch 0, {got}, expected {expected}. The model takes another "
        "path for it. Give all microbatches the same size and the same answers to the model's questions, or cut "
        "elsewhere."
    )
