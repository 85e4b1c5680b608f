# SPDX-License-Identifier: Apache-2.0
"""Tensor metadata, known before the tensor exists: shape, stride, dtype, device.

Problem. A receiver must allocate a buffer before the value arrives, and must end up with exactly what was sent,
including strides: if a transposed value arrives contiguous, a bias gradient sums it in another order, and the bits
differ.

Idea. Metadata is a frozen value, inferred once with fake tensors. `Spec.pack` returns the elements as contiguous bytes
in memory order, those along a broadcast dimension once, without a copy if memory is dense; `Spec.unpack` is its inverse
on the receiver.

Runs when a pipeline is built and in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import InputError


@dataclass(frozen=True)
class Spec:
    """Metadata of a tensor.

    >>> spec = Spec.of(torch.zeros(2, 3).t().expand(4, 3, 2))
    >>> spec.shape, spec.stride
    ((4, 3, 2), (0, 1, 3))
    >>> received = spec.unpack(spec.pack(torch.arange(6.0).reshape(2, 3).t().expand(4, 3, 2)))
    >>> received.stride(), received[2].tolist()
    ((0, 1, 3), [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """Return the metadata of `tensor`."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def resize(self, shape: tuple[int, ...]) -> Spec:
        """Return this spec with another shape: dimensions in the same memory order, without gaps.

        >>> Spec.of(torch.zeros(2, 3).t()).resize((5, 4)).stride
        (1, 5)
        """
        if shape == self.shape:
            return self
        rows = torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()
        order = range(len(shape)) if rows else self._order
        stride, size = [0] * len(shape), 1
        for dim in reversed(order):
            stride[dim], size = size, size * max(1, shape[dim])
        return replace(self, shape=shape, stride=tuple(stride))

    def like(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, copied if its strides differ from these, or if its elements are to be conjugated or negated.

        Raise `InputError` if its shape or dtype differs: the metadata was inferred under other conditions.
        """
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise InputError(
                f"a value between stages: got {Spec.of(tensor)}, expected {self} as inferred when the pipeline was "
                "built. Put autocast inside the model's modules, not around the step, and keep shapes independent of "
                "data."
            )
        tensor = resolve(tensor)
        if tensor.stride() == self.stride:
            return tensor
        return self.allocate().copy_(tensor) if 0 not in self.stride else self.unpack(self.pack(tensor))

    @property
    def nbytes(self) -> int:
        """The bytes of all elements, those along broadcast dimensions repeated."""
        return self.dtype.itemsize * prod(self.shape)

    def empty(self, device: torch.device | str | None = None) -> Tensor:
        """Return an uninitialized, writable tensor in this memory order, without gaps or broadcast dimensions."""
        home = self.device if device is None else device
        layout = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        if layout.is_contiguous():  # what follows does the same, in ten times as long
            return torch.empty(self.shape, dtype=self.dtype, device=home)
        return torch.empty_like(layout, device=home)

    def buffer(self) -> Tensor:
        """Return an uninitialized buffer for the bytes that `pack` returns."""
        return torch.empty(self._bytes, dtype=torch.uint8, device=self.device)

    def pack(self, tensor: Tensor) -> Tensor:
        """Return the elements of `tensor` as contiguous bytes, in memory order; a view if memory is dense."""
        return as_bytes(tensor if self._rows else self._without_repeats(tensor).permute(self._order))

    def unpack(self, data: Tensor) -> Tensor:
        """Return a tensor of this shape and stride: a view of the packed bytes, or a copy if memory has gaps."""
        flat = data.view(self.dtype)
        if self._dense:
            return flat.as_strided(self.shape, self.stride)
        packed = flat.reshape(self._packed)
        inverse = [self._order.index(dim) for dim in range(len(self.shape))]
        tensor = self.allocate()
        self._without_repeats(tensor).copy_(packed.permute(inverse))
        return tensor

    def _without_repeats(self, tensor: Tensor) -> Tensor:
        """Return a view of `tensor` without repetition along broadcast dimensions."""
        for dim, stride in enumerate(self.stride):
            if not stride:
                tensor = tensor.narrow(dim, 0, min(1, self.shape[dim]))
        return tensor

    def allocate(self) -> Tensor:
        """Return an uninitialized tensor of this shape and stride."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    @cached_property
    def _order(self) -> tuple[int, ...]:
        return tuple(sorted(range(len(self.shape)), key=lambda dim: -self.stride[dim]))

    @cached_property
    def _packed(self) -> tuple[int, ...]:
        sizes = [min(1, size) if not stride else size for size, stride in zip(self.shape, self.stride, strict=True)]
        return tuple(sizes[dim] for dim in self._order)

    @cached_property
    def _bytes(self) -> int:
        return prod(self._packed) * self.dtype.itemsize

    @cached_property
    def _rows(self) -> bool:
        """True if memory is in row-major order, without repetition."""
        return self._packed == self.shape and self._order == tuple(range(len(self.shape)))

    @cached_property
    def _dense(self) -> bool:
        """True if memory has no gaps: each dimension's stride is the product of the sizes of all faster ones."""
        expected = 1
        for dim, size in zip(reversed(self._order), reversed(self._packed), strict=True):
            if size > 1 and self.stride[dim] != expected:
                return False
            expected *= size
        return True

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class OptionalSpec(Spec):
    """Metadata of a tensor that may be absent, depending on data; the last packed byte says whether it is present.

    >>> spec = OptionalSpec.of(torch.zeros(2))
    >>> spec.unpack(spec.pack(torch.tensor([1.0, 2.0]))), spec.unpack(spec.pack(None))
    (tensor([1., 2.]), None)
    """

    @property
    def whole(self) -> Spec:
        """The metadata of the tensor when present."""
        return Spec(self.shape, self.stride, self.dtype, self.device)

    def buffer(self) -> Tensor:
        """Return an uninitialized buffer for the bytes that `pack` returns."""
        return torch.empty(self._bytes + 1, dtype=torch.uint8, device=self.device)

    def pack(self, tensor: Tensor | None) -> Tensor:
        """Return the bytes of `tensor`, or zeros if it is absent, followed by the byte that says which."""
        data = torch.zeros(self._bytes + 1, dtype=torch.uint8, device=self.device)
        if tensor is not None:
            data[:-1] = self.whole.pack(tensor)
            data[-1] = 1
        return data

    def unpack(self, data: Tensor) -> Any:
        """Return the tensor, or `None` if it is absent; wait for the device that holds the bytes."""
        return self.whole.unpack(data[:-1]) if data[-1] else None

    def __str__(self) -> str:
        return f"{self.whole} or nothing"


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` in row-major order, as one-dimensional bytes; a view if it is contiguous."""
    flat = resolve(tensor).contiguous().reshape(-1)
    if flat.stride() != (1,):  # a single element may have any stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def resolve(tensor: Tensor) -> Tensor:
    """Return `tensor`; a copy, if it is a view whose elements are to be conjugated or negated when they are read.

    Whoever receives a value knows nothing of such views.
    """
    return tensor.resolve_conj().resolve_neg()
