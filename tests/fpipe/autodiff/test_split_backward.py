# SPDX-License-Identifier: Apache-2.0
"""What is deferred, what is not and why, what is kept in between, and that the bits are those of one backward."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.autodiff.autograd import Autograd
from fpipe.autodiff.split_backward import Splitter, search_graph
from fpipe.autodiff.trail import AutogradGraph
from fpipe.tensors.tree import same_bits
from fpipe.torch_private import count_nodes
from schedules import one_f_one_b, split_backward
from tests.common.cases import WIDTH, mse
from tests.common.loops import loop
from tests.common.written_layers import WRITTEN, Written, build


def leaf(*shape):
    return torch.randn(*shape).requires_grad_()


@pytest.mark.parametrize("name", WRITTEN)
def test_split_backwards_are_exact_and_defer_what_they_can(name):
    function, undeferred = WRITTEN[name]
    pipe, model, inputs, targets = build(function)
    step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    want = loop(model, mse, inputs, targets, 3)
    assert same_bits(step.loss, want.loss)
    assert grads.keys() == want.grads.keys()
    assert all(same_bits(grads[k], want.grads[k]) for k in grads)
    for stage in pipe.stages:
        assert stage.undeferred == {f"{stage.index}.{weight}": why for weight, why in undeferred.items()}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_weight_half_reads_no_weights(name, monkeypatch):
    """So sharded weights need not be gathered for it: it gives the same bits while they are not numbers."""
    half = Autograd.backward_weight

    def without_weights(self, deferred, onto=()):
        weights = [weight for weight in (deferred[0] if deferred else ()) if weight.is_floating_point()]
        values = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.data.fill_(torch.nan)
        grads = half(self, deferred, onto)
        for weight, value in zip(weights, values, strict=True):
            weight.data.copy_(value)
        return grads

    pipe, model, inputs, targets = build(WRITTEN[name][0])
    monkeypatch.setattr(Autograd, "backward_weight", without_weights)
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    want = loop(model, mse, inputs, targets, 3)
    assert all(same_bits(grads[k], want.grads[k]) for k in grads)


def test_a_weight_that_later_stages_use_too_is_not_deferred():
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model[2].weight = model[0].weight
    how = split_backward(one_f_one_b(ranks=3, microbatches=2))
    pipe = fpipe.pipeline(model, example=(torch.ones(4, WIDTH),), loss=torch.mean, schedule=how, cuts=["1", "2"])
    assert pipe.stages[0].undeferred == {"0.weight": "also used by other stages"}
    assert pipe.stages[1].undeferred == pipe.stages[2].undeferred == {}


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpointed_body_runs_twice(whole):
    """Once forward, and once in the backward, be it split or not."""
    runs = []

    def body(x, weight, bias):
        runs.append(1)
        return functional.linear(functional.linear(x, weight, bias).sin(), weight.t(), bias)

    pipe, model, _, targets = build(
        lambda m, x: checkpoint(body, x, m.weight, m.bias, use_reentrant=False), batches=1, stages=2
    )
    params, _ = pipe.init(model)
    for stage in pipe.stages:
        x = leaf(2, WIDTH).detach()
        given = (x, targets[:2]) if stage.index else (x,)
        arguments = stage.leaves(params), (), tuple(given), 0
        if stage.index:
            arguments = stage.leaves(params), (), tuple(given[::-1]), 0
        runs.clear()
        _, _, kept = stage.forward(*arguments)
        incoming = (torch.ones(2, WIDTH),) * len(stage.pulled_by)
        if whole:
            stage.backward(kept, incoming)
        else:
            _, deferred = stage.backward_input(kept, incoming)
            stage.backward_weight(deferred)
        assert len(runs) == 2


def test_only_inputs_and_gradients_of_outputs_are_kept():
    """Between the halves everything else is freed, even if nothing waits for the input's gradient."""
    for inner in (True, False):
        x, w1, b1, w2 = leaf(8, WIDTH) if inner else torch.randn(8, WIDTH), leaf(16, WIDTH), leaf(16), leaf(WIDTH, 16)
        middle = functional.linear(x, w1, b1)
        active = functional.gelu(middle)
        out = functional.linear(active, w2).sin()
        watched = {"middle": weakref.ref(middle), "active": weakref.ref(active)}
        edges, half = Splitter({}, True).half(AutogradGraph([out], 0), [w1, b1, w2])
        found = torch.autograd.grad(out, [x, *edges] if inner else edges, torch.ones_like(out))
        incoming = found[inner:]
        del middle, active, out, found, edges
        gc.collect()
        assert not [name for name, ref in watched.items() if ref() is not None]
        kept = {t.data_ptr(): t for _, part in half.tasks for t in part if isinstance(t, torch.Tensor)}
        assert sum(t.numel() for t in kept.values()) == 8 * (WIDTH + 16)
        assert sum(t.numel() for t in incoming) == 8 * (16 + WIDTH)
        assert not [t for t in (*kept.values(), *incoming) if t.requires_grad or t.grad_fn is not None]
        assert None not in half.grads(incoming, [w1, b1, w2])


def graphs():
    """Graphs that a split may meet one after the other, all of the same leaves."""
    x, a, b, c = leaf(3, WIDTH), leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH)
    makes = {
        "a b": lambda: (x @ a).sin() @ b,
        "b a": lambda: (x @ b).sin() @ a,
        "a a": lambda: (x @ a).sin() @ a,
        "transposed": lambda: (x @ a.t()).sin() @ b.t(),
        "viewed": lambda: (x @ a.transpose(0, 1)).sin() @ b.mT,
        "reshaped": lambda: (x @ a.view(WIDTH, WIDTH)).sin() @ b.view(WIDTH, WIDTH),
        "one": lambda: x @ a,
        "three": lambda: ((x @ a).sin() @ b).sin() @ c,
        "sum": lambda: (x @ a).sin() @ b + c.sum().sin(),
        "sum of a": lambda: (x @ a).sin() @ b + a.sum(),
        "leaf": lambda: a,
    }
    return x, (a, b, c), makes


@pytest.mark.parametrize("first", graphs()[2])
@pytest.mark.parametrize("second", graphs()[2])
def test_a_changed_graph_is_searched_again(first, second):
    x, weights, makes = graphs()
    splitter = Splitter({}, True)
    for name in (first, second, first):
        out = makes[name]()
        want = torch.autograd.grad(out, [x, *weights], torch.ones_like(out), allow_unused=True)
        start, out = count_nodes(), makes[name]()
        edges, half = splitter.half(AutogradGraph([out], start), weights)
        ends = (x, *[weights[k] for k in half.split.now], *edges)
        found = torch.autograd.grad(out, ends, torch.ones_like(out), allow_unused=True)
        got = half.grads(found[1:], weights)
        for mine, grad in zip(got, want[1:], strict=True):
            assert mine is None if grad is None else same_bits(mine, grad)


def test_the_same_graph_is_searched_once():
    _, weights, makes = graphs()
    splitter, again = Splitter({}, True), Splitter({}, False)
    splits = []
    for _ in range(3):
        start, out = count_nodes(), makes["a b"]()
        splitter.half(AutogradGraph([out], start), weights)
        again.half(AutogradGraph([out], start), weights)
        splits.append((splitter.split, again.split))
    assert splits[0][0] is splits[1][0] is splits[2][0]
    assert splits[0][1] is not splits[1][1]


def test_without_an_incoming_gradient_there_is_none():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    x, w = leaf(2, WIDTH), leaf(WIDTH, WIDTH)
    out = Nothing.apply(x @ w.view(WIDTH, WIDTH)) + x
    edges, half = Splitter({}, True).half(AutogradGraph([out], 0), [w])
    _, incoming = torch.autograd.grad(out, [x, *edges], torch.ones_like(out), allow_unused=True)
    assert half.grads((incoming,), [w]) == (None,)


def test_weights_that_are_not_deferred_have_reasons():
    x, w = leaf(2, WIDTH), leaf(WIDTH, WIDTH)
    out = x @ w
    assert search_graph(AutogradGraph([out], 0), [w, leaf(3)], {}).reasons == {1: "not reached"}
    assert search_graph(AutogradGraph([out], 0), [w], {0: "told so"}).reasons == {0: "told so"}
    assert search_graph(AutogradGraph([out, w], 0), [w], {}).reasons == {0: "also used by other stages"}
    grouped = functional.conv1d(leaf(1, 2, 5), leaf(3, 2, 2), (bias := leaf(3)) * 1)
    assert search_graph(AutogradGraph([grouped], 0), [bias], {}).reasons == {0: "computed by MulBackward0"}


def test_weight_and_bias_of_a_convolution_are_deferred_together():
    w, b = leaf(3, 2, 2), leaf(3)
    out = functional.conv1d(leaf(1, 2, 5), w, b) + b.sum()
    assert search_graph(AutogradGraph([out], 0), [w, b], {}).reasons == {
        0: "ConvolutionBackward0 computes others too",
        1: "used 2 times",
    }


def test_graphs_that_depend_on_data_are_searched_each_time():
    def either(m, x):
        return (
            functional.linear(x, m.weight, m.bias) if x.sum() > 0 else functional.linear(x.sin(), m.weight) @ m.weight
        )

    torch.manual_seed(1)
    model, inputs, targets = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), Written(either)),
        (torch.randn(8, WIDTH),),
        torch.randn(8, WIDTH),
    )
    how = split_backward(one_f_one_b(ranks=2, microbatches=8))
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=["1"], unsplittable=[Written]
    )
    step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    want = loop(model, mse, inputs, targets, 8)
    assert same_bits(step.loss, want.loss)
    assert all(same_bits(grads[k], want.grads[k]) for k in want.grads)
    assert [stage.functions.varying for stage in pipe.stages] == [False, True]
    assert set(pipe.stages[1].undeferred.values()) == {"data decide how it is used"}
