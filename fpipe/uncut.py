# SPDX-License-Identifier: Apache-2.0
"""The model uncut, as a single stage: what the stages together are compared with.

A parameter whose gradients are summed over stages is there once for each of its stages, under the same name: so its
gradient comes out in parts, as in the pipeline, to be added in stage order. Units do not say which of their reads is
which argument of theirs, so the stages' own functions are called one after the other, in one autograd graph. Where there
is no such parameter, nothing of the cut is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TypeAlias

from torch import Tensor

from fpipe.capture.contract import Captured, Function, Parameter, Tensors, Value
from fpipe.capture.contract import Observed
from fpipe.graph import Layout, layouts
from fpipe.metadata import made_by

Copies: TypeAlias = Mapping[tuple[int, Value], Value]
"""Per stage and parameter, what stands for it there, if not itself."""


def uncut(
    captured: Captured,
    observed: Observed,
    results: tuple[Value, ...],
    stages: Sequence[Layout],
    functions: Sequence[Function],
    summed: frozenset[str],
) -> tuple[Captured, Layout, Function]:
    """The whole model: with copies among its sources, its layout, and its function."""
    (layout,) = layouts(captured, observed, (), results)
    copies = _copies(captured, stages, summed)
    if not copies:
        return captured, layout, captured.fuse(layout.units, observed.random, layout.inputs, made_by(layout))
    sources = {copy: captured.sources[value] for (_, value), copy in copies.items()}
    fakes = {copy: captured.fakes[value] for (_, value), copy in copies.items()}
    captured = replace(captured, sources={**captured.sources, **sources}, fakes={**captured.fakes, **fakes})
    layout = replace(layout, parameters=(*layout.parameters, *sources))
    return captured, layout, _composed(layout, stages, functions, copies)


def _copies(captured: Captured, stages: Sequence[Layout], summed: frozenset[str]) -> Copies:
    """A value for every stage but the first that reads a summed parameter; in stage order, parameter by parameter."""
    fresh = count(1 + max((*captured.sources, *(value for unit in captured.units for value in unit.makes))))
    shared = [v for v, source in captured.sources.items() if isinstance(source, Parameter) and source.name in summed]
    readers = {value: [s for s, layout in enumerate(stages) if value in layout.parameters] for value in shared}
    return {(s, value): next(fresh) for value in shared for s in readers[value][1:]}


def _composed(whole: Layout, stages: Sequence[Layout], functions: Sequence[Function], copies: Copies) -> Function:
    """The stages' functions, one after the other."""

    def run(key: int, *tensors: Tensor) -> Tensors:
        values = dict(zip(whole.inputs, tensors, strict=True))
        for s, (layout, function) in enumerate(zip(stages, functions, strict=True)):
            inputs = [values[copies.get((s, value), value)] for value in layout.inputs]
            values.update(zip(made_by(layout), function(key, *inputs), strict=True))
        return tuple(values[value] for value in made_by(whole))

    return Function(run)
