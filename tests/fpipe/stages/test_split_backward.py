# SPDX-License-Identifier: Apache-2.0
"""Halves of backwards: their bits and layouts, what they keep, and stages that are not split."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import fpipe
from fpipe.record.captured import Function
from fpipe.stages.autograd import Autograd
from fpipe.stages.backends import AS_GRAPH
from fpipe.stages.graph.joint import Joint, Tape, note_on
from fpipe.stages.interface import Wiring
from fpipe.stages.recorded import Recorded
from fpipe.tensors.fake import fake, fake_mode
from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, split_backward
from tests.common.cases import WIDTH, mse
from tests.common.loops import loop
from tests.common.options import grouped
from tests.common.sizes import few, sampled
from tests.common.written_layers import WRITTEN, Written, build

LAYOUTS = {
    "dense": lambda t: t,
    "by columns": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "a part": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "reversed dimensions": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t.flip(0),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def strides(tensor):
    """The strides that tell where elements are: those of dimensions with several."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def record(function, inputs, weights, cotangent, outgoing):
    """The recorded functions of a stage that computes `function(*inputs, *weights)`, all of which need gradients."""
    first, count = len(weights), len(weights) + len(inputs)
    wiring = Wiring(
        parameters=first,
        buffers=0,
        trained=frozenset(range(first)),
        differentiated=tuple(range(first, count)),
        inner=(),
        modified=(),
        reassigned=(),
        passed=(),
        outputs=((0, Spec.of(cotangent)),),
        loss=None,
        roots=(0,),
        leaves=(*range(first, count), *range(first)),
        cotangents=tuple(map(Spec.of, outgoing)),
    )
    run = Function(lambda key, *given: (function(*given[first:], *given[:first]),))
    mode = fake_mode()
    fakes = [
        tuple([fake(mode, one.detach(), one.device) for one in group]) for group in (weights, inputs, (cotangent,))
    ]
    eager, tape = Autograd(run, wiring, (), False), Tape()
    leaves = eager.leaves(fakes[0])
    params, given, cotangents = map(tape.take, (leaves, *fakes[1:]))
    with mode, note_on(tape):
        outputs, _, residuals = eager.forward(leaves, (), fakes[1], 0)
        forward = frozenset(tape.nodes)
        found = eager.differentiate(residuals, fakes[2])
    assert not tape.failure
    returned = [tuple(map(tape.node_of, group)) for group in (outputs, (), *found)]
    return AS_GRAPH(eager, Joint(tuple(tape.nodes), params, (), given, tape.key, cotangents, forward, *returned))


def halves(function, inputs, weights, lay_out=lambda out: out):
    """Compare the halves of a recorded backward with one backward; return the weights that are deferred."""
    out = function(*inputs, *weights)
    cotangent = lay_out(torch.randn(out.shape).to(out.dtype))
    whole = torch.autograd.grad(out, [*inputs, *weights], cotangent)
    stage = record(function, inputs, weights, cotangent, whole[: len(inputs)])
    with torch.no_grad():
        _, _, residuals = stage.forward(stage.leaves(tuple(weights)), (), tuple(inputs), 0)
        outgoing, deferred = stage.backward_input(residuals, (cotangent,))
        grads = stage.backward_weight(deferred)
    for one, other in zip(whole, (*outgoing, *grads), strict=True):
        assert same_bits(one, other)
        assert strides(one) == strides(other) or other.is_contiguous()  # a copy of what shares its memory
    return set(range(len(weights))) - stage.undeferred.keys()


def leaf(shape, layout="dense", dtype=torch.float32):
    return LAYOUTS[layout](torch.randn(shape).to(dtype)).detach().requires_grad_()


sizes = st.integers(1, 7)
layouts = st.sampled_from(list(LAYOUTS))


@st.composite
def products(draw):
    """A function of one tensor and of weights, those tensors, and the layout of the cotangent."""
    m, k, n, b = (draw(sizes) for _ in range(4))
    dtype = draw(st.sampled_from(DTYPES))

    def made(*shape):
        return leaf(shape, draw(layouts), dtype)

    function, given_, weights = draw(
        st.sampled_from(
            [
                (functional.linear, (m, k), [(n, k), (n,)]),
                (functional.linear, (b, m, k), [(n, k), (n,)]),
                (functional.linear, (b, 2, m, k), [(n, k)]),
                (lambda x, w: x @ w, (m, k), [(k, n)]),
                (lambda x, w: w @ x, (k, n), [(m, k)]),
                (lambda x, w: w.t() @ x, (k, n), [(k, m)]),
                (lambda x, w, b: torch.addmm(b, x, w), (m, k), [(k, n), (1,)]),
                (lambda x, w, b: torch.addmm(b, w, x), (k, n), [(m, k), (m, 1)]),
                (lambda x, w, b: torch.addmm(b, x, w, alpha=2, beta=3), (m, k), [(k, n), (n,)]),
                (torch.bmm, (b, m, k), [(b, k, n)]),
                (lambda x, w: torch.bmm(x, w.transpose(1, 2)), (b, m, k), [(b, n, k)]),
                (lambda x, w, a: torch.baddbmm(a, x, w), (b, m, k), [(b, k, n), (b, 1, n)]),
                (lambda x, w: torch.einsum("bij,kj->bik", x, w), (b, m, k), [(n, k)]),
                (lambda x, w: x @ w.expand(x.shape[0], -1, -1), (b, m, k), [(k, n)]),
                (lambda x, w: x @ w.to(x.dtype, copy=True), (m, k), [(k, n)]),
            ]
        )
    )
    return function, made(*given_), [made(*shape) for shape in weights], draw(layouts)


@settings(max_examples=few(40))
@given(products())
def test_products_have_the_bits_and_layouts_of_autograd(case):
    function, given_, weights, layout = case
    found = halves(function, [given_], weights, LAYOUTS[layout])
    if 1 not in (*given_.shape, *weights[0].shape):  # torch may multiply by one element instead
        assert 0 in found


@settings(max_examples=few(10))
@given(
    dims=st.integers(1, 3),
    transposed=st.booleans(),
    groups=st.sampled_from([1, 2]),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    bias=st.booleans(),
    last=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_convolutions_have_the_bits_and_layouts_of_autograd(
    dims, transposed, groups, stride, padding, bias, last, dtype
):
    kind = f"Conv{'Transpose' * transposed}{dims}d"
    module = getattr(nn, kind)(4, 6, 3, stride=stride, padding=padding, groups=groups, bias=bias).to(dtype)
    x = torch.randn(2, 4, *[6] * dims).to(dtype)
    if last and dims == 2:
        x = x.to(memory_format=torch.channels_last)
    names = [name for name, _ in module.named_parameters()]
    weights = [p.detach().requires_grad_() for p in module.parameters()]

    def function(x, *ws):
        return torch.func.functional_call(module, dict(zip(names, ws, strict=True)), (x,))

    assert halves(function, [x.requires_grad_()], weights) == set(range(len(weights)))


@settings(max_examples=few(10))
@given(
    shape=st.lists(sizes, max_size=3),
    padding=st.sampled_from([None, 0, 3, -1]),
    scaled=st.booleans(),
    layout=layouts,
)
def test_embeddings_have_the_bits_and_layouts_of_autograd(shape, padding, scaled, layout):
    ids = torch.randint(0, 5, shape)

    def function(w):
        return functional.embedding(ids, w, padding, scale_grad_by_freq=scaled)

    assert halves(function, [], [leaf((5, 3), layout)]) == {0}


@sampled(2)
@pytest.mark.parametrize("name", WRITTEN)
def test_the_weight_half_reads_no_weights(name, monkeypatch):
    """So sharded weights need not be gathered for it: it gives the same bits while they are not numbers."""
    pipe, model, inputs, targets = build(WRITTEN[name])
    params, buffers = pipe.init(model)
    want = loop(model, mse, inputs, targets, 3)
    for stage in pipe.stages:
        half = stage.functions.backward_weight

        def without_weights(deferred, onto=(), half=half):
            values = [weight.clone() for weight in params.values()]
            for weight in params.values():
                weight.data.fill_(torch.nan)
            grads = half(deferred, onto)
            for weight, value in zip(params.values(), values, strict=True):
                weight.data.copy_(value)
            return grads

        monkeypatch.setitem(stage.__dict__, "backward_weight", without_weights)
    _, grads = fpipe.value_and_grad(pipe)(params, buffers, inputs, targets)
    assert all(same_bits(grads[k], want.grads[k]) for k in grads)


def test_a_weight_that_later_stages_use_too_is_exact():
    """Its gradient is a cotangent, so nothing is kept from which to compute the gradient of the bias later."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model[2].weight = model[0].weight
    how = split_backward(one_f_one_b(ranks=3, microbatches=2))
    x = torch.randn(4, WIDTH)
    pipe = fpipe.pipeline(model, example=(x,), targets=x, loss=mse, schedule=how, cuts=["1", "2"])
    assert [list(stage.undeferred) for stage in pipe.stages] == [[], [], ["2.bias"]]
    assert fpipe.verify(pipe, model, (x,), x).eager


def either(m, x):
    return functional.linear(x, m.weight, m.bias) if x.sum() > 0 else functional.linear(x.sin(), m.weight) @ m.weight


FACTORS = {"doubled": False}


class Doubling(nn.Module):
    """Multiplies by its weight, and once more by that or by a frozen copy, as a global says."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("frozen", torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return x @ self.weight + x @ (self.weight if FACTORS["doubled"] else self.frozen)


def test_a_global_that_changes_what_a_split_stage_differentiates_is_refused(monkeypatch):
    x, how = torch.randn(4, WIDTH), split_backward(one_f_one_b(ranks=2, microbatches=2))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Doubling())
    pipe = fpipe.pipeline(model, example=(x,), targets=x, loss=mse, schedule=how, cuts=["1"])
    assert fpipe.verify(pipe, model, (x,), x).eager
    monkeypatch.setitem(FACTORS, "doubled", True)
    with pytest.raises(fpipe.InputError, match="FACTORS"):
        fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), x)


@pytest.mark.parametrize("sums", [None, torch.float64])
def test_a_stage_that_reads_values_is_exact_though_its_backward_is_not_split(sums):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Written(either))
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    options = {"example": (x,), "targets": y, "loss": mse, "cuts": ["1"], "unsplittable": [Written]}
    pipe = fpipe.pipeline(model, schedule=split_backward(one_f_one_b(ranks=2, microbatches=8)), **grouped(options))
    step, grads = fpipe.value_and_grad(pipe, sums=sums)(*pipe.init(model), (x,), y)
    out, want = fpipe.reference(pipe, sums=sums)(*pipe.init(model), (x,), y)
    assert same_bits(step.loss, out.loss)
    assert grads.keys() == want.keys()
    assert all(same_bits(grads[name], want[name]) for name in want)
    assert fpipe.verify(pipe, model, (x,), y).eager
    assert [type(stage.functions) for stage in pipe.stages] == [Recorded, Autograd]
    assert "  backward    by autograd: it reads the values of tensors" in str(pipe)
    assert "  undeferred  1.weight, 1.bias: its stage isn't recorded, so the backward isn't split" in str(pipe)
