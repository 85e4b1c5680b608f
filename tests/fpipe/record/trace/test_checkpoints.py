# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing, by the schedule and inside modules: what is computed again, how often, and which bits.

Normalization in a checkpoint counts a microbatch twice, as on one device, where the backward runs it again.
"""

from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaConfig, LlamaForCausalLM

import fpipe
from fpipe.stages.backends import splits
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, recompute, v_min, zb_h1, zb_v
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.growth import Operators
from tests.common.loops import loop
from tests.common.memory import require_as_simulated
from tests.common.running import build, require_eager, run, run_reference, staged
from tests.common.sizes import by_day, by_night, covering, in_turn, sampled

ROWS, MICROBATCHES, STAGES = 2, 5, 4
CALLS = STAGES * MICROBATCHES
HOWS = {
    "1F1B": one_f_one_b(ranks=4, microbatches=MICROBATCHES),
    "ZB-H1": zb_h1(ranks=4, microbatches=MICROBATCHES),
    "ZB-V": zb_v(ranks=2, microbatches=MICROBATCHES),
    "V-Min": v_min(ranks=2, microbatches=MICROBATCHES),
}
SMALL = {"1F1B": one_f_one_b(ranks=2, microbatches=2), "ZB-V": zb_v(ranks=2, microbatches=4)}
MANY = {
    "1F1B": one_f_one_b(ranks=2, microbatches=3),
    "recomputed": recompute(one_f_one_b(ranks=2, microbatches=3)),
    "ZB-V": zb_v(ranks=1, microbatches=3),
}
BACKWARDS = pytest.mark.parametrize("backward", ["autograd", "graph"])
aten = torch.ops.aten
every = pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
hooks_are_bypassed = pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")  # torch 2.15
PAIRS = by_day(product(["checkpoint", "products saved"], HOWS), 3)


def save_products(ctx, op, *args, **kwargs):
    return (
        CheckpointPolicy.MUST_SAVE if op in (aten.addmm.default, aten.mm.default) else CheckpointPolicy.PREFER_RECOMPUTE
    )


def save_nothing(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


class Counted(torch.autograd.Function):
    """Returns its argument, and counts its runs on real tensors."""

    @staticmethod
    def forward(ctx, x, runs):
        runs["body"] += not isinstance(x, FakeTensor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Body(nn.Module):
    """Two linear layers around others, counted when they run on real tensors; `around` calls it."""

    def __init__(self, runs, around=None, dropout=0.0):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.runs, self.around, self.dropout = runs, around, dropout

    def __deepcopy__(self, memo):
        """Copies count on the same counter."""
        new = Body(self.runs, self.around, self.dropout)
        memo[id(self)] = new
        for name in ("a", "b"):
            layer = getattr(self, name)
            for leaf, tensor in layer.named_parameters():
                setattr(getattr(new, name), leaf, memo.get(id(tensor), tensor))
        return new

    def body(self, x):
        return self.b(functional.dropout(self.a(Counted.apply(x, self.runs)).sin(), self.dropout, self.training)).sin()

    def forward(self, x):
        return self.body(x) if self.around is None else self.around(self.body, x)


inside = partial(checkpoint, use_reentrant=False)
selective = partial(inside, context_fn=partial(create_selective_checkpoint_contexts, save_products))
AROUND = {
    "plain": None,
    "checkpoint": inside,
    "generator not put back": partial(inside, preserve_rng_state=False),
    "products saved": selective,
    "products saved, by a list": partial(
        inside, context_fn=partial(create_selective_checkpoint_contexts, [aten.addmm.default])
    ),
    "nothing saved": partial(inside, context_fn=partial(create_selective_checkpoint_contexts, save_nothing)),
}


def case_of(around, **options):
    runs = Counter()
    build_model = lambda: nn.Sequential(*[Body(runs, AROUND[around], **options) for _ in range(STAGES)])  # noqa: E731
    return Case(build_model, rows_of(), mse, ("1", "2", "3"), random=bool(options)), runs


def runs_as_python(how):
    """Whether custom functions run in steps; if backwards are split, only the operators that they recorded do."""
    return not splits(how)


def count_runs(case, runs, how):
    """A second step, after the first has found its way: its results, how often bodies ran, and the operators."""
    built = build(case, how, ROWS * MICROBATCHES, capture="trace", backward="autograd")
    run(*built)
    runs.clear()
    with Operators() as operators:
        got = run(*built)
    times = runs["body"]
    assert_same(got, loop(built[1], mse, *built[2:], MICROBATCHES))
    assert_same(got, run_reference(*built))
    return times, operators.called


@sampled(1)
@pytest.mark.parametrize(("around", "how"), in_turn([name for name in AROUND if name != "plain"], HOWS))
def test_a_function_that_a_module_checkpoints_runs_twice(how, around):
    """The second time up to where all is there that the backward needs: not the last sine."""
    how = HOWS[how]
    case, runs = case_of(around)
    times, called = count_runs(case, runs, how)
    assert times == 2 * CALLS * runs_as_python(how)
    assert called[aten.sin.default] == (2 + 1) * CALLS
    assert called[aten.addmm.default] == (1 if "products" in around else 2) * 2 * CALLS


@sampled(1)
@every
def test_a_stage_that_the_schedule_recomputes_runs_twice(how):
    case, runs = case_of("plain")
    for stages in ((0, 1, 2, 3), (1, 3)):
        times, called = count_runs(case, runs, recompute(how, stages))
        count = (STAGES + len(stages)) * MICROBATCHES
        assert times == count * runs_as_python(how)
        assert called[aten.addmm.default] == called[aten.sin.default] == 2 * count


@sampled(1)
@hooks_are_bypassed
@pytest.mark.parametrize(("around", "name"), PAIRS)
def test_checkpoints_in_a_recomputed_stage_run_three_times(around, name):
    """The schedule's second forward is checkpointed like the first."""
    case, runs = case_of(around)
    times, called = count_runs(case, runs, recompute(HOWS[name], (0, 1, 2, 3)))
    assert times == 3 * CALLS * runs_as_python(HOWS[name])
    assert called[aten.addmm.default] == (2 if around == "products saved" else 3) * 2 * CALLS


@sampled(1)
@hooks_are_bypassed
@pytest.mark.parametrize(("around", "name"), PAIRS)
def test_memory_of_checkpoints_is_freed_in_the_backward(around, name):
    """What a checkpoint saves is let go of in the backward, like all else."""
    case, _ = case_of(around)
    for schedule in (HOWS[name], recompute(HOWS[name], (1, 2))):
        require_as_simulated(*build(case, schedule, ROWS * MICROBATCHES, capture="trace"))


def test_a_checkpoint_keeps_its_input_and_what_its_policy_saves():
    row = ROWS * WIDTH * 4
    # How many tensors the second stage keeps, its input first.
    kept = {"plain": 4, "checkpoint": 1, "products saved": 3, "nothing saved": 1}
    for around, tensors in kept.items():
        pipe, *_ = build(case_of(around)[0], HOWS["1F1B"], ROWS * MICROBATCHES, capture="trace")
        assert pipe.sizes.activation[1] == tensors * row, around


@sampled(1)
@pytest.mark.parametrize(("around", "how"), in_turn(AROUND, HOWS))
def test_a_checkpoint_draws_the_same_random_numbers_again(how, around):
    how = HOWS[how]
    case, _ = case_of(around, dropout=0.4)
    built = build(case, how, ROWS * MICROBATCHES, capture="trace")
    got = run(*built, seed=3)
    assert_same(got, run_reference(*built, seed=3))
    assert_same(got, run(*build(case_of("plain", dropout=0.4)[0], how, ROWS * MICROBATCHES, capture="trace"), seed=3))


# -------------------------------------------------------------- where they begin, and those that torch calls reentrant


reentrant = partial(checkpoint, use_reentrant=True)


class Asking(nn.Module):
    """Asks for the number of dimensions first, which is a torch call that computes nothing."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.a, self.b, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x, scale=None):
        assert x.dim() == 2
        h = functional.dropout(self.a(x).sin() * self.b(x), self.dropout, self.training) + x
        return h if scale is None else h * scale


class Stack(nn.Module):
    """Blocks, each called by `around(model, block, x)`."""

    def __init__(self, around, **options):
        super().__init__()
        self.blocks, self.around = nn.ModuleList([Asking(**options) for _ in range(4)]), around
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        for block in self.blocks:
            x = self.around(self, block, x)
        return x


def verify(model, name, backward):
    how, x, y = SMALL[name], torch.rand(8, WIDTH), torch.rand(8, WIDTH)
    cuts = ["blocks.2"] if how.stages == 2 else ["blocks.1", "blocks.2", "blocks.3"]
    require_eager(model, (x,), y, seed=3, cuts=cuts, schedule=how, backward=backward)


@sampled(1)
@covering(how=[*SMALL], backward=["autograd", "graph"])
def test_a_stage_may_begin_with_a_checkpoint_whose_first_calls_compute_nothing(how, backward):
    def around(model, block, x):
        return checkpoint(block, x, use_reentrant=False)

    verify(Stack(around), how, backward)


@BACKWARDS
def test_a_checkpointed_function_may_be_a_partial_without_tensors(backward):
    def around(model, block, x):
        return checkpoint(partial(block, scale=None), x, use_reentrant=False)

    verify(Stack(around), "ZB-V", backward)


@sampled(1)
@covering(how=[*SMALL], backward=["autograd", "graph"])
def test_a_reentrant_checkpoint_is_exact(how, backward):
    """The input of a block is used three times inside; the second argument is the same for all blocks."""

    def around(model, block, x):
        return reentrant(block, x, model.gain.sin())

    model = Stack(around)
    verify(model, how, backward)
    assert model.gain.requires_grad


@by_night
@BACKWARDS
def test_a_reentrant_checkpoint_draws_the_same_numbers_again(backward):
    model = Stack(lambda model, block, x: reentrant(block, x + model.gain), dropout=0.4)
    got = [gradients(model, backward, 3), gradients(model, backward, 3), gradients(model, backward, 4)]
    plain = Stack(lambda model, block, x: block(x + model.gain), dropout=0.4)
    plain.load_state_dict(model.state_dict())
    expected = gradients(plain, backward, 3)
    for name, grad in expected.items():
        assert torch.equal(got[0][name], grad), name
        assert torch.equal(got[1][name], grad), name
    assert not torch.equal(got[0]["gain"], got[2]["gain"])


def gradients(model, backward, seed):
    torch.manual_seed(0)
    x, y = torch.rand(8, WIDTH), torch.rand(8, WIDTH)
    step = run(staged(model, (x,), y, ["blocks.2"], backward=backward), model, (x,), y, seed=seed)
    assert torch.isfinite(step.loss)
    return step.grads


@sampled(1)
@BACKWARDS
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_parameters_in_a_reentrant_checkpoint_without_differentiable_inputs_get_no_gradient(backward):
    """The first block gets the batch alone, so torch records nothing of it."""
    model = Stack(lambda model, block, x: reentrant(block, x) * model.gain)
    verify(model, "1F1B", backward)


@sampled(1)
@BACKWARDS
def test_a_reentrant_checkpoint_under_autocast_casts_in_both_runs(backward):
    def around(model, block, x):
        with torch.autocast("cpu", torch.bfloat16):
            return reentrant(block, x + model.gain).float()

    verify(Stack(around), "1F1B", backward)


@sampled(1)
@BACKWARDS
def test_a_reentrant_checkpoint_in_another_checkpoint_is_exact(backward):
    def around(model, block, x):
        return checkpoint(lambda x: reentrant(block, x), x + model.gain, use_reentrant=False)

    verify(Stack(around), "1F1B", backward)


def shared(model, block, x):
    return reentrant(lambda x: block(x) * model.gain, x + model.gain)


def hidden(model, block, x):
    h = (x + model.gain).sin()
    return reentrant(lambda x: block(x) * h, x + h)


@pytest.mark.parametrize(
    ("around", "words"),
    [
        (shared, ["'gain'", "used outside it", "use_reentrant=False"]),
        (hidden, ["closure", "use_reentrant=False"]),
        (lambda m, b, x: reentrant(b, x, preserve_rng_state=False), ["preserve_rng_state"]),
    ],
    ids=["a shared parameter", "a tensor of a closure", "other numbers"],
)
def test_a_reentrant_checkpoint_that_cannot_be_exact_is_refused(around, words):
    with pytest.raises((fpipe.CaptureError, fpipe.CutError)) as caught:
        verify(Stack(around), "1F1B", "autograd")
    assert all(word in str(caught.value) for word in words), caught.value


@by_night
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("backward", "settings"), [("autograd", {}), ("graph", {"gradient_checkpointing_kwargs": {"use_reentrant": True}})]
)
def test_gradient_checkpointing_of_transformers_is_exact(backward, settings):
    """Without dropout, so that it is compared with the model run eagerly; a stage begins with each layer."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=1, **sizes)).train()
    model.gradient_checkpointing_enable(**settings)
    ids = torch.randint(3, 32, (4, 8))
    batch, how = {"input_ids": ids, "labels": ids, "use_cache": False}, zb_v(ranks=1, microbatches=2)
    options = {"loss": lambda out: out.loss, "schedule": how, "backward": backward}
    require_eager(model, batch, cuts=["model.layers.1"], **options)


# ------------------------------------------------------------------------------------------------------------- buffers


class Dense(nn.Module):
    """A layer of DenseNet as it saves memory: what it concatenates and normalizes is computed again."""

    def __init__(self, features, reentrant=False):
        super().__init__()
        self.norm, self.inner, self.reentrant = nn.BatchNorm1d(features), nn.Linear(features, 4), reentrant

    def forward(self, *features):
        def bottleneck(*features):
            return self.inner(torch.relu(self.norm(torch.cat(features, 1))))

        return checkpoint(bottleneck, *features, use_reentrant=self.reentrant)


class DenseBlock(nn.Module):
    def __init__(self, reentrant=False):
        super().__init__()
        self.layers = nn.ModuleList(Dense(4 * (k + 1), reentrant) for k in range(2))

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(*features))
        return features[-1]


def build_around(block, how, cut, backward):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 4)), torch.randn(9, 4), torch.randn(9, 4)
    return staged(model, (x,), y, [cut], schedule=how, backward=backward), model, x, y


def require_as_loop(built):
    """Return the buffers of a plain loop on one device; raise unless a step of the pipeline equals it."""
    pipe, model, x, y = built
    want = loop(model, mse, (x,), y, 3)
    assert_same(run(pipe, model, (x,), y), want)
    return want.buffers


@sampled(2)
@covering(reentrant={"": False, "reentrant": True}, cut=["1.layers.1", "2"], how=MANY, backward=["autograd", "graph"])
def test_running_statistics_in_a_checkpoint_are_those_of_one_device(reentrant, cut, how, backward):
    buffers = require_as_loop(build_around(DenseBlock(reentrant), how, cut, backward))
    assert buffers["1.layers.0.norm.num_batches_tracked"] == 6


def test_running_again_leaves_the_next_microbatch_its_buffers():
    """Under 1F1B, the backward of a microbatch comes after the next forward, which has begun with the same buffers."""
    require_as_loop(build_around(DenseBlock(reentrant=True), MANY["1F1B"], "2", "autograd"))


class Dropping(nn.Module):
    """What is normalized is random; the running mean is that of the last microbatch."""

    def __init__(self, checkpointed):
        super().__init__()
        self.norm, self.drop, self.checkpointed = nn.BatchNorm1d(4, momentum=1.0), nn.Dropout(0.5), checkpointed

    def forward(self, x):
        def normalized(x):
            return self.norm(self.drop(x))

        return checkpoint(normalized, x, use_reentrant=False) if self.checkpointed else normalized(x)


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_running_again_draws_the_same_numbers(backward):
    means = []
    for checkpointed, count in ((True, 6), (False, 3)):
        pipe, model, x, y = build_around(Dropping(checkpointed), MANY["1F1B"], "2", backward)
        got = run(pipe, model, (x,), y, seed=1)
        assert_same(got, run_reference(pipe, model, (x,), y, seed=1))
        assert got.buffers["1.norm.num_batches_tracked"] == count
        means.append(got.buffers["1.norm.running_mean"])
    assert same_bits(*means)


def test_a_frozen_checkpoint_updates_statistics_once():
    """Nothing is saved, so nothing is computed again."""
    block = DenseBlock().requires_grad_(False)
    buffers = require_as_loop(build_around(nn.Sequential(Detached(), block), MANY["1F1B"], "2", "autograd"))
    assert buffers["1.1.layers.0.norm.num_batches_tracked"] == 3


class Detached(nn.Module):
    def forward(self, x):
        return x.detach()


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Dense(4)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_a_checkpoint_in_a_checkpoint_is_refused():
    with pytest.raises(fpipe.CaptureError, match="a checkpoint in a checkpoint, with a function that changes a buffer"):
        build_around(Nested(), MANY["1F1B"], "2", "autograd")


class Averaging(nn.Module):
    """Subtracts a running mean, which it changes before, in or after its checkpoint."""

    def __init__(self, when):
        super().__init__()
        self.inner, self.when = nn.Linear(4, 4), when
        self.register_buffer("mean", torch.zeros(4))

    def average(self, when, x):
        if when == self.when:
            self.mean.mul_(0.5).add_(x.detach().mean(0))

    def forward(self, x):
        def centered(x):
            self.average("in", x)
            return (self.inner(x) - self.mean).sin() * x

        self.average("before", x)
        y = checkpoint(centered, x, use_reentrant=False)
        self.average("after", x)
        return y


@sampled(2)
@covering(when=["before", "after"], how=MANY, backward=["autograd", "graph"])
def test_running_again_finds_buffers_as_the_forward_left_them(when, how, backward):
    require_as_loop(build_around(Averaging(when), how, "2", backward))


def test_a_checkpoint_that_reads_a_buffer_it_changes_is_refused():
    with pytest.raises(fpipe.CaptureError, match=r"module 1, sub: got a checkpointed function that reads a buffer"):
        build_around(Averaging("in"), MANY["1F1B"], "2", "autograd")


class NormedTwice(nn.Module):
    """Normalizes twice with one module, of which the first is in a checkpoint."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        x = checkpoint(lambda x: self.norm(self.inner(x)), x, use_reentrant=False)
        return self.norm(x * 2)


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_running_again_comes_after_the_whole_forward(backward):
    assert require_as_loop(build_around(NormedTwice(), MANY["1F1B"], "2", backward))["1.norm.num_batches_tracked"] == 9
