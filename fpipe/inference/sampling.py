# SPDX-License-Identifier: Apache-2.0
"""Choose the next token of every sequence from its logits.

A chooser is a function `(logits, generator) -> tokens`: `logits` is a float tensor [sequences, vocabulary], `tokens` an
int64 tensor [sequences]. It runs on the rank of the last stage; all other ranks receive its tokens. The generator is
seeded from the seed of the call and the number of the token, so a chooser that draws from it alone repeats its choices
on any ranks.

Runs once per generated token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Generator, Tensor

from fpipe.errors import InputError
from fpipe.tensors.arguments import require_arguments

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
