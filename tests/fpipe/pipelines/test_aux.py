# SPDX-License-Identifier: Apache-2.0
"""What a loss returns beside itself comes back from all microbatches, and changes no bit of the rest."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import dualpipe, one_f_one_b, recompute, zb_v
from tests.common.comparison import Result, assert_same
from tests.common.meshes import options
from tests.common.options import grouped
from tests.common.sizes import in_turn, sampled

WAYS = {
    "1f1b": one_f_one_b(ranks=2, microbatches=4),
    "recomputed": recompute(one_f_one_b(ranks=2, microbatches=4)),
    "v": zb_v(ranks=2, microbatches=4),
    "two ranks with the loss": dualpipe(ranks=4, microbatches=4),
}


def counted(out, labels):
    loss = cross_entropy(out, labels)
    right = out.argmax(1) == labels
    return loss, {
        "right": right.sum(),
        "each": (right, [out.mean(0), loss]),
        "rows": len(labels),
        "name": "x",
        "no": None,
    }


def alone(out, labels):
    return cross_entropy(out, labels)


def build(how, loss, rows=8, **more):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(5, 5), nn.Tanh())])
    x, y = torch.randn(rows, 5), torch.randint(5, (rows,))
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=loss, schedule=how, **grouped(more))
    return pipe, model, x, y


def step_of(pipe, model, x, y, **asks):
    out, grads = fpipe.value_and_grad(pipe, outputs=True, **asks)(*pipe.init(model), (x,), y)
    return Result(out.loss, out.outputs, grads, out.buffers), out.aux


@sampled(1)
@pytest.mark.parametrize(
    ("way", "more"),
    in_turn(WAYS, [{}, {"backward": "autograd"}, {"whole": ["loss"]}, {"weight": lambda _, y: y.sum()}]),
)
def test_values_beside_the_loss_are_those_of_each_microbatch(way, more):
    pipe, model, x, y = build(WAYS[way], counted, **more)
    got, aux = step_of(pipe, model, x, y)
    want, nothing = step_of(*build(WAYS[way], alone, **more))
    assert_same(got, want)
    assert nothing is None
    each = [counted(model(a), b)[1] for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    assert aux["rows"].tolist() == [2, 2, 2, 2]
    assert (aux["name"], aux["no"]) == ("x", None)
    assert aux["right"].tolist() == [int(one["right"]) for one in each]
    assert same_bits(aux["each"][0], torch.stack([one["each"][0] for one in each]))
    assert not aux["each"][1][1].requires_grad
    assert same_bits(aux["each"][1][1], torch.stack([one["each"][1][1] for one in each]).detach())
    assert fpipe.verify(pipe, model, (x,), y).eager > fpipe.verify(*build(WAYS[way], alone, **more)[:2], (x,), y).eager
    out = fpipe.evaluate(pipe, outputs=False)(*pipe.init(model), (x,), y)
    assert out.aux["right"].tolist() == aux["right"].tolist()
    assert same_bits(out.loss, fpipe.stream(pipe, lambda i, outputs: None)(*pipe.init(model), (x,), y))


@pytest.mark.parametrize("layout", [{}, options(2, 2, 1)], ids=["alone", "copies"])
def test_a_function_merges_the_trees_of_all_microbatches(layout):
    """Of all copies, in order; microbatches may differ in shape, then."""
    pipe, model, x, y = build(WAYS["1f1b"], counted, rows=11, **layout)
    shapes = step_of(pipe, model, x, y, aux=lambda parts: [tuple(part["each"][0].shape) for part in parts])[1]
    assert shapes == [(len(part),) for part in y.tensor_split(8 if layout else 4)]
    assert step_of(pipe, model, x, y, aux=False)[1] is None
    with pytest.raises(fpipe.InputError, match=r"aux\['each'\]\[0\]: got shapes \[\[.\], \[.\]\].*aux=list"):
        step_of(pipe, model, x, y)


def test_a_training_step_and_the_reference_have_them_too():
    pipe, model, x, y = build(WAYS["v"], counted)
    params, buffers = pipe.init(model)
    want = step_of(pipe, model, x, y)[1]
    sgd = fpipe.optimizer(torch.optim.SGD, lr=0.1)
    out, *_ = fpipe.train_step(pipe, sgd)(params, buffers, sgd.init(params), (x,), y)
    whole = dict(model.named_parameters()), {}
    same, _ = fpipe.reference(pipe)(*whole, (x,), y)
    for one in (out, same):
        assert same_bits(one.aux["each"][1][0], want["each"][1][0])


def test_verify_compares_them():
    """A pipeline whose loss has seen another value of a global is refused; one of other values is found."""
    pipe, model, x, y = build(WAYS["1f1b"], counted)
    other = nn.Sequential(*model[:-1])
    with pytest.raises(fpipe.MismatchError):
        fpipe.verify(pipe, other, (x,), y)


class Opaque:
    pass


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        (lambda out, y: (alone(out, y), Opaque()), r"the loss's aux, at the root: got Opaque"),
        (lambda out, y: (out, {}), r"loss: got a tensor of shape \[2, 5\].*or a pair of one"),
        (lambda out, y: (alone(out, y), {}, 3), r"loss: got \(.*\(loss, aux\)"),
    ],
)
def test_what_is_no_pair_of_a_loss_and_a_tree_is_refused(returns, words):
    with pytest.raises(fpipe.PipelineError, match=words):
        build(WAYS["1f1b"], returns)
