# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in the sizes of DeepSeek-V3, whose Python asks for no value.

Each expert has room for as many tokens; a token that finds none goes to a slot that nobody reads. So shapes do not
depend on data, the model is recorded as it is, and it can be proved on the meta device. Queries, keys and values go
through narrow latents; rotary positions and the router's bias are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf


class Attention(nn.Module):
    """Causal attention; queries go through one latent, keys and values through another."""

    def __init__(self, width: int, heads: int, head: int, latents: tuple[int, int]) -> None:
        super().__init__()
        self.heads, self.head = heads, head
        self.q = nn.Sequential(*self._through(width, latents[0], heads * head))
        self.kv = nn.Sequential(*self._through(width, latents[1], 2 * heads * head))
        self.out = nn.Linear(heads * head, width, bias=False)

    def _through(self, width: int, latent: int, out: int) -> list[nn.Module]:
        return [nn.Linear(width, latent, bias=False), nn.RMSNorm(latent), nn.Linear(latent, out, bias=False)]

    def forward(self, x: Tensor) -> Tensor:
        """Return what each token reads of those before it."""
        q = self.q(x).unflatten(-1, (self.heads, self.head)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.heads, self.head)).permute(2, 0, 3, 1, 4)
        return self.out(nnf.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A feed-forward layer with a gate."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        return self.down(nnf.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Send each token to `chosen` of the experts, each of which has room for `capacity` tokens; one more takes all."""

    def __init__(self, width: int, inner: int, experts: int, chosen: int, capacity: int) -> None:
        super().__init__()
        self.experts, self.chosen, self.capacity = experts, chosen, capacity
        self.router, self.shared = nn.Linear(width, experts, bias=False), Gated(width, inner)
        self.gate, self.up = (nn.Parameter(torch.randn(experts, width, inner) / width) for _ in range(2))
        self.down = nn.Parameter(torch.randn(experts, inner, width) / inner)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted outputs of the experts, and of the shared one."""
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).sigmoid().topk(self.chosen, -1)
        sent = (expert.flatten()[:, None] == torch.arange(self.experts, device=x.device)).long()
        place = ((sent.cumsum(0) - 1) * sent).sum(-1)  # of each token, in its expert
        nowhere = self.experts * self.capacity
        slot = torch.where(place < self.capacity, expert.flatten() * self.capacity + place, nowhere)
        room = tokens.new_zeros(nowhere + 1, x.shape[-1])
        rows = room.index_copy(0, slot, tokens.repeat_interleave(self.chosen, 0))[:-1].unflatten(0, (self.experts, -1))
        done = torch.bmm(nnf.silu(torch.bmm(rows, self.gate)) * torch.bmm(rows, self.up), self.down).flatten(0, 1)
        back = nnf.pad(done, (0, 0, 0, 1))[slot].unflatten(0, (-1, self.chosen))
        share = weight / weight.sum(-1, keepdim=True)
        return (back * share[..., None]).sum(1).unflatten(0, x.shape[:2]) + self.shared(x)


class Block(nn.Module):
    """Attention and a feed-forward layer, both residual."""

    def __init__(self, attention: Attention, feed: nn.Module, width: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.feed = nn.RMSNorm(width), attention, nn.RMSNorm(width), feed

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Mixture(nn.Module):
    """Embedding, `layers` blocks, of which the first `dense` have no experts, and a head."""

    def __init__(
        self,
        words: int = 129280,
        width: int = 7168,
        layers: int = 61,
        dense: int = 3,
        widest: int = 18432,
        heads: int = 128,
        head: int = 128,
        latents: tuple[int, int] = (1536, 512),
        **experts: Any,
    ) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, width), nn.RMSNorm(width)
        feeds = [Gated(width, widest) if k < dense else Experts(width, **experts) for k in range(layers)]
        self.blocks = nn.ModuleList(Block(Attention(width, heads, head, latents), feed, width) for feed in feeds)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of the next word."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
