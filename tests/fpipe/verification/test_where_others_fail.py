# SPDX-License-Identifier: Apache-2.0
"""What `torch.distributed.pipelining`, or stage functions made in other ways, get wrong: here it works.

`test_incumbent` compares its schedules, receives and tables with ours; `distributed/test_gloo` has wrapped modules;
`test_exactness` has skip connections, tied weights, values that are no tensors, and integers in a later stage. Here is
what else the models and steps of users meet.
"""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import B, F, check, gpipe, linear, one_f_one_b, schedule, split_backward, zb_h1
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import build, require_exact, run, run_reference
from tests.common.schedules import SCHEDULES
from tests.common.sizes import by_night, covering, sampled
from tests.common.zoo import ZOO

HOWS = {"1F1B": one_f_one_b(ranks=4, microbatches=3), "split": split_backward(one_f_one_b(ranks=4, microbatches=3))}
every = pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)


# ------------------------------------------------------------------------------------------------------------- models


@sampled(1)
@every
def test_later_steps_may_have_other_shapes(how):
    """Elsewhere they abort the process."""
    case = ZOO["gpt"]
    pipe, model, *_ = build(case, how, 6, capture="trace")
    for rows, length in ((6, 3), (9, 2), (6, 3)):
        ids, targets = torch.randint(11, (2, rows, length))
        assert_same(run(pipe, model, (ids,), targets), loop(model, case.loss, (ids,), targets, 3))


@every
def test_batch_normalization_sees_the_batch_only(how):
    """Nothing runs before the step, nor are values of the example read; elsewhere, uninitialized memory counts."""
    case = ZOO["normalised"]
    model, inputs, targets = case.make(6)
    wild = (torch.full_like(inputs[0], 1e30),)
    pipe = fpipe.pipeline(model, example=wild, targets=targets, loss=mse, schedule=how, cuts=case.cuts)
    got = run(pipe, model, inputs, targets)
    assert got.buffers["1.running_mean"].abs().max() < 10
    assert_same(got, loop(model, case.loss, inputs, targets, 3))


@sampled(1)
@pytest.mark.parametrize("name", ["dropping", "gpt_dropout"])
def test_dropout_is_the_same_on_any_number_of_ranks(name):
    """And the same as on one device; elsewhere it equals nothing that one device does."""
    case = ZOO[name]
    results = []
    for ranks in (1, 2, 4):
        built = build(case, SCHEDULES["split_backward"](ranks=ranks, microbatches=3), 6, capture="trace")
        results.append(run(*built, seed=1))
        assert_same(results[-1], run_reference(*built, seed=1))
        assert_same(results[-1], results[0])


class Count(torch.autograd.Function):
    """Returns its argument, and counts its runs on real tensors."""

    runs = 0

    @staticmethod
    def forward(ctx, x):
        Count.runs += not isinstance(x, torch._subclasses.FakeTensor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Counted(nn.Module):
    """Layers in one checkpoint, and a count of how often they run."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])

    def body(self, x):
        return self.layers(Count.apply(x))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


@sampled(1)
@pytest.mark.parametrize("depth", [1, 8])
def test_a_checkpointed_function_runs_twice_however_many_parameters_it_has(depth, monkeypatch):
    """Elsewhere, if the backward is split, it runs again for every group of parameters."""
    monkeypatch.setattr(Count, "runs", 0)
    case = Case(lambda: nn.Sequential(*map(Counted, [depth] * 4)), rows_of(), mse, ("1", "2", "3"))
    for kind, runs in (("1F1B", 3 * 2 * 4), ("split", 0)):  # where backwards are split, it was recorded
        built = build(case, HOWS[kind], 6, capture="trace", backward="autograd")
        run(*built)
        Count.runs = 0
        got = run(*built)
        assert Count.runs == runs
        assert_same(got, loop(built[1], mse, *built[2:], 3))


# -------------------------------------------------------------------------------------------------------------- steps


@every
def test_the_same_step_twice_gives_twice_the_gradient(how):
    """A step returns its gradients and keeps nothing; elsewhere two steps give a quarter more."""
    pipe, model, inputs, targets = build(ZOO["mlp"], how, 6, capture="trace")
    params, buffers = pipe.init(model)
    step = fpipe.value_and_grad(pipe)
    (_, first), (_, second) = (step(params, buffers, inputs, targets) for _ in range(2))
    want = loop(model, mse, inputs, targets, 3).grads
    assert all(same_bits(first[name] + second[name], 2 * want[name]) for name in want)


@schedule(placement=linear)
def last_first(rank, ranks, microbatches):
    """Fill and drain; the last stage takes the second microbatch forward and back before the first."""
    if rank == ranks - 1:
        yield from (F(rank, 1), B(rank, 1), F(rank, 0), B(rank, 0))
    else:
        yield from (F(rank, 1), F(rank, 0), B(rank, 1), B(rank, 0))


@sampled(1)
@pytest.mark.parametrize("name", ["skips", "gpt"])
def test_the_last_stage_may_finish_a_later_microbatch_first(name):
    """Elsewhere the order F1 B1 F0 B0 is an error."""
    how = last_first(ranks=4, microbatches=2)
    check(how)
    require_exact(ZOO[name], how, order=[1, 0], capture="trace")


# ---------------------------------------------------------------------------------------------------- stage functions


class Shared(nn.Module):
    """One weight twice in a stage, and nothing that can be differentiated comes in."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x.detach()).tanh())


def test_split_stages_keep_gradients_of_tied_weights_without_a_differentiable_input():
    """Elsewhere both are lost."""
    case = Case(lambda: nn.Sequential(*[Shared() for _ in range(4)]), rows_of(), mse, ("1", "2", "3"))
    got = require_exact(case, HOWS["split"], capture="trace")
    assert got.grads.keys() == {"3.a.weight", "3.a.bias", "3.b.bias"}, "below a detach, nothing has a gradient"


@every
def test_checkpoints_run_again_with_the_parameters_of_the_step(how):
    """The module's own may have changed by then; elsewhere those are used."""
    case = Case(lambda: nn.Sequential(*[Counted(2) for _ in range(4)]), rows_of(), mse, ("1", "2", "3"))
    pipe, model, inputs, targets = build(case, how, 6, capture="trace")
    params, buffers = pipe.init(model)
    want = loop(model, mse, inputs, targets, 3)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    out, grads = fpipe.value_and_grad(pipe)(params, buffers, inputs, targets)
    assert_same(want._replace(loss=out.loss, grads=grads), want)


@every
def test_parameters_of_an_unused_output_have_no_gradient(how):
    """Elsewhere they have zeros."""
    got = require_exact(ZOO["unused"], how, capture="trace")
    assert not [name for name in got.grads if name.startswith(("dead", "spare"))], "none, as a plain backward says"


def test_two_pipelines_of_one_module_do_not_disturb_each_other():
    """Stages run on copies without tensors, and leave the user's module alone; elsewhere they swap its parameters."""
    case = ZOO["mlp"]
    model, inputs, targets = case.make(6)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    pipes = [
        fpipe.pipeline(model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=case.cuts)
        for how in HOWS.values()
    ]
    results = [run(pipe, model, inputs, targets) for pipe in (*pipes, *pipes)]
    for got in results:
        assert_same(got, results[0])
    assert all(same_bits(p, before[name]) for name, p in model.named_parameters())


def test_no_activation_outlives_the_step():
    """No stage keeps its arguments after the step; elsewhere hooks keep them alive."""
    seen = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(weakref.ref(x))
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Noted(nn.Module):
        def forward(self, x):
            return Noting.apply(x)

    case = Case(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Noted()), rows_of(), mse, ("", "", ""))
    pipe, model, inputs, targets = build(case, gpipe(ranks=2, microbatches=2), 4, ("1",), "trace")
    seen.clear()
    run(pipe, model, inputs, targets)
    gc.collect()
    assert seen
    assert not [ref for ref in seen if ref() is not None]


# ------------------------------------------------------------------------------------------------------------- autocast


class Casting(nn.Module):
    """Uses a value twice under autocast."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.a(x).float() * self.b(x).float()


class Around(nn.Module):
    """Runs modules under one autocast."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Casting()

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(x + self.first(x))


@sampled(2)
@covering(
    cut=["1", "2.second"],
    how={"1F1B": one_f_one_b(ranks=2, microbatches=2), "ZB-H1": zb_h1(ranks=2, microbatches=2)},
    backward=["autograd", "graph"],
)
def test_autocast_casts_a_received_value_at_every_use(backward, how, cut):
    """Autocast caches casts of leaves, and what a stage received is a leaf of its backward."""
    case = Case(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Casting(), Around()), rows_of(), mse, ("", "", ""))
    built = _, model, inputs, targets = build(case, how, 6, (cut,), "trace", backward=backward)
    got = run(*built)
    assert_same(got, run_reference(*built))
    assert_same(got, loop(model, case.loss, inputs, targets, how.microbatches))


# ------------------------------------------------------------------------------------------------------------- compiled


@by_night
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
def test_compiled_modules_run_under_zero_bubble():
    """Elsewhere they are refused."""
    inputs, targets = rows_of()(8)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    model = nn.Sequential(*[torch.compile(block, backend="aot_eager") for block in blocks])
    how = zb_h1(ranks=2, microbatches=4)
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=["1"])
    assert fpipe.verify(pipe, model, inputs, targets).eager
