# SPDX-License-Identifier: Apache-2.0
"""Layers as functions of a weight and a bias."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fpipe
from schedules import one_f_one_b, split_backward
from tests.common.cases import WIDTH, mse


class Written(nn.Module):
    """A part of a model with a weight and a bias, whose forward is a function."""

    def __init__(self, function):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def hooked(m, x):
    turned = m.weight.t()
    turned.register_hook(lambda grad: grad * 0.5)
    return x @ turned + m.bias


def under_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return functional.linear(x, m.weight, m.bias).float()


def with_node(m, x):
    y = functional.linear(x, m.weight, m.bias)
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda grads: tuple(grad * 0.5 for grad in grads))
    return y


def checkpointed(m, x):
    def body(x):
        return functional.linear(x, m.weight, m.bias).sin()

    return checkpoint(body, x, use_reentrant=False)


WRITTEN = {
    "linear": lambda m, x: functional.linear(x, m.weight, m.bias),
    "several rows": lambda m, x: functional.linear(x.view(-1, 1, WIDTH), m.weight, m.bias).view(-1, WIDTH),
    "autocast": under_autocast,
    "twice": lambda m, x: functional.linear(functional.linear(x, m.weight, m.bias), m.weight),
    "also in a norm": lambda m, x: functional.linear(x, m.weight, m.bias) + m.weight.square().mean(),
    "scaled": lambda m, x: functional.linear(x, m.weight * 2, m.bias),
    "norm": lambda m, x: functional.layer_norm(x, (WIDTH,), None, m.bias) @ m.weight,
    "factor": lambda m, x: torch.addmm(m.bias, x, m.weight, alpha=2),
    "checkpoint": checkpointed,
    "hook": hooked,
    "node": with_node,
    "convolution": lambda m, x: functional.conv1d(x[:, :, None], m.weight[:, :, None], m.bias)[:, :, 0],
    "unused": lambda m, x: functional.linear(x, m.weight),
    "dropout": lambda m, x: functional.linear(x.relu_(), m.weight, m.bias),
}


def build(function, backward="autograd", batches=3, stages=3, how=None):
    """Return a pipeline of one such layer per stage, the first without differentiable input; model, inputs, targets."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Written(function) for _ in range(stages)])
    inputs, targets = (torch.randn(2 * batches, WIDTH),), torch.randn(2 * batches, WIDTH)
    how = how or split_backward(one_f_one_b(ranks=stages, microbatches=batches))
    cuts = [str(k) for k in range(1, stages)]
    pipe = fpipe.pipeline(
        model,
        example=inputs,
        targets=targets,
        loss=mse,
        schedule=how,
        cuts=cuts,
        gradients=fpipe.Gradients(backward=backward),
    )
    return pipe, model, inputs, targets


def gelu(module, x):
    """Return the GELU of a linear layer, whose backward needs an activation, too."""
    return functional.gelu(functional.linear(x, module.weight, module.bias))
