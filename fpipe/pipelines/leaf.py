# SPDX-License-Identifier: Apache-2.0
"""A tensor leaf of a batch, and the ways to split it into microbatches.

Along a dimension, as `torch.tensor_split` does: into pieces whose sizes differ by at most one, the larger ones first.
Not at all: every microbatch gets the whole leaf. Or by a user's function.

Runs when a pipeline is built and in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.tensors.spec import Spec
from fpipe.tensors.torch_private import is_dtensor

SplitFunction: TypeAlias = Callable[[Tensor, int], Iterable[Tensor]]
SplitDim: TypeAlias = int | SplitFunction | None
"""A dimension, `None` for the whole leaf, or a function of the leaf and the number of microbatches."""

META = torch.device("meta")


@dataclass(frozen=True)
class Leaf:
    """A leaf of the example: its name, its spec, and the dimension or function that splits it.

    A batch's value of a leaf, `known`, is a tuple of the one whole tensor or, if a function splits it, of its
    microbatches.
    """

    name: str
    spec: Spec
    dim: SplitDim

    @classmethod
    def of(cls, name: str, tensor: Tensor, dim: object, home: torch.device) -> Leaf:
        """Return the leaf that `tensor` is an example of; raise `InputError` for a `dim` that it does not have.

        If the tensor is on meta, the leaf will be on `home`.
        """
        _require_dense(name, tensor)
        spec = replace(Spec.of(tensor), device=home if tensor.device == META else tensor.device)
        if dim is not None and not callable(dim):
            rank = len(spec.shape)
            if not isinstance(dim, int) or isinstance(dim, bool) or not -rank <= dim < rank:
                raise InputError(
                    f"{name}: got shape {list(spec.shape)} to split along dimension {dim!r}, expected one of its "
                    f"{rank} dimensions. Pass one in batch_dims, None to give every microbatch the whole leaf, or a "
                    "function (leaf, microbatches) -> tensors."
                )
            dim %= rank
        return cls(name, spec, dim)

    def conform(self, tensor: Tensor, microbatches: int) -> tuple[Tensor, ...]:
        """Return `known` for `tensor`, in the example's memory layout; raise `InputError` if it doesn't match."""
        spec = self.spec
        _require_dense(self.name, tensor)
        if tensor.dtype != spec.dtype or tensor.device not in (spec.device, META) or tensor.dim() != len(spec.shape):
            raise InputError(
                f"{self.name}: got {Spec.of(tensor)} on {tensor.device}, expected {spec} on {spec.device}, as in the "
                "example that pipeline() was given; sizes may differ. Convert it, or build another pipeline for this "
                "batch."
            )
        spec = spec.resize(tuple(tensor.shape))
        whole = replace(spec, device=META).allocate() if tensor.device == META else spec.like(tensor.detach())
        return self._split_by_function(self.dim, whole, microbatches) if callable(self.dim) else (whole,)

    def _split_by_function(self, function: SplitFunction, whole: Tensor, microbatches: int) -> tuple[Tensor, ...]:
        try:
            found = tuple(islice(function(whole, microbatches), microbatches + 1))
        except Exception as error:
            raise InputError(
                f"{self.name}: got {type(error).__name__}: {error} from the function in batch_dims, expected "
                f"{microbatches} tensors. Write it as f(tensor, microbatches), and return one for each."
            ) from error
        if len(found) != microbatches or not all(isinstance(part, Tensor) for part in found):
            kinds = [str(Spec.of(part)) if isinstance(part, Tensor) else repr(part) for part in found]
            raise InputError(
                f"{self.name}: got {kinds} from the function in batch_dims, expected {microbatches} tensors. Return "
                "one for each microbatch."
            )
        return found

    def memory(self, tensor: Tensor, known: tuple[Tensor, ...], microbatches: int) -> tuple[Tensor, ...]:
        """Return the tensors whose memory the microbatches of `tensor` would use on one device.

        A leaf that every microbatch gets whole counts once: no microbatch sees what another modifies in it.
        """
        if callable(self.dim):
            return known if tensor.stride() == self.spec.resize(tuple(tensor.shape)).stride else (*known, tensor)
        return (tensor,)

    def specs(self, known: Sequence[Tensor]) -> tuple[Spec, ...]:
        """Return the specs of `known`."""
        device = self.spec.device
        return tuple([Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype, device) for tensor in known])

    def parts(self, known: Sequence[Tensor], microbatches: int) -> Sequence[Tensor]:
        """Return one tensor for each microbatch."""
        if callable(self.dim):
            return known
        (whole,) = known
        if self.dim is None:
            return (whole,) * microbatches
        return torch.tensor_split(whole, microbatches, self.dim)

    def part_specs(self, known: Sequence[Spec], microbatches: int) -> Sequence[Spec]:
        """Return one spec for each microbatch."""
        if callable(self.dim):
            return known
        (whole,) = known
        if self.dim is None:
            return (whole,) * microbatches
        before, after = whole.shape[: self.dim], whole.shape[self.dim + 1 :]
        sizes = split_evenly(whole.shape[self.dim], microbatches)
        made = {size: replace(whole, shape=(*before, size, *after)) for size in set(sizes)}
        return tuple([made[size] for size in sizes])

    def piece_sizes(self, known: Sequence[Spec], microbatches: int) -> list[int]:
        """Return the sizes of pieces along the split dimension (for a function, the first); none for a whole leaf."""
        shapes = [spec.shape for spec in self.part_specs(known, microbatches)]
        dim = self.dim if isinstance(self.dim, int) else 0
        return [] if self.dim is None or not all(shapes) else [shape[dim] for shape in shapes]

    def require_rows(self, shape: tuple[int, ...], least: int) -> None:
        """Raise `InputError` if a leaf of this shape has fewer rows than there must be microbatches."""
        if isinstance(self.dim, int) and shape[self.dim] < least:
            raise InputError(
                f"{self.name}: got shape {list(shape)}, {shape[self.dim]} in dimension {self.dim}, expected at least "
                f"{least}, one row for each microbatch. Skip the batch (drop_last=True in a DataLoader), pad "
                "it, choose a schedule with fewer microbatches, or say in batch_dims how to split the leaf."
            )


def split_evenly(size: int, microbatches: int) -> list[int]:
    """Return the sizes of the pieces: they differ by at most one, and the larger ones come first.

    >>> split_evenly(7, 3), split_evenly(6, 3)
    ([3, 2, 2], [2, 2, 2])
    """
    least, larger = divmod(size, microbatches)
    return [least + (i < larger) for i in range(microbatches)]


def _require_dense(name: str, tensor: Tensor) -> None:
    """Raise `InputError` for a DTensor, and for a tensor whose memory has no strides."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        what = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        what = "a quantized tensor" if tensor.is_quantized else what
        raise InputError(
            f"{name}: got {what}, expected a dense one: batches are split along dimensions, and sent as they are in "
            "memory. Pass tensor.to_dense() or tensor.dequantize(), or a padded tensor with its mask."
        )
    if is_dtensor(tensor):
        raise InputError(
            f"{name}: got a DTensor, expected a plain tensor: a batch is split into microbatches before any module "
            "places it. Pass tensor.to_local() or tensor.full_tensor(), and let PrepareModuleInput place it."
        )
