# SPDX-License-Identifier: Apache-2.0
"""Tensors cut into pieces, one for each process of a group, and packed into bytes.

Problem. A sum depends on the order of its terms. The order in which a library reduces an element depends on where the
element is in the buffer, on the number of processes, and on the library. So gradients that are reduced stage by stage
differ in the last bit from those of the same model in one piece.

Idea. The library only moves bytes: every process sends each of the others the piece that is theirs to sum. Who receives
the pieces adds them in the order of the processes. That takes as many bytes as any reduction does, and gives the same
bits on any backend, for any cut and schedule, and in one process.

There are two ways to cut. *Shards* are cut by rows, tensor by tensor, as `fully_shard` and `Shard(0)` do it: with
ceil(rows / count) rows each, and fewer or none in the last pieces (`Pieces`). *Replicas* add up all gradients of a
stage: these are side by side in one buffer, in memory order, which is cut into portions of bytes (`FlatBuffer`). That
takes a single message, and no copies to put tensors together again: each process receives its portion of the buffers
of all others, adds them to its own in place, and sends the sum to all. So the buffer ends as one of sums, and the
gradients are views of it.

Invariant: layouts depend on metadata alone, so every process derives the same ones.

Runs in every step; layouts are made once per stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate
from math import prod
from typing import Final, TypeAlias

import torch
from torch import Tensor

from fpipe.stages.accumulation import Grads
from fpipe.tensors.spec import OptionalSpec, Spec, as_bytes

BOUNDARY: Final = 16  # bytes; no dtype needs more


def row_range(rows: int, count: int, k: int) -> tuple[int, int]:
    """Return the first row of piece `k` and the one after its last, as `torch.chunk` cuts.

    >>> [row_range(5, 4, k) for k in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-rows // count)
    return min(rows, k * size), min(rows, (k + 1) * size)


def take_rows(tensor: Tensor, count: int, k: int) -> Tensor:
    """Return piece `k` of a tensor cut by rows: a view."""
    first, end = row_range(tensor.shape[0], count, k)
    return tensor[first:end]


@dataclass(frozen=True)
class Packing:
    """The layout of tensors with these specs in one buffer of bytes; the last bytes say which are there."""

    specs: tuple[Spec, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The start of each tensor, and, last, of the flags of the optional ones."""
        sizes = [_round_up(spec.nbytes) for spec in self.specs]
        return tuple(accumulate(sizes, initial=0))

    @cached_property
    def optional(self) -> tuple[int, ...]:
        """The positions of the tensors that may be absent."""
        return tuple(j for j, spec in enumerate(self.specs) if isinstance(spec, OptionalSpec))

    @property
    def size(self) -> int:
        """The number of bytes, rounded up, so that what comes after it in memory is aligned, too."""
        return _round_up(self.offsets[-1] + len(self.optional))

    def write(self, buffer: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Write the tensors to a buffer of bytes."""
        for start, tensor in zip(self.offsets, tensors, strict=False):
            if tensor is not None and tensor.numel():
                data = as_bytes(tensor)
                buffer[start : start + len(data)] = data
        self.write_flags(buffer, [tensor is not None for tensor in tensors])

    def write_flags(self, buffer: Tensor, there: Sequence[bool]) -> None:
        """Write which tensors are there."""
        if self.optional:
            flags = [there[j] for j in self.optional]
            self.flags(buffer).copy_(torch.tensor(flags, dtype=torch.uint8, device=buffer.device))

    def flags(self, buffer: Tensor) -> Tensor:
        """Return the bytes of a buffer that say which optional tensors are there."""
        start = self.offsets[-1]
        return buffer[start : start + len(self.optional)]

    def read_flags(self, flags: Tensor) -> tuple[bool, ...]:
        """Return which tensors are there. Wait for the device if some are optional."""
        given = iter(flags.tolist() if self.optional else ())
        return tuple([not isinstance(spec, OptionalSpec) or bool(next(given)) for spec in self.specs])

    def read(self, buffer: Tensor) -> Grads:
        """Return the tensors in a buffer, in row-major order: views of it. Wait for the device if some are optional."""
        there = self.read_flags(self.flags(buffer))
        return tuple(
            _view(buffer, start, spec) if is_there else None
            for start, spec, is_there in zip(self.offsets, self.specs, there, strict=False)
        )


def _view(buffer: Tensor, start: int, spec: Spec) -> Tensor:
    """Return the place of a tensor in a buffer; an empty buffer may begin at an odd byte, so an empty tensor is new."""
    size = spec.nbytes
    data = buffer[start : start + size].view(spec.dtype) if size else buffer.new_empty(0, dtype=spec.dtype)
    return data.view(spec.shape)


def _round_up(size: int) -> int:
    return -(-size // BOUNDARY) * BOUNDARY


@dataclass(frozen=True)
class Pieces:
    """Tensors with these specs, cut by rows into `count` pieces."""

    specs: tuple[Spec, ...]
    count: int

    @cached_property
    def packings(self) -> tuple[Packing, ...]:
        """The layout of each piece."""
        return tuple(Packing(tuple(self._cut_spec(spec, k) for spec in self.specs)) for k in range(self.count))

    def _cut_spec(self, spec: Spec, k: int) -> Spec:
        first, end = row_range(spec.shape[0], self.count, k)
        shape = (end - first, *spec.shape[1:])
        return replace(spec, shape=shape, stride=tuple(prod(shape[d + 1 :]) for d in range(len(shape))))

    @property
    def widest(self) -> int:
        """The bytes of the largest piece, which is the first."""
        return self.packings[0].size

    def pack(self, tensors: Grads, device: torch.device) -> tuple[Tensor, ...]:
        """Return the pieces of these whole tensors, which are next to each other in memory."""
        sizes = [packing.size for packing in self.packings]
        parts = torch.split(torch.empty(sum(sizes), dtype=torch.uint8, device=device), sizes)
        for k, (packing, part) in enumerate(zip(self.packings, parts, strict=True)):
            packing.write(part, [None if one is None else take_rows(one, self.count, k) for one in tensors])
        return parts

    def pack_one(self, k: int, tensors: Grads, device: torch.device) -> Tensor:
        """Return piece `k`, given its tensors, in a buffer with room for the widest."""
        buffer = torch.empty(self.widest, dtype=torch.uint8, device=device)
        self.packings[k].write(buffer[: self.packings[k].size], tensors)
        return buffer

    def add(self, k: int, arrived: Sequence[Tensor]) -> Grads:
        """Return the sums of what processes have sent as piece `k`, in their order; `None` where none has a tensor."""
        return tuple(_add_in_order(terms) for terms in zip(*map(self.packings[k].read, arrived), strict=True))

    def join(self, buffers: Sequence[Tensor]) -> Grads:
        """Return the whole tensors, in new memory of their strides, given every piece in a buffer of its own."""
        pairs = zip(self.packings, buffers, strict=True)
        columns = zip(*[packing.read(buffer[: packing.size]) for packing, buffer in pairs], strict=True)
        return tuple(self._join(spec, column) for spec, column in zip(self.specs, columns, strict=True))

    def _join(self, spec: Spec, parts: Sequence[Tensor | None]) -> Tensor | None:
        there = [part for part in parts if part is not None]
        if not there:
            return None
        return present(spec).like(torch.cat(there))


def present(spec: Spec) -> Spec:
    """Return the spec of a tensor when it is there."""
    return spec.whole if isinstance(spec, OptionalSpec) else spec


def _add_in_order(terms: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the terms that are there, in new memory."""
    there = [term for term in terms if term is not None]
    if len(there) < 2:
        return there[0].clone() if there else None
    total = there[0] + there[1]
    for term in there[2:]:
        total += term
    return total


Portion: TypeAlias = tuple[Tensor, Tensor]
"""What a process sends another: a portion of its buffer, and the flags that say which optional tensors are there."""


@dataclass(frozen=True)
class FlatBuffer:
    """The layout of tensors with these specs in one buffer, cut into `count` portions."""

    specs: tuple[Spec, ...]
    count: int

    @cached_property
    def packing(self) -> Packing:
        """The layout of the tensors, each as one dimension in memory order."""
        return Packing(tuple(replace(spec, shape=(prod(spec.shape),), stride=(1,)) for spec in self.specs))

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The first byte of each portion, and the one after the last; no element is in two portions."""
        end = self.packing.offsets[-1]
        step = -(-end // (self.count * BOUNDARY)) * BOUNDARY
        return tuple(min(end, k * step) for k in range(self.count + 1))

    def pack(self, tensors: Grads, device: torch.device) -> Tensor:
        """Return a buffer that holds these tensors."""
        buffer = torch.empty(self.packing.size, dtype=torch.uint8, device=device)
        specs = map(present, self.specs)
        flat = [None if one is None else spec.pack(spec.like(one)) for spec, one in zip(specs, tensors, strict=True)]
        self.packing.write(buffer, flat)
        return buffer

    def parts(self, buffer: Tensor) -> tuple[Portion, ...]:
        """Return what goes to each process: views of the buffer."""
        flags = self.packing.flags(buffer)
        return tuple((buffer[start:end], flags) for start, end in zip(self.bounds, self.bounds[1:], strict=False))

    def add(self, k: int, buffer: Tensor, parts: Sequence[Portion]) -> None:
        """Add up the portions `k` of all processes, in their order, into the buffer, which holds the `k`-th of them."""
        there = [self.packing.read_flags(flags) for _, flags in parts]
        for j, dtype, here in self._cut(k):
            terms = [data[here].view(dtype) for (data, _), held in zip(parts, there, strict=True) if held[j]]
            _add_into(parts[k][0][here].view(dtype), terms)
        self.packing.write_flags(buffer, [any(held) for held in zip(*there, strict=True)])

    def _cut(self, k: int) -> Iterator[tuple[int, torch.dtype, slice]]:
        """Yield the tensors that have elements in portion `k`: number, dtype, and where in the portion they are."""
        first, end = self.bounds[k], self.bounds[k + 1]
        for j, (spec, start) in enumerate(zip(self.packing.specs, self.packing.offsets, strict=False)):
            here = max(first, start), min(end, start + spec.shape[0] * spec.dtype.itemsize)
            if here[0] < here[1]:
                yield j, spec.dtype, slice(here[0] - first, here[1] - first)

    def unpack(self, buffer: Tensor) -> Grads:
        """Return the tensors, in their own strides: views of the buffer, unless their memory has gaps."""
        pairs = zip(map(present, self.specs), self.packing.read(buffer), strict=True)
        return tuple(None if flat is None else spec.unpack(flat.view(torch.uint8)) for spec, flat in pairs)


def _add_into(total: Tensor, terms: Sequence[Tensor]) -> None:
    """Write the sum of the terms to `total`, which may be one of them."""
    if len(terms) > 1:
        torch.add(reduce(torch.add, terms[:-1]), terms[-1], out=total)
    elif terms:
        total.copy_(terms[0])
