# SPDX-License-Identifier: Apache-2.0
"""Numbers that change from step to step: the model is not recorded again, and every bit is as in the plain loop."""

import logging
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.record.numbers import compute, number_of
from schedules import one_f_one_b, zb_h1
from tests.common.options import grouped
from tests.common.sizes import sampled

BACKWARDS = [{"schedule": one_f_one_b(2, 2)}, {"schedule": one_f_one_b(2, 2), "backward": "graph"}]
BACKWARDS += [{"schedule": zb_h1(2, 2)}]
NAMES = ["autograd", "graph", "split"]


class Net(nn.Module):
    """Applies `use(h, n, f, x)` after both stages' layers."""

    def __init__(self, use, dtype=torch.float32):
        super().__init__()
        self.a, self.b, self.use = nn.Linear(4, 4, dtype=dtype), nn.Linear(4, 4, dtype=dtype), use

    def forward(self, x, n, f):
        return self.use(self.b(self.use(self.a(x), n, f, x)), n, f, x)


def square(output):
    return output.float().square().mean()


def steps(use, how=BACKWARDS[0], dtype=torch.float32, loss=square, numbers=((3, 0.5), (5, 0.25), (0, 1.75), (2, 0.1))):
    """Verify a step for each pair of numbers, the first of which is in the example; return the number of captures."""
    torch.manual_seed(0)
    model = Net(use, dtype)
    n, f = numbers[0]
    x = torch.randn(8, 4, dtype=dtype)
    pipe = fpipe.pipeline(model, example={"x": x, "n": n, "f": f}, loss=loss, cuts=["b"], **grouped(how))
    for n, f in numbers:
        found = fpipe.verify(pipe, model, {"x": torch.randn(8, 4, dtype=dtype), "n": n, "f": f})
        assert found.eager
    return len(pipe.memo.recordings)


def _in_place(h, n, f, x):
    h = h * 1
    h += n
    h *= f
    h[..., 0] = f
    return h


def _tensors(h, n, f, x):
    index = (torch.arange(4) * n) % 4
    h = h * torch.tensor(f) + torch.tensor(n, dtype=h.dtype) + torch.full((4,), f, dtype=h.dtype)
    return h[:, index] + torch.full_like(h, n) + (torch.arange(4) > n) + (torch.arange(4) * f).to(h.dtype)


def _nonlinear(h, n, f):
    return (h * f + n).sin() * f


def _again(h, n, f):
    return checkpoint(_nonlinear, h, n, f + 1, use_reentrant=False) * n


COMPUTING = {
    "operators": lambda h, n, f, x: (f - h * n + f) / (n + 1) - n / (h.abs() + f),
    "remainders": lambda h, n, f, x: h % (n + 1.5) + h.detach() // (f + 1),
    "alpha": lambda h, n, f, x: torch.add(h, h.tanh(), alpha=f) - torch.sub(h, h, alpha=n),
    "clamps": lambda h, n, f, x: h.clamp(-f, n + 1).clamp(max=f * 3),
    "masks": lambda h, n, f, x: torch.where(h < f, h.masked_fill(h > n, f), n),
    "Python's arithmetic": lambda h, n, f, x: (
        h * (0.9**n) + (n // 2 - divmod(7, n + 1)[1] + abs(-f) + f**2 + round(f) + round(f, 1))
    ),
    "math": lambda h, n, f, x: h * math.sqrt(n) + math.cos(math.pow(f, 2) * math.pi),
    "built-in functions": lambda h, n, f, x: h * sum([n, f]) / max(f, 0.001),
    "in place": _in_place,
    "new tensors": _tensors,
    "a flag": lambda h, n, f, x: h * 2 if n > 100 else h * n,
    "an integer from the batch": lambda h, n, f, x: h / ((x > 0).sum().item() + 1),
    "a float from the batch": lambda h, n, f, x: h / x.abs().max().item() * (1 - f),
    "a checkpoint": lambda h, n, f, x: (
        checkpoint(_nonlinear, h, n, f, use_reentrant=False) + checkpoint(_again, h, n, f, use_reentrant=False)
    ),
    "types": lambda h, n, f, x: h * n if type(n) is int and isinstance(f, float) else h,
}


@sampled(3)
@pytest.mark.parametrize("how", BACKWARDS, ids=NAMES)
@pytest.mark.parametrize("name", COMPUTING)
def test_numbers_that_code_only_computes_with_are_inputs_of_the_record(name, how):
    assert steps(COMPUTING[name], how) == 1


def test_numbers_are_those_of_the_step_where_a_backward_runs_a_function_again():
    assert steps(COMPUTING["a checkpoint"], BACKWARDS[2]) == 1
    assert (
        steps(lambda h, n, f, x: checkpoint(_nonlinear, h, n, f, use_reentrant=True), BACKWARDS[2]) == 4
    )  # whole calls


@sampled(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["operators", "alpha", "masks", "in place"])
def test_numbers_are_rounded_as_python_numbers_are(name, dtype):
    assert steps(COMPUTING[name], dtype=dtype) == 1


def test_numbers_in_targets_and_losses(caplog):
    def loss(output, target):
        return (output - target["y"]).abs().sum() / target["count"] / max((target["y"] > 0).sum().item(), 1)

    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4), torch.randn(8, 4)
    batch = {"example": (x,), "targets": {"y": y, "count": 8}, "loss": loss}
    pipe = fpipe.pipeline(model, **grouped(batch), schedule=one_f_one_b(2, 2))
    for count in range(1, 9):
        assert fpipe.verify(pipe, model, (x,), {"y": torch.randn(8, 4), "count": count}).eager
    assert len(pipe.memo.recordings) == 1
    assert not caplog.records


DECIDING = {
    "a loop": lambda h, n, f, x: [h := h.tanh() for _ in range(n)][-1] if n else h,
    "a shape": lambda h, n, f, x: h * torch.ones(n + 1, 1).sum(),
    "an index": lambda h, n, f, x: h * h[..., : n + 1].sum(),
    "a list": lambda h, n, f, x: h * [1, 2, 3, 4, 5, 6][n],
    "text": lambda h, n, f, x: h * float(f"{f:.3f}"),
    "an integer": lambda h, n, f, x: h * int(n),
    "a power": lambda h, n, f, x: h.abs() ** f,
    "a constant in a list": lambda h, n, f, x: h * torch.tensor([n, 1, 2, 3]),
    "numpy": lambda h, n, f, x: h * torch.as_tensor(__import__("numpy").float32(2) * f),
}


@sampled(2)
@pytest.mark.parametrize("how", BACKWARDS, ids=NAMES)
@pytest.mark.parametrize("name", DECIDING)
def test_numbers_that_decide_are_part_of_the_kind_of_batch(name, how):
    assert steps(DECIDING[name], how) == 4


def test_only_the_truth_of_a_comparison_is_part_of_the_kind_of_batch():
    def use(h, n, f, x):
        return h * 2 if n > 2 and f < 1 else h

    assert steps(use, numbers=[(n, 0.5) for n in range(6)]) == 2


def test_modules_that_run_as_python_get_python_numbers():
    class Inner(nn.Module):
        def forward(self, h, n):
            return h * n if float(h.sum()) > 0 else h / n

    class Outer(Net):
        def __init__(self):
            super().__init__(None)
            self.inner = Inner()

        def forward(self, x, n):
            return self.b(self.inner(self.a(x), n))

    torch.manual_seed(0)
    model, x = Outer(), torch.randn(8, 4)
    how = {"schedule": one_f_one_b(2, 2), "cuts": ["b"], "unsplittable": ["inner"]}
    pipe = fpipe.pipeline(model, example={"x": x, "n": 2}, loss=square, **grouped(how))
    for n in range(1, 5):
        assert fpipe.verify(pipe, model, {"x": torch.randn(8, 4), "n": n}).eager


def test_an_output_that_is_a_number_is_part_of_the_kind_of_batch():
    class Counting(Net):
        def forward(self, x, n):
            return self.b(self.a(x)) * n, n + 1

    model, x = Counting(None), torch.randn(8, 4)
    pipe = fpipe.pipeline(model, example={"x": x, "n": 2}, loss=lambda out: square(out[0]), schedule=one_f_one_b(2, 2))
    params, buffers = pipe.init(model)
    evaluate = fpipe.evaluate(pipe)
    for n in (2, 5):
        assert evaluate(params, buffers, {"x": x, "n": n}).outputs[1] == n + 1


@sampled(1)
@pytest.mark.parametrize("capture", ["export", "fx"])
def test_front_ends_that_read_graphs_get_python_numbers(capture):
    class Scaled(nn.Module):
        def forward(self, x, n):
            return x * n

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.s, self.b = nn.Linear(4, 4), Scaled(), nn.Linear(4, 4)

        def forward(self, x, n):
            return self.b(self.s(self.a(x), n))

    model, x = Two(), torch.randn(8, 4)
    how = {"schedule": one_f_one_b(2, 2), "cuts": ["b"], "capture": capture}
    pipe = fpipe.pipeline(model, example={"x": x, "n": 2}, loss=square, **grouped(how))
    for n in (2, 3):
        assert fpipe.verify(pipe, model, {"x": x, "n": n}).eager


@sampled(1)
@pytest.mark.parametrize(
    ("use", "leaf"),
    [
        (DECIDING["a loop"], "inputs['n']"),
        (DECIDING["a power"], "inputs['f']"),
        (lambda h, n, f, x: h * h[x > f].sum(), "inputs['x']"),
        (lambda h, n, f, x: h * int((x > f).sum()), "inputs['x']"),
    ],
)
def test_a_model_that_is_recorded_again_and_again_is_warned_of_once(use, leaf, caplog):
    caplog.set_level(logging.WARNING, logger="fpipe")
    steps(use, numbers=[(n + 1, 0.5 + n) for n in range(4)])
    (record,) = caplog.records
    assert record.name.startswith("fpipe")
    assert leaf in record.getMessage()
    assert "pass it as a tensor" in record.getMessage()


def test_other_leaves_that_make_the_model_be_recorded_again_are_named(caplog):
    caplog.set_level(logging.WARNING, logger="fpipe")
    model, x = nn.Linear(4, 4), torch.randn(8, 4)

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = model

        def forward(self, x, name):
            return self.a(x)

    pipe = fpipe.pipeline(Named(), example={"x": x, "name": "a"}, loss=square, schedule=one_f_one_b(1, 2))
    params, buffers = pipe.init(Named())
    for name in "bcde":
        fpipe.value_and_grad(pipe)(params, buffers, {"x": x, "name": name})
    (record,) = caplog.records
    assert "inputs['name']" in record.getMessage()


def test_arithmetic_is_pythons():
    large = torch.tensor(2**62)
    with pytest.raises(ValueError, match="Overflow"):
        compute("mul", large, 4)
    assert compute("truediv", large, 3).item() == 2**62 / 3
    assert compute("pow", torch.tensor(3), 4).item() == 81
    with pytest.raises(ZeroDivisionError):
        compute("truediv", 1.0, torch.tensor(0))


def test_a_number_looks_like_one():
    n = number_of(torch.tensor(3))
    assert isinstance(n, int)
    assert not isinstance(n, float)
    assert (n + 1).tensor.item() == 4
    assert [*range(n)] == [0, 1, 2]
    assert (n, str(n), {n: 1}[3], n.bit_length()) == (3, "3", 1, 2)
