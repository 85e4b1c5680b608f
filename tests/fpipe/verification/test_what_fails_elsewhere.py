# SPDX-License-Identifier: Apache-2.0
"""What `torch.distributed.pipelining` and stage functions made in other ways get wrong, each a test named after it.

Its schedules, receives and tables are held against ours in `test_incumbent`; wrapped modules are refused in
`distributed/test_gloo`. Here is what a model or a step of a user meets.
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
from tests.common.zoo import ZOO

HOWS = {"1F1B": one_f_one_b(ranks=4, microbatches=3), "split": split_backward(one_f_one_b(ranks=4, microbatches=3))}
every = pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)


# ------------------------------------------------------------------------------------------------------------- models


@every
def test_a_skip_connection_across_stages_makes_the_backward_raise(how):
    require_exact(ZOO["skips"], how, capture="trace")


@every
def test_gradients_of_tied_weights_are_never_summed(how):
    got = require_exact(ZOO["gpt"], how, capture="trace")
    alone = ZOO["gpt"].build()
    alone.head.weight = nn.Parameter(alone.embed.weight.detach().clone())
    assert "head.weight" not in got.grads
    assert not same_bits(got.grads["embed.weight"], loop_gradients(alone, how)["embed.weight"]), "both uses count"


def loop_gradients(model, how):
    _, inputs, targets = ZOO["gpt"].make(2 * how.microbatches)
    return loop(model, ZOO["gpt"].loss, inputs, targets, how.microbatches).grads


@every
def test_a_dict_none_an_integer_or_a_nested_tuple_between_stages_is_an_error(how):
    require_exact(ZOO["dicts"], how, capture="trace")


@every
def test_other_shapes_on_a_later_step_abort_the_process(how):
    case = ZOO["gpt"]
    pipe, model, *_ = build(case, how, 6, capture="trace")
    for rows, length in ((6, 3), (9, 2), (6, 3)):
        ids, targets = torch.randint(11, (2, rows, length))
        assert_same(run(pipe, model, (ids,), targets), loop(model, case.loss, (ids,), targets, 3))


@every
def test_batch_normalisation_has_seen_uninitialised_memory(how):
    """Nothing runs before the step, and the example's values are never read."""
    case = ZOO["normalised"]
    model, inputs, targets = case.make(6)
    wild = (torch.full_like(inputs[0], 1e30),)
    pipe = fpipe.pipeline(model, example=wild, targets=targets, loss=mse, schedule=how, cuts=case.cuts)
    got = run(pipe, model, inputs, targets)
    assert got.buffers["1.running_mean"].abs().max() < 10
    assert_same(got, loop(model, case.loss, inputs, targets, 3))


@every
def test_integers_into_a_later_stage_crash(how):
    require_exact(ZOO["later"], how, capture="trace")


@pytest.mark.parametrize("name", ["dropping", "gpt_dropout"])
def test_dropout_is_equal_to_nothing_that_one_device_does(name):
    """It is equal to one device, and to the same model on other numbers of ranks."""
    case = ZOO[name]
    results = []
    for ranks in (1, 2, 4):
        built = build(case, SCHEDULES["split_backward"](ranks=ranks, microbatches=3), 6, capture="trace")
        results.append(run(*built, seed=1))
        assert_same(results[-1], run_reference(*built, seed=1))
        assert_same(results[-1], results[0])


class Counted(nn.Module):
    """Layers in one checkpoint; counts how often they run on real tensors."""

    runs = 0

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])

    def body(self, x):
        if not isinstance(x, torch._subclasses.FakeTensor):
            Counted.runs += 1
        return self.layers(x)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


@pytest.mark.parametrize("depth", [1, 8])
def test_what_is_checkpointed_runs_again_for_every_group_of_parameters(depth, monkeypatch):
    """It runs twice, split backward or not, however many parameters there are."""
    monkeypatch.setattr(Counted, "runs", 0)
    case = Case(lambda: nn.Sequential(*map(Counted, [depth] * 4)), rows_of(), mse, ("1", "2", "3"))
    for kind in ("1F1B", "split"):
        built = build(case, HOWS[kind], 6, capture="trace")
        run(*built)
        Counted.runs = 0
        got = run(*built)
        assert Counted.runs == 3 * 2 * 4
        assert_same(got, loop(built[1], mse, *built[2:], 3))


# -------------------------------------------------------------------------------------------------------------- steps


@every
def test_accumulating_gradients_over_two_steps_gives_a_quarter_more(how):
    """Gradients are returned, nothing is kept: twice the same step is twice the gradient."""
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


@pytest.mark.parametrize("name", ["skips", "gpt"])
def test_the_order_f1_b1_f0_b0_on_the_last_stage_is_an_error(name):
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


def test_split_stages_lose_the_gradients_of_tied_weights_and_of_stages_without_a_differentiable_input():
    case = Case(lambda: nn.Sequential(*[Shared() for _ in range(4)]), rows_of(), mse, ("1", "2", "3"))
    got = require_exact(case, HOWS["split"], capture="trace")
    assert got.grads.keys() == {"3.a.weight", "3.a.bias", "3.b.bias"}, "below a detach, nothing has a gradient"


@every
def test_checkpoints_are_run_again_with_the_module_s_own_parameters(how):
    """They are those of the step: the module's own are others by then."""
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
def test_parameters_behind_an_unused_output_have_no_gradient_here_and_zeros_there(how):
    got = require_exact(ZOO["unused"], how, capture="trace")
    assert not [name for name in got.grads if name.startswith(("dead", "spare"))], "none, as a plain backward says"


def test_two_pipelines_of_one_module_swap_its_parameters():
    """Stages run on skeletons of their own, in turns or one inside the other; the user's module is left alone."""
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


def test_a_microbatch_s_activations_are_kept_alive_by_hooks_that_hold_them():
    """No stage keeps what it was called with behind the step."""
    seen = []

    class Noting(nn.Module):
        def forward(self, x):
            seen.append(weakref.ref(x))
            return x * 1

    case = Case(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Noting()), rows_of(), mse, ("", "", ""))
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


@pytest.mark.parametrize("backward", ["autograd", "graph"])
@pytest.mark.parametrize(
    "how", [one_f_one_b(ranks=2, microbatches=2), zb_h1(ranks=2, microbatches=2)], ids=["1F1B", "ZB-H1"]
)
@pytest.mark.parametrize("cut", ["1", "2.second"])
def test_autocast_does_not_remember_casts_of_what_a_stage_received(backward, how, cut):
    """Received values are leaves of a stage's backward, and of leaves autocast casts one only once."""
    case = Case(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Casting(), Around()), rows_of(), mse, ("", "", ""))
    built = _, model, inputs, targets = build(case, how, 6, (cut,), "trace", backward=backward)
    got = run(*built)
    assert_same(got, run_reference(*built))
    assert_same(got, loop(model, case.loss, inputs, targets, how.microbatches))


# ------------------------------------------------------------------------------------------------------------- compiled


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
def test_compiled_modules_are_refused_under_zero_bubble():
    """They run as they are; their weights are not deferred, and `print(pipe)` says so."""
    inputs, targets = rows_of()(8)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    model = nn.Sequential(*[torch.compile(block, backend="aot_eager") for block in blocks])
    how = zb_h1(ranks=2, microbatches=4)
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=["1"])
    assert fpipe.verify(pipe, model, inputs, targets).eager
    assert "computed by CompiledFunctionBackward" in str(pipe)
