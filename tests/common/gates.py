# SPDX-License-Identifier: Apache-2.0
"""A row of gates, each of which asks the batch which way to go: data decide which parameters have gradients."""

import torch
from torch import nn

import fpipe
from tests.common.cases import WIDTH, mse
from tests.common.options import grouped

BRANCHES = {  # what a gate does if the answer is no, where it uses its first layer if it is yes
    "other": lambda gate, x: gate.b(x),
    "nothing": lambda gate, x: x,
    "residual": lambda gate, x: x + 1,
    "detached": lambda gate, x: x.detach() * 2,
    "constant": lambda gate, x: torch.ones_like(x),
    "frozen": lambda gate, x: x * gate.scale,
    "negative": lambda gate, x: torch.relu(x - 3) * -0.5,
    "dead": lambda gate, x: gate.b(x.detach()) * -0.0,
}


class Gate(nn.Module):
    def __init__(self, kind, counting):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), -0.5), requires_grad=False)
        self.kind = kind
        if counting:
            self.register_buffer("count", torch.zeros(()))

    def forward(self, x, answers):
        if answers[0] > 0:
            if hasattr(self, "count"):
                self.count.add_(1)
            return -torch.relu(self.a(x))
        return BRANCHES[self.kind](self, x)


class Marked(nn.Module):
    """Three linears, the second of which only a microbatch with a mark goes through."""

    def __init__(self):
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x, marks):
        x = self.first(x).tanh()
        if marks.any():
            x = self.rare(x)
        return self.last(x)


class Rare(nn.Module):
    """A layer that only large values go through."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) if x.detach().max() > 0.9 else x


class Gates(nn.Module):
    def __init__(self, kinds, ties, residual, counting=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gates = nn.ModuleList([Gate(kind, counting) for kind in kinds])
        self.between = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in kinds])
        self.residual = residual
        for one, other in ties:
            self.gates[other].a.weight = self.gates[one].b.weight

    def forward(self, x, answers):
        x = self.first(x)
        for k, (gate, linear) in enumerate(zip(self.gates, self.between, strict=True)):
            y = linear(gate(x, answers[:, k]))
            x = x + y if self.residual else y
        return self.last(x)


def batch(answers, seed=0):
    """Inputs and targets, two rows for each microbatch; `answers` say per microbatch which way each gate goes."""
    torch.manual_seed(seed)
    x = torch.randn(2 * len(answers), WIDTH)
    said = torch.tensor(answers, dtype=torch.float32).repeat_interleave(2, 0) - 0.5
    return (x, said), torch.randn(2 * len(answers), WIDTH)


def build(model, how, inputs, targets, **options):
    cuts = [name for k in range(len(model.gates)) for name in (f"gates.{k}", f"between.{k}")]
    step = len(cuts) // (how.stages - 1) if how.stages > 1 else 1
    chosen = cuts[::step][: how.stages - 1]
    return fpipe.pipeline(
        model,
        example=inputs,
        targets=targets,
        loss=mse,
        schedule=how,
        cuts=chosen,
        **grouped({"unsplittable": Gate, **options}),
    )
