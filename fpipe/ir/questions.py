# SPDX-License-Identifier: Apache-2.0
"""Questions a model asks about its batch, and the answers.

Problem. `if mask.all():` takes one branch or the other, and a capture must know which.

Idea. A `Question` is answered from each batch at the start of its step. The `Answer` is part of the batch's signature,
so each answer has its own capture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fpipe.errors import CaptureError, InputError

LONGEST_ANSWER = 4096
"""The longest answer, in characters: answers are part of a capture's key, and are exchanged by ranks."""


class Answer(NamedTuple):
    """The result of a call that reads values: numbers as is, tensors by shape, stride, dtype and device.

    >>> Answer.of([True, 2.5]).text, Answer.of(torch.zeros(2, 3)).text
    ('{"list": [true, 2.5]}', '{"tensor": [[2, 3], [3, 1], "float32", "cpu"]}')
    >>> Answer.of((1, None)).result()
    (1, None)
    """

    text: str

    @classmethod
    def of(cls, result: Any) -> Answer:
        """Return the answer for a call's result; raise `InputError` if it cannot be encoded, or is too long."""
        text = json.dumps(_encode(result))
        if len(text) > LONGEST_ANSWER:
            raise InputError(
                f"a question about the batch: got an answer of {len(text)} characters, expected at most "
                f"{LONGEST_ANSWER}: every answer is captured separately. Ask for less (a count, a maximum), or compute "
                "it before the step and pass it as an argument that is not a tensor."
            )
        return cls(text)

    def result(self) -> Any:
        """Return what the call returned, with empty tensors in place of those that it made."""
        return _decode(json.loads(self.text))

    @property
    def has_tensors(self) -> bool:
        """True if the call made tensors; then only their shapes are known."""
        return '"tensor"' in self.text


def _encode(result: Any) -> Any:
    if isinstance(result, Tensor):
        dtype = str(result.dtype).removeprefix("torch.")
        return {"tensor": [list(result.shape), list(result.stride()), dtype, str(result.device)]}
    if type(result) in (list, tuple):
        return {type(result).__name__: [_encode(one) for one in result]}
    if result is None or type(result) in (bool, int, float, str):
        return result
    raise InputError(
        f"a question about the batch: got {type(result).__name__} for an answer, expected numbers, strings, tensors, "
        "or lists and tuples of them. Ask for a number, with .item() say."
    )


def _decode(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, held),) = tree.items()
    if kind == "tensor":
        shape, stride, dtype, device = held
        return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
    return {"list": list, "tuple": tuple}[kind](map(_decode, held))


GUESSES: Mapping[Any, Answer] = MappingProxyType(
    dict.fromkeys((Tensor.__bool__, Tensor.__contains__, torch.equal, torch.allclose), Answer.of(False))
    | dict.fromkeys((Tensor.item, Tensor.__int__, Tensor.__index__), Answer.of(0))
    | {Tensor.__float__: Answer.of(0.0)}
)
"""Answers assumed where an example has no values: no, and zero."""


@dataclass(frozen=True, eq=False)
class Question:
    """A question a model asks about a microbatch alone.

    - `where`: the module that asks, and the call.
    - `leaves`: the numbers of the batch's tensor leaves that decide; `compute` maps these to the answer.
    - `assumed`: the answer assumed where an example has no values.
    """

    where: str
    leaves: tuple[int, ...]
    compute: Callable[[Sequence[Tensor]], Answer]
    assumed: Answer | None


Ask: TypeAlias = Callable[[Question], Answer]


def refuse_questions(question: Question) -> Answer:
    """Raise `CaptureError`: no answer is available here."""
    raise CaptureError(
        f"{question.where}: got a question about the batch that was not asked before, expected a model that asks the "
        "same whenever it is run on the same batch. Take out of it what changes from call to call."
    )


class Reply(NamedTuple):
    """A question in a recorded run: the tick and the torch call that asked, and the answer."""

    tick: int
    function: Any
    answer: Answer
