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
from schedules import gpipe, one_f_one_b
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import Result, assert_same
from tests.common.loops import loop
from tests.common.running import build, run, run_reference
from tests.common.schedules import SCHEDULES, linear_fill_drain, looped_fill_drain, vee_fill_drain
from tests.common.sizes import NIGHTLY, covering, few, sampled
from tests.common.zoo import ZOO

# ---------------------------------------------------------------------- nothing but the arguments decides, and all stay


PLACES = ("1", "2", "3", "4", "5", "6")


@settings(max_examples=few(6))
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


@sampled(1)
@pytest.mark.parametrize("factory", [linear_fill_drain, looped_fill_drain, vee_fill_drain])
def test_dropout_does_not_depend_on_the_placement(factory):
    for name in ("dropping", "gpt_dropout") if NIGHTLY else ("dropping",):
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
        recording=fpipe.Recording(front_end=capture),
    )
    step, _ = fpipe.value_and_grad(pipe, outputs=True)({"1.weight": torch.eye(64)}, {}, (x,), seed=0)
    assert len({tuple(row.tolist()) for row in step.outputs}) == 4
    kept = (step.outputs != 0).float().mean().item()
    assert 0.1 < kept < 0.4, "two masks that are independent keep a quarter"


@sampled(2)
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


@sampled(2)
@covering(
    how=["step", "evaluate", "reference"],
    name=["in_place", "normalised", "strides", "several", "contexts", "dropping", "gpt"],
)
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


@sampled(1)
@covering(kind=["one_f_one_b", "split_backward"], microbatches=[1, 2, 3])
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


def test_gradients_are_computed_under_no_grad_too():
    built = build(ZOO["mlp"], one_f_one_b(ranks=2, microbatches=2), 4)
    want = run(*built)
    with torch.no_grad():
        assert_same(run(*built), want)
        assert_same(run_reference(*built), want)
        assert_same(run(*build(ZOO["mlp"], one_f_one_b(ranks=2, microbatches=2), 4)), want)
