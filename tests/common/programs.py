# SPDX-License-Identifier: Apache-2.0
"""Random models that compute values on the side, such as masks and tables, for layers to use.

A model has four layers. Before each, it computes a few values, one operation each, and a layer uses some of those so
far. Which of them a stage can compute itself follows from the description alone, not from what fpipe finds: those that
depend on nothing but the batch, constants, and a buffer that nobody writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.common.cases import WIDTH, Case, mse

LAYERS = 4
IMPURE = ("weight", "moving", "random", "hidden")
ROOTS = ("leaf", "positions", "constant", "still", *IMPURE)
STEPS = {  # and the number of values that they are computed from
    "sum": 2,
    "cosine": 2,
    "view": 1,
    "in place": 1,
    "through a view": 2,
    "no_grad": 2,
    "autocast": 2,
    "function": 1,
}


@dataclass(frozen=True)
class Aside:
    """A value on the side: what makes it, from which earlier values, before which layer."""

    kind: str
    operands: tuple[int, ...]
    layer: int

    @property
    def stage(self) -> int:
        """The stage that makes it: a cut is right before a layer."""
        return max(0, self.layer - 1)


@dataclass(frozen=True)
class Program:
    """The description of a model: its values on the side, and which of them each layer uses."""

    asides: tuple[Aside, ...]
    uses: tuple[frozenset[int], ...]

    def is_pure(self, k: int) -> bool:
        """Return whether value `k` depends on nothing impure; the first hidden state is a leaf of the batch."""
        one = self.asides[k]
        impure = one.kind in IMPURE and (one.kind, one.layer) != ("hidden", 0)
        return not impure and all(map(self.is_pure, one.operands))

    @property
    def is_random(self) -> bool:
        return any(one.kind == "random" for one in self.asides)

    def readers(self, k: int) -> set[int]:
        """Return the stages that read value `k` after the one that makes it, if a cut is before each layer."""
        made = {one.stage for one in self.asides if k in one.operands}
        used = {layer for layer, values in enumerate(self.uses) if k in values}
        return {stage for stage in made | used if stage > self.asides[k].stage}

    @property
    def sent(self) -> int:
        """The number of values that must be sent: hidden states, and what a stage can't compute itself."""
        moving = {one.stage for one in self.asides if one.kind == "moving"} - {0}
        impure = [k for k in range(len(self.asides)) if not self.is_pure(k)]
        return LAYERS - 1 + len(moving) + sum(len(self.readers(k)) for k in impure)

    def repeated(self, stage: int) -> int:
        """The number of values that a stage uses, but other stages make, and which it can compute itself."""
        return sum(self.is_pure(k) and stage in self.readers(k) for k in self.uses[stage])


class Square(torch.autograd.Function):
    """A custom autograd function."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Sided(nn.Module):
    """The model of a program."""

    def __init__(self, program: Program):
        super().__init__()
        self.program = program
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.register_buffer("still", torch.rand(WIDTH))
        self.register_buffer("moving", torch.rand(WIDTH))
        self.constant = torch.rand(WIDTH)

    def forward(self, x, leaf):
        h, known = x, dict[int, Tensor]()
        self.moving.mul_(0.5)
        moving = self.moving * 1
        for i, layer in enumerate(self.layers):
            for k, one in enumerate(self.program.asides):
                if one.layer == i:
                    known[k] = self.make(one, [known[operand] for operand in one.operands], h, leaf, moving)
            h = layer(h)
            for k in sorted(self.program.uses[i]):
                h = h * (1 + known[k].float())
        return h

    def make(self, one: Aside, operands: list[Tensor], h: Tensor, leaf: Tensor, moving: Tensor) -> Tensor:
        roots = {
            "leaf": lambda: leaf * 2,
            "positions": lambda: torch.arange(WIDTH) / WIDTH,
            "constant": lambda: self.constant + 1,
            "still": self.still.exp,
            "weight": lambda: self.layers[0].weight.detach().mean(0),
            "moving": lambda: moving + 1,
            "random": lambda: nn.functional.dropout(torch.ones(WIDTH), 0.5),
            "hidden": lambda: h.detach().mean(-1, keepdim=True).sin(),
        }
        return roots[one.kind]() if one.kind in roots else derive(one.kind, operands[0], operands[-1])


def derive(kind: str, a: Tensor, b: Tensor) -> Tensor:
    """Return a value computed from one or two others."""
    if kind == "sum":
        return a + b
    if kind == "cosine":
        return torch.cos(a) * b
    if kind == "view":
        return a[..., :1]
    if kind == "in place":
        found = a * 0.5
        found += 1
        return found
    if kind == "through a view":
        found = a * 1
        found[..., :1].mul_(b[..., :1].mean())
        return found
    if kind == "no_grad":
        with torch.no_grad():
            return a.abs() * b
    if kind == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            found = a + b
            return (found @ torch.ones(found.shape[-1], WIDTH)).float() / WIDTH
    return Square.apply(a)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A random program."""
    asides: list[Aside] = []
    for layer in range(LAYERS):
        for _ in range(draw(st.integers(0, 3))):
            known = len(asides)
            kind = draw(st.sampled_from(ROOTS) if not known else st.sampled_from((*ROOTS, *STEPS, *STEPS)))
            operands = tuple(draw(st.integers(0, known - 1)) for _ in range(STEPS.get(kind, 0)))
            asides.append(Aside(kind, operands, layer))
    uses = [
        frozenset(draw(st.sets(st.sampled_from(before), max_size=3)) if before else ())
        for layer in range(LAYERS)
        for before in [[k for k, one in enumerate(asides) if one.layer <= layer]]
    ]
    return Program(tuple(asides), tuple(uses))


def sided(program: Program) -> Case:
    """Return the case of a program, cut before each layer after the first."""

    def batch(rows: int):
        return (torch.randn(rows, WIDTH), torch.rand(rows, WIDTH)), torch.randn(rows, WIDTH)

    cuts = ("layers.1", "layers.2", "layers.3")
    return Case(lambda: Sided(program), batch, mse, cuts, random=program.is_random)
