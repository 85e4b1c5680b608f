# SPDX-License-Identifier: Apache-2.0
"""Every function that takes tensors by name takes trees of them, with the same bits, and returns trees like these."""

from collections import namedtuple
from dataclasses import dataclass

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.tensors.tree import NAMESPACE
from schedules import one_f_one_b

MODEL = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))
X, Y = torch.randn(8, 3), torch.randn(8, 1)


@dataclass
class Affine:
    weight: object
    bias: object


Pair = namedtuple("Pair", ["weight", "bias"])


def nest(values):
    """The model's parameters as lists, dicts, a dataclass and a named tuple; `None` for what is not there."""
    take = values.get
    return [
        Affine(take("0.weight"), take("0.bias")),
        {"weight": take("1.weight"), "bias": take("1.bias")},
        ({"weight": take("2.0.weight"), "bias": take("2.0.bias")},),
        Pair(take("3.weight"), take("3.bias")),
    ]


@pytest.fixture(scope="module")
def pipe():
    MODEL[0].bias.requires_grad_(False)
    return fpipe.pipeline(
        MODEL, example=(X,), targets=Y, loss=nn.functional.mse_loss, schedule=one_f_one_b(2, 4), cuts=["2"]
    )


def same(tree, named):
    """Whether a tree has exactly these tensors, bit for bit."""
    found = fpipe.by_name(tree)
    return found.keys() == named.keys() and all(torch.equal(found[name], named[name]) for name in named)


def test_a_training_step_on_trees_is_that_on_names(pipe):
    params, buffers = pipe.init(MODEL)
    tree, state = nest(params), {"1": {name.removeprefix("1."): one for name, one in buffers.items()}}
    assert same(tree, params)
    adam = fpipe.optimizer(torch.optim.AdamW, lr=0.1)
    for make in (fpipe.value_and_grad, fpipe.reference):
        step = make(pipe)
        (out, grads), (theirs, named) = step(tree, state, (X,), Y), step(params, buffers, (X,), Y)
        assert torch.equal(out.loss, theirs.loss)
        assert same(out.buffers, theirs.buffers)
        assert isinstance(grads[0], Affine)
        assert isinstance(grads[3], Pair)
        assert grads[0].bias is None  # frozen
        assert same(grads, named)
        _, more = step(tree, state, (X,), Y, onto=nest({k: v.clone() for k, v in named.items()}))
        assert same(more, step(params, buffers, (X,), Y, onto={k: v.clone() for k, v in named.items()})[1])
    clipped, norm = fpipe.clip(pipe, grads, 0.1)
    assert same(clipped, fpipe.clip(pipe, named, 0.1)[0])
    assert torch.equal(norm, fpipe.norm(pipe, grads))
    assert bool(fpipe.all_finite(pipe, grads))
    assert same(fpipe.clip_value(grads, 0.1), fpipe.clip_value(named, 0.1))
    assert same(fpipe.LossScale(2.0).unscale(grads), fpipe.LossScale(2.0).unscale(named))
    moved, moments = adam.update(grads, adam.init(tree), tree)
    expected, theirs = adam.update(named, adam.init(params), params)
    assert isinstance(moved[0], Affine)
    assert same(moved, expected)
    assert moments.keys() == theirs.keys() == params.keys()


def test_everything_around_a_step_takes_trees(pipe, tmp_path):
    params, buffers = pipe.init(MODEL)
    tree = nest(params)
    adam = fpipe.masters(fpipe.optimizer(torch.optim.SGD, lr=0.1))
    out, new, state, _ = fpipe.train_step(pipe, adam)(tree, buffers, adam.init(tree), (X,), Y)
    _, named, *_ = fpipe.train_step(pipe, adam)(params, buffers, adam.init(params), (X,), Y)
    assert same(new, named)
    assert torch.equal(
        fpipe.evaluate(pipe)(tree, buffers, (X,), Y).loss, fpipe.evaluate(pipe)(params, buffers, (X,), Y).loss
    )
    assert torch.equal(fpipe.predict(pipe)(tree, buffers, (X,)), fpipe.predict(pipe)(params, buffers, (X,)))
    assert fpipe.verify(pipe, MODEL, (X,), Y, params=tree, buffers=buffers)
    assert fpipe.find_nonfinite(pipe)(tree, buffers, (X,), Y) is None
    fpipe.save(pipe, tmp_path / "run", params=new, buffers=out.buffers, state=state, step=1)
    loaded = fpipe.load(pipe, tmp_path / "run")
    assert same(fpipe.as_tree(loaded.params, like=tree), named)
    fpipe.export(pipe, tmp_path / "model", new, out.buffers)
    assert torch.equal(fpipe.safetensors(tmp_path / "model")["0.weight"], named["0.weight"])


def test_a_tree_of_values_is_a_source(pipe):
    params, buffers = pipe.init(MODEL)
    tree = {"0": {"weight": params["0.weight"], "bias": params["0.bias"]}}
    tree |= {name: one for name, one in {**params, **buffers}.items() if not name.startswith("0.")}
    assert same(pipe.init(fpipe.by_name(tree))[0], params)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tree: tree[:3], r"params: .*3.weight"),
        (lambda tree: [*tree, {"scale": torch.ones(1)}], r"4.scale"),
        (lambda tree: [Affine(torch.ones(9), tree[0].bias), *tree[1:]], r"params\['0.weight'\]"),
        (lambda tree: [Affine("text", tree[0].bias), *tree[1:]], r"0.weight"),
    ],
)
def test_a_tree_of_another_structure_is_refused_by_name(pipe, change, words):
    params, buffers = pipe.init(MODEL)
    with pytest.raises(fpipe.InputError, match=words):
        fpipe.value_and_grad(pipe)(change(nest(params)), buffers, (X,), Y)


def test_two_leaves_of_one_name_are_refused(pipe):
    params, buffers = pipe.init(MODEL)
    with pytest.raises(fpipe.InputError, match="again"):
        fpipe.value_and_grad(pipe)({**params, "0": {"weight": params["0.weight"]}}, buffers, (X,), Y)


# --------------------------------------------------------------------------------------------- any tree, there and back

KEYS = st.text("abc", min_size=1, max_size=3)
TREES = st.recursive(
    st.builds(torch.tensor, st.integers(0, 9)),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Affine, inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


@given(TREES)
def test_any_tree_comes_back_from_its_names(tree):
    named = fpipe.by_name(tree)
    again = fpipe.as_tree(named, like=tree)
    spec = optree.tree_structure(tree, namespace=NAMESPACE)
    assert optree.tree_structure(again, namespace=NAMESPACE) == spec
    assert [*fpipe.by_name(again).values()] == [*named.values()]
    assert len(named) == spec.num_leaves
