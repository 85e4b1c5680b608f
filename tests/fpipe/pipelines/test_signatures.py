# SPDX-License-Identifier: Apache-2.0
"""Batches of every kind: uneven, split per argument, of other sizes on later steps.

Whatever the schedule, the bits are those of a plain loop over the same microbatches.
"""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import dualpipe, one_f_one_b, recompute
from tests.common.batches import FOUR, build, require_exact_batch, tokens
from tests.common.cases import LENGTH, WIDTH, WORDS, Case, cross_entropy, mse
from tests.common.comparison import Result, assert_same
from tests.common.layers import Block
from tests.common.loops import eval_loop, loop
from tests.common.running import run, run_evaluation, run_reference
from tests.common.sizes import by_day, by_night, few, sampled
from tests.common.zoo import ZOO

NAMES = ("gpt", "skips", "several", "chained", "in_place", "strides", "own_loss", "normalised")


@sampled(1)
@pytest.mark.parametrize(
    ("name", "kind"),
    by_day([*((name, list(FOUR)[k % 6]) for k, name in enumerate(NAMES)), ("skips", "v"), ("chained", "1f1b")], 2),
)
def test_microbatches_may_differ_in_size(name, kind):
    how = FOUR[kind]
    require_exact_batch(*build(ZOO[name], how, 4 * how.microbatches - 2), ZOO[name].loss)


@settings(max_examples=few(3))
@given(st.data(), st.sampled_from(["export", "trace", "modules"]), st.sampled_from(list(FOUR)))
def test_steps_may_have_any_number_of_rows(data, capture, kind):
    """Each step may have another number of rows than the example, even fewer than microbatches."""
    how, case = FOUR[kind], ZOO["mlp"]
    example, *later = data.draw(st.integers(how.microbatches, 64)), *data.draw(st.lists(st.integers(1, 64), max_size=2))
    pipe, model, *_ = build(case, how, example, capture=capture)
    for rows in (example, *later):
        _, inputs, targets = case.make(rows)
        require_exact_batch(pipe, model, inputs, targets, case.loss, rows)


@by_night
@pytest.mark.parametrize("microbatches", by_day([5, 1, 8, 9], 4))
def test_one_pipeline_takes_every_size(microbatches):
    """From a row for each microbatch up to 64 rows, all sizes together need few captures; fewer rows are as many
    microbatches."""
    case, most = ZOO["mlp"], 64
    pipe, model, *_ = build(case, one_f_one_b(ranks=2, microbatches=microbatches), 2 * microbatches)
    for rows in range(microbatches, most + 1, 3):
        _, inputs, targets = case.make(rows)
        want = loop(model, case.loss, inputs, targets, microbatches)
        assert_same(run(pipe, model, inputs, targets), want)
    assert len(pipe.memo.recordings) <= -(-most // microbatches)
    for rows in {1, microbatches - 1} - {0}:
        require_exact_batch(pipe, model, *case.make(rows)[1:], case.loss, rows)


def test_a_batch_has_a_row_on_each_route_of_a_bidirectional_schedule():
    """Each holds replicas of all stages, whose gradients are summed."""
    case = ZOO["mlp"]
    pipe, model, *_ = build(case, dualpipe(ranks=2, microbatches=4), 8)
    for rows in (2, 3):
        parts = pipe, model, *case.make(rows)[1:]
        assert_same(run(*parts), run_reference(*parts))
    with pytest.raises(fpipe.InputError, match="expected at least 2, one row for each"):
        run(pipe, model, *case.make(1)[1:])


def test_weighted_losses_of_a_small_batch_have_their_share_of_the_total():
    x, y, model = torch.randn(8, 4), torch.randn(8, 4), nn.Linear(4, 4)
    how = one_f_one_b(ranks=1, microbatches=4)
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        targets=y,
        loss=mse,
        microbatching=fpipe.Microbatching(weight=lambda x, y: len(y)),
        schedule=how,
    )
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    for rows in (6, 3):
        parts = zip(x[:rows].tensor_split(min(rows, 4)), y[:rows].tensor_split(min(rows, 4)), strict=True)
        first, *others = [mse(model(a), b) * (len(a) / 9) for a, b in parts]
        assert torch.equal(step(*state, (x[:rows],), y[:rows], total=9)[0].loss, sum(others, first))


@pytest.mark.parametrize("name", by_day(["dropping", "gpt_dropout"], 2))
def test_dropout_is_exact_with_a_smaller_last_microbatch(name):
    """Its masks are those of one device."""
    for how in (FOUR["split"], recompute(one_f_one_b(ranks=4, microbatches=3))):
        parts = build(ZOO[name], how, 8)
        assert_same(run(*parts, seed=3), run_reference(*parts, seed=3))


@by_night
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


@sampled(2)
@pytest.mark.parametrize("name", ["in_place", "normalised", "several"])
def test_verify_takes_any_batch(name):
    pipe, model, *_ = build(ZOO[name], FOUR["1f1b"], 6)
    for rows in (6, 8):
        _, inputs, targets = ZOO[name].make(rows)
        assert fpipe.verify(pipe, model, inputs, targets).eager > 0


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


LONGER = Case(Positions, lambda rows: tokens(rows, LENGTH), cross_entropy, ("blocks.0", "blocks.1", "head"))

STEPS = ((6, 3), (6, 5), (8, 5), (3, 1), (6, 3), (7, 8), (6, 5), (8, 5))


@by_night
@pytest.mark.parametrize(("capture", "cuts"), by_day([("trace", LONGER.cuts), ("export", None)], 2))
def test_rows_and_lengths_change_from_step_to_step(capture, cuts):
    """Training goes on from batch to batch; a batch of a known kind is not captured again."""
    model, inputs, targets = LONGER.make(6)
    how = FOUR["1f1b"]
    pipe = fpipe.pipeline(
        model,
        example=inputs,
        targets=targets,
        loss=cross_entropy,
        schedule=how,
        cuts=cuts,
        recording=fpipe.Recording(front_end=capture),
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
        counts.append(len(pipe.memo.recordings))
    assert counts == [1, 2, 3, 4, 4, 6, 6, 6], "of each microbatch's kind, one"


def test_evaluations_may_have_other_batches():
    pipe, model, *_ = build(LONGER, FOUR["1f1b"], 6)
    for rows, length in STEPS[:4]:
        inputs, targets = tokens(rows, length)
        for wanted in (targets, None):
            want = eval_loop(model, None if wanted is None else cross_entropy, inputs, wanted, 3)
            assert_same(run_evaluation(pipe, model, inputs, wanted), want)


class Flagged(nn.Module):
    """Its forward depends on a flag and a number."""

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


class Sequence(nn.Module):
    """Takes a batch in its second dimension, a mask that all rows share, a temperature, and groups of rows."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, mask, temperature, groups):
        mask.mul_(2)  # which must change no other tensor
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


@pytest.mark.parametrize(
    ("kind", "capture"), by_day([("split", "trace"), ("gpipe", "export"), ("recomputed", "trace")], 3)
)
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


class Fork(nn.Module):
    """Takes another path for single rows: with other parameters, or other values between modules."""

    def __init__(self, what):
        super().__init__()
        self.a, self.b, self.other, self.what = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(4, 4), what

    def forward(self, x):
        y = self.a(x)
        if len(x) > 1:
            return self.b(y)
        return self.b(self.other(y)) if self.what == "parameters" else self.b(y) + y if self.what == "values" else y


@sampled(2)
@pytest.mark.parametrize("what", ["parameters", "values", "modules"])
def test_a_model_may_take_another_path_for_another_shape(what):
    """It may compute and pass on other values, but all microbatches of a step must use the same parameters."""
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
    for x, y in ((inputs[0][:, :3], targets), (inputs[0], targets[:3]), (inputs[0][:0], targets[:0])):
        with pytest.raises(fpipe.InputError):
            step(*pipe.init(model), (x,), y)
    assert not spans
    assert_same(run(pipe, model, inputs, targets), want)
