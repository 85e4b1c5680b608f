# SPDX-License-Identifier: Apache-2.0
"""Assignments to buffers that a stage cannot carry to the next microbatch are refused by name, and so are some cuts."""

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fpipe
from schedules import mirror, one_f_one_b
from tests.common.reassigned_buffers import HOWS, WIDTH, Block, assert_as_one_device, average, build


def test_a_cut_between_two_uses_of_a_reassigned_buffer_is_refused_and_not_chosen():
    block = Block(after=average)
    model = nn.Sequential(block, nn.Linear(WIDTH, WIDTH), block, nn.Linear(WIDTH, WIDTH))
    with pytest.raises(fpipe.CutError, match=r"'0\.mean', which is assigned"):
        build(model, HOWS["1F1B"], ["1"])
    pipe, x, y = build(model, HOWS["1F1B"], None, stages=2)
    assert_as_one_device(pipe, model, x, y)


class Between(nn.Module):
    """Reads the buffer before its layer, and assigns it after."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x):
        h = self.inner(x * self.mean)
        self.mean = h.detach().mean(0)
        return h


def test_a_cut_between_reading_and_reassigning_is_refused():
    with pytest.raises(fpipe.CutError, match=r"'1\.mean', which is assigned there and used in stage 0"):
        build(nn.Sequential(nn.Linear(WIDTH, WIDTH), Between()), HOWS["1F1B"], ["1.inner"])


def test_replicas_may_not_reassign_buffers():
    model = nn.Sequential(Block(after=average), Block(after=average))
    how = mirror(one_f_one_b(ranks=2, microbatches=4))
    with pytest.raises(fpipe.CutError, match="modified buffers"):
        fpipe.pipeline(model, example=(torch.ones(8, WIDTH),), loss=torch.mean, schedule=how, cuts=["1"])


def wanting(block, h):
    block.mean = 0.9 * block.mean + 0.1 * h.mean(0)
    return h


def doubled(block, h):
    block.mean = h.detach().double().mean(0)
    return h


def grown(block, h):
    block.table = torch.cat([block.table, block.table])
    return h


def of_the_batch(block, h):
    block.mean = h.detach()
    return h


def of_chance(block, h):
    block.table = torch.rand(3)
    return h


def of_a_parameter(block, h):
    block.table = block.inner.weight.detach()[0] * 1
    return h


def of_a_changing_buffer(block, h):
    block.mean = block.mean + 1
    block.table = block.mean[:3] * 1
    return h


def lazily_of_the_batch(block, h):
    block.lazy = h.detach()
    return h


def laid_out_otherwise(block, h):
    block.table = torch.ones(2, 2).t() * h.detach().sum()
    return h


def a_parameter(block, h):
    block.mean = block.inner.bias.detach()
    return h


def a_buffer_that_changes(block, h):
    block.last.add_(1)
    block.mean = block.last
    return h


def none(block, h):
    block.mean = None
    return h


def unseen(block, h):
    block._buffers["mean"] = h.detach().mean(0)
    return h


def checkpointed(block, h):
    return checkpoint(average, block, h, use_reentrant=False)


def read_in_a_checkpoint(block, h):
    out = checkpoint(lambda h: h * block.mean, h, use_reentrant=False)
    block.mean = h.detach().mean(0)
    return out


def first_time_only(block, h):
    if not hasattr(block, "called"):
        block.called = True
        block.mean = torch.ones(WIDTH)
    return h


REFUSED = {
    wanting: r"requires a gradient to the buffer 'mean'.*\.detach\(\)",
    doubled: r"float64\[4\] to the buffer 'mean', which is float32\[4\].*depends on the parameter.*copy_",
    grown: r"float32\[4, 2\] to the buffer 'table', which is float32\[2, 2\].*depends on the buffer '0\.table'",
    of_the_batch: r"float32\[3, 4\] to the buffer 'mean', which is float32\[4\]",
    of_chance: "depends on random numbers",
    of_a_parameter: r"depends on the parameter '0\.inner\.weight'",
    of_a_changing_buffer: r"depends on the buffer '0\.mean'",
    lazily_of_the_batch: r"float32\[3, 4\] to the buffer 'lazy', which is None",
    laid_out_otherwise: r"of strides \[1, 2\] to the buffer 'table'",
    a_parameter: r"share with the parameter '0\.inner\.bias'.*clone\(\)",
    a_buffer_that_changes: r"share with the buffer '0\.last'",
    none: "an assignment of a NoneType to the buffer 'mean'",
    unseen: r"buffer 0\.mean: got a forward that replaces it",
    checkpointed: r"checkpointed function that uses or assigns a buffer.*\(mean\)",
    read_in_a_checkpoint: r"checkpointed function that uses or assigns a buffer.*\(mean\)",
    first_time_only: "does something else when it is called again",
}


@pytest.mark.parametrize("change", REFUSED)
def test_buffers_that_cannot_be_carried_are_refused_by_name(change):
    model = nn.Sequential(Block(after=change), Block())
    with pytest.raises(fpipe.CaptureError) as caught:
        build(model, HOWS["1F1B"], ["1"])
    assert re.search(REFUSED[change], str(caught.value)), caught.value
    assert "module 0" in str(caught.value) or change in (unseen, first_time_only)
