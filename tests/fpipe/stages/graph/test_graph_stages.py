# SPDX-License-Identifier: Apache-2.0
"""Stages recorded as graphs compute what autograd does, bit for bit, whatever the model does."""

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.stages.recorded import Recorded
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, recompute, split_backward, zb_v
from tests.common import written_layers
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.random_models import case_of, descriptions, places
from tests.common.random_pipelines import build_unless_refused, schedules_of
from tests.common.running import build, run, run_reference
from tests.common.sizes import by_day, by_night, few, in_turn, sampled
from tests.common.unusual_models import MODELS
from tests.common.written_layers import WRITTEN, Written, gelu
from tests.common.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes self.*_flat_weights")

HOWS = {"1F1B": one_f_one_b(ranks=4, microbatches=2), "ZB-V": zb_v(ranks=2, microbatches=2)}

LEFT_TO_AUTOGRAD = ("assignments to .data",)

RANDOM = ("dropping", "gpt_dropout")


def is_recorded(pipe):
    """Return whether all stages are graphs, none of them left to autograd."""
    return all(isinstance(stage.functions, Recorded) for stage in pipe.stages)


@sampled(2)
@pytest.mark.parametrize(("name", "how"), in_turn(by_day(ZOO, 3), HOWS))
def test_every_model_of_the_zoo_is_exact_as_graphs(name, how):
    how = HOWS[how]
    built = build(ZOO[name], how, 4, capture="trace", backward="graph")
    assert is_recorded(built[0])
    seed = 3 if name in RANDOM else None
    got = run(*built, seed=seed)
    assert_same(got, run_reference(*built, seed=seed))
    if name not in RANDOM:
        assert_same(got, loop(built[1], ZOO[name].loss, *built[2:], 2))


@sampled(2)
@pytest.mark.parametrize("name", by_day(MODELS, 2))
def test_models_that_a_graph_could_change_are_exact(name):
    """The recorded backward has the effects of custom functions, checkpoints, hooks, autocast and vmap."""
    make, cuts, *_ = MODELS[name]
    built = build(Case(make, rows_of(), mse, cuts), HOWS["ZB-V"], 4, cuts, "trace", backward="graph")
    assert is_recorded(built[0]) == (name not in LEFT_TO_AUTOGRAD), built[0].stages[0].functions.remark
    got = run(*built)
    assert_same(got, run_reference(*built))
    assert_same(got, loop(built[1], mse, *built[2:], 2))


EARLY = {"norm": {"bias": "computed by native_layer_norm_backward.default"}}


@sampled(2)
@pytest.mark.parametrize("name", WRITTEN)
def test_products_and_all_after_them_are_deferred(name):
    """Also all that follows a product, and gradients of weights that are used twice."""
    pipe, model, inputs, targets = written_layers.build(WRITTEN[name])
    step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    want = loop(model, mse, inputs, targets, 3)
    assert same_bits(step.loss, want.loss)
    assert grads.keys() == want.grads.keys()
    assert all(same_bits(grads[k], want.grads[k]) for k in grads)
    for stage in pipe.stages:
        assert stage.undeferred == {f"{stage.index}.{weight}": why for weight, why in EARLY.get(name, {}).items()}


def test_recomputed_stages_with_checkpoints_inside_are_exact():
    """A checkpointed body is in the graph twice: its values are not kept, and it draws the same numbers twice."""

    def plain(module, x):
        return functional.dropout(functional.dropout(gelu(module, x).sin(), 0.5), 0.3)

    def body(module, x):
        return checkpoint(lambda x: plain(module, x), x, use_reentrant=False)

    kept = {}
    for name, function in (("checkpoint", body), ("plain", plain)):
        pipe, model, inputs, targets = written_layers.build(function, "graph")
        again = fpipe.pipeline(
            model,
            example=inputs,
            targets=targets,
            loss=mse,
            schedule=recompute(pipe.schedule, (0, 1)),
            cuts=["1", "2"],
            gradients=fpipe.Gradients(backward="graph"),
        )
        assert is_recorded(pipe)
        assert is_recorded(again)
        assert_same(run(pipe, model, inputs, targets, 3), run_reference(pipe, model, inputs, targets, 3))
        assert_same(run(again, model, inputs, targets, 3), run_reference(pipe, model, inputs, targets, 3))
        stage, x = pipe.stages[1], inputs[0][:2]
        leaves = stage.leaves(pipe.init(model)[0])
        residuals = stage.forward(leaves, (), (x,), 0)[2]
        found = {one.data_ptr() for one in residuals if isinstance(one, torch.Tensor)}
        kept[name] = found - {leaf.data_ptr() for leaf in leaves}
    assert len(kept["checkpoint"]) == 1 < len(kept["plain"])


def by_rows(module, x):
    """Run other operators, with other views of the weight, for microbatches of another size."""
    return gelu(module, x) if len(x) == 3 else x @ module.weight + module.weight[:1] * module.bias


@pytest.mark.parametrize("function", [gelu, by_rows])
def test_each_size_of_batch_is_recorded(function):
    pipe, model, _, _ = written_layers.build(function, "graph")
    x = torch.randn(8, WIDTH)  # of 3, 3 and 2
    assert is_recorded(pipe)
    assert_same(run(pipe, model, (x,), x), loop(model, mse, (x,), x, 3))
    assert_same(run(pipe, model, (x,), x), run_reference(pipe, model, (x,), x))


def test_evaluations_of_graphs_are_exact():
    pipe, model, inputs, targets = written_layers.build(gelu, "graph")
    eager, *_ = written_layers.build(gelu)
    for batch in (inputs, targets), (inputs,):
        got, want = (fpipe.evaluate(one)(*one.init(model), *batch) for one in (pipe, eager))
        assert same_bits(got.outputs, want.outputs)


@sampled(1)
@pytest.mark.parametrize("name", by_day(["dropping", "gpt", "normalised", "unet"], 2))
def test_a_compiler_that_changes_nothing_is_exact(name):
    """The compiler gets graphs without seeds, which take and return tensors."""
    taken = []

    def compiler(module, examples):
        taken.append(module)
        return module

    how = zb_v(ranks=2, microbatches=2)
    for backward in (compiler, "aot_eager"):
        built = build(ZOO[name], how, 4, capture="trace", backward=backward)
        assert is_recorded(built[0])
        seed = 3 if name in RANDOM else None
        assert_same(run(*built, seed=seed), run_reference(*built, seed=seed))
    assert taken


@pytest.mark.filterwarnings("ignore:.torch.jit")
@by_night
def test_stages_compiled_by_inductor_are_close():
    built = build(
        ZOO["mlp"], split_backward(one_f_one_b(ranks=2, microbatches=2)), 4, capture="trace", backward="inductor"
    )
    assert is_recorded(built[0])
    assert "as a graph, compiled by inductor" in str(built[0])
    fpipe.verify(*built, tolerance=1e-5)
    with pytest.raises(fpipe.MismatchError, match="expected closer than 1e-30 of the largest magnitude"):
        fpipe.verify(*built, tolerance=1e-30)


@settings(max_examples=few(6))
@given(descriptions(), st.data())
def test_any_model_is_exact_as_graphs(description, data):
    """The bits are those of autograd, wherever the model is cut."""
    microbatches, names = data.draw(st.integers(1, 3)), places(description)
    chosen = data.draw(st.sets(st.sampled_from(names), max_size=5)) if names else set()
    cuts = tuple(name for name in names if name in chosen)
    how = data.draw(schedules_of(len(cuts) + 1, microbatches))
    case = case_of(description)
    built = build_unless_refused(description, case, how, 3 * microbatches, cuts, capture="trace", backward="graph")
    if built is None:
        return
    event("recorded" if is_recorded(built[0]) else next(filter(None, (s.functions.remark for s in built[0].stages))))
    seed = 5 if case.random else None
    assert_same(run(*built, seed=seed), run_reference(*built, seed=seed))


class Overwriting(torch.autograd.Function):
    """A product whose backward changes the gradient in place after its use for the weight."""

    @staticmethod
    def forward(x, weight):
        return x @ weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.clone()
        of_weight = x.t() @ grad
        grad[0].mul_(3)
        return grad @ weight.t(), of_weight


def started(module, x):
    """Make tensors that depend on no argument, and write to one of them."""
    ones, more = torch.ones_like(x), torch.ones_like(x) * 2
    ones[0] += x[0]
    return functional.linear(x * ones + more, module.weight, module.bias)


def with_statistics(module, x):
    """Update statistics that nothing reads."""
    functional.batch_norm(x, module.mean, module.square, training=True)
    return functional.linear(x, module.weight, module.bias)


def noise(module, x):
    """Draw twice, without a gradient."""
    return functional.linear(x + torch.rand_like(x) * torch.bernoulli(torch.full_like(x, 0.5)), module.weight)


def cast_once(module, x):
    """Use a weight twice under autocast: both uses share one cast, so the gradients are added in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        return functional.linear(functional.linear(x, module.weight, module.bias), module.weight).float()


def summed(module, x):
    """Compute sums whose views do not just remove the first dimension."""
    square = module.bias.view(2, 2)
    y = functional.linear(x, module.weight) + (square * 2).view(1, WIDTH)
    return y * module.weight[:1].sum(1, keepdim=True).view(1) * (module.weight[:1] * x[:1]).sum(1, keepdim=True).view(1)


def powers(module, x):
    """Compute a power of one, which is a copy, and write to only one of both."""
    y = functional.linear(x, module.weight, module.bias)
    return (y**1).mul_(y) + y


def normed(module, x):
    """The gradient of the bias is a view of what the norm's backward computes, which is not deferred."""
    x = functional.linear(x, module.weight)
    return functional.layer_norm(x, (WIDTH,), None, module.bias.view(1, WIDTH).view(WIDTH))


SUBTLE = {
    "cast once": (cast_once, set()),
    "sums": (summed, set()),
    "in place in the backward": (lambda m, x: Overwriting.apply(x, m.weight) + m.bias, {"weight", "bias"}),
    "constants": (started, set()),
    "noise": (noise, set()),
    "powers": (powers, set()),
    "a product of weights": (lambda m, x: x @ (m.weight @ m.weight.t()) + m.bias, {"weight", "bias"}),
    "a norm with a view of its weight": (normed, {"bias"}),
}


@pytest.mark.parametrize("name", SUBTLE)
def test_subtle_operators_are_exact_as_graphs(name):
    function, early = SUBTLE[name]
    pipe, model, inputs, targets = written_layers.build(function, "graph")
    assert is_recorded(pipe)
    seed = 7 if name == "noise" else None
    for _ in range(2):  # twice: no step changes what the next one uses
        assert_same(run(pipe, model, inputs, targets, seed), run_reference(pipe, model, inputs, targets, seed))
    assert pipe.stages[1].undeferred.keys() == {f"1.{name}" for name in early}


def test_statistics_that_the_loss_does_not_read_are_exact():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Written(with_statistics), nn.Linear(WIDTH, WIDTH))
    model[1].register_buffer("mean", torch.zeros(WIDTH))
    model[1].register_buffer("square", torch.ones(WIDTH))
    x, how = torch.randn(6, WIDTH), one_f_one_b(ranks=3, microbatches=3)
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        targets=x,
        loss=mse,
        schedule=how,
        cuts=["1", "2"],
        gradients=fpipe.Gradients(backward="graph"),
    )
    assert is_recorded(pipe)
    got = run(pipe, model, (x,), x)
    assert_same(got, run_reference(pipe, model, (x,), x))
    assert_same(got, loop(model, mse, (x,), x, 3))
    assert got.buffers["1.mean"].abs().sum() > 0


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_sparse_gradients_are_exact(backward, microbatches):
    torch.manual_seed(0)
    model, words, y = (
        nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)),
        torch.arange(6),
        torch.randn(6, WIDTH),
    )
    how = split_backward(one_f_one_b(ranks=2, microbatches=microbatches))
    pipe = fpipe.pipeline(
        model,
        example=(words,),
        targets=y,
        loss=mse,
        schedule=how,
        cuts=["1"],
        gradients=fpipe.Gradients(backward=backward),
    )
    grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (words,), y)[1]
    want = loop(model, mse, (words,), y, microbatches).grads
    assert grads["0.weight"].is_sparse
    assert grads.keys() == want.keys()
    assert all(same_bits(grads[name].to_dense(), want[name].to_dense()) for name in want)


class Twice(nn.Module):
    """Two layers with the same input, whose weights have equal gradients."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x):
        return self.a(x) + self.b(x)


def merge_equal_results(module, examples):
    """Return one tensor for equal results, as a compiler with common subexpression elimination does."""

    def run(*tensors):
        results = []
        for out in module(*tensors):
            results.append(next((one for one in results if one.shape == out.shape and torch.equal(one, out)), out))
        return results

    return run


def test_a_compiler_may_return_one_tensor_for_two_gradients():
    model, (x, y) = nn.Sequential(Twice(), Twice()), rows_of()(8)
    how = one_f_one_b(ranks=2, microbatches=4)
    pipe = fpipe.pipeline(
        model,
        example=x,
        targets=y,
        loss=mse,
        schedule=how,
        cuts=["1"],
        gradients=fpipe.Gradients(backward=merge_equal_results),
    )
    assert fpipe.verify(pipe, model, x, y).eager
