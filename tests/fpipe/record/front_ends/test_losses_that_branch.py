"""Losses, distributions and masks that look at values."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fpipe
from schedules import one_f_one_b
from tests.common.cases import WIDTH, mse
from tests.common.sizes import covering

BACKWARDS = pytest.mark.parametrize("backward", ["autograd", "graph"])
HOW = one_f_one_b(ranks=2, microbatches=2)


def build(model, loss=mse, backward="autograd", **options):
    torch.manual_seed(0)
    x, y = torch.rand(8, WIDTH), torch.rand(8, WIDTH)
    x[4:] *= 100  # the second microbatch goes the other way
    pipe = fpipe.pipeline(
        model, example=(x,), targets=y, loss=loss, schedule=HOW, cuts=["b"], backward=backward, **options
    )
    return pipe, (x,), y


class Two(nn.Module):
    """Two layers, and something between them."""

    def __init__(self, between=lambda x: x):
        super().__init__()
        self.a, self.between, self.b = nn.Linear(WIDTH, WIDTH), between, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(self.between(self.a(x)))


def branching(outputs, targets):
    each = (outputs - targets).square()
    return each.sum() if each.mean() > 1 else each.mean()


class Branching(nn.Module):
    def forward(self, outputs, targets):
        return branching(outputs, targets)


@BACKWARDS
@pytest.mark.parametrize(
    ("loss", "named"),
    [(branching, "loss"), (Branching(), "loss"), (Branching(), Branching)],
    ids=["function", "name", "class"],
)
def test_a_loss_named_in_unsplittable_may_read_values(loss, named, backward):
    pipe, inputs, targets = build(model := Two(), loss, backward, unsplittable=[named])
    assert fpipe.verify(pipe, model, inputs, targets).eager
    step, _ = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    halves = [branching(model(x), y) for x, y in zip(inputs[0].chunk(2), targets.chunk(2), strict=True)]
    assert torch.equal(step.loss, sum(half / 2 for half in halves))


def test_a_loss_that_reads_values_is_refused_with_the_repair():
    with pytest.raises(fpipe.CaptureError, match=r"unsplittable=\['loss'\]"):
        build(Two(), branching)


class Sampled(nn.Module):
    """Samples by a reparametrized normal distribution, whose arguments are looked at."""

    def forward(self, x):
        return torch.distributions.Normal(x, functional.softplus(x) + 0.1).rsample()


def density(x):
    return torch.distributions.Normal(x.mean(1, keepdim=True), x.square()).log_prob(x).clamp(-9)


@BACKWARDS
@pytest.mark.parametrize("between", [Sampled(), density], ids=["in a module", "in the model itself"])
def test_distributions_check_their_arguments_in_every_step(between, backward, monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # dynamo turns it off for good
    pipe, inputs, targets = build(model := Two(between), backward=backward)
    assert fpipe.verify(pipe, model, inputs, targets, seed=1).reference
    params, buffers = pipe.init(model)
    params["a.bias"] = torch.full((WIDTH,), torch.nan)
    with pytest.raises(ValueError, match="xpected"):
        fpipe.value_and_grad(pipe)(params, buffers, inputs, targets, seed=1)


class Columns(nn.Module):
    """Picks columns by their values, as many as there may be."""

    def __init__(self, pick):
        super().__init__()
        self.pick = pick

    def forward(self, x):
        mask = x.sum(0) > x.sum(0).mean()
        return x + self.pick(x, mask)


PICKS = {
    "columns": lambda x, mask: x[:, mask].sum(1, keepdim=True),
    "with others": lambda x, mask: x[0, ..., mask].sum() + x[:1, None, mask].mean(),
    "in two dimensions": lambda x, mask: x[None, x > mask].sum(),
    "masked_select": lambda x, mask: torch.masked_select(x, mask).sum(),
}


@covering(pick=PICKS, backward=["autograd", "graph"])
def test_an_unsplittable_module_may_index_by_a_mask_anywhere(pick, backward):
    pipe, inputs, targets = build(model := Two(Columns(pick)), backward=backward, unsplittable=["between"])
    assert fpipe.verify(pipe, model, inputs, targets).eager


def test_a_mask_computed_from_parameters_is_refused_with_the_name_of_the_module():
    with pytest.raises(fpipe.CaptureError, match=r"module between \(Columns\).*unsplittable"):
        build(Two(Columns(PICKS["columns"])))


class Looking(nn.Module):
    """Looks itself up by its address, which a copy has not."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def forward(self, x):
        return x * self.known[id(self)]


def test_an_error_that_has_nothing_to_do_with_values_is_not_blamed_on_control_flow():
    between = Looking()
    between.known[id(between)] = 2.0
    with pytest.raises(fpipe.CaptureError, match=r"module between \(Looking\): got KeyError.*through self") as caught:
        build(Two(between))
    assert "ontrol flow" not in str(caught.value)


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


@BACKWARDS
@pytest.mark.parametrize(
    "loss", [_with_numpy, _with_lists, _with_a_guard, _with_a_division, _with_equality, _with_a_best_index]
)
def test_code_that_may_branch_on_data_is_recorded_on_values_that_it_can_take(loss, backward):
    pipe, inputs, targets = build(model := Two(), loss, backward, unsplittable=["loss"])
    assert fpipe.verify(pipe, model, inputs, targets).eager
    whole, batch = InModel(loss), (*inputs, targets)
    options = {"schedule": HOW, "cuts": ["model.b"], "unsplittable": [Wrapped], "backward": backward}
    pipe = fpipe.pipeline(whole, example=batch, loss=lambda value: value, **options)
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
