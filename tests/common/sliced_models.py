# SPDX-License-Identifier: Apache-2.0
"""Modules that declare a carry, and the plain loop over slices that trains them on one device."""

import copy
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy

WIDTH, WORDS = 8, 16
IGNORED = -100
"""A word that does not count."""


class CausalAttention(nn.Module):
    """The carry has the keys and values of all earlier tokens."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, carry):
        q, k, v = self.qkv(x).chunk(3, -1)
        if carry is not None:
            k, v = torch.cat([carry[0], k], 1), torch.cat([carry[1], v], 1)
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(~seen, -1e9)
        return self.out(scores.softmax(-1) @ v), (k, v)


class Recurrence(nn.Module):
    """A GRU cell by hand; the carry is its state, and its first one is a parameter."""

    def __init__(self):
        super().__init__()
        self.cell, self.gain = nn.GRUCell(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, carry):
        state = x.new_zeros(x.shape[0], WIDTH) if carry is None else carry
        found = []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            found.append(state)
        return torch.stack(found, 1) * self.gain, state


class Block(nn.Module):
    def __init__(self, mixer, dropout):
        super().__init__()
        self.norm, self.mixer, self.drop = nn.LayerNorm(WIDTH), mixer, nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x, carry):
        y, carry = self.mixer(self.norm(x), carry)
        x = x + self.drop(y)
        return x + self.mlp(x), carry


class LanguageModel(nn.Module):
    """Blocks of attention and recurrence in turn; `tied`: the head's weight is the embedding's."""

    def __init__(self, tied=False, dropout=0.0, blocks=4):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        mixers = [Recurrence() if k % 2 else CausalAttention() for k in range(blocks)]
        self.blocks = nn.ModuleList(Block(mixer, dropout) for mixer in mixers)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids, carry=None):
        x, left = self.embedding(ids), []
        for k, block in enumerate(self.blocks):
            x, own = block(x, None if carry is None else carry[k])
            left.append(own)
        return self.head(x), left


def word_loss(logits, words):
    return cross_entropy(logits.flatten(0, 1), words.flatten())


def count_words(inputs, words):
    """The number of words that count; the loss leaves out the others."""
    return (words != IGNORED).sum()


def pad(words, lengths):
    """The same words, of which those after each row's length don't count."""
    after = torch.arange(words.shape[1]) >= torch.tensor(lengths)[:, None]
    return words.masked_fill(after, IGNORED)


def make_model(**options):
    torch.manual_seed(0)
    return LanguageModel(**options), torch.randint(WORDS, (6, 9)), torch.randint(WORDS, (6, 9))


def tensors(carry):
    return [one for own in carry for one in (own if isinstance(own, tuple) else (own,))]


def as_leaves(carry):
    """The same carry as new leaves, at which the backward of a slice ends."""
    leaf = lambda one: one.detach().requires_grad_()  # noqa: E731
    return None if carry is None else [tuple(map(leaf, o)) if isinstance(o, tuple) else leaf(o) for o in carry]


def loop(model, x, y, microbatches, lengths, weight=None, context=nullcontext):
    """One device: slices forward in order, backward from the last; the loss, the outputs, and gradients by name.

    The forward of each slice runs in a `context()` of its own.
    """
    model, total, outputs = copy.deepcopy(model), 0, []
    pieces = [words for rows in y.tensor_split(microbatches) for words in rows.split(lengths, 1)]
    counts = [1.0] * len(pieces) if weight is None else [float(weight(None, words)) for words in pieces]
    scales = iter([torch.tensor(count / sum(counts)) for count in counts])
    for rows, wanted in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        carry, tape, own, weighs = None, [], [], []
        for ids, words in zip(rows.split(lengths, 1), wanted.split(lengths, 1), strict=True):
            taken = as_leaves(carry)
            scale = next(scales)
            with context():
                logits, carry = model(ids, carry=taken)
                value = word_loss(logits, words)
                if weight is None:
                    value = value / (microbatches * x.shape[1] / ids.shape[1])
                else:
                    value = (value * scale).masked_fill(scale == 0, 0.0)
            tape.append((value, taken, carry))
            weighs.append(scale)
            own.append(logits.detach())
        share = tape[0][0].detach()
        for value, _, _ in tape[1:]:
            share = share + value.detach()
        total, back = total + share, []
        for value, taken, given in reversed(tape) if any(weighs) else ():
            torch.autograd.backward([value, *(tensors(given) if back else [])], [torch.tensor(1.0), *back])
            back = [] if taken is None else [one.grad for one in tensors(taken)]
        outputs.append(torch.cat(own, 1))
    return total, torch.cat(outputs), {name: p.grad for name, p in model.named_parameters()}
