# SPDX-License-Identifier: Apache-2.0
"""Tensors and functions of unusual kinds: exact in both backwards, or refused by name.

Sparse constants and gradients, Python attributes on tensors, weights that are computed before each forward, and what
`torch.jit` makes.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, weight_norm

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, zb_v
from tests.common.cases import BACKWARDS, WIDTH, mse
from tests.common.loops import loop
from tests.common.running import require_eager, run, staged
from tests.common.sizes import covering, sampled

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning"),  # since torch 2.14
]


def linears(count):
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def rows(count=8):
    return (torch.rand(count, WIDTH),), torch.rand(count, WIDTH)


class Model(nn.Module):
    """Two linears, and what `then(model, result)` makes of what they return."""

    def __init__(self, then):
        super().__init__()
        self.a, self.b = linears(2)
        self.register_buffer("table", torch.ones(WIDTH))
        self.b.weight.gain = self.table.gain = 2.0
        self.then = then

    def forward(self, x):
        return self.then(self, self.b(self.a(x)))


# -------------------------------------------------------------------------------------------------------------- sparse


class Graph(nn.Module):
    """A layer over the nodes of a graph, whose adjacency never changes."""

    def __init__(self, adjacency):
        super().__init__()
        self.adjacency, self.inner = adjacency, nn.Linear(4, 4)

    def forward(self, x):
        return (self.adjacency @ self.inner(x).T).T


def adjacency():
    return torch.tensor([[0.0, 1, 0, 2], [1, 0, 0, 0], [0, 0, 3, 0], [2, 0, 0, 1]])


def graph(layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4))


@sampled(2)
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("cut", ["1", "1.inner", "2"])
def test_a_sparse_constant_is_exact(cut, backward):
    model, (inputs, targets) = graph(Graph(adjacency().to_sparse())), rows(4)
    pipe = staged(model, inputs, targets, [cut], backward=backward)
    got, want = run(pipe, model, inputs, targets), loop(model, mse, inputs, targets, 2)
    assert same_bits(got.loss, want.loss)
    assert all(same_bits(got.grads[name], want.grads[name]) for name in want.grads)
    assert "keeps" in str(pipe)


def of_layout(kind, adjacency):
    layer = Graph(None)
    del layer.adjacency
    if kind == "buffer":
        layer.register_buffer("adjacency", adjacency)
    else:
        layer.adjacency = nn.Parameter(adjacency) if kind == "parameter" else adjacency
    return layer


@pytest.mark.parametrize(
    ("kind", "layout", "message"),
    [
        ("attribute", torch.sparse_csr, r"module 1 \(Graph\): got a constant of layout torch\.sparse_csr"),
        ("buffer", torch.sparse_coo, r"1\.adjacency: got a tensor of layout torch\.sparse_coo"),
        ("parameter", torch.sparse_coo, r"1\.adjacency: got a tensor of layout torch\.sparse_coo"),
    ],
)
def test_compressed_constants_and_sparse_state_are_refused(kind, layout, message):
    with pytest.raises(fpipe.CaptureError, match=message):
        staged(graph(of_layout(kind, adjacency().to_sparse(layout=layout))), *rows(4), ["2"])


def embedded():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)), torch.tensor([[1, 2, 1], [5, 1, 2]])


@pytest.mark.parametrize("backward", BACKWARDS)
def test_sparse_gradients_are_printed_verified_and_clipped_like_dense_ones(backward):
    model, words = embedded()
    pipe = staged(model, (words,), loss=torch.mean, backward=backward)
    assert "keeps" in str(pipe)
    assert pipe.sizes.activation
    assert fpipe.verify(pipe, model, (words,), steps=2) == (10, 10)
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (words,))
    dense = {name: grad.to_dense() for name, grad in grads.items()}
    for order in (1.0, 2.0, float("inf")):
        clipped, norm = fpipe.clip(pipe, grads, 0.1, order)
        expected, total = fpipe.clip(pipe, dense, 0.1, order)
        assert clipped["0.weight"].is_sparse
        torch.testing.assert_close(norm, total)
        for name, grad in clipped.items():
            torch.testing.assert_close(grad.to_dense(), expected[name])
    with pytest.raises(fpipe.InputError, match=r"order: got 0\.0, expected one above 0: gradients are sparse"):
        fpipe.norm(pipe, grads, 0)
    empty = {"0.weight": torch.sparse_coo_tensor(size=(9, 4))}
    assert [float(fpipe.norm(pipe, empty, order)) for order in (1.0, 2.0, float("inf"))] == [0.0] * 3


def test_sparse_tensors_of_other_bits_differ():
    one = torch.sparse_coo_tensor([[0, 2, 0]], torch.tensor([1.0, 2.0, 3.0]), (3,))
    same = torch.sparse_coo_tensor([[0, 2]], torch.tensor([4.0, 2.0]), (3,))
    others = [same * 2, torch.sparse_coo_tensor([[0, 1]], torch.tensor([4.0, 2.0]), (3,)), same.to_dense()]
    assert same_bits(one, same)
    assert not any(same_bits(one, other) for other in others)


# --------------------------------------------------------------------------------------------- attributes on tensors


@pytest.mark.parametrize("capture", ["trace", "export", "dynamo"])
@pytest.mark.parametrize(
    "then",
    [
        lambda model, made: made * getattr(model.b.weight, "gain", 1.0),
        lambda model, made: made * model.table * (2.0 if hasattr(model.table, "gain") else 1.0),
    ],
)
def test_reading_attributes_of_parameters_and_buffers_is_refused(then, capture):
    with pytest.raises(fpipe.CaptureError, match=r"parameter or buffer of shape .*reads its attribute 'gain'"):
        staged(Model(then), *rows(), ["b"], 4, capture=capture)


def test_attributes_that_nobody_reads_are_allowed():
    require_eager(Model(lambda model, made: made * getattr(model.b.weight, "scale", 3.0)), *rows(), cuts=["b"])


class Marking(nn.Linear):
    """A linear that marks what it makes."""

    def __init__(self, mark):
        super().__init__(WIDTH, WIDTH)
        self.mark = mark

    def forward(self, x):
        made = super().forward(x)
        made.gain = self.mark(made)
        return made


class Reading(nn.Linear):
    """A linear, times what its argument is marked with."""

    def forward(self, x):
        return super().forward(x) * getattr(x, "gain", 1.0)


@sampled(2)
@covering(
    mark=[lambda made: 2.0, lambda made: made.mean()],
    cuts=[["1"], ["2"], ["1", "2"], ["2", "3"]],
    backward=BACKWARDS,
)
def test_attributes_that_a_forward_sets_are_found_across_cuts(mark, cuts, backward):
    model = nn.Sequential(Marking(mark), Reading(WIDTH, WIDTH), Marking(mark), Reading(WIDTH, WIDTH))
    require_eager(model, *rows(), steps=2, cuts=cuts, microbatches=4, backward=backward)


# ---------------------------------------------------------------------------------------------------- computed weights


def normed():
    model = nn.Sequential(*linears(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and used by speech models
        for layer in model:
            weight_norm(layer)
    return model


def pruned():
    model = nn.Sequential(*linears(4))
    for layer in model:
        prune.l1_unstructured(layer, "weight", 0.5)
        prune.random_unstructured(layer, "weight", 0.2)
    return model


@sampled(2)
@covering(
    called={"new": False, "called before": True},
    make=[normed, pruned],
    how=[one_f_one_b(ranks=2, microbatches=2), zb_v(ranks=2, microbatches=2)],
    backward=["autograd", "graph"],
)
def test_weights_computed_before_each_forward_are_exact(make, called, how, backward):
    torch.manual_seed(0)
    model, x, y = make(), torch.rand(4, WIDTH), torch.rand(4, WIDTH)
    if called:
        mse(model(x), y).backward()
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        targets=y,
        loss=mse,
        schedule=how,
        stages=how.stages,
        gradients=fpipe.Gradients(backward=backward),
    )
    assert fpipe.verify(pipe, model, (x,), y).eager
    params, buffers = pipe.init(model)
    params = {name: p + 0.1 for name, p in params.items()}
    _, grads = fpipe.value_and_grad(pipe)(params, buffers, (x,), y)
    _, expected = fpipe.reference(pipe)(params, buffers, (x,), y)
    assert all(torch.equal(grads[name], expected[name]) for name in params)
    assert any(name.endswith(("weight_v", "weight_orig")) for name in grads)


class Stale(nn.Module):
    """Uses a tensor that was computed from a parameter once."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = self.linear.weight.sum() * 1.0

    def forward(self, x):
        return self.linear(x) * self.scale


def test_a_stale_tensor_with_a_gradient_is_refused():
    with pytest.raises(fpipe.CaptureError, match="requires a gradient"):
        staged(Stale(), *rows(4), [])


# --------------------------------------------------------------------------------------------------------------- jit


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def thinned(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5, True)


def calling(function):
    """A model that calls a function of the batch, and of what each of its linears makes."""
    model = Model(lambda model, made: made)
    model.a.register_forward_hook(lambda module, args, made: function(made))
    model.b.register_forward_hook(lambda module, args, made: function(made) * function(made.detach()))
    model.register_forward_pre_hook(lambda module, args: (function(args[0]), *args[1:]))
    return model


@pytest.mark.parametrize("backward", BACKWARDS)
def test_scripted_functions_are_called_as_one_torch_call(backward):
    require_eager(calling(torch.jit.script(gelu)), *rows(), steps=3, cuts=["b"], microbatches=4, backward=backward)


def test_scripted_functions_that_draw_are_refused():
    with pytest.raises(fpipe.CaptureError, match=r"torch.jit.script function 'thinned' that draws random numbers"):
        staged(calling(torch.jit.script(thinned)), *rows(), ["b"])


@pytest.mark.parametrize("made", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, WIDTH))])
def test_modules_of_torch_jit_are_refused(made):
    model = nn.ModuleDict({"a": made(nn.Linear(WIDTH, WIDTH)), "b": nn.Linear(WIDTH, WIDTH)})
    with pytest.raises(fpipe.InputError, match=r"model a: got a module of torch\.jit, Linear, expected one in Python"):
        staged(model, *rows(), ["b"])
