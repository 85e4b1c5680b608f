# SPDX-License-Identifier: Apache-2.0
"""Choose the next token of every sequence from its logits.

A chooser is a function `(logits, generator) -> tokens`: `logits` is a float tensor [sequences, vocabulary], `tokens` an
int64 tensor [sequences]. It runs on the rank of the last stage; all other ranks receive its tokens. The generator is
seeded from the seed of the call and the number of the token, so a chooser that draws from it alone repeats its choices
on any ranks. If it fails, the other ranks learn that in place of the tokens, so nobody waits.

Runs once per generated token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Generator, Tensor

from fpipe.errors import InputError, TransportError
from fpipe.network.ranks import Ranks
from fpipe.tensors import random
from fpipe.tensors.arguments import require_arguments
from fpipe.tensors.spec import Spec

Choose: TypeAlias = Callable[[Tensor, Generator], Tensor]
"""A function that chooses the next token of every sequence."""


def choose_likeliest(logits: Tensor, generator: Generator) -> Tensor:
    """Return the token with the largest logit of every sequence; of several, the first.

    >>> import torch, fpipe
    >>> fpipe.choose_likeliest(torch.tensor([[0.0, 2.0, 1.0]]), torch.Generator())
    tensor([1])
    """
    require_arguments(choose_likeliest, locals())
    return logits.argmax(-1)


def sample(temperature: float = 1.0, top: int | None = None) -> Choose:
    """Return a chooser that draws each token from the softmax of logits / `temperature`.

    With `top`, only the `top` tokens with the largest logits can be drawn. Raise `InputError` for a temperature that is
    not positive, or a `top` below 1.

    >>> import torch, fpipe
    >>> choose = fpipe.sample(temperature=0.7, top=2)
    >>> choose(torch.tensor([[0.0, 9.0, 9.0, 1.0]]), torch.Generator().manual_seed(0)).item() in (1, 2)
    True
    """
    require_arguments(sample, locals())
    if not temperature > 0:
        raise InputError(
            f"temperature: got {temperature}, expected a positive number. For the likeliest token, pass "
            "choose=fpipe.choose_likeliest."
        )
    if top is not None and top < 1:
        raise InputError(
            f"top: got {top}, expected at least 1. Pass the number of tokens to draw from, or None for all."
        )

    def draw(logits: Tensor, generator: Generator) -> Tensor:
        scores = logits.float() / temperature
        if top is not None and top < scores.shape[-1]:
            least = scores.topk(top).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        return torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(-1)

    return draw


@dataclass(frozen=True)
class Choice:
    """The choice of tokens: `choose` them, until each sequence has its token `end`, with draws seeded by `seed`."""

    choose: Choose
    end: int | None
    seed: int | None

    def agree_on_tokens(self, ranks: Ranks, source: int, logits: Tensor | None, like: Tensor, number: int) -> Tensor:
        """Return token `number` of every sequence, on every rank, as rank `source` chooses from its logits.

        `like` has the shape of the tokens. Raise what `choose` raises, and `TransportError` on the other ranks.
        """
        error, packed = None, None
        if logits is not None:
            try:
                packed = torch.cat([self._choose(logits, like, number), like.new_zeros(1)])
            except Exception as failure:
                error, packed = failure, torch.cat([torch.zeros_like(like), like.new_ones(1)])
        spec = Spec((len(like) + 1,), (1,), torch.int64, like.device)
        packed = ranks.broadcast(packed, spec, source)
        ranks.conclude()
        if error is not None:
            raise error
        if packed[-1]:
            raise TransportError(
                f"token {number}: got an error from choose on rank {source}, expected tokens. See the error of that "
                "rank."
            )
        return packed[:-1]

    def _choose(self, logits: Tensor, like: Tensor, number: int) -> Tensor:
        generator = torch.Generator(logits.device).manual_seed(random.key(self.seed or 0, number))
        tokens = self.choose(logits, generator)
        if not isinstance(tokens, Tensor) or tokens.shape != like.shape or tokens.dtype != torch.int64:
            got = Spec.of(tokens) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise InputError(
                f"token {number}: got {got} from choose, expected {Spec.of(like)}: a token for every sequence. Return "
                "what logits.argmax(-1) or torch.multinomial(...).squeeze(-1) returns."
            )
        return tokens

    def end_sequences(self, tokens: Tensor, before: Tensor | None) -> Tensor:
        """Return the tokens, with `end` for every sequence that had ended `before`."""
        if self.end is None or before is None:
            return tokens
        return tokens.masked_fill(before == self.end, self.end)

    def is_over(self, tokens: Tensor) -> bool:
        """Return whether every sequence has ended."""
        return self.end is not None and bool((tokens == self.end).all())
