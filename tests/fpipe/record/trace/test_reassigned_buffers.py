# SPDX-License-Identifier: Apache-2.0
"""Buffers that a forward reassigns have the values of one device."""

import copy

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import gpipe, interleaved_1f1b, one_f_one_b, recompute, zb_h1
from tests.common.cases import mse
from tests.common.loops import eval_loop, loop
from tests.common.reassigned_buffers import (
    BACKWARDS,
    CACHES,
    CHANGES,
    HOWS,
    WIDTH,
    Block,
    assert_as_one_device,
    average,
    average_again,
    build,
    count,
    remember,
    state,
)
from tests.common.running import run
from tests.common.sizes import by_day, covering, few


@covering(change=CHANGES, how=[*HOWS], backward=["autograd", "graph"])
def test_a_reassigned_buffer_has_the_values_of_one_device(change, how, backward):
    model = nn.Sequential(Block(after=change), nn.Linear(WIDTH, WIDTH), Block(before=change))
    pipe, x, y = build(model, HOWS[how], ["1"], backward)
    assert_as_one_device(pipe, model, x, y)


@covering(change=CHANGES, backward=["autograd", "graph"])
def test_a_module_that_is_cut_inside_reassigns_its_buffers(change, backward):
    """The change in block 1 comes before the cut, so the first stage replays it call by call."""
    model = nn.Sequential(Block(before=change), Block(before=change))
    pipe, x, y = build(model, HOWS["1F1B"], ["1.inner"], backward)
    assert_as_one_device(pipe, model, x, y)


@pytest.mark.parametrize("change", by_day(CHANGES, 2))
def test_an_evaluation_reassigns_buffers_too(change):
    model = nn.Sequential(Block(after=change), Block(before=change))
    pipe, x, y = build(model, HOWS["1F1B"], ["1"])
    got = fpipe.evaluate(pipe)(*state(copy.deepcopy(model)), (x,), y)
    want = eval_loop(model, mse, (x,), y, 3)
    assert same_bits(got.loss, want.loss)
    assert all(same_bits(got.buffers[name], buffer) for name, buffer in want.buffers.items())


@BACKWARDS
def test_returned_buffers_go_into_the_next_step(backward):
    model = nn.Sequential(Block(after=average), Block(after=count))
    pipe, x, y = build(model, HOWS["1F1B"], ["1"], backward)
    params, buffers = pipe.init(model)
    for _ in range(2):
        buffers = fpipe.value_and_grad(pipe)(params, buffers, (x,), y)[0].buffers
    whole = loop(model, mse, (x.repeat(2, 1),), y.repeat(2, 1), 6)
    assert int(buffers["1.steps"]) == 6
    assert all(same_bits(buffers[name], buffer) for name, buffer in whole.buffers.items())
    assert int(model[1].steps) == 0


@BACKWARDS
def test_a_module_that_is_called_twice_continues_from_its_own_value(backward):
    block = Block(after=average_again)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), block, block)
    pipe, x, y = build(model, HOWS["1F1B"], ["1"], backward)
    assert_as_one_device(pipe, model, x, y)


class Keeping(nn.Module):
    """Reads the first of two values that its block assigns."""

    def __init__(self):
        super().__init__()
        self.kept, self.block, self.outer = [], Block(after=self.twice), nn.Linear(WIDTH, WIDTH)

    def twice(self, block, h):
        block.mean = h.detach().mean(0)
        self.kept.append(block.mean)
        block.mean = block.mean + 1
        return h

    def forward(self, x):
        h = self.block(self.outer(x))
        return h * self.kept.pop()


@BACKWARDS
def test_an_earlier_value_of_a_buffer_is_not_taken_for_the_current_one(backward):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Keeping())
    pipe, x, y = build(model, HOWS["1F1B"], ["1.block"], backward)
    assert_as_one_device(pipe, model, x, y)


@BACKWARDS
def test_a_returned_buffer_has_its_own_memory(backward):
    """It shares no memory with the batch or with tensors that the model holds."""
    first, held = torch.ones(9, WIDTH), torch.ones(WIDTH)

    def remember(block, x):
        block.last, block.mean = x[-1], held
        return x * held

    model = nn.Sequential(Block(before=remember), nn.Linear(WIDTH, WIDTH))
    pipe, *_ = build(model, HOWS["1F1B"], ["1"], backward)
    params, buffers = pipe.init(model)
    after = fpipe.value_and_grad(pipe)(params, buffers, (first,), first)[0].buffers
    first.zero_()
    after["0.mean"].zero_()
    assert after["0.last"].tolist() == [1] * WIDTH
    assert held.tolist() == [1] * WIDTH


@pytest.mark.parametrize("change", by_day([*CACHES, average, remember], 2))
def test_verify_compares_reassigned_buffers_and_restores_the_model(change):
    model = nn.Sequential(Block(after=change), Block(before=change))
    pipe, x, y = build(model, HOWS["1F1B"], ["1"])
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    assert fpipe.verify(pipe, model, (x,), y, steps=2).eager
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    assert all(after[name] is buffer and same_bits(buffer, old) for name, (buffer, old) in before.items())


def count_silently(block, h):
    block.steps = block.steps + 1
    return h


def test_verify_finds_a_lost_assignment(monkeypatch):
    model = nn.Sequential(Block(after=count_silently), Block())
    pipe, x, y = build(model, HOWS["1F1B"], ["1"])
    monkeypatch.setattr("fpipe.stages.autograd._new_buffer", lambda new, old: old)
    with pytest.raises(fpipe.MismatchError, match=r"buffer 0\.steps"):
        fpipe.verify(pipe, model, (x,), y)


class Branching(nn.Module):
    """Reassigns its buffer if the data say so."""

    def __init__(self, otherwise):
        super().__init__()
        self.inner, self.otherwise = nn.Linear(WIDTH, WIDTH), otherwise
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x):
        h = self.inner(x)
        if bool(h.detach().sum() > 0) is not self.otherwise:
            return h * 2
        self.mean = self.mean + 1
        return h * self.mean


def test_a_module_that_branches_on_data_may_reassign_in_one_branch():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Branching(otherwise=False))
    pipe, x, y = build(model, HOWS["1F1B"], ["1"], unsplittable=Branching)
    found = {run(pipe, model, (x * scale,), y).buffers["1.mean"][0].item() for scale in (-3, -1, 1, 3)}
    assert len(found) > 1  # both branches are taken
    for scale in (-3, -1, 1, 3):
        assert_as_one_device(pipe, model, x * scale, y)


def test_a_branch_that_reassigns_unlike_the_one_at_capture_is_an_error():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Branching(otherwise=True))
    pipe, x, _ = build(model, one_f_one_b(ranks=2, microbatches=9), ["1"], unsplittable=Branching)
    batches = torch.cat([x * scale for scale in (-3, -1, 1, 3)])
    with pytest.raises(fpipe.InputError, match=r"module 1: got an assignment to the buffer 'mean'"):
        run(pipe, model, (batches,), batches)


STEPS = {one.__name__: one for one in (*CHANGES, *CACHES)}


@st.composite
def models(draw):
    """Draw blocks that change their buffers before and after, some of which are called twice, and where to cut."""
    names = st.none() | st.sampled_from(sorted(STEPS))
    plans = draw(st.lists(st.tuples(names, names), min_size=2, max_size=4))
    calls = [*range(len(plans)), *draw(st.lists(st.integers(0, len(plans) - 1), max_size=1))]
    return plans, calls, draw(st.booleans())


@given(
    models(),
    st.sampled_from([gpipe, one_f_one_b, zb_h1, interleaved_1f1b]),
    st.booleans(),
    st.sampled_from(["autograd", "graph"]),
)
@settings(max_examples=few(6), deadline=None)
def test_buffers_reassigned_in_any_way_have_the_values_of_one_device(made, kind, again, backward):
    plans, calls, inside = made
    torch.manual_seed(1)
    blocks = [Block(*[STEPS.get(name) for name in plan]) for plan in plans]
    model = nn.Sequential(*[blocks[k] for k in calls], nn.Linear(WIDTH, WIDTH))
    how = kind(ranks=2, microbatches=4) if kind is not interleaved_1f1b else interleaved_1f1b(ranks=1, microbatches=4)
    how = recompute(how) if again else how
    cut = "1.inner" if inside else str(len(blocks) // 2)
    x, y = torch.randn(12, WIDTH), torch.randn(12, WIDTH)
    try:
        pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, cuts=[cut], backward=backward)
    except (fpipe.CutError, fpipe.CaptureError) as error:
        event("refused")
        if "modified by an inplace operation" in str(error):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loop(model, mse, (x,), y, 4)
            return
        if "the buffer" in str(error) and (len(calls) > len(plans) or inside):
            return
        raise
    event("run")
    assert_as_one_device(pipe, model, x, y, 4)
