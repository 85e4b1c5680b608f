# SPDX-License-Identifier: Apache-2.0
"""`verify` finds equal what is equal, and names the leaf that is not."""

import copy

import pytest
import torch
from torch import nn

import fpipe
from fpipe.pipelines import step
from fpipe.stages.stage import ModelStage
from schedules import one_f_one_b
from tests.common.cases import mse
from tests.common.comparison import Result, assert_same
from tests.common.layers import linears
from tests.common.options import grouped
from tests.common.running import build
from tests.common.sizes import sampled
from tests.common.zoo import ZOO

HOW = one_f_one_b(ranks=2, microbatches=3)


@sampled(2)
@pytest.mark.parametrize(
    ("name", "capture"),
    [
        ("mlp", "export"),
        ("mlp", "modules"),
        ("normalised", "export"),
        ("unused", "export"),
        ("several", "export"),
        ("gpt", "export"),
        ("all_frozen", "modules"),
    ],
)
def test_verify_passes_a_correct_pipeline(name, capture):
    pipe, model, inputs, targets = build(ZOO[name], HOW, 6, capture=capture)
    found = fpipe.verify(pipe, model, inputs, targets)
    leaves = [p for p in model.parameters() if p.requires_grad]
    buffers = list(model.buffers())
    assert found.reference >= 2 + len(buffers), "loss, outputs, buffers"
    assert found.eager >= 2 + len(buffers)
    if name in ("mlp", "normalised", "gpt"):
        assert found.reference == found.eager == 2 + len(leaves) + len(buffers)


@sampled(1)
@pytest.mark.parametrize("width", [3, 5, 7])
def test_microbatches_may_begin_anywhere_in_memory(width):
    """Rows of an odd width: where a matrix begins decides how some kernels add."""
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, width))
        x, y = torch.randn(6, width), torch.randn(6, width)
        pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=HOW, cuts=["2"])
        assert fpipe.verify(pipe, model, (x,), y).eager


def test_a_model_that_draws_is_not_compared_with_an_eager_run():
    pipe, model, inputs, targets = build(ZOO["dropping"], HOW, 6)
    found = fpipe.verify(pipe, model, inputs, targets, seed=1)
    assert found.reference > 0
    assert found.eager == 0


def test_verify_takes_a_list_of_parts():
    parts = [nn.Linear(4, 4), torch.tanh, nn.Linear(4, 4)]
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    how = one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(
        parts,
        example=(x,),
        targets=y,
        loss=mse,
        schedule=how,
        cuts=["2"],
        recording=fpipe.Recording(front_end="modules"),
    )
    assert fpipe.verify(pipe, parts, (x,), y).eager == 6


def test_verify_finds_another_model():
    """The reference shares the capture and cannot see it; the model run eagerly can."""
    pipe, _, inputs, targets = build(ZOO["mlp"], HOW, 6)
    model = linears(nn.Tanh, nn.Tanh, nn.GELU)
    with pytest.raises(fpipe.MismatchError, match="from the model run eagerly") as caught:
        fpipe.verify(pipe, model, inputs, targets)
    assert str(caught.value).startswith("loss: got different bits")
    assert "largest difference" in str(caught.value)


def test_verify_finds_a_wrong_sum(monkeypatch):
    right = ModelStage.complete

    def wrong(self, total):
        total = right(self, total)
        return (total[0] * (1 + 2**-22), *total[1:]) if total and self.index == 1 else total

    pipe, model, inputs, targets = build(ZOO["mlp"], HOW, 6)
    monkeypatch.setattr(ModelStage, "complete", wrong)
    with pytest.raises(fpipe.MismatchError, match=r"gradient 4\.weight: got different bits from the reference"):
        fpipe.verify(pipe, model, inputs, targets)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("mlp", lambda grads: {n: g for n, g in grads.items() if n != "4.weight"}, "4.weight: got nothing, expected a"),
        ("unused", lambda grads: {**grads, "spare": torch.zeros(3)}, "spare: got a tensor, expected nothing"),
    ],
)
def test_verify_finds_a_lost_and_an_extra_gradient(name, change, words, monkeypatch):
    right = step.collect_gradients
    monkeypatch.setattr(step, "collect_gradients", lambda *given: change(right(*given)))
    pipe, model, inputs, targets = build(ZOO[name], HOW, 6)
    with pytest.raises(fpipe.MismatchError, match=f"gradient {words}"):
        fpipe.verify(pipe, model, inputs, targets)


def test_verify_finds_wrong_buffers(monkeypatch):
    def stale(self, params, buffers, inputs, key):
        outputs, _, residuals = self.functions.forward(params, buffers, inputs, key)
        return outputs, buffers, residuals

    pipe, model, inputs, targets = build(ZOO["normalised"], HOW, 6)
    monkeypatch.setattr(ModelStage, "forward", stale)
    with pytest.raises(fpipe.MismatchError):
        fpipe.verify(pipe, model, inputs, targets)


@pytest.mark.parametrize("name", ["in_place", "normalised"])
def test_verify_modifies_nothing(name):
    pipe, model, inputs, targets = build(ZOO[name], HOW, 6)
    before = copy.deepcopy((inputs, targets, dict(model.named_parameters()), dict(model.named_buffers())))
    fpipe.verify(pipe, model, inputs, targets)
    after = Result(None, (inputs, targets), dict(model.named_parameters()), dict(model.named_buffers()))
    assert_same(after, Result(None, before[:2], *before[2:]))


def attend(ids, offsets):
    """Each token's document, of packed sequences: the number of offsets that it does not come before."""
    return (ids[..., None] >= offsets).sum(-1, dtype=torch.float32)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, offsets):
        return self.b(self.a(x) * attend(torch.arange(x.shape[1]), offsets))


class Normalised(Packed):
    def __init__(self):
        super().__init__()
        self.b = nn.Sequential(nn.BatchNorm1d(4), self.b)


SPLITS = {
    "rows": (Packed, mse, ((0, None), 0), {}, ""),
    "a leaf that is no row": (Packed, mse, ((0, 0), 0), {}, "loss: got a difference of"),
    "a sum": (Packed, lambda out, y: mse(out, y) * len(y), ((0, None), 0), {}, "loss: got a difference of"),
    "weights": (Packed, mse, ((0, None), 0), {"weight": lambda _, y: len(y)}, ""),
    "unequal weights": (Packed, mse, ((0, None), 0), {"weight": lambda _, y: y.abs().sum()}, "weight="),
    "BatchNorm": (Normalised, mse, ((0, None), 0), {}, "BatchNorm"),
}


@sampled(2)
@pytest.mark.parametrize("what", SPLITS)
def test_verify_compares_with_the_whole_batch_in_one_piece(what):
    """The other comparisons split the batch as the pipeline does, so they pass."""
    torch.manual_seed(0)
    make, loss, dims, more, words = SPLITS[what]
    model, batch, y = make(), (torch.randn(6, 4), torch.tensor([0, 1, 2, 2, 3, 3])), torch.randn(6, 4)
    pipe = fpipe.pipeline(
        model,
        example=batch,
        targets=y,
        loss=loss,
        schedule=HOW,
        **grouped({"batch_dims": dims, **more}),
    )
    assert fpipe.verify(pipe, model, batch, y).eager
    if not words:
        assert fpipe.verify(pipe, model, batch, y, unsplit=1e-5).eager
        return
    with pytest.raises(fpipe.MismatchError, match=words) as caught:
        fpipe.verify(pipe, model, batch, y, unsplit=1e-5)
    assert "in one piece, expected at most 1e-05 of" in str(caught.value)


def test_random_numbers_are_not_compared_with_those_of_the_whole_batch():
    pipe, model, inputs, targets = build(ZOO["dropping"], HOW, 6)
    with pytest.raises(fpipe.InputError, match="unsplit: got 1e-05 for a model that draws random numbers"):
        fpipe.verify(pipe, model, inputs, targets, seed=1, unsplit=1e-5)
