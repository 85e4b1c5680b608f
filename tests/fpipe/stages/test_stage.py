# SPDX-License-Identifier: Apache-2.0
"""Stage functions are pure, their halves make the whole, and what flows is what was foretold."""

import copy
import gc
import operator
import weakref
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.record.variant import TRAINING
from fpipe.stages.accumulation import add_all, own_all, sum_of
from fpipe.stages.prologue import Feed
from fpipe.tensors.random import key, preserve_generators
from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, split_backward
from tests.common.generators import seeded
from tests.common.loops import loop
from tests.common.memory import Alive
from tests.common.running import FRONT_END, build, run, staged
from tests.common.sizes import NIGHTLY, by_day, few, sampled
from tests.common.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes self.*_flat_weights")

NAMES = by_day((name for name in ZOO if name not in ("recurrent",)), 2)


@cache
def built(name, capture=FRONT_END):
    """A pipeline of a case, with its model and batch."""
    return build(ZOO[name], one_f_one_b(ranks=4, microbatches=2), 4, capture=capture, backward="autograd")


def chain(name, capture=FRONT_END):
    """The stages of a case in order, each with what it is given for the first microbatch."""
    pipe, model, inputs, targets = built(name, capture)
    params, buffers = pipe.init(model)
    batch = pipe.batch(TRAINING, inputs, targets).take()
    crossing = {}
    for stage in pipe.stages:
        own = tuple(buffers[name] for name in stage.buffers)
        given = Feed(stage.prologue, [tuple(batch[leaf][0] for leaf in stage.batch)], own)(0)
        for one in stage.gets:
            given += crossing[one.source, stage.index]
        arguments = stage.leaves(params), own, given, key(1, 0)
        yield stage, arguments
        with preserve_generators([torch.device("cpu")]):
            outputs, _, _ = stage.forward(*arguments)
        rest = outputs[len(stage.results) :]
        for one in stage.gives:
            crossing[stage.index, one.target], rest = rest[: len(one.specs)], rest[len(one.specs) :]


def all_same(a, b):
    return len(a) == len(b) and all(map(same_bits, a, b))


def cotangents(stage):
    generator = seeded(0)
    specs = [spec for one in stage.pulled_by for spec in one.specs]
    return tuple(spec.like(torch.randn(spec.shape, generator=generator).to(spec.dtype)) for spec in specs)


@sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_stage_is_pure(name):
    """The same twice, of unchanged arguments; what comes out carries no graph."""
    for stage, arguments in chain(name):
        before = copy.deepcopy([[t.detach() for t in part] for part in arguments[:3]])
        with preserve_generators([torch.device("cpu")]):
            outputs, buffers, kept = stage.forward(*arguments)
            again, buffers_again, kept_again = stage.forward(*arguments)
        assert all_same(outputs, again)
        assert all_same(buffers, buffers_again)
        assert all(all_same(part, old) for part, old in zip(arguments[:3], before, strict=True))
        assert not any(tensor.requires_grad for tensor in (*outputs, *buffers))
        incoming = cotangents(stage)
        if kept is not None:
            for one, other in zip(stage.backward(kept, incoming), stage.backward(kept_again, incoming), strict=True):
                assert all_same(one, other)
                assert not any(tensor.requires_grad for tensor in one)


@sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_the_two_halves_make_the_whole_backward(name):
    for stage, arguments in chain(name):
        incoming = cotangents(stage)
        with preserve_generators([torch.device("cpu")]):
            _, _, kept = stage.forward(*arguments)
            _, _, again = stage.forward(*arguments)
        outgoing, grads = stage.backward(kept, incoming)
        half, deferred = stage.backward_input(again, incoming)
        assert all_same(half, outgoing)
        assert all_same(stage.backward_weight(deferred), grads)
        assert len(outgoing) == sum(len(one.specs) for one in stage.pulls)
        assert len(grads) == (len(stage.grads) if kept is not None else 0)


@pytest.mark.parametrize("name", NAMES if NIGHTLY else ["strides", "chained"])
def test_values_and_cotangents_have_their_inferred_layouts(name, monkeypatch):
    """Shapes, dtypes and strides of values and cotangents; nothing has to be laid out anew."""
    different = []
    like = Spec.like

    def watched(self, tensor):
        if Spec.of(tensor) != self:
            different.append((Spec.of(tensor), tensor.stride(), self, self.stride))
        return like(self, tensor)

    parts = built(name)
    monkeypatch.setattr(Spec, "like", watched)
    run(*parts, seed=1)
    assert not different


def test_a_frozen_stage_keeps_no_graph():
    stages = list(chain("frozen_below"))
    first, arguments = stages[0]
    _, _, kept = first.forward(*arguments)
    assert kept is None
    assert first.backward(None, ()) == ((), ())
    assert first.backward_input(None, ()) == ((), ())
    assert first.backward_weight(()) == ()
    assert all(stage.forward(*arguments)[2] is not None for stage, arguments in stages[1:])


def test_frozen_parameters_have_no_gradient():
    (_, _, (third, _), (fourth, _)) = chain("frozen_below")
    assert third.grads == ()
    assert fourth.grads == ("6.weight",)


def test_a_stage_has_its_own_leaves_for_parameters():
    for stage, (params, *_) in chain("frozen_below"):
        for name, leaf in zip(stage.parameters, params, strict=True):
            assert leaf.is_leaf
            assert leaf.requires_grad == (name in ("2.weight", "2.bias", "6.weight"))


class Scaled(nn.Linear):
    """With a buffer behind it."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("scale", torch.randn(4))

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_tensors_of_the_user_get_no_gradient(backward):
    """Not even those that require one, of which autograd makes leaves."""
    model, x = nn.Sequential(Scaled(), Scaled()), torch.randn(6, 4)
    how = one_f_one_b(ranks=2, microbatches=3)
    gradients = fpipe.Gradients(backward=backward)
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=how, cuts=["1"], gradients=gradients)
    params, buffers = pipe.init(model)
    buffers = {name: buffer.requires_grad_() for name, buffer in buffers.items()}
    fpipe.value_and_grad(pipe)(params, buffers, (x,), seed=0)
    assert not [tensor for tensor in (*params.values(), *buffers.values()) if tensor.grad is not None]


@settings(max_examples=few(60))
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=6), st.booleans())
def test_gradients_are_added_in_order_into_new_memory(values, fresh):
    """The first is copied unless it is fresh; later ones are added to it in place, and are not changed."""
    terms = [(torch.tensor([v + 0.1]), torch.tensor(v * 0.3)) for v in values]
    kept = copy.deepcopy(terms)
    first = total = own_all([*terms[0]], {0, 1} if fresh else ())
    for term in terms[1:]:
        total = add_all(total, term)
    want = kept[0]
    for term in kept[1:]:
        want = tuple(a + b for a, b in zip(want, term, strict=True))
    assert all_same(total, want)
    assert all(map(operator.is_, total, first))
    assert all(all_same(term, old) for term, old in zip(terms[fresh:], kept[fresh:], strict=True))


def test_only_fresh_gradients_become_a_sum_themselves():
    whole = torch.ones(3, 2)
    for grad in (whole, whole.t(), whole[0], torch.ones(2).expand(3, 2), torch.ones(8)[:4]):
        first, second, third = own_all([grad, whole, None], fresh={1})
        assert first.data_ptr() != grad.data_ptr()
        assert same_bits(first, grad)
        assert first.untyped_storage().nbytes() == first.numel() * first.element_size()
        assert second is whole
        assert third is None


def mean_square(out):
    return out.square().mean()


@pytest.mark.parametrize("backward", ["autograd", "graph"])
@pytest.mark.parametrize("split", [False, True])
def test_gradients_that_share_memory_are_summed_apart(backward, split):
    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b, self.m = (nn.Parameter(torch.randn(2, 3)) for _ in range(3))

        def forward(self, x):
            return torch.addmm(self.m, x + self.w + self.b, torch.ones(3, 3))

    how = one_f_one_b(ranks=2, microbatches=3)
    model, x = nn.Sequential(Sharing(), Sharing()), torch.randn(6, 3)
    how = split_backward(how) if split else how
    pipe = fpipe.pipeline(
        model, example=(x,), loss=mean_square, schedule=how, cuts=["1"], gradients=fpipe.Gradients(backward=backward)
    )
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), seed=0)
    want = loop(model, mean_square, (x,), None, 3).grads
    assert grads.keys() == want.keys()
    assert all(same_bits(grads[name], want[name]) for name in want)
    assert len({grad.data_ptr() for grad in grads.values()}) == len(grads)


def test_gradients_that_come_after_the_first_microbatch_share_no_memory():
    """Autograd puts the same gradient into `.grad` of both, of the second one as a view."""

    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.v, self.w = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(6))

        def forward(self, x):
            return x + self.v + self.w.view(3, 2)

    pipe = staged(nn.Sequential(nn.Tanh(), Adding()), (torch.randn(3, 2),), microbatches=1, backward="autograd")
    stage = pipe.stages[1]
    leaves = stage.leaves({name: torch.randn(spec.shape) for name, spec in pipe.training.params.items()})
    _, _, kept = stage.forward(leaves, (), (torch.randn(3, 2),), 0)
    _, sums = stage.backward(kept, (), (None, None))
    assert len({one.untyped_storage().data_ptr() for one in sums}) == 2


def test_absent_gradients_add_nothing():
    """Zeros would make zeros of negative ones."""
    none, zero, one = (None,), (torch.tensor([-0.0]),), (torch.tensor([1.0]),)
    assert add_all(none, none) == sum_of(none, none) == none
    for add in add_all, sum_of:
        assert same_bits(add(zero, none)[0], torch.tensor([-0.0]))
        assert same_bits(add(none, zero)[0], torch.tensor([-0.0]))
        assert same_bits(add(none, one)[0], one[0])
        assert add(none, one)[0] is not one[0]
    assert STAGE.complete(()) == (None,) * len(STAGE.grads)


STAGE = build(ZOO["mlp"], one_f_one_b(ranks=1, microbatches=1), 2)[0].stages[0]


def test_the_backward_frees_what_the_forward_kept():
    """Activations live from F to B, and from F to I if nothing is left for W."""
    stage, arguments = list(chain("mlp", "modules"))[1]
    saved = []

    def pack(tensor):
        saved.append(weakref.ref(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs, _, kept = stage.forward(*arguments)
    parameters = {id(leaf) for leaf in arguments[0]}
    alive = [ref for ref in saved if ref() is not None and id(ref()) not in parameters]
    assert alive
    incoming = cotangents(stage)
    stage.backward(kept, incoming)
    del kept, outputs, arguments
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


def test_a_checkpointed_forward_keeps_nothing_for_a_backward():
    """Autograd records it, but drops each tensor that it saves at once."""
    model, x = nn.Sequential(nn.Linear(4, 4), *[nn.Tanh() for _ in range(8)]), torch.randn(1000, 4)
    pipe, alive = staged(model, (x,), cuts=(), microbatches=1, backward="autograd"), Alive()
    (stage,) = pipe.stages
    leaves = stage.leaves(pipe.init(model)[0])
    with alive:
        stage.evaluate(leaves, (), (x,), 0)
    assert alive.most < 4 * x.nbytes


class Either(nn.Module):
    """Makes a sparse gradient of its weight or a dense one, as data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, tokens):
        if tokens[0, 0] == 0:
            return nn.functional.embedding(tokens, self.weight, sparse=True).sum(1)
        return (nn.functional.one_hot(tokens, 4).to(self.weight.dtype) @ self.weight).sum(1)


def test_a_dense_gradient_is_added_to_a_sparse_sum():
    """Autograd does not do so in place, but makes a new sum."""
    model, targets = nn.Sequential(Either(), nn.Linear(3, 2)), torch.randn(2, 2)
    tokens, loss = torch.tensor([[0, 1], [2, 3]]), nn.functional.mse_loss
    how = one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(
        model,
        example=(tokens,),
        targets=targets,
        loss=loss,
        schedule=how,
        recording=fpipe.Recording(unsplittable=["0"]),
    )
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (tokens,), targets)
    for part, target in zip(tokens.split(1), targets.split(1), strict=True):
        (loss(model(part), target) / 2).backward()
    assert all(same_bits(grads[name], parameter.grad) for name, parameter in model.named_parameters())
