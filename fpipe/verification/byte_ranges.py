# SPDX-License-Identifier: Apache-2.0
"""Bytes of memory, as parts of what operators computed.

A tensor is a window into memory. Memory is a list of ranges, each a part of one operator's result, or of an input. What
is written changes ranges; what is read is a list of them, or a window with strides into one.

Runs when `prove` is called.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor


class ByteRange(NamedTuple):
    """Bytes from `start` to `end` of some memory: those from `at` on of an operator's result, or of an input.

    `source` is the result's expression, or for an input -1 and below.
    """

    start: int
    end: int
    source: int
    at: int


class ByteWindow(NamedTuple):
    """Bytes of an operator's result, or of an input, from `at` on: `dims` has strides and sizes, the smallest first."""

    source: int
    at: int
    dims: tuple[tuple[int, int], ...]


def read_ranges(known: Sequence[ByteRange], tensor: Tensor) -> list[ByteRange]:
    """Return the ranges of a tensor's elements, by address, without what is between them; `known`: of its memory."""
    found, place = list[ByteRange](), 0
    for start, end in list_runs(tensor):
        found += shift_ranges(cut_ranges(known, start, end), place)
        place += end - start
    return cut_ranges(found, 0, place)


def write_ranges(known: list[ByteRange], tensor: Tensor, new: Sequence[ByteRange]) -> None:
    """Put ranges in the place of a tensor's elements, in those of its memory."""
    place = 0
    for start, end in list_runs(tensor):
        before = [one._replace(end=min(one.end, start)) for one in known if one.start < start]
        after = [
            ByteRange(max(one.start, end), one.end, one.source, one.at + max(0, end - one.start))
            for one in known
            if one.end > end
        ]
        middle = cut_ranges(new, place, place + end - start)
        known[:] = [*before, *shift_ranges(middle, start), *after]
        place += end - start


def align_ranges(one: Sequence[ByteRange], other: Sequence[ByteRange]) -> Iterator[tuple[ByteRange, ByteRange]]:
    """Yield pairs of ranges with the same place, which together are all of these."""
    bounds = sorted({bound for part in (*one, *other) for bound in (part.start, part.end)})
    rows = iter(one), iter(other)
    now = [next(row) for row in rows]
    for start, end in pairwise(bounds):
        now = [next(row) if part.end <= start else part for part, row in zip(now, rows, strict=True)]
        first, second = (ByteRange(start, end, part.source, part.at + start - part.start) for part in now)
        yield first, second


def is_scattered(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor are not one block of memory, each once."""
    dims = list_dims(tensor)
    return dims is None or len(dims) > 1


def find_around(known: Sequence[ByteRange], tensor: Tensor) -> ByteRange | None:
    """Return the range that holds all of a tensor; `None` if several do."""
    if len(known) == 1:
        return known[0]
    first, end = first_byte(tensor), end_byte(tensor)
    return next((one for one in known if one.start <= first < end <= one.end), None)


def order_dims(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions in the order of their strides, the largest first, without those of size 1."""
    strides: tuple[int, ...] = tensor.stride()
    dims = [dim for dim, size in enumerate(tensor.shape) if size != 1]
    return tuple(sorted(dims, key=lambda dim: (-strides[dim], dim)))


def list_runs(tensor: Tensor) -> list[tuple[int, int]]:
    """Return where the bytes of a tensor are in its memory: the first and the end of each run without a gap."""
    size = tensor.element_size()
    if not tensor.numel():
        return []
    dims = sorted((stride, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n != 1 and stride)
    block, starts = 1, [int(tensor.storage_offset())]
    while dims and dims[0][0] == block:
        block *= dims.pop(0)[1]
    for stride, n in dims:
        starts = [start + k * stride for start in starts for k in range(n)]
    return [(start * size, (start + block) * size) for start in sorted(set(starts))]


def first_byte(tensor: Tensor) -> int:
    """Return where the bytes of a tensor begin in its memory."""
    return int(tensor.storage_offset()) * tensor.element_size()


def end_byte(tensor: Tensor) -> int:
    """Return where the bytes of a tensor end in its memory."""
    if not tensor.numel():
        return first_byte(tensor)
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first_byte(tensor) + (last + 1) * tensor.element_size()


def count_runs(tensor: Tensor) -> int:
    """Return in how many separate parts of memory a tensor is, at most."""
    dims = list_dims(tensor)
    return len(list_runs(tensor)) if dims is None else math.prod(n for _, n in dims[1:])


def list_dims(tensor: Tensor) -> tuple[tuple[int, int], ...] | None:
    """Return strides and sizes of a tensor's bytes, smallest first; `None` if elements overlap, or there are none."""
    size = tensor.element_size()
    if not tensor.numel():
        return None
    if tensor.is_contiguous():
        return ((1, tensor.numel() * size),)
    pairs = sorted((stride, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n != 1 and stride)
    found = [(1, size)]
    for stride, n in pairs:
        before, count = found[-1]
        if stride * size < before * count:
            return None
        found[-1:] = [(before, count * n)] if stride * size == before * count else [found[-1], (stride * size, n)]
    return tuple(found)


def join_windows(pieces: list[ByteWindow]) -> tuple[ByteWindow, ...]:
    """Return pieces as one, if they are all of one source, and regular."""
    lengths = {(one.source, one.dims) for one in pieces}
    if len(pieces) < 2 or len(lengths) > 1:
        return tuple(pieces)
    ats, dims = [one.at for one in pieces], list(pieces[0].dims)
    while len(ats) > 1:
        stride, count = ats[1] - ats[0], 1
        while count < len(ats) and ats[count] - ats[0] == count * stride:
            count += 1
        firsts = ats[::count]
        expected = [first + k * stride for first in firsts for k in range(count)]
        if expected != ats or stride < dims[-1][0] * dims[-1][1]:
            return tuple(pieces)
        dims.append((stride, count))
        ats = firsts
    return (ByteWindow(pieces[0].source, pieces[0].at, tuple(dims)),)


def shift_ranges(known: Sequence[ByteRange], by: int) -> list[ByteRange]:
    """Return the same ranges at places that are `by` bytes later."""
    return [one._replace(start=one.start + by, end=one.end + by) for one in known]


def cut_ranges(known: Sequence[ByteRange], start: int, end: int) -> list[ByteRange]:
    """Return what is between two places, counted from the first; neighbors that continue each other are joined."""
    found: list[ByteRange] = []
    for one in known:
        first, last = max(one.start, start), min(one.end, end)
        if first >= last:
            continue
        part = ByteRange(first - start, last - start, one.source, one.at + first - one.start)
        before = found[-1] if found else None
        if before is not None and before.source == part.source and before.at + before.end - before.start == part.at:
            found[-1] = before._replace(end=part.end)
        else:
            found.append(part)
    return found
