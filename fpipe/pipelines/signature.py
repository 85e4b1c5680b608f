# SPDX-License-Identifier: Apache-2.0
"""The kinds of batches and of microbatches: everything about them except the values of their tensors.

Batches of one kind run the same program. A kind is a value, so that every rank derives the same one by itself, and
captures and plans are looked up by it.

Runs when a plan is made and in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fpipe.record.questions import Answer
from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import Structure


@dataclass(frozen=True)
class Signature:
    """Everything about a batch except its tensors' values, plus the answers to the model's questions about these.

    - `leaves`: per tensor leaf, its spec, or those of its microbatches if a user's function splits it.
    - `program`: the non-tensor leaves, which are part of the program, but of numbers only the types; `halves`: the
      trees of inputs and of targets, which include them.
    - `divisor`: what losses are divided by, if they are not weighted: the number of microbatches in all.
    - `answers`: by microbatch, the answers to the model's questions; empty if it asks none.
    """

    leaves: tuple[tuple[Spec, ...], ...]
    program: str
    halves: tuple[Structure, Structure] = field(compare=False)
    divisor: float
    answers: tuple[tuple[Answer, ...], ...] = ()

    def __str__(self) -> str:
        said = f", answering {[[one.text for one in row] for row in self.answers]}" if self.answers else ""
        return f"{', '.join(' '.join(map(str, specs)) for specs in self.leaves)} and {self.program}{said}"

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """The numbers among the leaves, which may differ from step to step."""
        return tuple(value for half in self.halves for _, value in half.numbers)

    def with_answers(self, rows: Sequence[tuple[Answer, ...]]) -> Signature:
        """Return the signature with the answers of each microbatch."""
        return replace(self, answers=tuple(rows) if any(rows) else ())


@dataclass(frozen=True)
class Microbatch:
    """Everything about a microbatch except its tensors' values.

    `leaves` are the specs of its tensors, in the order of the tree `structure`: (inputs, targets, scale), where the
    scale is `None` if losses are not weighted; then they are divided by `divisor`. The tensors that hold its numbers
    follow. `program` has the other leaves.
    `answers` are those to the model's questions so far.
    """

    leaves: tuple[Spec, ...]
    program: str
    structure: Structure = field(compare=False)
    divisor: float
    answers: tuple[Answer, ...] = ()

    def __str__(self) -> str:
        said = f", answering {[one.text for one in self.answers]}" if self.answers else ""
        return f"{', '.join(map(str, self.leaves))} and {self.program}{said}"

    def with_answer(self, answer: Answer) -> Microbatch:
        """Return the microbatch with one more answer."""
        return replace(self, answers=(*self.answers, answer))
