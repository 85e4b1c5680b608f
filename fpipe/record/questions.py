# SPDX-License-Identifier: Apache-2.0
"""Questions that a model asks about the values of its batch, and the answers.

Problem. `if mask.all():` takes one branch or the other, and a capture must know which.

Idea. At the start of a step, a `Question` is answered from the batch. The `Answer` becomes part of the batch's
signature, so there is one capture per answer.

Runs when a pipeline is built and, if the model asks questions, at the start of every step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fpipe.errors import CaptureError, InputError
from fpipe.record.numbers import NUMBER_TYPES, READERS

LONGEST_ANSWER = 4096
"""The limit on an answer, in characters: answers are part of a capture's key, and ranks exchange them."""


class Answer(NamedTuple):
    """The result of a call that reads values, as text: numbers in full, tensors as shape, stride, dtype and device.

    >>> Answer.of([True, 2.5]).text, Answer.of(torch.zeros(2, 3)).text
    ('{"list": [true, 2.5]}', '{"tensor": [[2, 3], [3, 1], "float32", "cpu"]}')
    >>> Answer.of((1, None)).result()
    (1, None)
    """

    text: str

    @classmethod
    def of(cls, result: Any) -> Answer:
        """Return the answer for a call's result; raise `InputError` if it cannot be encoded or is too long."""
        text = json.dumps(_encode(result))
        if len(text) > LONGEST_ANSWER:
            raise InputError(
                f"a question about the batch: got an answer of {len(text)} characters, expected at most "
                f"{LONGEST_ANSWER}: every answer is captured separately. Read less (a count, a maximum), or compute it "
                "before the step and pass it as an argument that is not a tensor."
            )
        return cls(text)

    def result(self) -> Any:
        """Return the result of the call, its tensors replaced by empty ones."""
        return _decode(json.loads(self.text))

    @property
    def has_tensors(self) -> bool:
        """True if the result contains tensors, whose values the answer lacks."""
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
        "or lists and tuples of them. Read a number, for example with .item()."
    )


def _decode(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, held),) = tree.items()
    if kind == "tensor":
        shape, stride, dtype, device = held
        return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
    return {"list": list, "tuple": tuple}[kind](map(_decode, held))


@dataclass(frozen=True)
class Sample:
    """The result of a call that reads values, for made-up ones; real ones may lead to something else in every step."""

    held: Any
    has_tensors: bool = True

    @classmethod
    def of(cls, result: Any) -> Sample:
        """Return the sample of a call's result."""
        tree = result if isinstance(result, list | tuple) else (result,)
        return cls(Answer(json.dumps(_encode(result))) if any(isinstance(one, Tensor) for one in tree) else result)

    def result(self) -> Any:
        """Return the result of the call, its tensors replaced by empty ones."""
        return self.held.result() if isinstance(self.held, Answer) else deepcopy(self.held)


GUESSES: Mapping[Any, Answer] = MappingProxyType(
    dict.fromkeys((Tensor.__bool__, Tensor.__contains__, torch.equal, torch.allclose), Answer.of(False))
    | dict.fromkeys((Tensor.item, Tensor.__int__, Tensor.__index__), Answer.of(0))
    | {Tensor.__float__: Answer.of(0.0)}
    | {read: Answer.of(NUMBER_TYPES[dtype]()) for dtype, read in READERS.items()}
)
"""Answers assumed for an example without values: no, and zero."""


@dataclass(frozen=True, eq=False)
class Question:
    """A question that depends on the values of a microbatch alone.

    - `where`: the module that asks, and the call, for errors.
    - `leaves`: the numbers of the batch's tensor leaves that decide; `compute` maps their values to the answer.
    - `assumed`: the answer for an example without values; `None` if nothing can be assumed.
    """

    where: str
    leaves: tuple[int, ...]
    compute: Callable[[Sequence[Tensor]], Answer]
    assumed: Answer | None


Ask: TypeAlias = Callable[[Question], Answer]


def refuse_questions(question: Question) -> Answer:
    """Raise `CaptureError`; used where every answer should be known already."""
    raise CaptureError(
        f"{question.where}: got a question about the batch that was not asked before, expected a model that asks the "
        "same questions whenever it runs on the same batch. Move code that changes from call to call out of it."
    )


class Reply(NamedTuple):
    """A question in a recorded run: the tick and the torch call that asked, and the answer."""

    tick: int
    function: Any
    answer: Answer | Sample
