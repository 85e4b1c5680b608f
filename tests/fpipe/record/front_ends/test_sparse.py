# SPDX-License-Identifier: Apache-2.0
"""Sparse constants and gradients: the bits of one device in both backwards; what cannot be held is refused by name."""

import pytest
import torch
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b
from tests.common.cases import mse
from tests.common.loops import loop

HOW = one_f_one_b(ranks=2, microbatches=2)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")


class Graph(nn.Module):
    """A layer over the nodes of a graph, whose adjacency never changes."""

    def __init__(self, adjacency):
        super().__init__()
        self.adjacency, self.inner = adjacency, nn.Linear(4, 4)

    def forward(self, x):
        return (self.adjacency @ self.inner(x).T).T


def adjacency():
    return torch.tensor([[0.0, 1, 0, 2], [1, 0, 0, 0], [0, 0, 3, 0], [2, 0, 0, 1]])


def build(layer, cut, backward):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4)), torch.randn(4, 4), torch.randn(4, 4)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=HOW, cuts=[cut], backward=backward)
    return pipe, model, x, y


@pytest.mark.parametrize("backward", ["autograd", "graph"])
@pytest.mark.parametrize("cut", ["1", "1.inner", "2"])
def test_a_sparse_constant_is_exact(cut, backward):
    pipe, model, x, y = build(Graph(adjacency().to_sparse()), cut, backward)
    got, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y)
    want = loop(model, mse, (x,), y, 2)
    assert same_bits(got.loss, want.loss)
    assert all(same_bits(grads[name], want.grads[name]) for name in want.grads)
    assert "keeps" in str(pipe)


def test_a_compressed_constant_is_refused():
    with pytest.raises(fpipe.CaptureError, match=r"module 1 \(Graph\): got a constant of layout torch\.sparse_csr"):
        build(Graph(adjacency().to_sparse_csr()), "2", "autograd")


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_state_must_be_dense(kind):
    layer = Graph(None)
    sparse = adjacency().to_sparse()
    del layer.adjacency
    if kind == "buffer":
        layer.register_buffer("adjacency", sparse)
    else:
        layer.adjacency = nn.Parameter(sparse)
    with pytest.raises(fpipe.CaptureError, match=r"1\.adjacency: got a tensor of layout torch\.sparse_coo"):
        build(layer, "2", "autograd")


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_a_sparse_embedding_is_printed(backward):
    model, words = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)), torch.arange(6)
    pipe = fpipe.pipeline(model, example=(words,), loss=torch.mean, schedule=HOW, cuts=["1"], backward=backward)
    assert "keeps" in str(pipe)
    assert pipe.sizes.activation


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_sparse_gradients_are_verified_and_clipped_like_dense_ones(backward):
    torch.manual_seed(0)
    model, words = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)), torch.tensor([[1, 2, 1], [5, 1, 2]])
    pipe = fpipe.pipeline(model, example=(words,), loss=torch.mean, schedule=HOW, cuts=["1"], backward=backward)
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
