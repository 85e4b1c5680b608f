# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing, by the schedule and inside modules: what is computed again, how often, and which bits."""

from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fpipe.stages.backends import splits
from schedules import one_f_one_b, recompute, v_min, zb_h1, zb_v
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.growth import Operators
from tests.common.loops import loop
from tests.common.memory import require_as_simulated
from tests.common.running import build, run, run_reference
from tests.common.sizes import by_day, in_turn

ROWS, MICROBATCHES, STAGES = 2, 5, 4
CALLS = STAGES * MICROBATCHES
HOWS = {
    "1F1B": one_f_one_b(ranks=4, microbatches=MICROBATCHES),
    "ZB-H1": zb_h1(ranks=4, microbatches=MICROBATCHES),
    "ZB-V": zb_v(ranks=2, microbatches=MICROBATCHES),
    "V-Min": v_min(ranks=2, microbatches=MICROBATCHES),
}
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


@pytest.mark.parametrize(("around", "how"), in_turn([name for name in AROUND if name != "plain"], HOWS))
def test_a_function_that_a_module_checkpoints_runs_twice(how, around):
    how = HOWS[how]
    """The second time up to where all is there that the backward needs: not the last sine."""
    case, runs = case_of(around)
    times, called = count_runs(case, runs, how)
    assert times == 2 * CALLS * runs_as_python(how)
    assert called[aten.sin.default] == (2 + 1) * CALLS
    assert called[aten.addmm.default] == (1 if "products" in around else 2) * 2 * CALLS


@every
def test_a_stage_that_the_schedule_recomputes_runs_twice(how):
    case, runs = case_of("plain")
    for stages in ((0, 1, 2, 3), (1, 3)):
        times, called = count_runs(case, runs, recompute(how, stages))
        count = (STAGES + len(stages)) * MICROBATCHES
        assert times == count * runs_as_python(how)
        assert called[aten.addmm.default] == called[aten.sin.default] == 2 * count


@hooks_are_bypassed
@pytest.mark.parametrize(("around", "name"), PAIRS)
def test_checkpoints_in_a_recomputed_stage_run_three_times(around, name):
    """The schedule's second forward is checkpointed like the first."""
    case, runs = case_of(around)
    times, called = count_runs(case, runs, recompute(HOWS[name], (0, 1, 2, 3)))
    assert times == 3 * CALLS * runs_as_python(HOWS[name])
    assert called[aten.addmm.default] == (2 if around == "products saved" else 3) * 2 * CALLS


@hooks_are_bypassed
@pytest.mark.parametrize(("around", "name"), PAIRS)
def test_memory_of_checkpoints_is_freed_in_the_backward(around, name):
    """What a checkpoint saves is let go of in the backward, like all else."""
    case, _ = case_of(around)
    for schedule in (HOWS[name], recompute(HOWS[name], (1, 2))):
        require_as_simulated(*build(case, schedule, ROWS * MICROBATCHES, capture="trace"))


def test_a_checkpoint_keeps_its_input_and_what_its_policy_saves():
    row = ROWS * WIDTH * 4
    kept = {
        "plain": 4,
        "checkpoint": 1,
        "products saved": 3,
        "nothing saved": 1,
    }  # of the second stage, its input first
    for around, tensors in kept.items():
        pipe, *_ = build(case_of(around)[0], HOWS["1F1B"], ROWS * MICROBATCHES, capture="trace")
        assert pipe.sizes.activation[1] == tensors * row, around


@pytest.mark.parametrize(("around", "how"), in_turn(AROUND, HOWS))
def test_a_checkpoint_draws_the_same_random_numbers_again(how, around):
    how = HOWS[how]
    case, _ = case_of(around, dropout=0.4)
    built = build(case, how, ROWS * MICROBATCHES, capture="trace")
    got = run(*built, seed=3)
    assert_same(got, run_reference(*built, seed=3))
    assert_same(got, run(*build(case_of("plain", dropout=0.4)[0], how, ROWS * MICROBATCHES, capture="trace"), seed=3))
