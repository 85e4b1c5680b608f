# SPDX-License-Identifier: Apache-2.0
"""A compiler gets each kind of block of a model once, and a step computes what all blocks in a row do."""

import gc
from weakref import WeakSet

import pytest
import torch
from torch import nn

import fpipe
from schedules import one_f_one_b, zb_h1
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.layers import Block
from tests.common.running import build, run, run_reference

HOWS = {"1F1B": one_f_one_b(ranks=2, microbatches=2), "ZB-H1": zb_h1(ranks=2, microbatches=2)}


def build_deep(depth, how, compiler, **options):
    """Return a pipeline of two stages, each with as many equal blocks after a linear layer, and its batch."""

    def stages():
        return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), *map(Block, [WIDTH] * depth)) for _ in range(2)])

    return build(Case(stages, rows_of(), mse, ("1",) * 3), HOWS[how], 4, ("1",), "trace", backward=compiler, **options)


@pytest.mark.parametrize("how", HOWS)
def test_deeper_models_are_compiled_from_the_same_blocks(how):
    compiled = {}
    for depth in (4, 6):
        taken = compiled[depth] = []

        def compiler(module, examples, taken=taken):
            taken.append(len(module.graph.nodes))
            return module

        built = build_deep(depth, how, compiler)
        got = run(*built)
        assert_same(got, run_reference(*built))
        assert_same(got, run(*build_deep(depth, how, "graph")))
    assert len(compiled[4]) == len(compiled[6]) > 2
    assert sum(compiled[6]) == sum(compiled[4])


def test_blocks_of_other_constants_are_compiled_each():
    scales, taken = [], []

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.scale = Block(WIDTH), torch.full((WIDTH,), 1.0 + len(scales))
            scales.append(self.scale)

        def forward(self, x):
            return self.block(x) * self.scale

    def compiler(module, examples):
        taken.append(module)
        return module

    case = Case(lambda: nn.Sequential(*[Scaled() for _ in range(4)]), rows_of(), mse, ("2",) * 3)
    built = build(case, HOWS["1F1B"], 4, ("2",), "trace", backward=compiler)
    assert_same(run(*built), run_reference(*built))
    constants = {id(one) for module in taken for one in module.buffers()}
    assert len(constants) >= len(scales)


def test_each_block_gets_the_layouts_that_it_was_compiled_for():
    """A compiler may return a result in another layout."""

    def compiler(module, examples):
        layouts = [one.stride() for one in examples]

        def call(*tensors):
            assert [one.stride() for one in tensors] == layouts
            return [one.t().contiguous().t() if one.dim() == 2 else one for one in module(*tensors)]

        return call

    built = build_deep(4, "1F1B", compiler)
    assert_same(run(*built), run_reference(*built))


def test_blocks_are_freed_with_the_plans_that_use_them():
    made = WeakSet()

    def compiler(module, examples):
        made.add(module)
        return module

    pipe, model, *_ = build_deep(4, "1F1B", compiler, plans=1)
    step, counts = fpipe.value_and_grad(pipe), []
    for rows in (6, 8, 10, 12):
        step(*pipe.init(model), *rows_of()(rows))
        gc.collect()
        counts.append(len(made))
    assert len({*counts}) == 1, "the pipeline keeps its own plan, and that of the last kind of batch"
