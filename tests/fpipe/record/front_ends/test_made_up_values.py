# SPDX-License-Identifier: Apache-2.0
"""Models that read values or make modules where fake tensors alone do not do: made-up values, custom functions."""

import pytest
import torch
from torch import nn

import fpipe
from schedules import one_f_one_b
from tests.common.cases import WIDTH
from tests.common.options import grouped
from tests.common.sizes import sampled

BACKWARDS = pytest.mark.parametrize("backward", ["autograd", "graph"])
HOW = one_f_one_b(ranks=2, microbatches=2)


def build(model, loss, backward="autograd", **options):
    torch.manual_seed(0)
    x, y = torch.rand(8, WIDTH), torch.rand(8, WIDTH)
    batch = {"example": (x,), "targets": y, "loss": loss}
    pipe = fpipe.pipeline(
        model,
        **grouped({"backward": backward, **batch}),
        schedule=HOW,
        cuts=["b"],
        **grouped(options),
    )
    return pipe, (x,), y


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(self.a(x))


def _with_numpy(outputs, targets):
    chosen = torch.as_tensor(torch.cdist(outputs, targets).detach().numpy().argmin(1))
    return (outputs - targets[chosen]).abs().mean()


def _with_lists(outputs, targets):
    costs = torch.cdist(outputs, targets).tolist()
    chosen = torch.tensor([min(range(len(row)), key=row.__getitem__) for row in costs])
    return (outputs - targets[chosen]).abs().mean()


def _with_a_guard(outputs, targets):
    if not (outputs.abs() >= 0).all():
        raise ValueError("negative")
    return (outputs - targets).abs().mean()


def _with_a_division(outputs, targets):
    return (outputs - targets).abs().sum() * (1.0 / (outputs > -1000).sum().item())


def _with_equality(outputs, targets):
    assert torch.equal(outputs, outputs.clone())
    assert torch.allclose(targets, targets + 0)
    return (outputs - targets).abs().mean()


def _with_a_best_index(outputs, targets):
    best = outputs.sum(1).topk(2).indices.tolist()
    assert best[0] != best[1]
    return (outputs[best] - targets[best]).abs().mean()


class InModel(nn.Module):
    """A loss inside the model, as its last module."""

    def __init__(self, loss):
        super().__init__()
        self.model, self.loss = Two(), Wrapped(loss)

    def forward(self, x, y):
        return self.loss(self.model(x), y)


class Wrapped(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, *args):
        return self.loss(*args)


@sampled(1)
@BACKWARDS
@pytest.mark.parametrize(
    "loss", [_with_numpy, _with_lists, _with_a_guard, _with_a_division, _with_equality, _with_a_best_index]
)
def test_code_that_may_branch_on_data_is_recorded_on_values_that_it_can_take(loss, backward):
    pipe, inputs, targets = build(model := Two(), loss, backward, unsplittable=["loss"])
    assert fpipe.verify(pipe, model, inputs, targets).eager
    whole, batch = InModel(loss), (*inputs, targets)
    options = {"schedule": HOW, "cuts": ["model.b"], "unsplittable": [Wrapped], "backward": backward}
    pipe = fpipe.pipeline(whole, example=batch, loss=lambda value: value, **grouped(options))
    assert fpipe.verify(pipe, whole, batch).eager


def test_a_guard_still_raises_in_a_step():
    def loss(outputs, targets):
        if (outputs > 5).any():
            raise ValueError("too large")
        if not (outputs.abs() >= 0).all():
            raise ValueError("negative")
        return (outputs - targets).abs().mean()

    pipe, (x,), targets = build(model := Two(), loss, unsplittable=["loss"])
    with pytest.raises(ValueError, match="too large"):
        fpipe.value_and_grad(pipe)(*pipe.init(model), (x * 1000,), targets)


class Factor(nn.Module):
    """A module that forwards make anew in every call."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([0.5]), requires_grad=False)
        self.inner = nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False)
        self.register_buffer("shift", torch.tensor(0.25))

    def forward(self, x):
        return self.inner(x) * self.factor + self.shift


@sampled(2)
@BACKWARDS
@pytest.mark.parametrize("named", [[], ["loss"]])
@pytest.mark.parametrize(
    "convert",
    [lambda made, x: made, lambda made, x: made.to(x.device), lambda made, x: made.double().to(x), nn.Module.float],
)
def test_a_module_that_a_loss_makes_may_be_converted(convert, named, backward):
    def loss(outputs, targets):
        made = Factor()
        made = convert(made, outputs) if convert is not nn.Module.float else made.float()
        return (made(outputs) - targets).abs().mean()

    pipe, inputs, targets = build(model := Two(), loss, backward, unsplittable=named)
    assert fpipe.verify(pipe, model, inputs, targets).eager


class Checked(torch.autograd.Function):
    """Doubles `x` if `times` increase, which its forward checks, else triples it."""

    @staticmethod
    def forward(ctx, x, times):
        steps = times[1:] - times[:-1]
        ctx.factor = 2.0 if (steps > 0).all() else 3.0
        return x * ctx.factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Between(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.a, self.b, self.times = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), times

    def forward(self, x):
        return self.b(Checked.apply(self.a(x), self.times(x)))


@sampled(2)
@BACKWARDS
@pytest.mark.parametrize(
    "times", [lambda x: torch.tensor([0.0, 0.5, 1.0]), lambda x: torch.tensor([1.0, 0.0]), lambda x: x.sum(1) + 1]
)
def test_a_custom_function_may_ask_about_constants_and_the_batch(times, backward):
    model = Between(times)
    pipe, (x,), y = build(model, nn.functional.mse_loss, backward)
    for batch in (x, x * torch.arange(1, 9).view(8, 1), x.flip(0) * torch.arange(8, 0, -1).view(8, 1)):
        assert fpipe.verify(pipe, model, (batch,), y).eager


class Inside(Between):
    def __init__(self):
        super().__init__(None)
        self.middle = Wrapped(lambda h: Checked.apply(h, h.sum(1)))

    def forward(self, x):
        return self.b(self.middle(self.a(x)))


@BACKWARDS
def test_a_custom_function_may_ask_about_anything_in_modules_that_run_as_python(backward):
    pipe, inputs, targets = build(model := Inside(), nn.functional.mse_loss, backward, unsplittable=["middle"])
    assert fpipe.verify(pipe, model, inputs, targets).eager


def test_a_question_in_a_custom_function_about_activations_is_refused_by_name():
    with pytest.raises(fpipe.CaptureError, match=r"middle \(Wrapped\).*depend on the parameter 'a\.weight'"):
        build(Inside(), nn.functional.mse_loss)


class Scaled(torch.Tensor):
    """Integers with a scale, as libraries of quantized weights keep them."""

    @staticmethod
    def __new__(cls, integers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=torch.float32)

    def __init__(self, integers, scale):
        self.integers, self.scale = integers, scale

    def __tensor_flatten__(self):
        return ["integers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].integers, args[0].scale)
        raise NotImplementedError(func)


def test_a_weight_that_holds_other_tensors_is_refused_by_name():
    model = Two()
    integers = torch.ones(WIDTH, WIDTH, dtype=torch.int8)
    model.a.weight = nn.Parameter(Scaled(integers, torch.tensor(0.25)), requires_grad=False)
    with pytest.raises(fpipe.CaptureError, match=r"a\.weight: got a tensor of class Scaled"):
        build(model, nn.functional.mse_loss)
