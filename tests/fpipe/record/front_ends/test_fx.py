# SPDX-License-Identifier: Apache-2.0
"""The front end `fx`: what its proxies do not see by themselves is kept, or refused by name."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from schedules import one_f_one_b, split_backward
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.layers import Average
from tests.common.loops import loop
from tests.common.running import build, run, run_reference
from tests.common.sizes import few


class Layer(nn.Module):
    """A linear layer with something done to what it returns."""

    def __init__(self, then):
        super().__init__()
        self.linear, self.then = nn.Linear(WIDTH, WIDTH), then
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.table = torch.linspace(0, 1, WIDTH)

    def forward(self, x):
        return self.then(self, self.linear(x))


def add_in_place(self, x):
    y = x
    y += 1  # x too, which a new tensor would leave as it was
    return x


def count(self, x):
    self.seen += x.detach().sum(0)
    return x + self.seen


def set_item(self, x):
    x = x * 1
    x[:, 0] = 3
    x[1:, 1:] *= self.table[1:]
    return x


def set_data(self, x):
    y = torch.zeros_like(x)
    y.data = x.detach() * 2
    return x + y


def sizes(self, x):
    rows, width = x.shape
    x = x.view(rows, width // 2, 2).transpose(1, 2).reshape(rows, -1)
    return x / width**0.5 + x.size(-1) * x.new_ones(rows, width)


def without_gradient(self, x):
    with torch.no_grad():
        scale = self.linear(x).abs().mean(-1, keepdim=True)
        with torch.enable_grad():
            shift = self.linear(x)
    return x * scale + shift


def constants(self, x):
    return x * self.table + torch.arange(WIDTH) * torch.ones(WIDTH)


def hook(self, x):
    x.register_hook(lambda grad: grad * 2)
    return x


def several(self, x):
    (a, b), index = x.chunk(2, dim=-1), x.argmax(-1, keepdim=True)
    values, _ = x.topk(2)
    return torch.cat([a, b], -1).gather(-1, index) * x + values.sum(-1, keepdim=True)


KEPT = [add_in_place, count, set_item, sizes, without_gradient, constants, several]


def case(*thens):
    return Case(lambda: nn.Sequential(*[Layer(then) for then in thens]), rows_of(), mse, ("1", "2", "3"))


@pytest.mark.parametrize("then", KEPT)
def test_fx_keeps_what_its_proxies_do_not_see(then):
    one = case(sizes, then, then, constants)
    how = split_backward(one_f_one_b(ranks=4, microbatches=3))
    built = _, model, inputs, targets = build(one, how, 6, capture="fx")
    got = run(*built)
    assert_same(got, loop(model, mse, inputs, targets, 3))
    assert_same(got, run_reference(*built))


@settings(max_examples=few(8))
@given(thens=st.lists(st.sampled_from(KEPT), min_size=4, max_size=4), microbatches=st.integers(1, 3))
def test_fx_keeps_layers_in_any_order(thens, microbatches):
    built = _, model, inputs, targets = build(
        case(*thens), one_f_one_b(ranks=4, microbatches=microbatches), 2 * microbatches, capture="fx"
    )
    assert_same(run(*built), loop(model, mse, inputs, targets, microbatches))


def draw(self, x):
    return x + torch.rand(WIDTH)


def branch(self, x):
    return x if x.sum() > 0 else -x


def branch_on_a_size(self, x):
    return x if x.shape[0] > 1 else -x


def lose_a_buffer(self, x):
    self.seen = self.seen + 1
    return x


def cast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        return self.linear(x).float()


REFUSED = {
    draw: "got random numbers that do not depend on an input",
    branch: ".*got a question about values",
    branch_on_a_size: 'the front end fx could not read it: symbolically traced variables.*choose capture="trace"',
    lose_a_buffer: "got a change of the buffer '2.seen'",
    cast: "got autocast to",
    hook: "got the tensor hook hook.<locals>.<lambda>",
    set_data: "got an assignment to .data",
}


@pytest.mark.parametrize("then", REFUSED)
def test_fx_refuses_what_it_cannot_keep(then):
    with pytest.raises(fpipe.CaptureError, match=r"module 2(\.linear)? \((Layer|Linear)\):? ?" + REFUSED[then]):
        build(case(sizes, sizes, then, sizes), one_f_one_b(ranks=4, microbatches=2), 4, capture="fx")


def double(self, x):
    self.table.mul_(2)
    return x * self.table


def add(self, x):
    self.table += 1
    return x * self.table


@pytest.mark.parametrize("change", [double, add])
def test_fx_refuses_a_change_that_does_not_depend_on_an_input(change):
    with pytest.raises(
        fpipe.CaptureError, match="in-place change of a tensor that is neither a parameter nor a buffer"
    ):
        build(case(change, sizes, sizes, sizes), one_f_one_b(ranks=4, microbatches=2), 4, capture="fx")


def test_the_loss_runs_as_it_is():
    """It may do what proxies cannot: branch on sizes, and have a backward of its own."""

    def loss(outputs, targets):
        return mse(outputs, targets) if len(outputs) == 2 else outputs.sum()

    one = Case(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]), rows_of(), loss, ("1", "2", "3"))
    built = _, model, inputs, targets = build(one, one_f_one_b(ranks=4, microbatches=3), 6, capture="fx")
    assert_same(run(*built), loop(model, loss, inputs, targets, 3))


def test_calls_of_traced_modules_are_recorded():
    """Also of those that were traced through: at each of them a stage can begin."""
    layers = nn.Sequential(nn.Sequential(Layer(sizes), Average()), Layer(sizes), nn.Sequential(Layer(sizes), nn.ReLU()))
    one = Case(lambda: layers, rows_of(), mse, ("0.1", "1", "2.0"))
    built = pipe, model, inputs, targets = build(one, one_f_one_b(ranks=4, microbatches=3), 6, capture="fx")
    calls = [(call.path, call.kind.__name__) for call in pipe.training.assembly.captured.calls]
    assert calls == [
        ("", "Sequential"),
        ("0", "Sequential"),
        ("0.0", "Layer"),
        ("0.0.linear", "Linear"),
        ("0.1", "Average"),
        ("1", "Layer"),
        ("1.linear", "Linear"),
        ("2", "Sequential"),
        ("2.0", "Layer"),
        ("2.0.linear", "Linear"),
        ("2.1", "ReLU"),
        ("loss", "function"),
    ]
    assert_same(run(*built), loop(model, mse, inputs, targets, 3))
