# SPDX-License-Identifier: Apache-2.0
"""Copies of a pipeline on a mesh that one process plays compute what a plain loop over them computes, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import (
    chimera,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    recompute,
    reduce_gradients,
    repeat,
    shard,
    simulate,
    zb_h1,
    zb_v,
)
from tests.common.cases import mse
from tests.common.comparison import assert_same
from tests.common.meshes import SHAPES, loop_over_copies, options
from tests.common.options import grouped
from tests.common.running import build, run, run_reference
from tests.common.sizes import by_day, covering, few, in_turn, sampled
from tests.common.zoo import ZOO

FAMILIES = {"1f1b": one_f_one_b, "interleaved": interleaved_1f1b, "zb_h1": zb_h1, "zb_v": zb_v}
TWO = one_f_one_b(ranks=2, microbatches=2)
MODELS = ["mlp", "gpt", "tied_sequence", "skips", "dicts", "frozen_below", "unused", "several", "own_loss"]


def copies(rows, how, replicas, shards, gathered=1, name="mlp", **more):
    """A pipeline in several copies, its model, and a batch of so many rows."""
    return build(ZOO[name], how, rows, capture="trace", **options(how.ranks, replicas, shards, gathered), **more)


@sampled(2)
@pytest.mark.parametrize(("shape", "family"), in_turn(SHAPES, FAMILIES))
def test_copies_equal_a_plain_loop(shape, family):
    replicas, shards = SHAPES[shape]
    pipe, model, (x,), y = copies(24, FAMILIES[family](2, 2), replicas, shards)
    step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y)
    loss, wanted = loop_over_copies(model, mse, x, y, 2, replicas, shards)
    assert same_bits(step.loss, loss)
    assert grads.keys() == wanted.keys()
    assert all(same_bits(grads[name], wanted[name]) for name in wanted)


@sampled(2)
@covering(name=by_day(MODELS, 2), shape=[*SHAPES], backward=["autograd", "graph"])
def test_any_model_equals_one_device(name, shape, backward):
    pipe, model, inputs, targets = copies(24, zb_h1(2, 2), *SHAPES[shape], name=name, backward=backward)
    fpipe.verify(pipe, model, inputs, targets, seed=5)


@sampled(1)
@covering(shape=["both", "three shards"], tied=["exact", "sum"])
def test_tied_gradients_are_reduced_before_they_are_shared(tied, shape):
    how = one_f_one_b(ranks=4, microbatches=2)
    pipe, model, inputs, targets = build(
        ZOO["tied_sequence"], how, 24, capture="modules", tied=tied, **options(4, *SHAPES[shape])
    )
    fpipe.verify(pipe, model, inputs, targets)


def test_replicas_of_a_stage_are_summed_before_copies():
    pipe, model, inputs, targets = copies(16, chimera(ranks=2, microbatches=4), 2, 1)
    fpipe.verify(pipe, model, inputs, targets)


def test_random_numbers_differ_between_copies_and_are_those_of_one_device():
    pipe, model, inputs, targets = copies(16, TWO, 2, 2, name="dropping")
    assert_same(run(pipe, model, inputs, targets, seed=7), run_reference(pipe, model, inputs, targets, seed=7))
    alone, *_ = build(ZOO["dropping"], one_f_one_b(ranks=2, microbatches=8), 16, capture="trace")
    outputs = run(alone, model, inputs, targets, seed=7).outputs
    assert same_bits(outputs, run(pipe, model, inputs, targets, seed=7).outputs)


@settings(max_examples=few(8), deadline=None)
@given(data=st.data())
def test_any_mesh_schedule_model_and_options(data):
    replicas, shards, microbatches = (data.draw(st.integers(1, most)) for most in (3, 3, 3))
    made = data.draw(st.sampled_from([*FAMILIES.values(), gpipe]))
    ranks = data.draw(st.integers(1, 2))
    if made is interleaved_1f1b:
        microbatches *= ranks
    how = made(ranks=ranks, microbatches=microbatches)
    how = recompute(how) if data.draw(st.booleans()) else how
    count = replicas * shards * microbatches
    rows = data.draw(st.integers(count, 2 * count + 3))
    name = data.draw(st.sampled_from(MODELS))
    if rows % count and name not in ("mlp", "skips", "unused"):
        rows = count  # others have leaves that must be split alike
    gathered = data.draw(st.none() | st.integers(1, 2))
    extra = {"backward": data.draw(st.sampled_from(["autograd", "graph"]))}
    extra["reduce"] = data.draw(st.sampled_from(["mean", "sum"]))
    pipe, model, inputs, targets = copies(rows, how, replicas, shards, gathered, name, **extra)
    fpipe.verify(pipe, model, inputs, targets, seed=3)


@pytest.mark.parametrize("shape", ["dp", "both"])
def test_losses_are_summed_on_request(shape):
    replicas, shards = SHAPES[shape]
    pipe, model, (x,), y = copies(16, TWO, replicas, shards, reduce="sum")
    step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y)
    loss, wanted = loop_over_copies(model, mse, x, y, 2, replicas, shards, mean=False)
    assert same_bits(step.loss, loss)
    assert all(same_bits(grads[name], wanted[name]) for name in wanted)


def test_weights_are_over_all_copies():
    """Rows are weighted by a count, so the loss is that of the whole batch, however it is split."""
    pipe, model, (x,), y = copies(14, TWO, 2, 2, weight=lambda inputs, targets: len(targets))
    step, _ = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y)
    assert torch.isclose(step.loss, mse(model(x), y))


@sampled(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_earlier_sums_are_added_after_the_reduction(shape):
    pipe, model, (x,), y = copies(12, zb_h1(ranks=2, microbatches=2), *SHAPES[shape])
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    _, once = step(*state, (x,), y)
    _, twice = step(*state, (x,), y, onto={name: grad.clone() for name, grad in once.items()})
    assert all(same_bits(twice[name], once[name] + once[name]) for name in once)
    _, theirs = fpipe.reference(pipe)(*state, (x,), y, onto={name: grad.clone() for name, grad in once.items()})
    assert all(same_bits(twice[name], theirs[name]) for name in once)


@sampled(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_updates_within_the_step_equal_those_after_it(shape):
    pipe, model, (x,), y = copies(12, interleaved_1f1b(ranks=2, microbatches=2), *SHAPES[shape])
    adam = fpipe.optimizer(torch.optim.AdamW, lr=0.1)
    params, buffers = pipe.init(model)
    _, new, state, norm = fpipe.train_step(pipe, adam, max_norm=0.1)(params, buffers, adam.init(params), (x,), y)
    _, grads = fpipe.value_and_grad(pipe)(params, buffers, (x,), y)
    grads, total = fpipe.clip(pipe, grads, 0.1)
    wanted, slots = adam.update(grads, adam.init(params), params)
    assert same_bits(norm, total)
    assert all(same_bits(new[name], wanted[name]) for name in wanted)
    assert all(same_bits(state[name]["exp_avg"], slots[name]["exp_avg"]) for name in slots)


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_norms_of_shards_are_those_of_the_whole(order):
    pipe, model, (x,), y = copies(12, TWO, 1, 3)
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y)
    assert torch.isclose(fpipe.norm(pipe, grads, order), torch.nn.utils.get_total_norm(grads.values(), order))


def test_evaluation_on_a_mesh():
    pipe, model, inputs, targets = copies(16, zb_v(ranks=2, microbatches=2), 2, 2, name="gpt")
    alone, *_ = build(ZOO["gpt"], zb_v(ranks=2, microbatches=8), 16, capture="trace")
    found = fpipe.evaluate(pipe)(*pipe.init(model), inputs, targets)
    wanted = fpipe.evaluate(alone)(*alone.init(model), inputs, targets)
    assert same_bits(found.outputs, wanted.outputs)
    assert torch.isclose(found.loss, wanted.loss)


@pytest.mark.parametrize(("gathered", "count"), [(None, 4), (1, 16)])
def test_a_policy_says_how_often_weights_are_gathered(gathered, count):
    """Two ranks of two stages, four microbatches: once per stage, or as often as one of them makes room."""
    spans = []
    pipe, model, (x,), y = copies(16, interleaved_1f1b(ranks=2, microbatches=4), 1, 2, gathered)
    fpipe.value_and_grad(pipe, record=spans.append)(*pipe.init(model), (x,), y)
    posted = {(span.rank, span.action) for span in spans if span.action.kind == "UNSHARD"}
    assert len(posted) == count


def test_a_schedule_may_have_its_own_collectives():
    how = shard(reduce_gradients(repeat(gpipe(ranks=2, microbatches=2), times=2)), limit=1)
    pipe, model, (x,), y = copies(16, how, 1, 2)
    assert pipe.schedule == how
    fpipe.verify(pipe, model, (x,), y)


def test_sizes_are_those_of_shards():
    whole, pipe = (copies(16, TWO, 1, shards)[0] for shards in (1, 2))
    assert [a + b for a, b in zip(pipe.sizes.weight, pipe.sizes.gathered, strict=True)] == list(whole.sizes.weight)
    assert simulate(pipe.schedule, sizes=pipe.sizes).peak_memory


def test_masters_of_shards():
    """Parameters in bfloat16, their masters in float32, one per element."""
    model, (x,), y = ZOO["mlp"].make(16)
    model, x, y = model.bfloat16(), x.bfloat16(), y.bfloat16()
    how = one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, **grouped(options(2, 2, 2)))
    params, buffers = pipe.init(model)
    adam = fpipe.masters(fpipe.optimizer(torch.optim.AdamW, lr=1e-3))
    step, state = fpipe.value_and_grad(pipe, sums=torch.float32), adam.init(params)
    _, grads = step(params, buffers, (x,), y)
    assert all(grad.dtype is torch.float32 for grad in grads.values())
    _, theirs = fpipe.reference(pipe, sums=torch.float32)(params, buffers, (x,), y)
    assert all(same_bits(grads[name], theirs[name]) for name in theirs)
    params, state = adam.update(grads, state, params)
    assert all(p.dtype is torch.bfloat16 for p in params.values())


def mean_square(out):
    return out.square().mean()


@pytest.mark.parametrize("shape", ["dp", "three shards"])
def test_sparse_gradients_are_reduced_dense(shape):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    ids, how = torch.arange(24).reshape(12, 2) % 10, one_f_one_b(ranks=2, microbatches=2)
    loss = {"loss": mean_square, "schedule": how}
    pipe = fpipe.pipeline(model, example=(ids,), **grouped(loss), **grouped(options(2, *SHAPES[shape])))
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (ids,))
    assert grads["0.weight"].layout is torch.strided
    fpipe.verify(pipe, model, (ids,))


@pytest.mark.parametrize("shape", ["dp", "three shards"])
def test_gradients_have_the_strides_of_their_parameters(shape):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in model:
        layer.weight.data = layer.weight.data.t()
    x, given = torch.randn(12, 6), {"loss": mean_square, "schedule": TWO}
    pipe = fpipe.pipeline(model, example=(x,), **grouped(given), **grouped(options(2, *SHAPES[shape])))
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,))
    assert {name: grad.stride() for name, grad in grads.items()} == {n: p.stride() for n, p in model.named_parameters()}
