# SPDX-License-Identifier: Apache-2.0
"""The uncut model as a single stage, to compare the stages with.

If a parameter's gradients are summed over stages, each stage that uses it gets a copy under the same name. Its gradient
then comes in parts, as in the pipeline, which are added in stage order. To make these parts, the stages' own functions
are called in sequence, in one autograd graph. Without such a parameter, the cuts have no effect here.

Runs when the uncut model is first needed: by `reference`, by `verify`, or to compare kinds of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from typing import TypeAlias, cast

from fpipe.cutting.repetition import Repetition
from fpipe.cutting.routing import Section, route
from fpipe.record.captured import Captured, Function, Observed, Operation, Parameter, Tensors, Value, compose

Copies: TypeAlias = Mapping[tuple[int, Value], Value]
"""The copy that a stage uses in place of a parameter, by stage and parameter."""


def build_whole(
    captured: Captured,
    observed: Observed,
    results: tuple[Value, ...],
    stages: Sequence[Section],
    functions: Sequence[Function],
    summed: frozenset[str],
    repetitions: Sequence[Repetition],
) -> tuple[Captured, Section, Function]:
    """Return the captured model with the copies among its sources, the whole model's section, and its function."""
    slices, captured = 1 + len(captured.slices), replace(captured, slices=())
    (section,) = route(captured, observed, (), results)
    copies = _copies(captured, stages, summed, len(stages) // slices)
    if not copies:
        return captured, section, captured.fuse(section.units, observed.random, section.inputs, section.outputs)
    sources = {copy: captured.sources[value] for (_, value), copy in copies.items()}  # in the order of the groups
    fakes = {copy: captured.fakes[value] for (_, value), copy in copies.items()}
    captured = replace(captured, sources={**captured.sources, **sources}, fakes={**captured.fakes, **fakes})
    section = replace(section, parameters=(*section.parameters, *sources))
    repeats = [_repeat(captured, repetition) for repetition in repetitions]
    return captured, section, _compose(section, stages, functions, copies, repeats)


def _copies(captured: Captured, stages: Sequence[Section], summed: frozenset[str], each: int) -> Copies:
    """Return a new value for each later stage that reads a summed parameter, by parameter and then in stage order.

    A slice has `each` stages; those of a later slice that read any other parameter that is trained share a new value.
    """
    fresh = count(1 + max((*captured.sources, *(value for unit in captured.units for value in unit.makes))))
    found = dict[tuple[int, Value], Value]()
    for value, source in captured.sources.items():
        if not isinstance(source, Parameter) or source.name not in captured.trainable | summed:
            continue
        readers = [s for s, section in enumerate(stages) if value in section.parameters]
        groups = [(s,) if source.name in summed else (s // each,) for s in readers]
        made = {group: Value(next(fresh)) for group in dict.fromkeys(groups) if group != groups[0]}
        found |= {(s, value): made[group] for s, group in zip(readers, groups, strict=True) if group in made}
    return found


def _repeat(captured: Captured, repetition: Repetition) -> Operation:
    """Return the operation that makes what a stage repeats."""
    again = {*repetition.once, *repetition.each}
    units = [unit for unit in captured.units if unit in again]
    reads = dict.fromkeys(value for unit in units for value in unit.reads if value in captured.sources)
    values = tuple(repetition.values)
    return Operation(tuple(reads), values, captured.fuse(units, {}, tuple(reads), values))


def _compose(
    whole: Section,
    stages: Sequence[Section],
    functions: Sequence[Function],
    copies: Copies,
    repeats: Sequence[Operation],
) -> Function:
    """Return a function that calls the stages' functions in sequence, each with its own copies, after its repeats."""
    reads = [tuple(copies.get((s, value), value) for value in section.inputs) for s, section in enumerate(stages)]
    operations = [
        operation
        for read, section, function, repeat in zip(reads, stages, functions, repeats, strict=True)
        for operation in (repeat, Operation(read, section.outputs, function))
    ]

    @contextmanager
    def backward_scope(tensors: Tensors) -> Iterator[None]:
        values = dict(zip(whole.inputs, tensors, strict=True))
        with ExitStack() as stack:
            for read, function in zip(reads, functions, strict=True):
                stack.enter_context(
                    function.backward_scope(cast("Tensors", tuple(values.get(value) for value in read)))
                )
            yield

    scoped = any(function.scope is not None for function in functions)
    redraws = any(function.redraws for function in functions)
    return Function(compose(operations, whole.inputs, whole.outputs), backward_scope if scoped else None, redraws)
