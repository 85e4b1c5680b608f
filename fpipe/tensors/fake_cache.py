# SPDX-License-Identifier: Apache-2.0
"""A cache of operator results on fake tensors.

A model's blocks are alike, and the model runs several times before the first step, so most operators are called with
metadata seen before. torch has a cache too, but a lookup in it costs more than the operator. This one caches less,
under smaller keys: only torch's own operators that write nothing, on ordinary fake tensors of one mode. Everything else
is left to torch.

Invariant: the key determines the result. It contains the arguments' metadata and torch's settings; whatever else is in
torch's own key rules out caching here. A result that aliased an argument's memory aliases it again.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from fpipe.tensors.torch_private import (
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    default_device,
    dispatch_keys,
)

CacheKey: TypeAlias = tuple[object, ...]
Operator: TypeAlias = Callable[[], Any]
MakeFake: TypeAlias = Callable[[Any, Tensor, torch.device], Tensor]

CACHEABLE = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format})
VALUES_DECIDE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


class _UnlikeError(Exception):
    """An argument or a result that cannot be cached."""


class ResultTensor(NamedTuple):
    """A description of a tensor that an operator returned: its metadata, and what it aliases.

    - `argument`: the position, among the tensor arguments, of the one whose memory it shares; `None` if it is new.
    - `itself`: whether it is that argument.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    argument: int | None
    itself: bool


class CachedResult(NamedTuple):
    """A description of an operator's result; `kind` is list or tuple, or `FakeTensor` for a single tensor."""

    kind: type
    tensors: tuple[ResultTensor | None, ...]


class ResultCache:
    """A cache of operator results for the mode that owns it, held weakly: a mode goes with its last tensor, at once.

    - `make(mode, meta, device)`: returns a fake tensor on `device` with the metadata of `meta`.
    - `known`: results by operator and key; `None` for operators that are not cached.
    """

    def __init__(self, mode: FakeTensorMode, make: MakeFake) -> None:
        self._mode, self.make = ref(mode), make
        self.known: dict[Any, dict[CacheKey, CachedResult] | None] = {}

    @property
    def mode(self) -> FakeTensorMode:
        """The mode, which lives as long as it uses its cache."""
        mode = self._mode()
        assert mode is not None, "only the mode calls this"
        return mode

    def result(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], run: Operator) -> Any:
        """Return the result of `func(*args, **kwargs)`, from the cache or from `run()`, which calls it."""
        try:
            table = self.known[func]
        except KeyError:
            table = self.known[func] = {} if _is_cacheable(func) else None
        if table is None or torch.is_inference_mode_enabled():
            return run()
        key, tensors, mode = [torch.get_default_dtype(), default_device()], list[Tensor](), self.mode
        try:
            with DisableTorchFunction():  # these calls are not the model's
                _add_to_key(args, key, tensors, mode)
                for name, value in kwargs.items():
                    _add_to_key((name, value), key, tensors, mode)
                known = table.get(tuple(key))
                if known is not None:
                    return self._make_result(known, tensors)
        except _UnlikeError:
            return run()
        out = run()
        with suppress(_UnlikeError), DisableTorchFunction():
            table[tuple(key)] = self._describe_result(out, tensors)
        return out

    def _describe_result(self, out: Any, tensors: Sequence[Tensor]) -> CachedResult:
        """Return a description from which an equal result can be made; raise `_UnlikeError` if there is none."""
        if type(out) is FakeTensor:
            return CachedResult(FakeTensor, (self._describe_tensor(out, tensors),))
        if type(out) not in (list, tuple):
            raise _UnlikeError
        made = tuple([self._describe_tensor(one, tensors) for one in out])
        fresh = {
            one.untyped_storage()._cdata for one, its in zip(out, made, strict=True) if its and its.argument is None
        }
        if len(fresh) < sum(its is not None and its.argument is None for its in made):
            raise _UnlikeError  # two new tensors share memory
        return CachedResult(type(out), made)

    def _describe_tensor(self, tensor: Any, tensors: Sequence[Tensor]) -> ResultTensor | None:
        if tensor is None:
            return None
        if not is_plain(tensor, self.mode) or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
            raise _UnlikeError
        shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        memory = tensor.untyped_storage()
        shared = [k for k, other in enumerate(tensors) if other.untyped_storage()._cdata == memory._cdata]
        itself = [k for k in shared if tensors[k] is tensor]
        if not shared and (offset or memory.nbytes() != _extent(tensor)):
            raise _UnlikeError
        argument = next(iter(itself or shared), None)
        return ResultTensor(shape, stride, offset, tensor.dtype, tensor.fake_device, argument, bool(itself))

    def _make_result(self, returned: CachedResult, tensors: Sequence[Tensor]) -> Any:
        """Return the described result. No mode is active here, so meta tensors report meta."""
        out = [None if made is None else self._make_tensor(made, tensors) for made in returned.tensors]
        return out[0] if returned.kind is FakeTensor else returned.kind(out)

    def _make_tensor(self, made: ResultTensor, tensors: Sequence[Tensor]) -> Tensor:
        if made.argument is not None and made.itself:
            return tensors[made.argument]
        if made.argument is None:
            meta = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        else:
            meta = torch.empty((0,), dtype=made.dtype, device="meta")
            meta.set_(tensors[made.argument].untyped_storage(), made.offset, made.shape, made.stride)
        return self.make(self.mode, meta, made.device)


def _add_to_key(values: Sequence[Any], key: list[Any], tensors: list[Tensor], mode: FakeTensorMode) -> None:
    """Append the metadata or value of each argument to `key`, and the tensors among them to `tensors`.

    Raise `_UnlikeError` for an argument that cannot be part of a key.
    """
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if not is_plain(value, mode):
                raise _UnlikeError
            tensors.append(value)
            key.append(_metadata(value))
        elif kind in CACHEABLE or (kind is torch.device and (value.type == "cpu" or value.index is not None)):
            key += (kind, value)
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            _add_to_key(value, key, tensors, mode)
        else:
            raise _UnlikeError


def is_plain(tensor: Any, mode: FakeTensorMode) -> bool:
    """Return whether a tensor is a fake of this mode without a known value, fully described by sizes and strides."""
    ours = type(tensor) is FakeTensor and tensor.fake_mode is mode and tensor.constant is None
    if not ours or tensor.layout is not torch.strided:
        return False
    return not (tensor._has_symbolic_sizes_strides or tensor.is_quantized)


def _is_cacheable(func: Any) -> bool:
    """Return whether an operator is one of torch's that write nothing, with results that do not depend on values."""
    return (
        isinstance(func, OpOverload)
        and func.namespace == "aten"
        and not func._schema.is_mutable
        and not any(tag in func.tags for tag in VALUES_DECIDE)
        and not func._schema.name.startswith(("aten::lift", "aten::index_put"))  # each assignment tells of its mask
    )


def _metadata(tensor: Any) -> CacheKey:
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.fake_device,
        tensor.requires_grad,
        dispatch_keys(tensor).raw_repr(),  # conjugate, negative, inference mode, ...
    )


def _extent(tensor: Tensor) -> int:
    """Return the number of bytes that a tensor's elements span."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * step for size, step in steps) + 1) * tensor.element_size()
