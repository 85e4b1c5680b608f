# SPDX-License-Identifier: Apache-2.0
"""Unsplittable modules may branch on data: they run as a whole, whichever branch the capture took.

Their random numbers are keyed, are refused without a seed, and do not influence draws elsewhere.
"""

import copy
from collections import Counter
from dataclasses import dataclass
from functools import partial, reduce
from itertools import count
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP

import fpipe
from fpipe.tensors import random
from schedules import gpipe, interleaved_1f1b, one_f_one_b, recompute, zb_h1, zb_v
from tests.common.cases import WIDTH, mse
from tests.common.comparison import Result, assert_same
from tests.common.loops import loop
from tests.common.options import grouped
from tests.common.running import require_eager, require_loop, run, run_reference, staged
from tests.common.sizes import by_night, covering, few, sampled
from tests.common.unusual_models import AT, INSIDE, Block, Stack, Switch, branching

CPU, SEED = torch.device("cpu"), 3


@dataclass
class Made:
    """The output of one module."""

    h: Tensor


class Wrapping(Block):
    def forward(self, x):
        return Made(super().forward(x))


def test_unsplittable_modules_may_branch_on_data():
    """Unsplittable modules run as a whole; the branch that they took at capture does not matter."""
    how, options = gpipe(ranks=4, microbatches=3), {"unsplittable": ["blocks.*"]}
    require_loop(Stack(branching), how, AT, **options)
    with pytest.raises(fpipe.CutError, match=r"blocks\.0"):
        require_loop(Stack(branching), how, INSIDE, **options)


class Either(nn.Module):
    """Uses one weight or the other, and counts the uses of the first in a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if x.sum() > 0:
            self.count.add_(1)
            return self.first(x)
        return self.second(x)


def test_a_module_may_return_any_registered_type():
    """A module that returns a dataclass can be called as a whole."""

    class Unpacking(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Wrapping(lambda m, x: torch.tanh(x) if x.sum() > 0 else -x), Block()

        def forward(self, x):
            return self.b(self.a(x).h)

    require_loop(Unpacking(), gpipe(ranks=2, microbatches=2), ["b"], rows=4, unsplittable=Wrapping)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_may_return_its_argument(sign):
    """The capture records one branch, and a step may take either."""

    class Maybe(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return {"h": self.linear(x), "x": x} if sign * x.sum() > 0 else {"h": x, "x": x}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.maybe, self.last = nn.Linear(WIDTH, WIDTH), Maybe(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            out = self.maybe(self.first(x))
            return self.last(out["h"]) + out["x"]

    torch.manual_seed(0)
    x = torch.randn(8, WIDTH)
    require_eager(Model(), (x,), x, cuts=["maybe", "last"], microbatches=8, unsplittable=["maybe"])


def test_either_branch_gets_its_gradients():
    """Whichever branch the capture took. A weight that no microbatch uses gets none."""
    inputs, targets = (torch.cat([torch.ones(2, WIDTH), -torch.ones(4, WIDTH)]),), torch.randn(6, WIDTH)
    model = nn.Sequential(Either(), nn.Linear(WIDTH, WIDTH), Either())
    pipe = staged(model, inputs, targets, ["1", "2"], 3, unsplittable=Either)
    got, want = run(pipe, model, inputs, targets), loop(model, mse, inputs, targets, 3)
    assert want.buffers["0.count"] == 1
    assert_same(got, want)
    assert fpipe.verify(pipe, model, inputs, targets).eager


class AnyExperts(nn.Module):
    """A mixture of experts whose router chooses an expert for each row, so that shapes depend on data."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        chosen, out = probabilities.argmax(-1), torch.zeros_like(x)
        for k in (torch.nn.functional.one_hot(chosen, 3).sum(0) > 0).nonzero():
            rows = chosen == k[0]
            out[rows] = self.experts[int(k)](x[rows]) * probabilities[rows].max(-1, keepdim=True).values
        return out


def test_experts_may_see_any_rows():
    model = nn.Sequential(AnyExperts(), Block(), AnyExperts())
    require_loop(model, one_f_one_b(ranks=3, microbatches=3), ["1", "2"], rows=9, unsplittable=AnyExperts)


# --------------------------------------------------------------------------------------------------- draws in branches


def switching(how, cuts=("1",)):
    class First(nn.Linear):
        """Returns its input, so that the data decide the branch."""

        def forward(self, x):
            return x + 0 * super().forward(x)

    model = nn.Sequential(First(WIDTH, WIDTH), Switch(functional.dropout), nn.Linear(WIDTH, WIDTH))
    x = torch.ones(4, WIDTH)
    pipe = staged(model, (x,), x, cuts, schedule=how, unsplittable=Switch)
    return pipe, model, (torch.cat([x, -x]).roll(2, 0),), torch.cat([x, x])


def test_draws_that_only_data_decide_are_keyed_and_do_not_advance_the_generator():
    """The capture sees no draw at all."""
    results = []
    for how, cuts in ((gpipe(2, 4), ("1",)), (one_f_one_b(3, 4), ("1", "2")), (gpipe(1, 4), ())):
        pipe, model, inputs, targets = switching(how, cuts)
        model.load_state_dict(results[0][0] if results else model.state_dict())
        before = torch.get_rng_state()
        got = run(pipe, model, inputs, targets, seed=SEED)
        assert torch.equal(torch.get_rng_state(), before)
        assert_same(got, run_reference(pipe, model, inputs, targets, seed=SEED))
        assert torch.equal(torch.get_rng_state(), before)
        results.append((model.state_dict(), got))
        torch.rand(3)
    assert_same(results[0][1], results[1][1])
    assert_same(results[0][1], results[2][1])
    assert not torch.equal(got.outputs, run(pipe, model, inputs, targets, seed=SEED + 1).outputs)


def test_a_branch_that_draws_without_a_seed_is_refused_when_it_is_taken():
    pipe, model, (x,), targets = switching(one_f_one_b(2, 4))
    before = torch.get_rng_state()
    for function in (fpipe.value_and_grad(pipe), fpipe.reference(pipe)):
        function(*pipe.init(model), (-x.abs(),), targets)
        with pytest.raises(fpipe.InputError, match=r"seed: got none, .*because module 1 draws random"):
            function(*pipe.init(model), (x,), targets)
    assert torch.equal(torch.get_rng_state(), before)


def test_verify_runs_the_model_eagerly_unless_it_draws():
    pipe, model, (x,), targets = switching(one_f_one_b(2, 4))
    assert fpipe.verify(pipe, model, (-x.abs(),), targets, seed=SEED).eager
    before = torch.get_rng_state()
    found = fpipe.verify(pipe, model, (x,), targets, seed=SEED)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.reference
    assert not found.eager


def test_a_loss_that_branches_may_draw():
    def loss(out, y):
        return functional.dropout(out, 0.5).sum() if out.sum() > 0 else mse(out, y)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    x, y = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
    results = []
    for how in (gpipe(2, 8), one_f_one_b(1, 8)):
        pipe = staged(model, (x,), y, ["1"][: how.stages - 1], schedule=how, loss=loss, unsplittable="loss")
        results.append(run(pipe, model, (x,), y, seed=SEED))
        assert_same(results[-1], run_reference(pipe, model, (x,), y, seed=SEED))
    assert_same(*results)


class Telling(Switch):
    """Returns which branch it took, as a Python value."""

    def forward(self, x):
        return super().forward(x), bool(x.sum() > 0)


class Listening(nn.Module):
    """Draws once more if the returned value says so."""

    def __init__(self):
        super().__init__()
        self.telling, self.drop = Telling(functional.dropout), nn.Dropout(0.5)

    def forward(self, x):
        x, positive = self.telling(x)
        return self.drop(self.drop(x) if positive else x)


def test_draws_that_depend_on_a_returned_python_value_are_refused():
    model, x = nn.Sequential(nn.Identity(), Listening(), nn.Linear(WIDTH, WIDTH)), torch.ones(4, WIDTH)
    pipe = staged(model, (x,), x, ["2"], unsplittable=Telling)
    run(pipe, model, (-x,), x, seed=SEED)
    with pytest.raises(fpipe.InputError, match=r"module 1.telling: got \[True\] among what it returned"):
        run(pipe, model, (x,), x, seed=SEED)


def test_the_same_modules_are_skipped_at_random_under_any_schedule_and_cut():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x if torch.rand([]) < 0.5 else functional.dropout(self.linear(x), 0.5)

    model, x = nn.Sequential(*[Skipping() for _ in range(4)], nn.Linear(WIDTH, WIDTH)), torch.randn(8, WIDTH)
    results = []
    for how, cuts in ((zb_h1(3, 8), ["1", "3"]), (gpipe(1, 8), [])):
        pipe = staged(model, (x,), x, cuts, schedule=how, unsplittable=Skipping)
        results.append(run(pipe, model, (x,), x, seed=SEED))
        assert_same(results[-1], run_reference(pipe, model, (x,), x, seed=SEED))
    assert_same(*results)


class Sharing(nn.Module):
    """Uses a dropout module that others use, too, before it branches."""

    def __init__(self, drop):
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), drop

    def forward(self, x):
        x = self.drop(x)
        return self.linear(x) if x.sum() > 0 else x


def test_draws_in_branches_do_not_change_draws_outside(monkeypatch):
    drop, x, found = nn.Dropout(0.5), torch.ones(4, WIDTH), set()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), drop, Sharing(drop), drop)
    pipe = staged(model, (x,), x, [], unsplittable=Sharing)
    reseed = random.reseed

    def noted(key, label, device):
        found.add(label)
        reseed(key, label, device)

    monkeypatch.setattr(random, "reseed", noted)
    run(pipe, model, (x,), x, seed=SEED)
    assert found == {random.label("1", 0), random.stream_label("2", 0), random.label("1", 1)}


# ------------------------------------------------------------------------------------------------------------- streams


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
    return staged(model, (example,), example, cuts, schedule=how, unsplittable=Experts, **options)


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


@sampled(1)
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


@sampled(1)
@pytest.mark.parametrize("around", AROUND)
def test_a_module_that_is_cut_inside_draws_as_one_that_is_not(around, monkeypatch):
    """Draws, also those of a recomputed checkpoint, and statistics are those of the eager run."""
    body = AROUND[around] or (lambda function, x: function(x))
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Around(body)), torch.randn(8, WIDTH)
    pipes = [
        staged(model, (x,), x, cuts, schedule=how, unsplittable=Reading)
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


@by_night
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
        pipe = fpipe.pipeline(model, example=batch, schedule=how, stages=how.stages, **grouped(options))
        assert fpipe.verify(pipe, model, batch, seed=SEED).reference
        step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), batch, seed=SEED)
        results.append(Result(step.loss, None, grads, step.buffers))
    assert_same(*results)
