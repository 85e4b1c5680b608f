# SPDX-License-Identifier: Apache-2.0
"""Drive the executor with stages whose backward, and its halves, are your own; and test such a stage.

    python examples/own_backward.py

A stage may keep any values for its backward, and split it in any way. This one keeps only its input, computes the
activation again, and leaves the product for the weight half, with which a zero-bubble schedule fills its gaps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fpipe
from fpipe.testing import check_stage
from schedules import lower, zb_v

WIDTH = 16


def forward(weight: Tensor, buffers: Any, inputs: tuple[Tensor, ...], key: int) -> tuple[Tensor, Any, Any]:
    """Return `tanh(x @ weight)`; keep `x` and the weight."""
    (x,) = inputs
    return torch.tanh(x @ weight), buffers, (x, weight)


def backward_input(residuals: Any, cotangent: Tensor) -> tuple[tuple[Tensor], Any]:
    """Return the cotangent of `x`; the weight's gradient can wait."""
    x, weight = residuals
    inner = cotangent * (1 - torch.tanh(x @ weight) ** 2)
    return (inner @ weight.T,), (x, inner)


def backward_weight(deferred: Any) -> Tensor:
    """Return the gradient of the weight."""
    x, inner = deferred
    return x.T @ inner


def loss(weight: Tensor, inputs: tuple[Tensor, Tensor]) -> Tensor:
    h, targets = inputs
    return functional.mse_loss(h @ weight, targets)


def main() -> None:
    """Check the stage, run it under a schedule that splits backwards, and compare with autograd."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = fpipe.Stage(forward, backward_input=backward_input, backward_weight=backward_weight, name="hidden")
    check_stage(hidden, torch.randn(4, 4, dtype=torch.float64), (), (torch.randn(3, 4, dtype=torch.float64),))
    stages = fpipe.connect_stages([hidden, hidden, hidden, loss])
    program = lower(zb_v(ranks=2, microbatches=8), stages.graph)
    params = [torch.randn(WIDTH, WIDTH) / 4 for _ in range(4)]
    x, y = torch.randn(2, 32, WIDTH)
    out, grads = fpipe.execute(program, stages, params, [()] * 4, (x,), y)

    leaves = [p.clone().requires_grad_() for p in params]
    for rows, targets in zip(x.chunk(8), y.chunk(8), strict=True):
        h = rows
        for weight in leaves[:3]:
            h = torch.tanh(h @ weight)
        (loss(leaves[3], (h, targets)) / 8).backward()
    close = [torch.allclose(g, leaf.grad, rtol=1e-4, atol=1e-6) for g, leaf in zip(grads, leaves, strict=True)]
    print(f"loss {out.loss:.4f}; {sum(close)} of {len(close)} gradients equal those of autograd, up to rounding")


if __name__ == "__main__":
    main()
