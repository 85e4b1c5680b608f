# SPDX-License-Identifier: Apache-2.0
"""Weighted losses, and losses in earlier stages or of the model itself, equal a plain loop over microbatches."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import fpipe
from fpipe.tensors.placed import whole_tensor
from fpipe.tensors.tree import same_bits
from schedules import dualpipe, dualpipe_v, one_f_one_b
from tests.common.batches import FOUR, build, require_exact_batch, tokens
from tests.common.cases import LENGTH, WIDTH, WORDS, Case, cross_entropy, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.loops import eval_loop, loop
from tests.common.meshes import options
from tests.common.options import grouped
from tests.common.running import run, run_evaluation, run_reference
from tests.common.sizes import by_day, by_night, in_turn, sampled
from tests.common.zoo import GPT, ZOO


def padded(rows, length=LENGTH):
    inputs, targets = tokens(rows, length)
    keep = torch.arange(length) < torch.randint(1, length + 1, (rows, 1))
    return inputs, torch.where(keep, targets, -100)


def count(inputs, targets):
    return (targets != -100).sum()


@sampled(1)
@pytest.mark.parametrize(("kind", "capture"), by_day([("1f1b", "export"), *((kind, "trace") for kind in FOUR)], 3))
def test_a_mean_over_tokens_is_exact(kind, capture):
    """The weighted sum over uneven microbatches equals a loop bit for bit, and is the mean over the whole batch."""
    case, how = Case(GPT, padded, cross_entropy, ZOO["gpt"].cuts), FOUR[kind]
    pipe, model, inputs, targets = build(case, how, 4 * how.microbatches - 1, weight=count, capture=capture)
    for rows in (4 * how.microbatches - 1, 3 * how.microbatches):
        inputs, targets = padded(rows)
        got = require_exact_batch(pipe, model, inputs, targets, cross_entropy, weight=count)
        whole = copy.deepcopy(model)
        loss = cross_entropy(whole(*inputs), targets)
        loss.backward()
        assert torch.allclose(got.loss, loss, rtol=1e-5)
        assert all(torch.allclose(got.grads[n], p.grad, atol=1e-6) for n, p in whole.named_parameters())
    assert fpipe.verify(pipe, model, inputs, targets).eager > 0


@by_night
def test_weighted_losses_are_exact_on_replicas():
    case = Case(GPT, padded, cross_entropy, ZOO["gpt"].cuts)
    pipe, model, inputs, targets = build(case, dualpipe(ranks=2, microbatches=4), 7, weight=count)
    assert same_bits(
        run(pipe, model, inputs, targets).loss, loop(model, cross_entropy, inputs, targets, 4, weight=count).loss
    )
    assert fpipe.verify(pipe, model, inputs, targets).eager > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_weighted_loss_keeps_its_type(dtype):
    model = nn.Linear(WIDTH, WIDTH, dtype=dtype)
    x, y = torch.randn(7, WIDTH, dtype=dtype), torch.randn(7, WIDTH, dtype=dtype)
    how = one_f_one_b(ranks=1, microbatches=3)
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        targets=y,
        loss=mse,
        schedule=how,
        microbatching=fpipe.Microbatching(weight=lambda inputs, targets: len(targets)),
    )
    got = run(pipe, model, (x,), y)
    assert got.loss.dtype == dtype
    if dtype == torch.float64:
        assert_same(got, loop(model, mse, (x,), y, 3, weight=lambda inputs, targets: len(targets)))
    fpipe.verify(pipe, model, (x,), y)


def test_a_batch_of_weight_zero_is_refused():
    case = Case(GPT, padded, cross_entropy, ZOO["gpt"].cuts)
    pipe, model, inputs, targets = build(case, FOUR["1f1b"], 7, weight=count)
    state = pipe.init(model)
    for function in (fpipe.value_and_grad(pipe), fpipe.evaluate(pipe), fpipe.reference(pipe)):
        with pytest.raises(fpipe.InputError, match="weight: got 0 for each of the 3 microbatches"):
            function(*state, inputs, torch.full_like(targets, -100))


@pytest.mark.parametrize("read", [lambda inputs, targets: targets[0, 0], lambda inputs, targets: float(targets[0, 0])])
def test_weights_that_are_no_counts_are_refused(read):
    model, x, y = nn.Linear(WIDTH, WIDTH), torch.randn(8, WIDTH), torch.ones(8, WIDTH)
    how, counting = one_f_one_b(ranks=1, microbatches=4), fpipe.Microbatching(weight=read)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, microbatching=counting)
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    for wrong in (-0.5, math.inf, math.nan):
        y[4] = wrong
        with pytest.raises(fpipe.InputError, match=f"weight, microbatch 2: got {wrong}, expected a finite number, 0"):
            step(*state, (x,), y)


class Averaged(nn.Module):
    """The mean over the words of a row: 0 / 0 for a row without any."""

    def forward(self, x, ids):
        keep = (ids >= 0).to(x.dtype)[..., None]
        return x * keep.sum(1, keepdim=True) / keep.sum(1, keepdim=True)


class Reader(nn.Module):
    def __init__(self, averages):
        super().__init__()
        self.embed, self.first = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mean, self.second, self.last = Averaged(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.averages = averages

    def forward(self, ids):
        x = self.first(self.embed(ids.clamp(min=0)))
        x = self.mean(x, ids) if self.averages else x
        return self.last(self.second(x).tanh())


def masked_mean(outputs, targets):
    """A mean of 0 / 0 where nothing is kept; so are its gradients, even for a cotangent of 0."""
    keep = targets != -100
    each = functional.cross_entropy(outputs.transpose(1, 2), targets.clamp(min=0), reduction="none")
    return (each * keep).sum() / keep.sum()


EMPTY = {
    "1f1b": (FOUR["1f1b"], {0}),
    "recomputed": (FOUR["recomputed"], {1}),
    "v": (FOUR["v"], {0, 3}),
    "split": (FOUR["split"], {0, 2}),
    "two replicas, one without any": (dualpipe(ranks=4, microbatches=8), {0, 2, 4, 6}),
}


@sampled(2)
@pytest.mark.parametrize(("kind", "averages"), in_turn(list(EMPTY), [False, True]))
def test_a_microbatch_of_weight_zero_counts_for_nothing(kind, averages):
    """Its loss may be nan, its gradients, or already its activations; its forward and its buffers are as ever."""
    how, empty = EMPTY[kind]
    ids = torch.randint(WORDS, (2 * how.microbatches, LENGTH))
    for i in empty:
        ids[2 * i : 2 * i + 2] = -100
    cuts = ("first", "mean" if averages else "second", "last")
    case = Case(lambda: Reader(averages), lambda rows: ((ids,), ids), masked_mean, cuts)
    pipe, model, inputs, targets = build(case, how, len(ids), weight=count)
    got = run(pipe, model, inputs, targets)
    assert all(grad.isfinite().all() for grad in (got.loss, *got.grads.values()))
    assert_same(got, run_reference(pipe, model, inputs, targets))
    want = eval_loop(model, masked_mean, inputs, targets, how.microbatches, weight=count)
    assert_same(run_evaluation(pipe, model, inputs, targets), want)
    assert fpipe.verify(pipe, model, inputs, targets).eager > 0
    assert fpipe.find_nonfinite(pipe)(*pipe.init(model), inputs, targets) is None
    if "replicas" not in kind:
        assert_same(got, loop(model, masked_mean, inputs, targets, how.microbatches, weight=count))


@sampled(2)
@pytest.mark.parametrize("layout", [{}, options(2, 2, 1), options(2, 1, 2)], ids=["alone", "replicas", "shards"])
def test_a_step_in_which_nothing_counts_adds_nothing(layout):
    """Its words are those of other steps, or other copies, which `total` has."""
    ids, model, how = torch.randint(WORDS, (8, LENGTH)), Reader(False), one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(
        model,
        example=(ids,),
        targets=ids,
        loss=masked_mean,
        schedule=how,
        **grouped({"weight": count, **layout}),
    )
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    nothing, some = torch.full_like(ids, -100), ids.clone()
    some[4:] = -100  # all of the second copy
    _, zeros = step(*state, (ids,), nothing, total=8)
    assert all(not grad.any() for grad in zeros.values())
    out, grads = step(*state, (ids,), some)
    whole = dict(model.named_parameters()), dict(model.named_buffers())
    same, theirs = fpipe.reference(pipe)(*whole, (ids,), some)
    assert torch.equal(out.loss, same.loss)
    assert torch.allclose(out.loss, masked_mean(model(ids), some))
    before = {name: grad.clone() for name, grad in grads.items()}
    _, after = step(*state, (ids,), nothing, total=8, onto=grads)
    assert all(same_bits(after[name], before[name]) for name in before)
    assert before.keys() == theirs.keys() == zeros.keys()
    assert all(same_bits(whole_tensor(before[name]), theirs[name]) for name in theirs)


def squares(outputs, targets):
    return functional.mse_loss(outputs, targets, reduction="sum")


@sampled(2)
@pytest.mark.parametrize(
    ("loss", "warns"),
    [
        (squares, True),
        (nn.MSELoss(reduction="sum"), True),
        (lambda out, y: squares(out, y) - 0.5 * out.exp().sum(), True),
        (lambda out, y: (out - y).pow(2).sum(1).mean(), False),
        (lambda out, y: (out - y).pow(2).sum() / len(out), False),
        (lambda out, y: mse(out, y) + out.mean(0).pow(2).sum(), False),
    ],
)
def test_losses_that_sum_are_pointed_out(loss, warns, caplog):
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    how = {"example": (x,), "targets": y, "loss": loss, "schedule": one_f_one_b(ranks=1, microbatches=4)}
    fpipe.pipeline(nn.Linear(WIDTH, WIDTH), **grouped(how))
    assert ("1/4 of the sum over the batch" in caplog.text) is warns
    caplog.clear()
    fpipe.pipeline(
        nn.Linear(WIDTH, WIDTH),
        **grouped({"reduce": "sum", **how}),
    )
    assert not caplog.text


MLP = Case(ZOO["mlp"].build, ZOO["mlp"].batch, squares, ZOO["mlp"].cuts)


@sampled(1)
@pytest.mark.parametrize("kind", ["interleaved", "v"])
def test_losses_may_be_summed(kind):
    """Each is as the loss has it, nothing is divided; a `total` divides the sum."""
    pipe, model, inputs, targets = build(MLP, FOUR[kind], 15, reduce="sum")
    got = require_exact_batch(pipe, model, inputs, targets, lambda out, y: 4 * squares(out, y))  # of 4 microbatches
    assert torch.allclose(got.loss, squares(model(*inputs), targets))
    assert fpipe.verify(pipe, model, inputs, targets, unsplit=1e-5).eager
    out, _ = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets, total=2)
    assert same_bits(out.loss, got.loss / 2), "a power of two"


def test_without_a_loss_nothing_is_weighted():
    case = Case(GPT, padded, cross_entropy, ZOO["gpt"].cuts)
    pipe, model, inputs, _ = build(case, FOUR["1f1b"], 7, weight=count)
    assert_same(run_evaluation(pipe, model, inputs, None), eval_loop(model, None, inputs, None, 3))


class Experts(nn.Module):
    """A mixture of two experts, with a loss that balances them."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        share = self.router(x).softmax(-1)
        best = functional.one_hot(share.argmax(-1), 2).to(x.dtype)
        mixed = sum(share[:, k : k + 1] * expert(x) for k, expert in enumerate(self.experts))
        return x + mixed.tanh(), 2 * (share.mean(0) * best.mean(0)).sum()


class Mixture(nn.Module):
    """A model with a balance loss in every layer, which is returned or added to its own loss."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Experts() for _ in range(4)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, labels=None):
        balance = []
        for layer in self.layers:
            x, loss = layer(x)
            balance.append(loss)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits, "balance": balance}
        return {"loss": functional.cross_entropy(logits, labels) + 0.1 * sum(balance), "logits": logits}


def balanced(outputs, targets):
    return mse(outputs["logits"], targets) + 0.1 * torch.stack(outputs["balance"]).mean()


MIXTURE = Case(Mixture, rows_of(), balanced, ("layers.1", "layers.2", "layers.3"))

OWN = Case(
    Mixture,
    lambda rows: ({"x": torch.randn(rows, WIDTH), "labels": torch.randint(WIDTH, (rows,))}, None),
    lambda outputs: outputs["loss"],
    ("layers.1", "layers.2", "layers.3"),
)


@sampled(1)
@pytest.mark.parametrize(("kind", "weighted"), by_day([(kind, k % 2) for k, kind in enumerate(FOUR)], 3))
def test_losses_in_earlier_stages_have_the_same_weights(kind, weighted):
    how, weight = FOUR[kind], (lambda inputs, targets: 1 + len(inputs[0])) if weighted else None
    parts = build(MIXTURE, how, 4 * how.microbatches - 2, weight=weight)
    got = require_exact_batch(*parts, balanced, weight=weight)
    assert any(name.startswith("layers.0.router") for name in got.grads)
    model = copy.deepcopy(parts[1])
    alone = loop(model, lambda out, y: mse(out["logits"], y), *parts[2:], how.microbatches, weight=weight)
    assert not same_bits(alone.grads["layers.0.router.weight"], got.grads["layers.0.router.weight"])


@sampled(1)
@pytest.mark.parametrize(("kind", "weighted"), by_day([(kind, 1 - k % 2) for k, kind in enumerate(FOUR)][::-1], 3))
def test_a_model_may_compute_its_own_loss(kind, weighted):
    how, weight = FOUR[kind], (lambda inputs, targets: len(inputs["labels"])) if weighted else None
    pipe, model, inputs, _ = build(OWN, how, 4 * how.microbatches - 2, weight=weight)
    got = require_exact_batch(pipe, model, inputs, None, OWN.loss, weight=weight)
    assert got.outputs["loss"].shape == (how.microbatches,), "each microbatch's own"
    assert run_evaluation(pipe, model, inputs, None).loss.isfinite()


def test_losses_in_earlier_stages_are_exact_in_a_fused_v():
    parts = build(MIXTURE, dualpipe_v(ranks=2, microbatches=4), 7)
    assert_same(run(*parts), run_reference(*parts))
    assert fpipe.verify(*parts).eager > 0
