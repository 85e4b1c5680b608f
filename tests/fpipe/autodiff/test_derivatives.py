# SPDX-License-Identifier: Apache-2.0
"""What is computed late has the bits and the layout of what autograd computes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fpipe.autodiff.derivatives import DERIVATIVES, Operand
from fpipe.autodiff.split_backward import Splitter
from fpipe.autodiff.trail import AutogradGraph
from fpipe.tensors.tree import same_bits
from tests.common.sizes import few

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


def halves(function, inputs, weights, cotangent=None):
    """Gradients of the weights by one backward and by two halves, and which were deferred."""
    out = function(*inputs, *weights)
    cotangent = torch.randn(out.shape).to(out.dtype) if cotangent is None else cotangent(out)
    whole = torch.autograd.grad(out, [*inputs, *weights], cotangent)
    out = function(*inputs, *weights)
    edges, half = Splitter({}, True).half(AutogradGraph([out], 0), weights)
    now = [weights[k] for k in half.split.now]
    found = torch.autograd.grad(out, [*inputs, *now, *edges], cotangent)
    grads = half.grads(found[len(inputs) :], weights)
    split = (*found[: len(inputs)], *grads)
    for one, other in zip(whole, split, strict=True):
        assert same_bits(one, other)
        assert strides(one) == strides(other) or other.is_contiguous()  # a copy of what shares its memory
    return set(range(len(weights))) - set(half.split.now)


def leaf(shape, layout="dense", dtype=torch.float32):
    return LAYOUTS[layout](torch.randn(shape).to(dtype)).detach().requires_grad_()


sizes = st.integers(1, 7)
layouts = st.sampled_from(list(LAYOUTS))


@st.composite
def products(draw):
    """A function of one tensor and of weights, those tensors, the layout of the cotangent, and what can be deferred."""
    m, k, n, b = (draw(sizes) for _ in range(4))
    dtype = draw(st.sampled_from(DTYPES))

    def made(*shape):
        return leaf(shape, draw(layouts), dtype)

    function, given_, weights, deferred = draw(
        st.sampled_from(
            [
                (functional.linear, (m, k), [(n, k), (n,)], {0, 1}),
                (functional.linear, (b, m, k), [(n, k), (n,)], {0, 1}),
                (functional.linear, (b, 2, m, k), [(n, k)], {0}),
                (functional.linear, (b, m, k), [(n, k)], {0}),
                (lambda x, w: x @ w, (m, k), [(k, n)], {0}),
                (lambda x, w: w @ x, (k, n), [(m, k)], {0}),
                (lambda x, w: w.t() @ x, (k, n), [(k, m)], {0}),
                (lambda x, w, b: torch.addmm(b, x, w), (m, k), [(k, n), (n,)], {0, 1}),
                (lambda x, w, b: torch.addmm(b, x, w), (m, k), [(k, n), (1,)], {0, 1}),
                (lambda x, w, b: torch.addmm(b, w, x), (k, n), [(m, k), (m, 1)], {0, 1}),
                (lambda x, w, b: torch.addmm(b, x, w, alpha=2, beta=3), (m, k), [(k, n), (n,)], set()),
                (torch.bmm, (b, m, k), [(b, k, n)], {0}),
                (lambda x, w: torch.bmm(w, x), (b, k, n), [(b, m, k)], {0}),
                (lambda x, w: torch.bmm(x, w.transpose(1, 2)), (b, m, k), [(b, n, k)], {0}),
                (lambda x, w, a: torch.baddbmm(a, x, w), (b, m, k), [(b, k, n), (b, 1, n)], {0, 1}),
                (lambda x, w, a: torch.baddbmm(a, x, w), (b, m, k), [(b, k, n), (m, n)], {0, 1}),
                (lambda x, w: torch.einsum("bij,kj->bik", x, w), (b, m, k), [(n, k)], {0}),
                (lambda x, w: x @ w.expand(x.shape[0], -1, -1), (b, m, k), [(k, n)], {0}),
                (lambda x, w: x @ w.to(x.dtype, copy=True), (m, k), [(k, n)], {0}),
            ]
        )
    )
    return function, made(*given_), [made(*shape) for shape in weights], draw(layouts), deferred


@settings(max_examples=few(200))
@given(products())
def test_products_have_the_bits_of_autograd(case):
    function, given_, weights, layout, deferred = case
    got = halves(function, [given_], weights, lambda out: LAYOUTS[layout](torch.randn(out.shape).to(out.dtype)))
    assert got <= deferred
    if 1 not in (*given_.shape, *weights[0].shape):  # torch may multiply by one element instead, or add a bias apart
        assert got & {0} == deferred & {0}


@settings(max_examples=few(40))
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
def test_convolutions_have_the_bits_of_autograd(dims, transposed, groups, stride, padding, bias, last, dtype):
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


@settings(max_examples=few(40))
@given(
    shape=st.lists(sizes, max_size=3),
    padding=st.sampled_from([None, 0, 3, -1]),
    scaled=st.booleans(),
    layout=layouts,
)
def test_embeddings_have_the_bits_of_autograd(shape, padding, scaled, layout):
    ids = torch.randint(0, 5, shape)

    def function(w):
        return functional.embedding(ids, w, padding, scale_grad_by_freq=scaled)

    assert halves(function, [], [leaf((5, 3), layout)]) == {0}


def test_sparse_gradients_are_not_deferred():
    weight = leaf((5, 3))
    out = functional.embedding(torch.tensor([1, 1]), weight, sparse=True)
    _, half = Splitter({}, True).half(AutogradGraph([out], 0), [weight])
    assert half.split.now == (0,)


def test_complex_weights_are_not_deferred():
    def function(x, w):
        return torch.view_as_real(x.to(torch.complex64) @ w)

    assert halves(function, [leaf((2, 3))], [leaf((3, 3), dtype=torch.complex64)]) == set()


NODES = {
    "AddmmBackward0": lambda t: torch.addmm(t(4), t(2, 3), t(3, 4)),
    "MmBackward0": lambda t: t(2, 3) @ t(3, 4),
    "BaddbmmBackward0": lambda t: torch.baddbmm(t(4), t(1, 2, 3), t(1, 3, 4)),
    "BmmBackward0": lambda t: torch.bmm(t(1, 2, 3), t(1, 3, 4)),
    "ConvolutionBackward0": lambda t: functional.conv1d(t(1, 2, 5), t(3, 2, 2), t(3)),
    "EmbeddingBackward0": lambda t: functional.embedding(torch.tensor([0]), t(2, 2)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_fit_the_nodes_of_this_torch(name):
    """What autograd's nodes are called, and what they save under which names."""
    out = NODES[name](lambda *shape: leaf(shape))
    assert out.grad_fn.name() == name
    for formula in DERIVATIVES[name]:
        assert formula.fits(out.grad_fn)
        kept = formula.keep(out.grad_fn)
        assert not [t for t in kept if isinstance(t, torch.Tensor) and t.requires_grad]
        assert len(formula.grads(torch.ones_like(out), kept, operands(out.grad_fn, formula))) == len(formula.inputs)


def operands(node, formula):
    shapes = [tuple(node.next_functions[k][0]._input_metadata[0].shape) for k in formula.inputs]
    return [Operand(0, number, shape, False, ()) for number, shape in zip(formula.inputs, shapes, strict=True)]
