# SPDX-License-Identifier: Apache-2.0
"""Blocks: the runs of units between places where a model may be cut.

A profile is about blocks, in the order in which they run; a stage is a contiguous run of them. If microbatches are cut
into slices, blocks are those of the first slice, and all slices have the same ones. A block is named after
the outermost module call that begins with it, or else after the one that has just ended. It is identified by a digest
of what it computes: operations, shapes and dtypes, but no names. So the layers of a transformer have equal digests.

Runs when a model is profiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from fpipe.cutting.calls import Calls, Mark
from fpipe.errors import InputError
from fpipe.pipelines.pipeline import Pipeline
from fpipe.record.captured import Captured, Parameter, Unit, Value
from fpipe.tensors.spec import Spec


class ModelBlock(NamedTuple):
    """A piece of a model between two places where it may be cut.

    - `name`: where it begins, for readers; `marks`: the calls that begin or end there, which identify the place.
    - `units`: the number of operations; `digest`: what they compute.
    """

    name: str
    marks: tuple[Mark, ...]
    units: int
    digest: str

    def __str__(self) -> str:
        return f"{self.name!r} of {self.units} operations ({self.digest})"


def find_blocks(captured: Captured, model: nn.Module, places: Sequence[int]) -> tuple[ModelBlock, ...]:
    """Return the blocks of a model that may be cut before the units at `places`."""
    calls, bounds = Calls.of(captured, model), list(pairwise([0, *places, len(captured.units)]))
    return tuple(
        ModelBlock(
            name_place(calls.marks(start)),
            calls.marks(start),
            stop - start,
            _digest(captured, captured.units[start:stop]),
        )
        for start, stop in bounds
    )


def name_place(marks: Sequence[Mark]) -> str:
    """Return the name of the place where calls begin or end.

    >>> name_place([Mark("a", 0, True), Mark("b", 0, False), Mark("b.c", 0, False)])
    'b'
    >>> name_place([Mark("a.b", 0, True)]), name_place([])
    ('after a.b', 'the beginning')
    """
    named = [mark for mark in marks if mark.path]
    begins, ends = ([str(one._replace(end=False))[1:-1] for one in named if one.end is end] for end in (False, True))
    return begins[0] if begins else f"after {ends[0]}" if ends else "the beginning"


def _digest(captured: Captured, units: Sequence[Unit]) -> str:
    """Return a digest of operations, with values numbered in the order in which they are used."""
    found = blake2b(digest_size=8)
    for line in _lines(captured, units):
        found.update(f"{line}\n".encode())
    return found.hexdigest()


def _lines(captured: Captured, units: Sequence[Unit]) -> Iterator[str]:
    number: dict[Value, int] = {}
    for unit in units:
        for value in (*unit.reads, *unit.makes):
            if value not in number:
                number[value] = len(number)
                if value in captured.sources:
                    spec = Spec.of(captured.fakes[value])
                    yield f"{number[value]}: {_role(captured, value)} {spec} {spec.stride} {spec.device}"
        reads, makes = ([number[value] for value in values] for values in (unit.reads, unit.makes))
        yield f"{unit.does} of {reads} makes {makes}"


def _role(captured: Captured, value: Value) -> str:
    """Return what a source is to a block."""
    source = captured.sources[value]
    if isinstance(source, Parameter):
        return "trained" if source.name in captured.trainable else "frozen"
    return type(source).__name__


def require_blocks_of(pipe: Pipeline, blocks: Sequence[ModelBlock]) -> None:
    """Raise `InputError`, naming the first difference, unless a pipeline's model consists of these blocks."""
    captured, model = pipe.training.assembly.captured.slice(0), pipe.model
    calls, places = Calls.of(captured, model), list[int]()
    for k, block in enumerate(blocks[1:], 1):
        place = calls.position_of(block.marks)
        if place is None or place <= (places or [0])[-1]:
            raise InputError(
                f"pipe: got a model that has no block {k} named {block} after {blocks[k - 1]}, expected the model of "
                "the profile. Profile this model, for this batch."
            )
        places.append(place)
    require_same_blocks(find_blocks(captured, model, places), blocks, "pipe")


def require_same_blocks(got: Sequence[ModelBlock], expected: Sequence[ModelBlock], what: str) -> None:
    """Raise `InputError` unless these are the blocks expected of `what`, naming the first that differs."""
    for k, (one, other) in enumerate(zip(got, expected, strict=False)):
        if one != other:
            raise InputError(
                f"{what}: got a block {k} named {one}, expected {other}: it is of another model, of other shapes, or "
                "may be cut elsewhere. Profile this model, for this batch."
            )
    if len(got) != len(expected):
        raise InputError(
            f"{what}: got {len(got)} blocks, expected {len(expected)}: it is of another model, or may be cut "
            "elsewhere. Profile this model, for this batch."
        )
