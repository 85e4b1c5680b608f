# SPDX-License-Identifier: Apache-2.0
"""Leaves of a batch may share memory as long as the model writes to none of them; else they are refused by name."""

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.pipelines.memory import has_overlap
from schedules import one_f_one_b
from tests.common.cases import WIDTH, mse
from tests.common.comparison import Result, assert_same
from tests.common.loops import loop
from tests.common.sizes import sampled

HOW = one_f_one_b(ranks=2, microbatches=2)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), function

    def forward(self, *given):
        return self.last(torch.tanh(self.first(self.function(*given))))


def doubling(x, *others):
    x.mul_(2)
    return sum(others, start=x)


def through_a_view(x, *others):
    x[:, 1:].view(-1, WIDTH - 1)[0] = 3
    return sum(others, start=x)


def reading(x, *others):
    return sum(others, start=x * 2)


def build(function, inputs, targets, dims=0, backward="autograd"):
    model = Net(function)
    return model, fpipe.pipeline(
        model,
        example=inputs,
        targets=targets,
        loss=mse,
        schedule=HOW,
        cuts=["last"],
        microbatching=fpipe.Microbatching(batch_dims=dims),
        gradients=fpipe.Gradients(backward=backward),
    )


def twice(x):
    return x, x


def windows(x):
    return torch.randn(WIDTH + 3).as_strided((4, WIDTH), (1, 1)), x


def rows_of_others(x):
    long = torch.randn(5, WIDTH)
    return long[:-1], long[1:]


def one_array(x):
    array = numpy.ones((4, WIDTH), dtype=numpy.float32)
    return torch.from_numpy(array), torch.from_numpy(array)


SHARED = {  # inputs, targets, how they are cut, and whom the error names
    "one tensor twice": lambda x, y: (twice(x), y, 0, r"inputs\[0\]: got memory that it shares with inputs\[1\]"),
    "a view": lambda x, y: ((x, x.view(2, 2, WIDTH).flatten(0, 1)), y, 0, r"shares with inputs\[1\]"),
    "the target": lambda x, y: ((x, y), x, 0, r"inputs\[0\]: got memory that it shares with targets and that"),
    "shifted rows": lambda x, y: (rows_of_others(x), y, 0, r"shares with inputs\[1\]"),
    "two tensors of an array": lambda x, y: (one_array(x), y, 0, r"shares with inputs\[1\]"),
    "windows": lambda x, y: (windows(x), y, 0, r"inputs\[0\]: got microbatches that share memory"),
    "by a function": lambda x, y: (
        (x, y),
        y.clone(),
        ((lambda x, m: [x[:2], x[1:3]], 0), 0),
        r"microbatches that share",
    ),
}


@sampled(2)
@pytest.mark.parametrize(("function", "backward"), [(doubling, "graph"), (through_a_view, "autograd")])
@pytest.mark.parametrize("what", SHARED)
def test_changing_memory_that_another_leaf_shares_is_refused(what, function, backward):
    """The stage would change a copy of its own, and the others see nothing of it."""
    torch.manual_seed(0)
    inputs, targets, dims, why = SHARED[what](torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    model, pipe = build(function, inputs, targets, dims, backward)
    state = pipe.init(model)
    for step in (fpipe.value_and_grad(pipe), fpipe.reference(pipe), fpipe.evaluate(pipe)):
        with pytest.raises(fpipe.InputError, match=why):
            step(*state, inputs, targets)
    with pytest.raises(fpipe.InputError, match=why):
        fpipe.verify(pipe, model, inputs, targets)


@sampled(2)
@pytest.mark.parametrize("what", SHARED)
def test_leaves_may_share_memory_that_nobody_changes(what):
    inputs, targets, dims, _ = SHARED[what](torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    model, pipe = build(reading, inputs, targets, dims)
    fpipe.verify(pipe, model, inputs, targets)


@pytest.mark.parametrize(
    ("inputs", "dims"),
    [
        (lambda x: (x[:, :WIDTH], x[:, WIDTH:]), 0),
        (lambda x: (x[:4, :WIDTH], x[4:, :WIDTH]), 0),
        (lambda x: (x[:2, :WIDTH], x[4:, WIDTH:]), ((lambda x, m: [x.clone() for _ in range(m)], 0), 0)),
        (lambda x: (x[:4, :WIDTH].t().contiguous().t(), x[4:, WIDTH:]), 0),
    ],
    ids=["columns", "rows", "clones", "turned"],
)
def test_adjacent_leaves_do_not_share_memory(inputs, dims):
    """A leaf that the model changes is as on one device; what was passed in stays as it was."""
    torch.manual_seed(0)
    x = torch.randn(8, 2 * WIDTH)
    given = inputs(x)
    targets = torch.randn(4 if len(given[1]) == 4 else 8, WIDTH)
    model, pipe = build(doubling, given, targets, dims)
    before = x.clone()
    out, grads = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), given, targets)
    want = loop(model, mse, given, targets, 2, dims=dims if isinstance(dims, tuple) else (0, 0))
    assert_same(Result(out.loss, out.outputs, grads, out.buffers), want)
    assert torch.equal(x, before)


def test_buffers_passed_to_a_step_may_share_memory():
    """Buffers may share memory: each is replaced by one of its own, as if they had been apart."""
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=HOW, cuts=["2"])
    params, buffers = pipe.init(model)
    one = torch.zeros(WIDTH)
    shared = {**buffers, "0.running_mean": one, "2.running_mean": one, "2.running_var": buffers["0.running_var"]}
    apart = {name: buffer.clone() for name, buffer in shared.items()}
    step = fpipe.value_and_grad(pipe)
    (got, grads), (want, others) = step(params, shared, (x,), y), step(params, apart, (x,), y)
    assert_same(Result(got.loss, (), grads, got.buffers), Result(want.loss, (), others, want.buffers))
    assert len({buffer.data_ptr() for buffer in got.buffers.values()}) == len(buffers)


VIEWS = {
    "two parameters": lambda m: setattr(m, "b", nn.Parameter(m.a.data)),
    "part of a parameter": lambda m: setattr(m, "b", nn.Parameter(m.a.data[:2])),
    "a buffer of a parameter": lambda m: m.register_buffer("b", m.a.detach()),
    "a buffer of a buffer": lambda m: m.register_buffer("b", m.c[1:]),
}


@pytest.mark.parametrize("what", VIEWS)
def test_state_that_shares_memory_is_refused(what):
    """Different tensors over the same memory cannot be told from copies once they are apart."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.randn(WIDTH))
            self.register_buffer("c", torch.randn(WIDTH))
            VIEWS[what](self)

        def forward(self, x):
            return x * self.a * self.b.sum() * self.c

    with pytest.raises(fpipe.CaptureError, match=r"b: got memory that [ac] shares"):
        fpipe.pipeline(Model(), example=(torch.ones(2, WIDTH),), loss=torch.mean, schedule=HOW)


@st.composite
def strided(draw, size=24):
    """Any view of one memory."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    strides = draw(st.lists(st.integers(0, 6), min_size=len(shape), max_size=len(shape)))
    reach = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return shape, strides, draw(st.integers(0, size - 1 - min(reach, size - 1))), reach


@given(strided(), strided())
def test_overlap_is_found_to_the_byte(one, other):
    memory = torch.arange(64, dtype=torch.int16)
    views = [memory.as_strided(shape, strides, start) for shape, strides, start, _ in (one, other)]
    common = set(views[0].flatten().tolist()) & set(views[1].flatten().tolist())
    assert has_overlap(*views) == bool(common)
