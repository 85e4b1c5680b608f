# SPDX-License-Identifier: Apache-2.0
"""A language model of our own, its decoder as users write it, and the plain loop that generates without a cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.common.generators import seeded

VOCABULARY = 32


def texts(rows: int, width: int, seed: int = 1) -> Tensor:
    """Prompts, always the same."""
    return torch.randint(1, VOCABULARY, (rows, width), generator=seeded(seed))


class Average(nn.Module):
    """A language model of our own: each word sees the mean of all words so far, which it reads from a cache if given.

    The cache is a float tensor [rows, length, width] of the embeddings of all words so far, of which `start` are known.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.middle = nn.Linear(width, width)
        self.mix = Mix()
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids, cache=None, start=None):
        return self.head(self.mix(torch.tanh(self.middle(self.embed(ids))), cache, start))


class Mix(nn.Module):
    def forward(self, x, cache=None, start=None):
        places = torch.arange(x.shape[1])
        if cache is not None:
            places = places + start
            cache.index_copy_(1, places, x)
            x = cache
        seen = (torch.arange(x.shape[1]) <= places[:, None]).to(x.dtype)
        return (seen / seen.sum(-1, keepdim=True)) @ x


class AverageDecoder(nn.Module):
    """A decoder as users write it."""

    def __init__(self, model, sequences, length):
        super().__init__()
        self.model = model
        self.register_buffer("cache", torch.zeros(sequences, length, model.middle.out_features))

    def forward(self, ids, start):
        return self.model(ids, self.cache, start)[:, -1]


def word_loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate_from_scratch(model, text, count) -> Tensor:
    """The likeliest tokens, each from a forward over the whole text so far."""
    width = text.shape[1]
    for _ in range(count):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    return text[:, width:]
