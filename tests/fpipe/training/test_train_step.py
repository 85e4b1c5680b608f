# SPDX-License-Identifier: Apache-2.0
"""A step that updates each stage early trains as a step, a clip and an update do, bit for bit."""

from dataclasses import replace

import pytest
import torch

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import U, dualpipe, gpipe, interleaved_1f1b, one_f_one_b, pipedream, update_weights, zb_h1, zb_v
from tests.common.memory import Alive
from tests.common.running import build
from tests.common.sizes import covering, sampled
from tests.common.updates import (
    ADAM,
    STEPS,
    decay,
    require_equal,
    require_same_updates,
    require_training_of_a_plain_loop,
    train_after,
    train_early,
)
from tests.common.zoo import ZOO

HOW = one_f_one_b(ranks=2, microbatches=4)
SCHEDULES = [HOW, zb_h1(ranks=2, microbatches=4), zb_v(ranks=2, microbatches=4), dualpipe(ranks=2, microbatches=4)]


@sampled(1)
@pytest.mark.parametrize(
    ("name", "how"),
    [("gpt", SCHEDULES[0]), ("gpt", SCHEDULES[3]), *[("dropping", how) for how in SCHEDULES]],
    ids=lambda part: part if isinstance(part, str) else part.factory.__name__,
)
def test_training_is_the_same_whether_a_norm_exceeds_the_limit_or_not(name, how):
    found = require_same_updates(ZOO[name], how, "median")
    over = [bool(norm > sorted(found.norms)[STEPS // 2 - 1]) for norm in found.norms]
    assert True in over
    assert False in over


@sampled(1)
@pytest.mark.parametrize("limit", [None, 0.0, float("inf")])
def test_training_is_the_same_with_any_limit(limit):
    found = require_same_updates(ZOO["gpt"], zb_v(ranks=2, microbatches=4), limit, steps=3)
    assert all((norm is None) == (limit is None) for norm in found.norms)


@sampled(1)
@covering(how=[one_f_one_b(4, 4), zb_v(2, 3), interleaved_1f1b(2, 4, chunks=2), dualpipe(4, 5)], tied=["exact", "sum"])
def test_tied_parameters_are_updated_with_their_whole_gradient(tied, how):
    require_same_updates(ZOO["gpt"], how, None, steps=3, tied=tied)


@sampled(2)
@pytest.mark.parametrize(
    ("how", "ranks", "update"),
    [
        (zb_v(2, 3), (0, 1), (0, 2)),  # stages 0 and 3 are on rank 0, and 0U2 is the last of its actions
        (interleaved_1f1b(2, 4, chunks=2), (0,), (0, 3)),
        (interleaved_1f1b(2, 4, chunks=2), (1,), (3, 3)),
        (interleaved_1f1b(2, 4, chunks=2), (0, 1), None),  # another rank of this process may still read it
        (dualpipe(4, 5), (0,), (3, 3)),
        (dualpipe(4, 5), (0, 1, 2, 3), None),
    ],
)
def test_each_parameter_is_in_one_update_after_all_that_reads_it(how, ranks, update):
    pipe, *_ = build(ZOO["gpt"], how, 2 * how.microbatches, capture="trace")
    plan = replace(pipe.training.updating, ranks=ranks)
    found = [(name, at) for at, names in plan.names_by_update.items() for name in names]
    assert [at for name, at in found if name == "embed.weight"] == [update] * (update is not None)
    rest = [name for name in plan.params if name != "embed.weight"]
    assert sorted(name for name, _ in found if name != "embed.weight") == sorted(rest)


def test_a_norm_at_the_limit_is_clipped_as_torch_does():
    """Torch divides by the norm plus a millionth, so gradients shrink a little though their norm is not too large."""
    setting = build(ZOO["mlp"], HOW, 8, capture="trace")
    (norm,) = train_after(*setting, float("inf"), steps=1).norms
    early, unclipped = (train_early(*setting, limit, steps=1) for limit in (float(norm), None))
    require_equal(early, train_after(*setting, float(norm), steps=1))
    assert not all(same_bits(early.state[name]["exp_avg"], unclipped.state[name]["exp_avg"]) for name in early.state)


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_batch_norm_and_graph_stages(backward):
    case = replace(ZOO["normalised"], fronts=("trace",))
    require_same_updates(case, one_f_one_b(ranks=4, microbatches=4), 0.5, steps=3, backward=backward)


@sampled(1)
@pytest.mark.parametrize("how", SCHEDULES[:3], ids=lambda how: how.factory.__name__)
def test_training_is_that_of_a_plain_loop(how):
    require_training_of_a_plain_loop(ZOO["gpt"], how)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_other_optimizers(cls):
    setting = build(ZOO["mlp"], HOW, 8, capture="trace")
    options = {"lr": 0.1, **({"momentum": 0.9} if cls is not torch.optim.Adagrad else {})}
    require_equal(*(train(*setting, 0.5, cls, options, steps=4) for train in (train_early, train_after)))


@sampled(1)
@pytest.mark.parametrize("limit", [None, 1e-3])
def test_the_last_of_several_steps_updates_with_the_sums_of_all(limit):
    pipe, model, inputs, targets = build(ZOO["gpt"], zb_v(ranks=2, microbatches=4), 8, capture="trace")
    adam, (params, buffers) = fpipe.optimizer(torch.optim.AdamW, **ADAM), pipe.init(model)
    step, found = fpipe.value_and_grad(pipe), []
    for last in (step, fpipe.train_step(pipe, adam, limit)):
        _, sums = step(params, buffers, inputs, targets, total=8)
        if last is step:
            _, grads = step(params, buffers, inputs, targets, onto=sums, total=8)
            grads = grads if limit is None else fpipe.clip(pipe, grads, limit)[0]
            found.append(adam.update(grads, adam.init(params), params))
        else:
            found.append(last(params, buffers, adam.init(params), inputs, targets, onto=sums, total=8)[1:3])
    (after, _), (early, _) = found
    assert all(same_bits(early[name], after[name]) for name in params)


def test_gradients_that_are_not_finite_are_clipped_as_torch_does():
    pipe, model, inputs, targets = build(ZOO["mlp"], HOW, 8, capture="trace")
    setting = pipe, model, inputs, targets * float("inf")
    found = train_early(*setting, 1.0, steps=2)
    require_equal(found, train_after(*setting, 1.0, steps=2))
    assert not found.norms[0].isfinite()


def test_nothing_that_is_passed_is_modified_and_what_is_frozen_stays():
    case = ZOO["mlp"]
    model, inputs, targets = case.make(8)
    model[0].requires_grad_(False)
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=case.loss, schedule=HOW)
    adam = fpipe.optimizer(torch.optim.AdamW, **ADAM)
    params, buffers = pipe.init(model)
    state = adam.init(params)
    before = {name: p.detach().clone() for name, p in params.items()}
    _, new, slots, _ = fpipe.train_step(pipe, adam, 1e-3)(params, buffers, state, inputs, targets)
    assert all(same_bits(params[name].detach(), before[name]) for name in params)
    assert state == {name: {} for name in params}
    unchanged = {name for name in params if new[name] is params[name]}
    assert unchanged == {"0.weight", "0.bias"} == {name for name, one in slots.items() if not one}


def test_a_donating_optimizer_updates_in_place_where_nothing_can_be_undone():
    pipe, model, inputs, targets = build(ZOO["gpt"], zb_v(ranks=2, microbatches=4), 8, capture="trace")
    adam = fpipe.optimizer(torch.optim.AdamW, donate=True, **ADAM)
    after = train_after(pipe, model, inputs, targets, None, steps=3)
    params, buffers = pipe.init(model)
    given, state, step = params, adam.init(params), fpipe.train_step(pipe, adam)
    for i in range(3):
        _, params, state, _ = step(params, buffers, state, inputs, targets, lr=decay(i))
    assert all(params[name] is given[name] and same_bits(params[name], after.params[name]) for name in params)
    with pytest.raises(fpipe.InputError, match=r"optimizer: got one that updates in place.*max_norm=1.0 is undone"):
        fpipe.train_step(pipe, adam, 1.0)(params, buffers, state, inputs, targets)


@pytest.mark.parametrize("limit", [1e-6, 1e6])
def test_a_step_needs_no_more_memory_than_a_step_a_clip_and_an_update(limit):
    model, x = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), torch.ones(8, 64)
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=one_f_one_b(ranks=4, microbatches=2))
    adam, (params, buffers) = fpipe.optimizer(torch.optim.AdamW, **ADAM), pipe.init(model)
    early, step = fpipe.train_step(pipe, adam, limit), fpipe.value_and_grad(pipe)
    _, params, state, _ = early(params, buffers, adam.init(params), (x,))
    with Alive() as ours:
        early(params, buffers, state, (x,))
    with Alive() as theirs:
        _, grads = step(params, buffers, (x,))
        grads, _ = fpipe.clip(pipe, grads, limit, donate=True)
        adam.update(grads, state, params)
    assert ours.most <= 1.02 * theirs.most


def test_updates_are_recorded():
    pipe, model, inputs, targets = build(ZOO["mlp"], HOW, 8, capture="trace")
    adam, spans = fpipe.optimizer(torch.optim.AdamW, **ADAM), []
    params, buffers = pipe.init(model)
    fpipe.train_step(pipe, adam, record=spans.append)(params, buffers, adam.init(params), inputs, targets)
    assert [span.action for span in spans if span.action.kind == "U"] == [U(1, 3), U(0, 3)]
    assert all(time > 0 for time in fpipe.costs(pipe, spans).U)


def test_what_an_update_refuses_is_refused_before_the_step():
    pipe, model, inputs, targets = build(ZOO["mlp"], HOW, 8, capture="trace")
    adam, sgd = fpipe.optimizer(torch.optim.AdamW, **ADAM), fpipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    params, buffers = pipe.init(model)
    step, spans = fpipe.train_step(pipe, adam, 1.0), []
    recorded = fpipe.train_step(pipe, adam, 1.0, record=spans.append)
    grads = {name: torch.zeros_like(p) for name, p in params.items()}
    _, other = sgd.update(grads, sgd.init(params), params)
    some = dict(list(adam.init(params).items())[1:])
    for state, options, words in (
        (some, {}, r"state: got one for 7 parameters, expected 8 \(missing \['0.weight'\]"),
        (other, {}, r"state\['.*'\]: got \['momentum_buffer'\], expected .*exp_avg"),
        (adam.init(params), {"learning_rate": 1.0}, r"options: got \['learning_rate'\]"),
    ):
        with pytest.raises(fpipe.InputError, match=words):
            recorded(params, buffers, state, inputs, targets, **options)
    assert not spans, "nothing ran"
    step(params, buffers, adam.init(params), inputs, targets)
    with pytest.raises(fpipe.InputError, match="max_norm: got -1"):
        fpipe.train_step(pipe, adam, -1)


def test_a_schedule_with_updates_of_its_own_is_refused():
    for how in (pipedream(2, 4), update_weights(gpipe(2, 4))):
        with pytest.raises(
            fpipe.InputError, match=r"schedule: got .*, with updates 0U.*what one update applies.*train_step"
        ):
            build(ZOO["mlp"], how, 8, capture="trace")
