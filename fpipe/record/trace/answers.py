# SPDX-License-Identifier: Apache-2.0
"""Give calls that read values the results that their answers stand for, when they run on fake tensors.

In a step, a module that reads values reads real ones. They agree with the answers at capture, because the answers are
part of the capture's key. On fake tensors, while a model is recorded, shapes are inferred or a stage is recorded below
autograd, there are no values to read.

Selecting elements by a mask reads values, too. Only the mask decides how many are selected, so `logits[labels > 0]`
asks about the labels alone, though the logits depend on parameters. On fake tensors, the mask is replaced by as many
indices as it has true elements. Likewise, packing padded sequences asks about their lengths alone.

Runs when a pipeline is built; the operations of `answer_on_fakes` run in every step, where they do nothing else, and
`count_selected` on real masks, also at the start of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fpipe.record.captured import Operation, Tensors
from fpipe.record.fakes.recurrent import pack
from fpipe.record.fakes.sizes import SIZED, read_sizes
from fpipe.record.questions import Answer, Sample
from fpipe.record.trace.branching import report_read
from fpipe.tensors.torch_private import PACK, FakeTensor

AnswersByCall: TypeAlias = Mapping[tuple[Any, int], Answer | Sample]
"""Answers by function and call number."""


def answer_on_fakes(operation: Operation, answers: AnswersByCall) -> Operation:
    """Return the operation, which gets these answers when it runs on fake tensors."""
    if not answers:
        return operation

    def run(key: int, *tensors: Tensor) -> Tensors:
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return operation.call(key, *tensors)
        with _AnswerMode(answers):
            return operation.call(key, *tensors)

    return operation._replace(call=run)


class _AnswerMode(TorchFunctionMode):
    """A torch function mode that returns the recorded answer of each call in `answers`."""

    def __init__(self, answers: AnswersByCall) -> None:
        super().__init__()
        self.answers, self.calls = answers, Counter[Any]()

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func in SIZED:
            with self:
                args, kwargs = read_sizes(func, args, kwargs or {})
        answer = self.answers.get((func, self.calls[func]))
        self.calls[func] += 1
        if answer is None:
            return func(*args, **(kwargs or {}))
        if answer.has_tensors or deciding_masks(func, args):  # a graph cannot hold shapes that depend on values
            report_read(next(arg for arg in args if isinstance(arg, Tensor)))
        return result_on_fakes(func, args, answer)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def count_selected(masks: Sequence[Tensor]) -> list[int]:
    """Return how many elements each mask selects."""
    return [int(mask.count_nonzero()) for mask in masks]


def read_lengths(tensors: Sequence[Tensor]) -> list[int]:
    """Return the lengths of sequences."""
    lengths: list[int] = tensors[0].tolist()
    return lengths


def reader_of(function: Any) -> Callable[[Sequence[Tensor]], list[int]]:
    """Return the function that reads what decides the shape of a call's result from `deciding_masks`."""
    return read_lengths if function is PACK else count_selected


def deciding_masks(function: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the masks, or lengths, that decide the shape of a call's result; none if something else does."""
    if function is PACK:
        return (args[1],)
    return MASKS[function](*args) if function in MASKS and len(args) == 2 else ()


def _masks_in_index(tensor: Tensor, index: Any) -> tuple[Tensor, ...]:
    return tuple(filter(_is_mask, index if isinstance(index, tuple) else (index,)))


def _the_mask(tensor: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return (mask,)


MASKS: Mapping[Any, Callable[..., tuple[Tensor, ...]]] = MappingProxyType(
    {Tensor.__getitem__: _masks_in_index, torch.masked_select: _the_mask, Tensor.masked_select: _the_mask}
)
"""Torch functions that select by masks, and which of their two arguments' tensors are the masks."""


def result_on_fakes(function: Any, args: Sequence[Any], answer: Answer | Sample) -> Any:
    """Return a call's result on fake tensors, once its question has been answered."""
    result = answer.result()
    if not deciding_masks(function, args):
        return result
    if function is PACK:
        return pack(args[0], result, args[2])
    tensor, index = args
    return (
        _get_items(tensor, index, result)
        if function is Tensor.__getitem__
        else _select_by_mask(tensor, index, result[0])
    )


def _get_items(tensor: Tensor, index: Any, counts: Sequence[int]) -> Tensor:
    remaining = iter(counts)
    parts = index if isinstance(index, tuple) else (index,)
    return tensor[tuple(part for one in parts for part in _without_mask(tensor, one, remaining))]


def _select_by_mask(tensor: Tensor, mask: Tensor, count: int) -> Tensor:
    """Select by a mask after broadcasting it and the tensor to one shape."""
    whole = tensor * torch.ones_like(mask, dtype=tensor.dtype)
    times = whole.numel() // max(1, mask.numel())
    return whole.reshape(-1)[_empty_indices(tensor, count * times)]


def _without_mask(tensor: Tensor, index: Any, counts: Iterator[int]) -> list[Any]:
    """Return a mask as index tensors, one for each of its dimensions; any other index unchanged."""
    return [_empty_indices(tensor, next(counts))] * index.dim() if _is_mask(index) else [index]


def _empty_indices(tensor: Tensor, count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device=tensor.device)
