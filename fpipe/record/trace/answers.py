# SPDX-License-Identifier: Apache-2.0
"""Repeat the answers of the recording when a module runs on fake tensors again.

In a step, a module that reads values reads real ones. They agree with the answers at capture, because the answers are
part of the capture's key. On fake tensors, while shapes are inferred or a stage is recorded below autograd, there are
no values to read, so the recorded answers are returned.

Runs in every step; answers are returned only when a pipeline is built, while tensors are fake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.overrides import TorchFunctionMode

from fpipe.record.captured import Operation, Tensors
from fpipe.record.questions import Answer
from fpipe.record.trace.branching import report_read
from fpipe.record.trace.selection import deciding_masks, result_on_fakes
from fpipe.tensors.torch_private import FakeTensor

AnswersByCall: TypeAlias = Mapping[tuple[Any, int], Answer]
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
        answer = self.answers.get((func, self.calls[func]))
        self.calls[func] += 1
        if answer is None:
            return func(*args, **(kwargs or {}))
        if answer.has_tensors or deciding_masks(func, args):  # a graph cannot hold shapes that depend on values
            report_read(next(arg for arg in args if isinstance(arg, Tensor)))
        return result_on_fakes(func, args, answer)
