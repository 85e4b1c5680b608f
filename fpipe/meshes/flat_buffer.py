# SPDX-License-Identifier: Apache-2.0
"""Gradients side by side in one buffer, which is cut into portions of bytes: one for each process to add up.

Problem. Replicas add up all gradients of a stage. Sending them tensor by tensor takes a message each, and cutting each
tensor takes copies to put the pieces together again.

Idea. The gradients of a stage are copied into one buffer, in memory order. Each process receives its portion of the
buffers of all others, adds them to its own in place, and sends the sum to all. So the buffer ends as one of sums, and
the gradients are views of it.

Invariant: layouts depend on metadata alone, so every process derives the same ones.

Runs in every step; layouts are made once per stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from fpipe.meshes.pieces import BOUNDARY, Packing, present
from fpipe.stages.accumulation import Gradients
from fpipe.tensors.spec import Spec

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

    def pack(self, tensors: Gradients, device: torch.device) -> Tensor:
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
            _add_in_order(terms, parts[k][0][here].view(dtype))
        self.packing.write_flags(buffer, [any(held) for held in zip(*there, strict=True)])

    def _cut(self, k: int) -> Iterator[tuple[int, torch.dtype, slice]]:
        """Yield the tensors that have elements in portion `k`: number, dtype, and where in the portion they are."""
        first, end = self.bounds[k], self.bounds[k + 1]
        for j, (spec, start) in enumerate(zip(self.packing.specs, self.packing.offsets, strict=False)):
            here = max(first, start), min(end, start + spec.shape[0] * spec.dtype.itemsize)
            if here[0] < here[1]:
                yield j, spec.dtype, slice(here[0] - first, here[1] - first)

    def unpack(self, buffer: Tensor) -> Gradients:
        """Return the tensors, in their own strides: views of the buffer, unless their memory has gaps."""
        pairs = zip(map(present, self.specs), self.packing.read(buffer), strict=True)
        return tuple(None if flat is None else spec.unpack(flat.view(torch.uint8)) for spec, flat in pairs)


def _add_in_order(terms: Sequence[Tensor], total: Tensor) -> None:
    """Write the sum of the terms to `total`, which may be one of them."""
    if len(terms) > 1:
        torch.add(reduce(torch.add, terms[:-1]), terms[-1], out=total)
    elif terms:
        total.copy_(terms[0])
