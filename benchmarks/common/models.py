# SPDX-License-Identifier: Apache-2.0
"""The model that is measured: a GPT as a sequence of layers."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and an MLP, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add both parts to `x`."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feed(x)


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, words: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens and add the positions."""
        return self.tokens(tokens) + self.positions.weight


def gpt(blocks: int, width: int, heads: int, words: int, length: int) -> nn.Sequential:
    """Return embedding, blocks, and an untied head."""
    layers = [Block(width, heads) for _ in range(blocks)]
    return nn.Sequential(Embedding(words, width, length), *layers, nn.Linear(width, words, bias=False))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all positions."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def starts(blocks: int, stages: int) -> list[int]:
    """Return the layers of a `gpt` at which stages after the first begin, with equally many blocks in each.

    >>> starts(blocks=8, stages=4)
    [3, 5, 7]
    """
    return [1 + blocks * stage // stages for stage in range(1, stages)]


def parts(model: nn.Sequential, cuts: list[int]) -> list[nn.Sequential]:
    """Return the stages of a model cut before these layers."""
    layers = list(model)
    return [nn.Sequential(*layers[start:end]) for start, end in zip([0, *cuts], [*cuts, len(layers)], strict=True)]
