# SPDX-License-Identifier: Apache-2.0
"""Stages on two ranks: bidirectional schedules compute what one device computes, in the order that they state.

A replica adds the gradients of its microbatches in its own order; then the sums are added, in the order of routes. The
plain loop of `tests.common.loops` gives one microbatch's gradients at a time, and knows nothing of either.
"""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import chimera, dualpipe, mirror, one_f_one_b, split_backward, summarize
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import Result, assert_same
from tests.common.layers import linears
from tests.common.loops import eval_loop, loop_as_stated
from tests.common.running import build, require_exact, run
from tests.common.sizes import by_day, covering, few, sampled
from tests.common.zoo import ZOO, captured_by

STATEFUL = {"unet", "normalised"}
SEED = 5

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes self.*_flat_weights")


@sampled(2)
@pytest.mark.parametrize("name", by_day([name for name, _ in captured_by("export") if name not in STATEFUL], 2))
def test_every_model_of_the_zoo_is_exact_on_replicas(name):
    require_exact(ZOO[name], dualpipe(ranks=4, microbatches=5))


@sampled(1)
@pytest.mark.parametrize("factory", [chimera, dualpipe])
@pytest.mark.parametrize(("name", "capture"), [("chained", "export"), ("tied_sequence", "modules"), ("mlp", "modules")])
def test_replicas_are_exact_at_all_sizes(name, capture, factory):
    for ranks, microbatches in by_day(product((2, 4), range(2, 7)), 3):
        require_exact(ZOO[name], factory(ranks=ranks, microbatches=microbatches), capture=capture)


@settings(max_examples=few(8))
@given(
    name=st.sampled_from(["chained", "tied_sequence", "one_weight", "skips", "dropping", "frozen_below"]),
    ranks=st.sampled_from([1, 2, 4]),
    microbatches=st.integers(1, 4),
    split=st.booleans(),
)
def test_any_mirrored_schedule_is_exact(name, ranks, microbatches, split):
    made = one_f_one_b(ranks=ranks, microbatches=microbatches)
    require_exact(ZOO[name], mirror(split_backward(made) if split else made))


def test_the_middle_rank_of_three_has_one_replica():
    case = Case(lambda: linears(nn.Tanh, nn.Tanh, nn.Tanh), rows_of(WIDTH), mse, ("2", "4", "6"))
    how = mirror(one_f_one_b(ranks=3, microbatches=3))
    built = pipe, model, inputs, targets = build(case, how, 12, cuts=("2", "4"))
    assert [how.placement.replicas(s) for s in range(3)] == [(0, 2), (1,), (2, 0)]
    assert_same(run(*built), loop_as_stated(pipe, model, case.loss, inputs, targets))


def test_the_order_of_addition_matters():
    """Else the tests above would not see a wrong one."""
    case = ZOO["chained"]
    got = run(*build(case, chimera(ranks=4, microbatches=6), 12))
    ascending = run(*build(case, one_f_one_b(ranks=4, microbatches=6), 12))
    assert same_bits(got.loss, ascending.loss)
    assert any(not same_bits(got.grads[name], ascending.grads[name]) for name in got.grads)


@pytest.mark.parametrize("name", sorted(STATEFUL))
def test_a_stage_that_keeps_state_has_no_replicas(name):
    with pytest.raises(fpipe.CutError, match=r"modified buffers \['.*running_mean.*on ranks \[\d, \d\], expected none"):
        build(ZOO[name], chimera(ranks=4, microbatches=4), 8)


@sampled(2)
@covering(factory=[chimera, dualpipe], targets_given=[True, False])
def test_an_evaluation_on_replicas_is_exact(factory, targets_given):
    case = ZOO["skips"]
    pipe, model, inputs, targets = build(case, factory(ranks=4, microbatches=4), 8)
    wanted = targets if targets_given else None
    got = fpipe.evaluate(pipe)(*pipe.init(model), inputs, wanted)
    want = eval_loop(model, case.loss if targets_given else None, inputs, wanted, 4)
    assert_same(Result(got.loss, got.outputs, {}, got.buffers), want._replace(buffers=got.buffers))


def test_verify_adds_in_the_same_order():
    pipe, model, inputs, targets = build(ZOO["tied_sequence"], dualpipe(ranks=4, microbatches=5), 10)
    assert fpipe.verify(pipe, model, inputs, targets).eager > 0


def test_a_pipeline_prints_the_ranks_of_its_stages():
    pipe, *_ = build(ZOO["mlp"], chimera(ranks=4, microbatches=4), 8)
    assert "stage 1 on ranks 1, 2" in str(pipe)
    assert "stage 2 on ranks 2, 1" in str(pipe)


def test_measured_timelines_include_sums_of_gradients():
    pipe, model, inputs, targets = build(ZOO["mlp"], dualpipe(ranks=4, microbatches=4), 8)
    spans = []
    fpipe.value_and_grad(pipe, record=spans.append)(*pipe.init(model), inputs, targets)
    for rank in range(4):
        mine = [span.action for span in spans if span.rank == rank and not span.waits]
        assert mine == list(pipe.schedule.actions(rank))
    assert summarize(spans, pipe.schedule).makespan > 0


def test_gradients_are_new_memory():
    """Both replicas have the sum; what a user does with it must not change what a step computes next."""
    pipe, model, inputs, targets = build(ZOO["mlp"], chimera(ranks=2, microbatches=2), 4)
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    first = step(*state, inputs, targets)[1]
    kept = {name: grad.clone() for name, grad in first.items()}
    for grad in first.values():
        grad.fill_(torch.nan)
    again = step(*state, inputs, targets)[1]
    assert all(same_bits(again[name], kept[name]) for name in kept)
