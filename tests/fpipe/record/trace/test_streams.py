# SPDX-License-Identifier: Apache-2.0
"""Modules that branch on data draw the random numbers of one device, whichever branch they take."""

import copy
from collections import Counter
from functools import partial, reduce
from itertools import count
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP

import fpipe
from fpipe.tensors import random
from schedules import gpipe, interleaved_1f1b, one_f_one_b, recompute, zb_h1, zb_v
from tests.common.cases import WIDTH, mse
from tests.common.comparison import Result, assert_same
from tests.common.running import run, run_reference
from tests.common.sizes import covering, few
from tests.common.unusual_models import Switch

CPU, SEED = torch.device("cpu"), 3

KINDS = {"plain": None, "checkpoint": partial(checkpoint, use_reentrant=False)}

AROUND = {**KINDS, "reentrant": partial(checkpoint, use_reentrant=True)}


class Expert(nn.Module):
    """A linear layer with dropout, checkpointed or not."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def body(self, x):
        return functional.dropout(self.linear(functional.dropout(x, 0.3)).tanh(), 0.5)

    def forward(self, x):
        return self.body(x) if KINDS[self.kind] is None else KINDS[self.kind](self.body, x)


class Experts(nn.Module):
    """Experts, one for each row; on the tensors of a capture, which have no values, none runs."""

    def __init__(self, kinds):
        super().__init__()
        self.router = nn.Linear(WIDTH, len(kinds))
        self.experts = nn.ModuleList([Expert(kind) for kind in kinds])

    def forward(self, x):
        x = functional.dropout(x, 0.1)
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return functional.dropout(out, 0.2)


class Layer(nn.Module):
    """Experts between dropouts, which may be called twice and may be checkpointed."""

    def __init__(self, kinds, around, twice):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.before, self.after = nn.Dropout(0.2), nn.Dropout(0.2)
        self.experts, self.around, self.twice = Experts(kinds), around, twice

    def routed(self, x):
        return self.experts(x) if AROUND[self.around] is None else AROUND[self.around](self.experts, x)

    def forward(self, x):
        h = self.routed(self.before(self.first(x)))
        h = self.routed(x + h) if self.twice else h
        return x + self.last(self.after(h))


kinds = st.lists(st.sampled_from([*KINDS]), min_size=2, max_size=3)

layers = st.builds(Layer, kinds, st.sampled_from([*AROUND]), st.booleans())

places = ["1", "1.experts", "1.after", "1.last", "2", "2.experts", "2.last"]

families = {
    1: [gpipe(1, 4), zb_v(ranks=1, microbatches=4)],
    2: [gpipe(2, 4), one_f_one_b(2, 4), zb_h1(2, 4), recompute(one_f_one_b(2, 4)), interleaved_1f1b(1, 4, chunks=2)],
    3: [gpipe(3, 4), one_f_one_b(3, 4), zb_h1(3, 4), recompute(gpipe(3, 4))],
}


def build(model, how, cuts, example, **options):
    named = {"unsplittable": Experts} | options
    return fpipe.pipeline(model, example=(example,), targets=example, loss=mse, schedule=how, cuts=cuts, **named)


def seed_at(key, label):
    random.reseed(key, label, CPU)


def with_keys(model, key):
    """Return a copy of the model that seeds where fpipe seeds, to be run eagerly."""
    model = copy.deepcopy(model)
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            label = random.label(path, 0)
            module.register_forward_pre_hook(lambda module, args, label=label: seed_at(key, label))
        if isinstance(module, Layer):
            module.routed = seeding(module.routed, path if AROUND[module.around] else f"{path}.experts", key)
    return model


def seeding(function, path, key):
    """Return the function, each of whose calls first begins the next stream of the module at `path`."""
    calls = count()

    def seeded(x):
        seed_at(key, random.stream_label(path, next(calls)))
        return function(x)

    return seeded


def eagerly(model, x, y, microbatches):
    """Run a loop on one device, in which draws follow from the keys of each microbatch."""
    losses, outputs, grads = [], [], {}
    parts = zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)
    with random.preserve_generators([CPU]):
        for i, (rows, wanted) in enumerate(parts):
            own = with_keys(model, random.key(SEED, i))
            out = own(rows)
            losses.append(mse(out, wanted) / microbatches)
            losses[-1].backward()
            outputs.append(out.detach())
            made = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
            grads |= {name: grads[name] + grad if name in grads else grad for name, grad in made.items()}
    return Result(reduce(add, losses).detach(), torch.cat(outputs), grads, {})


CASES = {
    "two calls": (["plain", "plain"], "plain", True),
    "a checkpoint in a branch": (["checkpoint", "checkpoint"], "plain", False),
    "branches in a checkpoint": (["plain", "plain"], "checkpoint", True),
    "branches in a reentrant checkpoint": (["plain", "plain"], "reentrant", False),
}


@covering(case=CASES, backward=["autograd", "graph"])
def test_branches_draw_what_one_device_draws(case, backward):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(*case), nn.Linear(WIDTH, WIDTH))
    x, y = torch.randn(12, WIDTH), torch.randn(12, WIDTH)
    pipe = build(model, recompute(one_f_one_b(2, 4)), ["1.after"], torch.ones(12, WIDTH), backward=backward)
    got = run(pipe, model, (x,), y, seed=SEED)
    assert_same(got, run_reference(pipe, model, (x,), y, seed=SEED))
    assert_same(got, eagerly(model, x, y, 4))


@settings(max_examples=few(4))
@given(layers, layers, st.lists(st.sampled_from(range(len(places))), max_size=2, unique=True).map(sorted), st.data())
def test_every_schedule_draws_what_one_device_draws(first, second, chosen, data):
    """Pipeline, reference and eager run are equal, though microbatches take other branches than the capture."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), first, second)
    cuts = [places[k] for k in chosen]
    how = data.draw(st.sampled_from([one for one in families[len(cuts) + 1] if one.stages == len(cuts) + 1]))
    backward = data.draw(st.sampled_from(["autograd", "graph"]))
    x, y = torch.randn(12, WIDTH), torch.randn(12, WIDTH)
    state = torch.get_rng_state()
    pipe = build(model, how, cuts, torch.ones(12, WIDTH), backward=backward)
    got = run(pipe, model, (x,), y, seed=SEED)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert_same(got, run_reference(pipe, model, (x,), y, seed=SEED))
    assert_same(got, eagerly(model, x, y, 4))


class Reading(nn.Module):
    """Reads a tensor that is not an argument, so that it cannot be called as a whole; its body draws."""

    def __init__(self, body):
        super().__init__()
        self.branch, self.body, self.seed = Switch(partial(functional.dropout, p=0.3)), body, None
        self.register_buffer("mean", torch.zeros(WIDTH))

    def changing(self, x):
        if self.seed is not None:
            self.seed()
        x = functional.dropout(x, 0.3)
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x.sin().sin()

    def forward(self, x):
        h = self.branch(functional.dropout(x, 0.3))
        return functional.dropout(self.body(self.changing, h) + self.other, 0.3)


class Around(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.reading, self.drop, self.last = Reading(body), nn.Dropout(0.4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.reading.other = self.drop(x)
        return self.last(self.drop(self.reading(x)))


@pytest.mark.parametrize("around", AROUND)
def test_a_module_that_is_cut_inside_draws_as_one_that_is_not(around, monkeypatch):
    """Draws, also those of a recomputed checkpoint, and statistics are those of the eager run."""
    body = AROUND[around] or (lambda function, x: function(x))
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Around(body)), torch.randn(8, WIDTH)
    pipes = [
        fpipe.pipeline(model, example=(x,), targets=x, loss=mse, schedule=how, cuts=cuts, unsplittable=Reading)
        for how, cuts in ((gpipe(3, 4), ["1", "1.last"]), (gpipe(1, 4), []))
    ]
    results = [run(pipe, model, (x,), x, seed=SEED) for pipe in pipes]
    assert_same(*results)
    assert_same(results[0], run_reference(pipes[0], model, (x,), x, seed=SEED))
    labels, reseed = Counter(), random.reseed
    with monkeypatch.context() as patched:
        patched.setattr(
            random, "reseed", lambda key, label, device: labels.update([label]) or reseed(key, label, device)
        )
        assert_same(results[0], run(pipes[0], model, (x,), x, seed=SEED))
    drop, stream = [random.label("1.drop", k) for k in range(2)], random.stream_label("1.reading", 0)
    again = [label for label, number in labels.items() if number == 8]  # a checkpointed function, run twice
    assert len(again) == (around != "plain")
    assert labels == Counter([*drop, stream, *again, *again] * 4)
    own = copy.deepcopy(model)
    with random.preserve_generators([CPU]):
        for i, rows in enumerate(x.chunk(4)):
            key, each = random.key(SEED, i), copy.deepcopy(own)
            each[1].drop.register_forward_pre_hook(partial(seed_next, key, iter(drop)))
            each[1].reading.register_forward_pre_hook(partial(seed_next, key, iter([stream])))
            each[1].reading.seed = partial(seed_at, key, *again) if again else None
            (mse(each(rows), rows) / 4).backward()
            own.load_state_dict(each.state_dict())
            for p, new in zip(own.parameters(), each.parameters(), strict=True):
                p.grad = new.grad if p.grad is None or new.grad is None else p.grad + new.grad
    want = Result(None, None, grads_of(own), dict(own.named_buffers()))
    assert_same(results[0]._replace(loss=None, outputs=None), want)


def seed_next(key, labels, *_):
    seed_at(key, next(labels))


def grads_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_translation_model_drops_the_same_under_any_schedule_and_cut():
    """A model of transformers whose experts drop out activations, and whose sparse layers drop tokens."""
    sizes = {"layers": 2, "attention_heads": 2, "ffn_dim": 16, "sparse_step": 2, "layerdrop": 0.0}
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in sizes.items()}
    config = NllbMoeConfig(
        vocab_size=32, d_model=16, num_experts=4, expert_capacity=8, use_cache=False, moe_token_dropout=0.4, **sizes
    )
    torch.manual_seed(0)
    model, ids = NllbMoeForConditionalGeneration(config), torch.randint(3, 32, (4, 6))
    batch, options = {"input_ids": ids, "labels": ids}, {"loss": lambda out: out.loss, "unsplittable": NllbMoeSparseMLP}
    results = []
    for how in (one_f_one_b(2, 4), gpipe(1, 4)):
        pipe = fpipe.pipeline(model, example=batch, schedule=how, stages=how.stages, **options)
        assert fpipe.verify(pipe, model, batch, seed=SEED).reference
        step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), batch, seed=SEED)
        results.append(Result(step.loss, None, grads, step.buffers))
    assert_same(*results)
