# SPDX-License-Identifier: Apache-2.0
"""Answer the model's questions about the values of a batch.

A rank may lack the leaves that decide. So ranks exchange their answers, and all take the answer of the first rank that
has one. What a model asks next depends on the answers so far; the open questions of all microbatches are answered
together.

Runs when a pipeline is built, and at the start of every step, unless the model is known not to ask.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from fpipe.errors import InputError
from fpipe.pipelines.batch import Microbatch, Signature, SplitBatch
from fpipe.pipelines.captures import Captures
from fpipe.pipelines.memo import KnownMicrobatch
from fpipe.pipelines.modes import isolate
from fpipe.record.questions import Answer, Question
from fpipe.record.variant import Variant

ExchangeText: TypeAlias = Callable[[str], Sequence[str]]
"""Sends a text to all ranks, and returns the texts of all ranks."""
OpenQuestions: TypeAlias = Mapping[int, Question]
"""The open question of each microbatch that has one."""


def own_text(text: str) -> Sequence[str]:
    """Return only this process's text; nothing is exchanged."""
    return [text]


@dataclass(frozen=True)
class Resolver:
    """A resolver of the questions about one batch.

    - `exchange_text`: exchanges texts with the other ranks; all must call this at the same time.
    - `example`: whether the batch only provides shapes: if so, ranks may disagree, and all may lack its values.
    """

    captures: Captures
    variant: Variant
    batch: SplitBatch
    exchange_text: ExchangeText
    example: bool = False

    def resolve(self) -> SplitBatch:
        """Return the batch with all answers in its signature; raise `InputError` if one can't be found."""
        batch, asked = self.batch, {}
        microbatches = batch.batching.split(batch.signature)
        while asked := dict(self._open_questions(microbatches)):
            for i, answer in self._ask(asked).items():
                microbatches[i] = microbatches[i].with_answer(answer)
        rows = [self._explore(i, microbatch).answers for i, microbatch in enumerate(microbatches)]
        return replace(batch, signature=batch.signature.with_answers(rows)) if any(rows) else batch

    def require_answers(self, example: Signature) -> None:
        """Raise `InputError` if a question has another answer than in the example, as far as this process has values.

        Ranks exchange nothing.
        """
        for i, microbatch in enumerate(self.batch.batching.split(self.batch.signature)):
            for expected in example.answers[i] if example.answers else ():
                question = self.captures.find(self.variant, microbatch)
                own = self._own_answer(i, question) if isinstance(question, Question) else None
                if isinstance(question, Question) and own not in (None, expected):
                    raise InputError(
                        f"microbatch {i}: got values about which {question.where} finds {own.text}, expected "
                        f"{expected.text}, as in the first batch"
                    )
                microbatch = microbatch.with_answer(expected)

    def _open_questions(self, microbatches: Sequence[Microbatch]) -> Iterator[tuple[int, Question]]:
        for i, microbatch in enumerate(microbatches):
            question = self.captures.find(self.variant, microbatch)
            if isinstance(question, Question):
                yield i, question

    def _explore(self, i: int, microbatch: Microbatch) -> Microbatch:
        """Return a microbatch with all answers; capture the model for it if necessary."""

        def ask(question: Question) -> Answer:
            return self._ask({i: question})[i]

        while not isinstance(known := self.captures.find(self.variant, microbatch), KnownMicrobatch):
            if known is None:
                with isolate(self.variant):
                    return self.captures.explore(self.variant, microbatch, ask)
            microbatch = microbatch.with_answer(ask(known))
        return microbatch

    def _ask(self, asked: OpenQuestions) -> dict[int, Answer]:
        """Return the answers to the open questions, the same on all ranks."""
        mine = [None if answer is None else answer.text for answer in map(self._own_answer, asked, asked.values())]
        rows = [json.loads(text) for text in self.exchange_text(json.dumps(mine))]
        return {i: self._choose(i, question, [row[k] for row in rows]) for k, (i, question) in enumerate(asked.items())}

    def _own_answer(self, i: int, question: Question) -> Answer | None:
        """Return this process's answer, or `None` if it lacks the leaves that decide."""
        try:
            taken = self.batch.take(question.leaves)
        except InputError:
            return None
        return question.compute([taken[leaf][i] for leaf in question.leaves])

    def _choose(self, i: int, question: Question, found: Sequence[str | None]) -> Answer:
        known = {rank: text for rank, text in enumerate(found) if text is not None}
        if len(set(known.values())) > 1 and not self.example:
            raise InputError(
                f"microbatch {i}: got batches on ranks {list(known)} about which {question.where} finds "
                f"{list(known.values())}, expected the same batch on every rank. Pass every rank the same batch; to "
                "ranks that lack it, pass tensors on the meta device."
            )
        if known:
            return Answer(next(iter(known.values())))
        if self.example and question.assumed is not None:
            return question.assumed
        names = [self.batch.batching.leaf_name(leaf) for leaf in question.leaves]
        raise InputError(
            f"microbatch {i}: got no values of {', '.join(names)}, expected them on at least one rank: they decide "
            f"what the model does, in {question.where}. Pass the values on some rank."
        )
