"""Weights that are computed before each forward, and held in attributes: the old weight_norm, and pruning."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, weight_norm

import fpipe
from schedules import one_f_one_b, zb_v
from tests.common.cases import WIDTH, mse
from tests.common.sizes import covering


def normed():
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and used by speech models
        for layer in model:
            weight_norm(layer)
    return model


def pruned():
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    for layer in model:
        prune.l1_unstructured(layer, "weight", 0.5)
        prune.random_unstructured(layer, "weight", 0.2)
    return model


@covering(
    called={"new": False, "called before": True},
    make=[normed, pruned],
    how=[one_f_one_b(ranks=2, microbatches=2), zb_v(ranks=2, microbatches=2)],
    backward=["autograd", "graph"],
)
def test_weights_computed_before_each_forward_are_exact(make, called, how, backward):
    torch.manual_seed(0)
    model, x, y = make(), torch.rand(4, WIDTH), torch.rand(4, WIDTH)
    if called:
        mse(model(x), y).backward()
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, stages=how.stages, backward=backward)
    assert fpipe.verify(pipe, model, (x,), y).eager
    params, buffers = pipe.init(model)
    params = {name: p + 0.1 for name, p in params.items()}
    _, grads = fpipe.value_and_grad(pipe)(params, buffers, (x,), y)
    _, expected = fpipe.reference(pipe)(params, buffers, (x,), y)
    assert all(torch.equal(grads[name], expected[name]) for name in params)
    assert any(name.endswith(("weight_v", "weight_orig")) for name in grads)


class Stale(nn.Module):
    """Uses a tensor that was computed from a parameter once."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = self.linear.weight.sum() * 1.0

    def forward(self, x):
        return self.linear(x) * self.scale


def test_a_stale_tensor_with_a_gradient_is_refused():
    x = torch.rand(4, WIDTH)
    with pytest.raises(fpipe.CaptureError, match="requires a gradient"):
        fpipe.pipeline(Stale(), example=(x,), loss=torch.mean, schedule=one_f_one_b(ranks=1, microbatches=2))
