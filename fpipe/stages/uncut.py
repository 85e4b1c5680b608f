# SPDX-License-Identifier: Apache-2.0
"""The uncut model as a single stage, to compare the stages with.

A parameter whose gradients are summed over stages has one copy for each of its stages, under the same name: so its
gradient comes in parts, as in the pipeline, to be added in stage order. To do this, the stages' own functions are
called in sequence, in one autograd graph. If there is no such parameter, the cut has no effect here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from typing import TypeAlias, cast

from fpipe.cutting.routing import Piece, route
from fpipe.ir.captured import Captured, Function, Observed, Operation, Parameter, Tensors, Value, compose

Copies: TypeAlias = Mapping[tuple[int, Value], Value]
"""The copy of a parameter that a stage uses in place of it, by stage and parameter."""


def uncut(
    captured: Captured,
    observed: Observed,
    results: tuple[Value, ...],
    stages: Sequence[Piece],
    functions: Sequence[Function],
    summed: frozenset[str],
) -> tuple[Captured, Piece, Function]:
    """Return the whole model, with copies among its sources; its piece; and its function."""
    (piece,) = route(captured, observed, (), results)
    copies = _copies(captured, stages, summed)
    if not copies:
        return captured, piece, captured.fuse(piece.units, observed.random, piece.inputs, piece.outputs)
    sources = {copy: captured.sources[value] for (_, value), copy in copies.items()}
    fakes = {copy: captured.fakes[value] for (_, value), copy in copies.items()}
    captured = replace(captured, sources={**captured.sources, **sources}, fakes={**captured.fakes, **fakes})
    piece = replace(piece, parameters=(*piece.parameters, *sources))
    return captured, piece, _composed(piece, stages, functions, copies)


def _copies(captured: Captured, stages: Sequence[Piece], summed: frozenset[str]) -> Copies:
    """Return a value for each later stage that reads a summed parameter; parameter by parameter, in stage order."""
    fresh = count(1 + max((*captured.sources, *(value for unit in captured.units for value in unit.makes))))
    shared = [v for v, source in captured.sources.items() if isinstance(source, Parameter) and source.name in summed]
    readers = {value: [s for s, piece in enumerate(stages) if value in piece.parameters] for value in shared}
    return {(s, value): next(fresh) for value in shared for s in readers[value][1:]}


def _composed(whole: Piece, stages: Sequence[Piece], functions: Sequence[Function], copies: Copies) -> Function:
    """Return the stages' functions called in sequence, each with its own copies."""
    reads = [tuple(copies.get((s, value), value) for value in piece.inputs) for s, piece in enumerate(stages)]
    operations = [
        Operation(read, piece.outputs, function) for read, piece, function in zip(reads, stages, functions, strict=True)
    ]

    @contextmanager
    def placed(tensors: Tensors) -> Iterator[None]:
        values = dict(zip(whole.inputs, tensors, strict=True))
        with ExitStack() as stack:
            for read, function in zip(reads, functions, strict=True):
                stack.enter_context(
                    function.backward_scope(cast("Tensors", tuple(values.get(value) for value in read)))
                )
            yield

    scoped = any(function.scope is not None for function in functions)
    return Function(compose(operations, whole.inputs, whole.outputs), placed if scoped else None)
