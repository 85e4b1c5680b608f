# SPDX-License-Identifier: Apache-2.0
"""Batches of every kind through a pipeline: uneven, cut per argument, of other sizes on later steps, weighted.

Whatever the schedule, the bits are those of a plain loop over the same microbatches.
"""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import (
    Schedule,
    dualpipe,
    dualpipe_v,
    interleaved_1f1b,
    one_f_one_b,
    recompute,
    zb_v,
)
from tests.common.cases import LENGTH, WIDTH, WORDS, Case, cross_entropy, mse, rows_of
from tests.common.comparison import Result, assert_same
from tests.common.layers import Block
from tests.common.loops import eval_loop, loop
from tests.common.models import GPT
from tests.common.running import run, run_evaluation, run_reference
from tests.common.schedules import SCHEDULES
from tests.common.sizes import few
from tests.common.zoo import ZOO

FOUR = {
    "gpipe": SCHEDULES["gpipe"](ranks=4, microbatches=3),
    "1f1b": one_f_one_b(ranks=4, microbatches=3),
    "split": SCHEDULES["split_backward"](4, 3),
    "recomputed": recompute(one_f_one_b(ranks=4, microbatches=3)),
    "interleaved": interleaved_1f1b(ranks=2, microbatches=4, chunks=2),
    "v": zb_v(ranks=2, microbatches=4),
}


def build(case: Case, how: Schedule, rows: int, **options):
    model, inputs, targets = case.make(rows)
    cuts = case.at(how.stages) if case.cuts else None
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=case.loss, schedule=how, cuts=cuts, **options)
    return pipe, model, inputs, targets


def require_exact_batch(pipe, model, inputs, targets, loss, **how) -> Result:
    """A step, its reference and an evaluation equal plain loops."""
    got, m = run(pipe, model, inputs, targets), pipe.schedule.microbatches
    assert_same(got, loop(model, loss, inputs, targets, m, **how))
    assert_same(got, run_reference(pipe, model, inputs, targets))
    assert_same(run_evaluation(pipe, model, inputs, targets), eval_loop(model, loss, inputs, targets, m, **how))
    return got


# -------------------------------------------------------------------------------------------------------------- uneven


NAMES = ("gpt", "skips", "several", "chained", "in_place", "strides", "own_loss", "normalised")


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, list(FOUR)[k % 6]) for k, name in enumerate(NAMES)), ("skips", "v"), ("chained", "1f1b")],
)
def test_microbatches_may_differ_in_size(name, kind):
    how = FOUR[kind]
    require_exact_batch(*build(ZOO[name], how, 4 * how.microbatches - 2), ZOO[name].loss)


@settings(max_examples=few(5))
@given(st.data(), st.sampled_from(["export", "trace", "modules"]), st.sampled_from(list(FOUR)))
def test_steps_may_have_any_number_of_rows(data, capture, kind):
    """The example has one number of rows, and each step another."""
    how, case = FOUR[kind], ZOO["mlp"]
    example, *later = data.draw(st.lists(st.integers(how.microbatches, 64), min_size=1, max_size=3))
    pipe, model, *_ = build(case, how, example, capture=capture)
    for rows in (example, *later):
        _, inputs, targets = case.make(rows)
        require_exact_batch(pipe, model, inputs, targets, case.loss)


@pytest.mark.parametrize("microbatches", [1, 5, 8, 9])
def test_one_pipeline_takes_every_size(microbatches):
    """From a row for each microbatch up to 64 rows; all sizes together need few captures."""
    case, most = ZOO["mlp"], 64
    pipe, model, *_ = build(case, one_f_one_b(ranks=2, microbatches=microbatches), 2 * microbatches)
    for rows in range(microbatches, most + 1, 3):
        _, inputs, targets = case.make(rows)
        want = loop(model, case.loss, inputs, targets, microbatches)
        assert_same(run(pipe, model, inputs, targets), want)
    assert len(pipe.captures.captured) <= -(-most // microbatches)
    with pytest.raises(fpipe.InputError, match=rf"expected at least {microbatches}, one row for each"):
        run(pipe, model, *case.make(microbatches - 1)[1:])


@pytest.mark.parametrize("name", ["dropping", "gpt_dropout"])
def test_dropout_is_exact_with_a_smaller_last_microbatch(name):
    """Its masks are those of one device."""
    for how in (FOUR["split"], recompute(one_f_one_b(ranks=4, microbatches=3))):
        parts = build(ZOO[name], how, 8)
        assert_same(run(*parts, seed=3), run_reference(*parts, seed=3))


def test_replicas_take_microbatches_of_different_sizes():
    for name in ("tied_sequence", "own_loss"):
        parts = build(ZOO[name], dualpipe(ranks=2, microbatches=4), 7)
        got = run(*parts)
        assert_same(got, run_reference(*parts))
        _, model, inputs, targets = parts
        want = loop(model, ZOO[name].loss, inputs, targets, 4)
        assert_same(got._replace(grads={}), want._replace(grads={}))
        assert all(torch.allclose(got.grads[n], grad, atol=1e-6) for n, grad in want.grads.items())
        assert_same(run_evaluation(*parts), eval_loop(model, ZOO[name].loss, inputs, targets, 4))
        assert fpipe.verify(*parts).eager > 0


@pytest.mark.parametrize("name", ["in_place", "normalised", "several"])
def test_verify_takes_any_batch(name):
    pipe, model, *_ = build(ZOO[name], FOUR["1f1b"], 6)
    for rows in (6, 8):
        _, inputs, targets = ZOO[name].make(rows)
        assert fpipe.verify(pipe, model, inputs, targets).eager > 0


# ------------------------------------------------------------------------------------------------------- later batches


class Positions(nn.Module):
    """A transformer for sequences of any length up to eight."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(rows, length):
    return (torch.randint(WORDS, (rows, length)),), torch.randint(WORDS, (rows, length))


LONGER = Case(Positions, lambda rows: tokens(rows, LENGTH), cross_entropy, ("blocks.0", "blocks.1", "head"))
STEPS = ((6, 3), (6, 5), (8, 5), (3, 1), (6, 3), (7, 8), (6, 5), (8, 5))


@pytest.mark.parametrize(("capture", "cuts"), [("export", None), ("trace", LONGER.cuts)])
def test_rows_and_lengths_change_from_step_to_step(capture, cuts):
    """Parameters are trained on, from batch to batch; a batch of a known kind is not captured again."""
    model, inputs, targets = LONGER.make(6)
    how = FOUR["1f1b"]
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=cross_entropy, schedule=how, cuts=cuts, capture=capture
    )
    params, buffers = pipe.init(model)
    step, counts = fpipe.value_and_grad(pipe, outputs=True), []
    for rows, length in STEPS:
        inputs, targets = tokens(rows, length)
        out, grads = step(params, buffers, inputs, targets)
        model.load_state_dict(params)
        want = loop(model, cross_entropy, inputs, targets, 3)
        assert_same(Result(out.loss, out.outputs, grads, out.buffers), want)
        params = {name: p.detach() - 0.1 * grads[name] for name, p in params.items()}
        counts.append(len(pipe.captures.captured))
    assert counts == [1, 2, 3, 4, 4, 6, 6, 6], "of each microbatch's kind, one"


def test_evaluations_may_have_other_batches():
    pipe, model, *_ = build(LONGER, FOUR["1f1b"], 6)
    for rows, length in STEPS:
        inputs, targets = tokens(rows, length)
        for wanted in (targets, None):
            want = eval_loop(model, None if wanted is None else cross_entropy, inputs, wanted, 3)
            assert_same(run_evaluation(pipe, model, inputs, wanted), want)


class Flagged(nn.Module):
    """Computes what a flag and a number say."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, flag=False, power=1):
        x = self.a(x)
        return self.b(x.tanh() if flag else x) ** power


def test_inputs_other_than_tensors_may_change():
    case = Case(Flagged, lambda rows: ({"x": torch.randn(rows, WIDTH), "flag": False, "power": 1}, None), None, ("b",))
    model, inputs, _ = case.make(6)
    pipe = fpipe.pipeline(
        model, example=inputs, loss=torch.mean, schedule=one_f_one_b(ranks=2, microbatches=3), cuts=["b"]
    )
    losses = set()
    for flag, power in ((False, 1), (True, 1), (True, 2), (False, 1)):
        given = {**inputs, "flag": flag, "power": power}
        losses.add(require_exact_batch(pipe, model, given, None, torch.mean).loss.item())
    assert len(losses) == 3


def test_layouts_may_differ_from_the_example():
    """A batch is copied into the layout that the example has."""
    pipe, model, *_ = build(ZOO["strides"], FOUR["1f1b"], 6)
    for rows in (6, 9):
        _, inputs, targets = ZOO["strides"].make(rows)
        turned = (inputs[0].transpose(0, 2).contiguous().transpose(0, 2),)
        want = run(pipe, model, inputs, targets)
        assert_same(run(pipe, model, turned, targets.contiguous()), want)


# ------------------------------------------------------------------------------------------------------ cut by argument


class Sequence(nn.Module):
    """Time before rows; a mask that all rows share, a temperature, and ragged groups of rows."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, mask, temperature, groups):
        mask.mul_(2)  # nobody else may see this
        mask = mask[:, None, None] * 1
        hidden = self.a(x) * mask
        hidden = self.b(hidden).tanh() / temperature
        hidden = hidden + self.c(groups).sum(0)
        return {"time first": self.d(hidden) * mask, "mask": mask * 1, "count": len(groups)}


def ragged(rows, microbatches):
    return rows.split([1, 3, 2][:microbatches])


def sequences(rows):
    inputs = (torch.randn(5, rows, WIDTH), torch.rand(5), torch.tensor(2.0), torch.randn(6, WIDTH))
    return inputs, torch.randn(5, rows, WIDTH)


def far(outputs, targets):
    return mse(outputs["time first"], targets)


@pytest.mark.parametrize(("kind", "capture"), [("gpipe", "export"), ("split", "trace"), ("recomputed", "trace")])
def test_each_argument_is_split_along_its_own_dimension(capture, kind):
    case = Case(Sequence, sequences, far, ("b", "c", "d"))
    dims = ((1, None, None, ragged), 1)
    joined = {"time first": 1, "mask": None, "count": 0}
    pipe, model, inputs, targets = build(case, FOUR[kind], 7, batch_dims=dims, output_dims=joined, capture=capture)
    for rows in (7, 9):
        inputs, targets = sequences(rows)
        before = copy.deepcopy((inputs, targets))
        got, want = run(pipe, model, inputs, targets), loop(model, far, inputs, targets, 3, dims=dims, joined=1)
        assert same_bits(got.outputs["time first"], want.outputs["time first"])
        assert same_bits(got.outputs["mask"], inputs[1][:, None, None] * 2)
        assert got.outputs["count"] == 1
        assert_same(got._replace(outputs=None), want._replace(outputs=None))
        assert_same(got, run_reference(pipe, model, inputs, targets))
        assert_same(Result(None, (inputs, targets), {}, {}), Result(None, before, {}, {}))
        assert fpipe.verify(pipe, model, inputs, targets).eager > 5


def test_outputs_may_be_merged_by_a_function():
    pipe, model, inputs, targets = build(ZOO["mlp"], FOUR["1f1b"], 7, output_dims=tuple)
    got = run(pipe, model, inputs, targets).outputs
    assert [part.shape[0] for part in got] == [3, 2, 2]
    assert same_bits(torch.cat(got), loop(model, mse, inputs, targets, 3).outputs)


def test_outputs_that_cannot_be_merged_are_refused_when_requested():
    pipe, model, inputs, targets = build(ZOO["mlp"], FOUR["1f1b"], 7, output_dims=1)
    fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    with pytest.raises(fpipe.InputError, match=r"outputs: got shapes \[\[3, 4\], \[2, 4\]\].*output_dims"):
        fpipe.value_and_grad(pipe, outputs=True)


# -------------------------------------------------------------------------------------------------------------- weights


def padded(rows, length=LENGTH):
    inputs, targets = tokens(rows, length)
    keep = torch.arange(length) < torch.randint(1, length + 1, (rows, 1))
    return inputs, torch.where(keep, targets, -100)


def count(inputs, targets):
    return (targets != -100).sum()


@pytest.mark.parametrize(("kind", "capture"), [("1f1b", "export"), *((kind, "trace") for kind in FOUR)])
def test_a_mean_over_tokens_is_exact(kind, capture):
    """The weighted sum over uneven microbatches equals a loop bit for bit, and the mean over the whole batch."""
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
        model, example=(x,), targets=y, loss=mse, schedule=how, weight=lambda inputs, targets: len(targets)
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


def test_without_a_loss_nothing_is_weighted():
    case = Case(GPT, padded, cross_entropy, ZOO["gpt"].cuts)
    pipe, model, inputs, _ = build(case, FOUR["1f1b"], 7, weight=count)
    assert_same(run_evaluation(pipe, model, inputs, None), eval_loop(model, None, inputs, None, 3))


# ------------------------------------------------------------------------------------- losses on the way, and of models


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
    """A balance loss in every layer; returned, or added to a loss of its own."""

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


@pytest.mark.parametrize(("kind", "weighted"), [(kind, k % 2) for k, kind in enumerate(FOUR)])
def test_losses_in_earlier_stages_have_the_same_weights(kind, weighted):
    how, weight = FOUR[kind], (lambda inputs, targets: 1 + len(inputs[0])) if weighted else None
    parts = build(MIXTURE, how, 4 * how.microbatches - 2, weight=weight)
    got = require_exact_batch(*parts, balanced, weight=weight)
    assert any(name.startswith("layers.0.router") for name in got.grads)
    model = copy.deepcopy(parts[1])
    alone = loop(model, lambda out, y: mse(out["logits"], y), *parts[2:], how.microbatches, weight=weight)
    assert not same_bits(alone.grads["layers.0.router.weight"], got.grads["layers.0.router.weight"])


@pytest.mark.parametrize(("kind", "weighted"), [(kind, 1 - k % 2) for k, kind in enumerate(FOUR)])
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


# ------------------------------------------------------------------------------------------------------ what is refused


class Fork(nn.Module):
    """Another path for single rows: other parameters, or other values between modules."""

    def __init__(self, what):
        super().__init__()
        self.a, self.b, self.other, self.what = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(4, 4), what

    def forward(self, x):
        y = self.a(x)
        if len(x) > 1:
            return self.b(y)
        return self.b(self.other(y)) if self.what == "parameters" else self.b(y) + y if self.what == "values" else y


@pytest.mark.parametrize("what", ["parameters", "values", "modules"])
def test_a_model_may_take_another_path_for_another_shape(what):
    """It may compute otherwise, and pass on more. In one step, parameters must be those of the other microbatches."""
    model, x, y = Fork(what), torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    how = one_f_one_b(ranks=2, microbatches=3)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, cuts=["b"])
    if what == "values":
        require_exact_batch(pipe, model, (x[:5],), y[:5], mse)
    else:
        words = r"inputs\[0\]: got float32\[5, 4\], where the example has float32\[6, 4\].*microbatch 2: got other"
        with pytest.raises(fpipe.InputError, match=words):
            run(pipe, model, (x[:5],), y[:5])
    if what != "modules":
        require_exact_batch(pipe, model, (x[:3],), y[:3], mse)


def test_a_refused_batch_changes_nothing():
    pipe, model, inputs, targets = build(ZOO["mlp"], FOUR["1f1b"], 6)
    want = run(pipe, model, inputs, targets)
    spans = []
    step = fpipe.value_and_grad(pipe, record=spans.append)
    for x, y in ((inputs[0][:, :3], targets), (inputs[0], targets[:3]), (inputs[0][:2], targets[:2])):
        with pytest.raises(fpipe.InputError):
            step(*pipe.init(model), (x,), y)
    assert not spans
    assert_same(run(pipe, model, inputs, targets), want)
