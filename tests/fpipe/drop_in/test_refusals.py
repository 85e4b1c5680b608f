# SPDX-License-Identifier: Apache-2.0
"""What a drop-in module can't keep exact, it refuses, and leaves everything as it was."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fpipe
from fpipe.errors import InputError
from schedules import one_f_one_b, pipedream
from tests.common.drop_in import M, batches, make, net
from tests.common.sizes import sampled

X, Y = next(batches(1))


def grads(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same_grads(model, known):
    for name, p in model.named_parameters():
        assert (p.grad is None) == (known[name] is None), name
        assert p.grad is None or torch.equal(p.grad, known[name]), name


def test_a_schedule_that_updates_in_flight():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    given = {"loss": functional.mse_loss, "example": (x,), "targets": x}
    with pytest.raises(InputError, match=r"updates weights while microbatches are in flight.*fpipe.train_stream"):
        fpipe.Pipelined(model, schedule=pipedream(2, 1), **given)
    fpipe.Pipelined(model, schedule=one_f_one_b(2, 2), **given)  # the repair works


def test_a_second_backward():
    model = make()
    loss = model(X, targets=Y)
    loss.backward()
    known = grads(model)
    with pytest.raises(InputError, match="got a second call for the same loss, expected one"):
        loss.backward()
    assert_same_grads(model, known)


@sampled(2)
@pytest.mark.parametrize("join", [lambda a, b: a + b, lambda a, b: b + a, lambda a, b: a, lambda a, b: a / 2 + b])
def test_a_backward_of_an_earlier_forward(join):
    """Adding up the sums of two forwards would round differently than going on from the first one's."""
    model = make()
    loss = join(model(X, targets=Y), model(X.flip(0), targets=Y))
    with pytest.raises(InputError, match=r"got the loss of an earlier forward, .*before the next forward"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    model(X, targets=Y).backward()  # the repair still works
    model(X, targets=Y).backward()


@sampled(2)
@pytest.mark.parametrize("divide", [3.0, 0.7, float("inf")])
def test_a_cotangent_that_would_round(divide):
    model = make()
    loss = model(X, targets=Y)
    with pytest.raises(InputError, match=r"got a cotangent of .*, expected 1: .* only a power of two.*scale="):
        (loss / divide).backward()
    assert all(p.grad is None for p in model.parameters())
    loss.backward()  # the repair still works


def test_another_cotangent_than_the_sums_had():
    model = make()
    (model(X, targets=Y) / 2).backward()
    loss = model(X, targets=Y)
    with pytest.raises(InputError, match=r"got a cotangent of 1, expected 0.5, as in the previous backward"):
        loss.backward()
    (loss / 2).backward()


def test_a_cotangent_in_float16():
    model = fpipe.Pipelined(
        nn.Linear(6, 3).half(),
        loss=lambda out, y: functional.cross_entropy(out.float(), y),
        example=(X.half(),),
        targets=Y,
        schedule=one_f_one_b(1, M),
    )
    with pytest.raises(InputError, match=r"in float16, small numbers are lost.*scale=1024"):
        (model(X.half(), targets=Y) * 1024).backward()
    (model(X.half(), targets=Y, scale=1024.0) * 1024).backward()


def test_an_optimizer_step_between_forward_and_backward():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X, targets=Y).backward()
    loss = model(X, targets=Y)
    optimizer.zero_grad()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(InputError, match=r"written to after the forward.*optimizer.step\(\) after loss.backward"):
        loss.backward()


def test_an_early_optimizer_step_on_borrowed_gradients_shows():
    model = make()
    model(X, targets=Y).backward()
    model(X, targets=Y)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(p.isnan().all() for p in model.parameters())


def test_gradients_cleared_after_the_forward_added_to_them():
    model = make()
    model(X, targets=Y).backward()
    loss = model(X, targets=Y)
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    with pytest.raises(InputError, match=r"0.weight: got a .grad that was cleared.*zero_grad\(\) before the forward"):
        loss.backward()


def test_gradients_that_an_optimizer_has_used():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X, targets=Y).backward()
    optimizer.step()
    loss = model(X, targets=Y)
    with pytest.raises(InputError, match=r"0.weight: got a .grad that an optimizer has used but that was not cleared"):
        loss.backward()
    optimizer.zero_grad(set_to_none=False)
    loss.backward()


def test_a_forward_after_one_without_backward():
    model = make()
    model(X, targets=Y)  # nothing was added to
    model(X, targets=Y).backward()
    model(X, targets=Y)
    with pytest.raises(InputError, match="the loss of the last one had no backward"):
        model(X, targets=Y)
    model.zero_grad()
    model(X, targets=Y).backward()


def test_steps_of_weighted_microbatches():
    model = make(weight=lambda inputs, targets: len(targets))
    with pytest.raises(InputError, match="steps: got 2 for a pipeline with a weight, expected total"):
        model(X, targets=Y, steps=2)
    with pytest.raises(InputError, match="steps: got 2 and total=9, expected one of them"):
        model(X, targets=Y, steps=2, total=9)
    model(X, targets=Y, total=16).backward()


def test_a_rank_without_parameters():
    with pytest.raises(InputError, match=r"rank 1: got stages \[1\] without parameters, expected some on every rank"):
        make(nn.Sequential(nn.Linear(6, 3), nn.Tanh()), cuts=["1"])


def test_a_keyword_of_the_models_with_a_name_of_the_modules():
    class Scaled(nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale

    with pytest.raises(InputError, match=r"example: got arguments named \['scale'\], expected other names"):
        fpipe.Pipelined(
            Scaled(6, 3), loss=torch.mean, example={"x": X, "scale": torch.ones(8, 1)}, schedule=one_f_one_b(1, M)
        )


def test_a_batch_that_does_not_fit_leaves_the_gradients():
    model = make()
    (model(X, targets=Y) / 4).backward()
    known = grads(model)
    with pytest.raises(InputError):
        model(X[:, :5], targets=Y)
    assert_same_grads(model, known)


def evaluate_in_part(model):
    model.eval().get_submodule("3").train()
    model(X)


def hook(model):
    model.get_parameter("0.weight").register_hook(lambda grad: grad * 2)
    model(X, targets=Y)


def replace_module(model):
    model.add_module("2", nn.GELU())
    model(X, targets=Y)


FORWARDS = {
    "in train mode without gradients": (
        torch.no_grad()(lambda model: model(X, targets=Y)),
        r"train mode under no_grad.*Call model.eval\(\) first",
    ),
    "of a model in eval mode with a submodule in train mode": (
        evaluate_in_part,
        "3: got train mode inside a model in eval mode",
    ),
    "after a hook on a gradient": (hook, r"0.weight: got a hook on its gradient, .*expected none"),
    "after a module was replaced": (replace_module, r"module 3 of the model.*: got GELU, expected ReLU"),
    "of inputs by position and by keyword": (
        lambda model: model(X, mask=X, targets=Y),
        r"got 1 positional arguments and \['mask'\] by keyword, expected either",
    ),
    **{
        f"of {steps} steps": (
            lambda model, steps=steps: model(X, targets=Y, steps=steps),
            f"steps: got {steps}, expected a whole number above 0",
        )
        for steps in (0, 1.5, True)
    },
}


@sampled(2)
@pytest.mark.parametrize("what", FORWARDS)
def test_a_forward(what):
    call, words = FORWARDS[what]
    with pytest.raises(InputError, match=words):
        call(make(net(0.5)))


# --------------------------------------------------- One process refuses what several would, so that it predicts them


class Clipped(torch.optim.SGD):
    """Clips by the norm of all gradients that it has."""

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        for grad in grads:
            grad.mul_(1 / max(1.0, norm.item()))
        return super().step(closure)


def test_an_optimizer_that_combines_parameters():
    model = make()
    model(X, targets=Y).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(InputError, match="got Clipped, whose update of a parameter depends on other parameters"):
        Clipped(model.parameters(), lr=0.1).step()
    assert all(map(torch.equal, before, [p.detach() for p in model.parameters()]))
    torch.optim.AdamW(model.parameters()).step()


class Scaled(nn.Module):
    """A network with one parameter in double precision."""

    def __init__(self, net):
        super().__init__()
        self.net, self.scale = net, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.net(x) * self.scale.float()


def test_an_epsilon_from_the_dtype_of_another_parameter():
    model = make(Scaled(net()))
    model(X, targets=Y).backward()
    dtypes = "'torch.float32', 'torch.float64'"
    with pytest.raises(InputError, match=f"got Adafactor without an epsilon for parameters in .{dtypes}.,"):
        torch.optim.Adafactor(model.parameters()).step()
    torch.optim.Adafactor(model.parameters(), eps=(1e-16, 1e-3)).step()
    model = make(net())
    model(X, targets=Y).backward()
    torch.optim.Adafactor(model.parameters()).step()


class Talking(nn.Sequential):
    def answer(self, x):
        return self(x).argmax(-1)

    def count(self):
        return len(self)


def test_a_method_that_runs_the_model():
    model = Talking(nn.Linear(4, 4), nn.Linear(4, 2))
    x = torch.ones(4, 4)
    how = one_f_one_b(ranks=2, microbatches=2)
    whole = fpipe.Pipelined(model, loss=lambda out: out.sum(), example=(x,), schedule=how)
    with pytest.raises(InputError, match=r"answer: got a call of \w+ in it, .*fpipe.generate"):
        whole.answer(x)
    assert whole.count() == 2
    alone = fpipe.Pipelined(model, loss=lambda out: out.sum(), example=(x,), schedule=one_f_one_b(1, 2))
    assert alone.answer(x).shape == (4,)
