# SPDX-License-Identifier: Apache-2.0
"""The functions that users call: pure, independent of how the model is cut, and clear about bad arguments."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import B, F, gpipe, linear, one_f_one_b, schedule
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import Result, assert_same
from tests.common.layers import linears
from tests.common.loops import loop
from tests.common.running import build, run, run_reference
from tests.common.schedules import SCHEDULES, linear_fill_drain, looped_fill_drain, vee_fill_drain
from tests.common.sizes import few
from tests.common.zoo import ZOO

# ---------------------------------------------------------------------- nothing but the arguments decides, and all stay


PLACES = ("1", "2", "3", "4", "5", "6")


@settings(max_examples=few(20))
@given(
    cuts=st.sets(st.sampled_from(PLACES), max_size=4).map(sorted),
    kind=st.sampled_from(list(SCHEDULES)),
    capture=st.sampled_from(["export", "modules"]),
)
def test_dropout_depends_on_the_seed_alone(cuts, kind, capture):
    """Not on cuts, ranks or schedule. (Between front ends it may: a part handed in is keyed as a whole.)"""
    case = ZOO["dropping"]
    uncut = run(*build(case, gpipe(ranks=1, microbatches=3), 6, (), capture), seed=9)
    how = SCHEDULES[kind](ranks=len(cuts) + 1, microbatches=3)
    assert_same(run(*build(case, how, 6, tuple(cuts), capture), seed=9), uncut)


@pytest.mark.parametrize("factory", [linear_fill_drain, looped_fill_drain, vee_fill_drain])
def test_dropout_does_not_depend_on_the_placement(factory):
    for name in ("dropping", "gpt_dropout"):
        case = ZOO[name]
        uncut = run(*build(case, gpipe(ranks=1, microbatches=2), 4, ()), seed=9)
        assert_same(run(*build(case, factory(ranks=2, microbatches=2), 4), seed=9), uncut)


@pytest.mark.parametrize("capture", ["export", "modules"])
def test_different_seeds_draw_different_numbers(capture):
    built = build(ZOO["dropping"], one_f_one_b(ranks=4, microbatches=3), 6, capture=capture)
    losses = [run(*built, seed=seed).loss.item() for seed in range(5)]
    assert len(set(losses)) == 5


@pytest.mark.parametrize("capture", ["export", "modules"])
def test_microbatches_and_layers_draw_different_numbers(capture):
    """Each dropout of each microbatch has a mask of its own, even where path or position coincide."""
    x = torch.ones(4, 64)
    pipe = fpipe.pipeline(
        nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64, bias=False), nn.Dropout(0.5)),
        example=(x,),
        loss=lambda out: out.sum(),
        schedule=gpipe(ranks=1, microbatches=4),
        capture=capture,
    )
    step, _ = fpipe.value_and_grad(pipe, outputs=True)({"1.weight": torch.eye(64)}, {}, (x,), seed=0)
    assert len({tuple(row.tolist()) for row in step.outputs}) == 4
    kept = (step.outputs != 0).float().mean().item()
    assert 0.1 < kept < 0.4, "two masks that are independent keep a quarter"


@pytest.mark.parametrize("name", ["dropping", "mlp"])
@pytest.mark.parametrize("capture", ["export", "modules"])
def test_the_user_s_generator_is_not_advanced(name, capture):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    built = build(ZOO[name], one_f_one_b(ranks=2, microbatches=3), 6, capture=capture)
    assert torch.equal(torch.get_rng_state(), before), "after building"
    run(*built, seed=1)
    assert torch.equal(torch.get_rng_state(), before), "after a step"
    run_reference(*built, seed=1)
    assert torch.equal(torch.get_rng_state(), before), "after the reference"
    torch.manual_seed(4)
    assert_same(run(*built, seed=1), run_reference(*built, seed=1))


@pytest.mark.parametrize("name", ["in_place", "normalised", "strides", "several", "contexts", "dropping", "gpt"])
@pytest.mark.parametrize("how", ["step", "evaluate", "reference"])
def test_no_argument_is_modified(name, how):
    case = ZOO[name]
    pipe, model, inputs, targets = build(case, one_f_one_b(ranks=4, microbatches=3), 6)
    state = pipe.init(model) if how != "reference" else (dict(model.named_parameters()), dict(model.named_buffers()))
    before = copy.deepcopy((state, inputs, targets))
    flags = [p.requires_grad for p in state[0].values()]
    function = {"step": fpipe.value_and_grad, "evaluate": fpipe.evaluate, "reference": fpipe.reference}[how](pipe)
    function(*state, inputs, targets, seed=1)
    after = Result(None, (inputs, targets), state[0], state[1])
    assert_same(after, Result(None, before[1:], *before[0]))
    assert [p.requires_grad for p in state[0].values()] == flags
    assert all(p.grad is None for p in state[0].values())


def test_parameters_need_not_be_leaves_nor_require_a_gradient():
    """What wants a gradient was settled when the pipeline was built; what is frozen may not be passed as if trained."""
    built = pipe, model, inputs, targets = build(ZOO["frozen_below"], one_f_one_b(ranks=2, microbatches=2), 4)
    params, buffers = pipe.init(model)
    want = run(*built)
    for change in (lambda p: p.detach(), lambda p: p.detach().requires_grad_(), lambda p: p + 0, nn.Parameter):
        changed = {name: change(p) if p.requires_grad else p.detach() for name, p in params.items()}
        out, grads = fpipe.value_and_grad(pipe)(changed, buffers, inputs, targets)
        assert same_bits(out.loss, want.loss)
        assert_same(want._replace(grads=grads), want)


def test_the_same_step_twice_gives_the_same_bits():
    for name in ("normalised", "dropping", "chained"):
        built = build(ZOO[name], one_f_one_b(ranks=4, microbatches=3), 6)
        assert_same(run(*built, seed=1), run(*built, seed=1))


def test_results_of_a_step_are_not_overwritten_by_the_next():
    pipe, model, inputs, targets = build(ZOO["normalised"], one_f_one_b(ranks=4, microbatches=3), 6)
    step = fpipe.value_and_grad(pipe, outputs=True)
    params, buffers = pipe.init(model)
    first = step(params, buffers, inputs, targets)
    kept = copy.deepcopy(first)
    step(params, first[0].buffers, inputs, targets)
    for (out, grads), (old, old_grads) in [(first, kept)]:
        assert_same(
            Result(out.loss, out.outputs, grads, out.buffers), Result(old.loss, old.outputs, old_grads, old.buffers)
        )


class Aliases(nn.Module):
    """The gradients of two parameters are one tensor, and that of a third is expanded from one number."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(2, WIDTH)) for _ in range(3))

    def forward(self, x):
        return x + self.a + self.b, self.c.sum()


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("kind", ["one_f_one_b", "split_backward"])
def test_gradients_are_new_tensors(kind, microbatches):
    """An optimiser may work in place on any of them, as on `.grad`."""
    case = Case(Aliases, rows_of(), lambda out, y: mse(out[0], y) + out[1], ())
    for one, cuts in ((case, ()), (ZOO["tied_sequence"], ("1", "2", "3"))):
        how = SCHEDULES[kind](ranks=len(cuts) + 1, microbatches=microbatches)
        pipe, model, inputs, targets = build(one, how, 2 * microbatches, cuts)
        want = loop(model, one.loss, inputs, targets, microbatches).grads
        whole = dict(model.named_parameters()), dict(model.named_buffers())
        for function, state in ((fpipe.value_and_grad(pipe), pipe.init(model)), (fpipe.reference(pipe), whole)):
            _, grads = function(*state, inputs, targets)
            for grad in grads.values():
                grad.add_(1)
            for name, grad in grads.items():
                assert same_bits(grad, want[name] + 1), name


def test_two_pipelines_take_turns():
    one = build(ZOO["dropping"], one_f_one_b(ranks=4, microbatches=3), 6)
    two = build(ZOO["normalised"], SCHEDULES["split_backward"](2, 2), 4)
    alone = run(*one, seed=1), run(*two)
    steps = [fpipe.value_and_grad(built[0], outputs=True) for built in (one, two)]
    for _ in range(2):
        for (pipe, model, inputs, targets), step, want in zip((one, two), steps, alone, strict=True):
            out, grads = step(*pipe.init(model), inputs, targets, seed=1)
            assert_same(Result(out.loss, out.outputs, grads, out.buffers), want)


def test_a_step_runs_inside_a_step_of_another_pipeline():
    """A step in the middle of a step: nothing is kept outside the running call."""
    inner = build(ZOO["dropping"], one_f_one_b(ranks=4, microbatches=3), 6)
    pipe, model, inputs, targets = outer = build(ZOO["normalised"], one_f_one_b(ranks=4, microbatches=3), 6)
    want, found = (run(*outer), run(*inner, seed=1)), []

    def record(span):
        if not span.waits:
            found.append(run(*inner, seed=1))

    step = fpipe.value_and_grad(pipe, outputs=True, record=record)
    out, grads = step(*pipe.init(model), inputs, targets)
    assert_same(Result(out.loss, out.outputs, grads, out.buffers), want[0])
    assert len(found) == 4 * 3 * 2
    for one in found:
        assert_same(one, want[1])


# ------------------------------------------------------------------------------------------------------ what comes back


def test_a_step_without_outputs_has_none():
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=2, microbatches=2), 4)
    step, _ = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    assert step.outputs is None
    step, _ = fpipe.reference(pipe)(dict(model.named_parameters()), {}, inputs, targets)
    assert step.outputs is None


def test_gradients_come_in_the_order_of_the_parameters():
    for name in ("gpt", "unused"):
        pipe, model, inputs, targets = build(ZOO[name], one_f_one_b(ranks=4, microbatches=2), 4)
        params, buffers = pipe.init(model)
        _, grads = fpipe.value_and_grad(pipe)(params, buffers, inputs, targets)
        assert list(params) == [name for name, _ in model.named_parameters()]
        assert list(grads) == [name for name in params if name in grads]


def test_init_copies():
    pipe, model, *_ = build(ZOO["frozen_below"], one_f_one_b(ranks=2, microbatches=2), 4)
    params, _ = pipe.init(model)
    for name, p in model.named_parameters():
        assert same_bits(params[name], p)
        assert params[name].data_ptr() != p.data_ptr()
        assert params[name].is_leaf
        assert params[name].requires_grad == p.requires_grad


def test_spans_are_those_of_the_schedule():
    pipe, model, inputs, targets = build(ZOO["mlp"], SCHEDULES["split_backward"](4, 3), 6)
    spans = []
    fpipe.value_and_grad(pipe, record=spans.append)(*pipe.init(model), inputs, targets)
    for rank in range(4):
        mine = [span for span in spans if span.rank == rank and not span.waits]
        assert [span.action for span in mine] == list(pipe.schedule.actions(rank))
        assert all(0 < span.start <= span.end for span in mine)


def test_a_pipeline_shows_its_stages():
    pipe, *_ = build(ZOO["gpt"], one_f_one_b(ranks=2, microbatches=2), 4)
    text = str(pipe)
    assert "GPT under one_f_one_b(ranks=2, microbatches=2)" in text
    assert "stage 0 on rank 0" in text
    assert "stage 1 on rank 1" in text
    assert len(pipe.stages) == 2
    assert pipe.program.schedule == pipe.schedule


def test_a_pipeline_is_built_from_a_model_on_meta():
    case = ZOO["gpt"]
    with torch.device("meta"):
        model = case.build()
    _, inputs, targets = case.make(6)
    how = one_f_one_b(ranks=4, microbatches=3)
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=case.loss, schedule=how, cuts=case.cuts)
    real, *_ = case.make(6)
    got = run(pipe, real, inputs, targets)
    assert_same(got, loop(real, case.loss, inputs, targets, 3))


@pytest.mark.parametrize("stages", [None, 3])
def test_without_cuts_the_model_is_cut_evenly(stages):
    case, how = ZOO["mlp"], one_f_one_b(ranks=3, microbatches=2)
    model, inputs, targets = case.make(4)
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=case.loss, schedule=how, stages=stages)
    assert len(pipe.stages) == 3
    assert all(stage.parameters for stage in pipe.stages)
    assert_same(run(pipe, model, inputs, targets), loop(model, case.loss, inputs, targets, 2))


def test_values_of_the_example_do_not_matter():
    """Its values do not matter, and capture does not change them."""
    case, how = ZOO["in_place"], one_f_one_b(ranks=2, microbatches=2)
    model, inputs, targets = case.make(4)
    nans = (torch.full_like(inputs[0], float("nan")),)
    pipe = fpipe.pipeline(model, example=nans, targets=targets * float("inf"), loss=mse, schedule=how, cuts=("c",))
    assert_same(run(pipe, model, inputs, targets), loop(model, case.loss, inputs, targets, 2))
    assert bool(nans[0].isnan().all())


def test_the_user_s_gradients_are_left_alone():
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=2, microbatches=2), 4)
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    run(pipe, model, inputs, targets)
    fpipe.verify(pipe, model, inputs, targets)
    assert all(bool((p.grad == 7).all()) for p in model.parameters())


def test_gradients_do_not_flow_into_the_inputs():
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=2, microbatches=2), 4)
    x = inputs[0].clone().requires_grad_()
    out, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), targets)
    assert not out.loss.requires_grad
    assert x.grad is None
    assert_same(run(pipe, model, inputs, targets)._replace(grads=grads), run(pipe, model, inputs, targets))


def test_gradients_are_computed_under_no_grad_too():
    built = build(ZOO["mlp"], one_f_one_b(ranks=2, microbatches=2), 4)
    want = run(*built)
    with torch.no_grad():
        assert_same(run(*built), want)
        assert_same(run_reference(*built), want)
        assert_same(run(*build(ZOO["mlp"], one_f_one_b(ranks=2, microbatches=2), 4)), want)


# -------------------------------------------------------------------------------------------------------- bad arguments

MODEL, X, Y = linears(nn.ReLU, nn.Tanh, nn.GELU), torch.randn(4, WIDTH), torch.randn(4, WIDTH)


def pipeline(**changes):
    """A pipeline of two ranks, with something changed."""
    given = {
        "model": MODEL,
        "example": (X,),
        "targets": Y,
        "loss": mse,
        "schedule": one_f_one_b(ranks=2, microbatches=2),
        "cuts": ["4"],
    }
    given |= changes
    return fpipe.pipeline(given.pop("model"), **given)


@schedule(placement=linear)
def backwards_first(rank, ranks, microbatches):
    for i in range(microbatches):
        yield B(rank, i)
        yield F(rank, i)


@schedule(placement=linear)
def crossed(rank, ranks, microbatches):
    """The last rank runs both forwards first; the first wants a backward before its second forward."""
    order = (
        [F(rank, 0), F(rank, 1), B(rank, 1), B(rank, 0)] if rank else [F(rank, 0), B(rank, 0), F(rank, 1), B(rank, 1)]
    )
    yield from order


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, out, target):
        return mse(out, target) * self.weight


BAD = {
    "fewer rows than microbatches": (
        {"example": (X[:1],), "targets": Y[:1]},
        fpipe.InputError,
        ["inputs[0]", "[1, 4]", "pieces of [1]", "expected 2", "Pass 2"],
    ),
    "targets of another size": (
        {"targets": Y[:3]},
        fpipe.InputError,
        ["targets: got 3 in dimension 0", "4 in dimension 0 of inputs[0]", "divisible by 2", "Pad"],
    ),
    "a dimension that is not there": (
        {"batch_dims": 2},
        fpipe.InputError,
        ["inputs[0]", "[4, 4]", "dimension 2", "2 dim"],
    ),
    "batch_dims of another tree": ({"batch_dims": ((0, 1), 0)}, fpipe.InputError, ["batch_dims", "((0, 1), 0)"]),
    "a function of too few parts": (
        {"batch_dims": (lambda x, m: [x], 0)},
        fpipe.InputError,
        ["inputs[0]", "['float32[4, 4]']", "expected 2 tensors"],
    ),
    "a scalar in the batch": ({"example": (torch.tensor(1.0),)}, fpipe.InputError, ["inputs[0]", "shape []"]),
    "an empty batch": ({"example": (X[:0],)}, fpipe.InputError, ["inputs[0]", "[0, 4]"]),
    "a nested leaf": ({"targets": {"a": [Y, Y[:1]]}}, fpipe.InputError, ["targets['a'][1]", "[1, 4]"]),
    "no tuple": ({"example": X}, fpipe.InputError, ["example", "Tensor", "tuple", "(x,)"]),
    "a list": ({"example": [X]}, fpipe.InputError, ["example", "list", "tuple"]),
    "no schedule": ({"schedule": one_f_one_b}, fpipe.InputError, ["schedule", "Schedule", "one_f_one_b(ranks=4"]),
    "no such front end": ({"capture": "jit"}, fpipe.InputError, ["capture", "'jit'", "export", "modules"]),
    "an unknown name": ({"cuts": ["44"]}, fpipe.CutError, ["'44'", "Did you mean", "'4'"]),
    "too few cuts": ({"cuts": []}, fpipe.CutError, ["got 1 stages", "expected 2", "Give 1 cuts"]),
    "too many cuts": ({"cuts": ["2", "4"]}, fpipe.CutError, ["got 3 stages", "expected 2"]),
    "cuts and stages": ({"stages": 2}, fpipe.CutError, ["both", "Drop stages"]),
    "other stages": ({"cuts": None, "stages": 3}, fpipe.CutError, ["got 3 stages", "expected 2"]),
    "a repeated name": (
        {"cuts": ["4", "4"], "schedule": gpipe(ranks=3, microbatches=2)},
        fpipe.CutError,
        ["'4' twice"],
    ),
    "names out of order": (
        {"cuts": ["4", "2"], "schedule": gpipe(ranks=3, microbatches=2)},
        fpipe.CutError,
        ["'2' after '4'", "order of execution", "Put '2' first"],
    ),
    "the first operation": ({"cuts": ["0"]}, fpipe.CutError, ["'0'", "no operation", "Drop one"]),
    "more stages than modules": (
        {"cuts": None, "schedule": gpipe(ranks=30, microbatches=2)},
        fpipe.CutError,
        ["got 30", "expected at most", "fewer stages"],
    ),
    "a loss that is no scalar": (
        {"loss": lambda out, t: (out - t).square()},
        fpipe.CaptureError,
        ["loss", "[2, 4]", "scalar", ".mean()"],
    ),
    "a loss that is no tensor": ({"loss": lambda out, t: 1.0}, fpipe.CaptureError, ["loss", "1.0", "scalar"]),
    "a loss of two values": ({"loss": lambda out, t: (out.mean(), out)}, fpipe.CaptureError, ["loss", "scalar"]),
    "an integer loss": ({"loss": lambda out, t: out.argmax()}, fpipe.CaptureError, ["loss", "int64", "floating-point"]),
    "a loss with parameters": (
        {"loss": Counter()},
        fpipe.CaptureError,
        ["loss", "['weight']", "Put them into the model"],
    ),
    "an uncopiable model": (
        {"model": nn.Sequential(nn.Linear(WIDTH, WIDTH)), "cuts": None, "schedule": gpipe(ranks=1, microbatches=2)},
        fpipe.CaptureError,
        ["Sequential", "copy.deepcopy"],
    ),
    "a backward before its forward": (
        {"schedule": backwards_first(ranks=2, microbatches=2)},
        fpipe.ScheduleError,
        ["rank 0, position 0", "0B0", "forward_before_backward"],
    ),
    "a schedule that waits in a circle": (
        {"schedule": crossed(ranks=2, microbatches=2)},
        fpipe.ScheduleError,
        ["rank"],
    ),
    "a model that cannot be modules": (
        {"model": ZOO["skips"].build(), "capture": "modules"},
        fpipe.CaptureError,
        ["Skips", "nn.Sequential", 'capture="trace"'],
    ),
    "DataParallel": ({"model": nn.DataParallel(MODEL)}, fpipe.InputError, ["DataParallel", "plain module"]),
    "a wrapper inside": (
        {"model": nn.Sequential(MODEL, nn.DataParallel(nn.Linear(WIDTH, WIDTH)))},
        fpipe.InputError,
        ["model 1", "DataParallel"],
    ),
    "a wrapper among parts": (
        {"model": [nn.Linear(WIDTH, WIDTH), nn.DataParallel(nn.Linear(WIDTH, WIDTH))], "capture": "modules"},
        fpipe.InputError,
        ["DataParallel", "plain module"],
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_invalid_arguments_of_pipeline_are_refused(what):
    changes, error, words = BAD[what]
    if what == "an uncopiable model":
        changes["model"].lock = __import__("threading").Lock()
    with pytest.raises(error) as caught:
        pipeline(**changes)
    message = str(caught.value)
    assert not [word for word in [*words, "expected"] if word not in message] or error is fpipe.ScheduleError, message
    assert not [word for word in words if word not in message], message
    assert isinstance(caught.value, fpipe.PipelineError)


def test_invalid_sizes_are_refused():
    for factory in (gpipe, one_f_one_b):
        with pytest.raises(fpipe.SizeError, match="microbatches=0"):
            factory(ranks=2, microbatches=0)
        with pytest.raises(fpipe.SizeError, match="ranks=-1"):
            factory(ranks=-1, microbatches=2)


def test_a_stage_may_begin_at_a_module_that_runs_nothing():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity(), nn.Linear(WIDTH, WIDTH))
    assert [stage.parameters for stage in pipeline(model=model, cuts=["1"]).stages] == [
        ("0.weight", "0.bias"),
        ("2.weight", "2.bias"),
    ]
    with pytest.raises(fpipe.CutError) as caught:
        pipeline(model=model, cuts=["1"], capture="export")
    assert "'1', a module that runs no operation of its own" in str(caught.value)
    assert "runs next" in str(caught.value)


def test_a_cut_may_be_given_as_one_name():
    assert len(pipeline(cuts="4").stages) == 2


STATE_CHANGES = {
    "a missing parameter": (
        lambda p, b: (dict(list(p.items())[1:]), b),
        ["params", "missing ['0.weight']", "pipe.init(model)"],
    ),
    "an unknown parameter": (lambda p, b: ({**p, "x": X}, b), ["params", "unexpected ['x']"]),
    "no dict of parameters": (lambda p, b: (list(p.values()), b), ["params", "list"]),
    "another shape": (
        lambda p, b: ({**p, "0.weight": X[:2]}, b),
        ["params['0.weight']", "float32[2, 4]", "float32[4, 4]"],
    ),
    "another dtype": (
        lambda p, b: ({**p, "0.bias": p["0.bias"].double()}, b),
        ["params['0.bias']", "float64[4]", "float32[4]"],
    ),
    "no tensor": (lambda p, b: ({**p, "0.bias": [0.0] * 4}, b), ["params['0.bias']", "list", "float32[4]"]),
    "on meta": (lambda p, b: ({**p, "0.bias": p["0.bias"].to("meta")}, b), ["params['0.bias']", "meta", "initialise"]),
    "a missing buffer": (lambda p, b: (p, {}), ["buffers", "missing", "1.running_mean"]),
    "a buffer of another dtype": (
        lambda p, b: (p, {**b, "1.num_batches_tracked": torch.tensor(0.0)}),
        ["buffers['1.num_batches_tracked']", "float32[]", "int64[]"],
    ),
}

BATCH_CHANGES = {
    "another number of inputs": (((X, X), Y), ["inputs", "expected"]),
    "a dict for a tuple": (({"x": X}, Y), ["inputs", "missing"]),
    "another number of rows than targets": (((X[:2],), Y), ["inputs[0]", "float32[2, 4]", "example has float32[4, 4]"]),
    "no rows": (((X[:0],), Y[:0]), ["inputs[0]", "[0, 4]", "pieces of []"]),
    "another width": (((X[:, :3],), Y), ["inputs[0]", "float32[4, 3]", "example has float32[4, 4]"]),
    "another number of dimensions": (((X[None],), Y), ["inputs[0]", "float32[1, 4, 4]", "another pipeline"]),
    "on meta": (((X.to("meta"),), Y), ["inputs[0]", "meta device", "Pass the batch"]),
    "another dtype": (((X.double(),), Y), ["inputs[0]", "float64[4, 4]", "float32[4, 4]"]),
    "targets of another shape": (((X,), Y[:2]), ["targets", "float32[2, 4]"]),
    "targets of another dtype": (((X,), Y.long()), ["targets", "int64[4, 4]"]),
    "targets of another tree": (((X,), [Y]), ["targets", "expected"]),
    "no targets": (((X,), None), ["targets", "got nothing", "expected float32[4, 4]"]),
    "no inputs": ((None, Y), ["inputs[0]", "got nothing"]),
    "no tensor": (((X.tolist(),), Y), ["inputs", "expected"]),
}


@pytest.fixture(scope="module")
def normalised():
    case = Case(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), rows_of(), mse, ("", "1", ""))
    return build(case, one_f_one_b(ranks=2, microbatches=2), 4)


def functions(pipe, model):
    """Every function that takes state and a batch, with the state that it takes."""
    whole = dict(model.named_parameters()), dict(model.named_buffers())
    yield fpipe.value_and_grad(pipe), pipe.init(model)
    yield fpipe.evaluate(pipe), pipe.init(model)
    yield fpipe.reference(pipe), whole


@pytest.mark.parametrize("what", STATE_CHANGES)
def test_parameters_and_buffers_of_another_model_are_refused(normalised, what):
    pipe, model, inputs, targets = normalised
    change, words = STATE_CHANGES[what]
    for function, state in functions(pipe, model):
        with pytest.raises(fpipe.InputError) as caught:
            function(*change(*state), inputs, targets)
        assert not [word for word in [*words, "expected"] if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize("what", BATCH_CHANGES)
def test_a_batch_unlike_the_example_is_refused(normalised, what):
    pipe, model, *_ = normalised
    batch, words = BATCH_CHANGES[what]
    for function, state in functions(pipe, model):
        if what == "no targets" and "evaluation" in function.__qualname__:
            continue
        with pytest.raises(fpipe.InputError) as caught:
            function(*state, *batch)
        assert not [word for word in words if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize("capture", ["export", "modules"])
def test_dropout_without_a_seed_is_refused(capture):
    pipe, model, inputs, targets = build(ZOO["dropping"], one_f_one_b(ranks=2, microbatches=2), 4, capture=capture)
    for function in (fpipe.value_and_grad(pipe), fpipe.reference(pipe)):
        with pytest.raises(
            fpipe.InputError, match=r"seed: got none, expected an integer.*draws random numbers.*seed=step"
        ):
            function(*pipe.init(model), inputs, targets)


@pytest.mark.parametrize("name", ["mlp", "gpt", "normalised", "tied_sequence"])
def test_models_that_draw_nothing_need_no_seed(name):
    run(*build(ZOO[name], one_f_one_b(ranks=2, microbatches=2), 4))


def test_dropout_needs_no_seed_in_evaluation():
    pipe, model, inputs, targets = build(ZOO["gpt_dropout"], one_f_one_b(ranks=2, microbatches=2), 4)
    assert fpipe.evaluate(pipe)(*pipe.init(model), inputs, targets).loss.isfinite()


def test_init_refuses_other_models():
    pipe = pipeline()
    with torch.device("meta"):
        empty = linears(nn.ReLU, nn.Tanh, nn.GELU)
    for model, words in (
        (empty, ["source['0.weight']", "meta", "initialise"]),
        (linears(nn.ReLU), ["source: got no value for ['4.weight', '4.bias', '6.weight', '6.bias']"]),
        (nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7)]), ["source: got ['1.weight', "]),
        (copy.deepcopy(MODEL).double(), ["source['0.weight']", "float64[4, 4]", "float32[4, 4]"]),
    ):
        with pytest.raises(fpipe.InputError) as caught:
            pipe.init(model)
        assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_nothing_runs_before_everything_is_checked():
    """A bad batch is refused before any stage function is called."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=2, microbatches=2), 4)
    spans = []
    step = fpipe.value_and_grad(pipe, record=spans.append)
    params, buffers = pipe.init(model)
    for arguments in (
        (params, {"x": X}, inputs, targets),
        (params, buffers, inputs, targets.double()),
        (params, buffers, inputs, None),
    ):
        with pytest.raises(fpipe.InputError):
            step(*arguments)
    assert not spans
