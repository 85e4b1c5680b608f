# SPDX-License-Identifier: Apache-2.0
"""Plans for many kinds of batches: the last ones are kept, nothing is left of the others, and no bit differs."""

import gc
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.captured import Captured
from fpipe.record.reads.watch import Watch
from fpipe.record.variant import TRAINING
from fpipe.stages.assembly import Assembly
from fpipe.stages.recorded import Recorded
from fpipe.stages.stage import ModelStage
from schedules import forwards, gpipe, one_f_one_b
from schedules.files.csv import table
from tests.common.cases import WORDS, cross_entropy
from tests.common.comparison import Result, assert_same
from tests.common.loops import loop
from tests.common.options import grouped
from tests.common.running import build as build_case
from tests.common.running import open_questions
from tests.common.running import require_exact as require_exact_case
from tests.common.sizes import NIGHTLY, by_night, few, sampled
from tests.common.zoo import ZOO

LENGTHS = (3, 4, 5)
PAGE = 2**12  # bytes


class Averages(nn.Module):
    """Predicts words from the words so far; asks whether a mask is full, if there is one."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 4), nn.Linear(4, WORDS)

    def forward(self, ids, mask=None):
        hidden = self.embed(ids)
        if mask is not None and not mask.all():
            hidden = hidden * mask[..., None]
        return self.head(self.mix(hidden).cumsum(1))


def batch(length, rows=2):
    return (torch.randint(WORDS, (rows, length)),), torch.randint(WORDS, (rows, length))


def masked(length, full):
    (ids,), targets = batch(length)
    return (ids, torch.arange(length).expand(2, length) < length - (not full)), targets


def build(plans, like=None, how=None, **options):
    torch.manual_seed(0)
    model = Averages()
    inputs, targets = batch(2) if like is None else like
    how = one_f_one_b(ranks=2, microbatches=2) if how is None else how
    loss = cross_entropy if how.backward else None
    pipe = fpipe.pipeline(
        model,
        example=inputs,
        targets=targets,
        loss=loss,
        schedule=how,
        cuts=["head"],
        **grouped({"plans": plans, **options}),
    )
    return model, pipe


def require_exact(model, pipe, step, inputs, targets):
    out, grads = step(*pipe.init(model), inputs, targets)
    assert_same(
        Result(out.loss, None, grads, {}), loop(model, cross_entropy, inputs, targets, 2)._replace(outputs=None)
    )


@settings(max_examples=few(4))
@given(st.integers(1, 3), st.lists(st.sampled_from([2, *LENGTHS, 6]), min_size=1, max_size=10))
@example(2, [3, 4, 3, 5, 3, 4])
def test_the_plans_that_are_kept_are_those_used_last(plans, lengths):
    """A plan is the same object for as long as it is kept; the example's always is. A new one has the same bits."""
    model, pipe = build(plans)
    step, own = fpipe.value_and_grad(pipe), pipe.training
    kept: dict[int, StepPlan] = {}
    for length in lengths:
        require_exact(model, pipe, step, *batch(length))
        assert pipe.training is own
        if length != 2:
            plan = pipe.memo.batches[next(reversed(pipe.memo.agreements))].plan
            assert kept.pop(length, plan) is plan
            kept[length] = plan
            kept = dict([*kept.items()][-plans:])
        assert [pipe.memo.batches[kind].plan for kind in pipe.memo.agreements] == [own, *kept.values()]
        assert len(pipe.memo.batches) == len(pipe.memo.microbatches) == 1 + len(kept)
        assert all(len(one.assemblies) == 1 for one in pipe.memo.recordings.values())


@sampled(1)
@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_nothing_is_left_of_plans_that_are_forgotten(backward):
    """Over many lengths: as many objects of each kind as ever, among them torch's, and as much memory."""
    kinds = (StepPlan, Assembly, Captured, ModelStage, Watch, Recorded)
    model, pipe = build(3, backward=backward)
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    count, found = 20 if NIGHTLY else 7, []
    for length in range(3, 3 + count):
        step(*state, *batch(length))
        if length in (7, 2 + count):
            found.append(count_objects())
    first, last = found
    assert [first[kind] for kind in kinds] == [last[kind] for kind in kinds]
    assert first[StepPlan] >= 4, "objects are counted"
    assert last.total() - first.total() < 8 * count, "torch keeps no shapes either"


@by_night
def test_memory_stays_flat_over_two_hundred_lengths():
    model, pipe = build(4)
    step, state, sizes = fpipe.value_and_grad(pipe), pipe.init(model), []
    for length in range(3, 203):
        step(*state, *batch(length))
        if length % 50 == 2:
            gc.collect()
            sizes.append(resident())
    assert sizes[-1] - sizes[0] < 4 * 2**20, sizes


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def count_objects():
    while gc.collect():
        pass
    return Counter(map(type, gc.get_objects()))


def test_train_and_eval_mode_and_outputs_count_separately():
    model, pipe = build(2)
    state, inputs = pipe.init(model), batch(4)
    fpipe.value_and_grad(pipe)(*state, *inputs)
    fpipe.evaluate(pipe)(*state, *inputs)
    assert len(pipe.memo.batches) == 3
    fpipe.evaluate(pipe)(*state, inputs[0])
    assert [variant.training for variant, _ in pipe.memo.agreements] == [True, False, False]


def test_questions_are_asked_again_about_forgotten_kinds():
    """Batches of one shape that answer differently are different kinds; they share what was asked first."""
    model, pipe = build(1, masked(2, full=True))
    step = fpipe.value_and_grad(pipe)
    for length, full in ((4, True), (4, False), (2, True), (2, False), (4, False), (4, True)):
        require_exact(model, pipe, step, *masked(length, full))
        answers = [signature.answers for _, signature in pipe.memo.agreements]
        assert len(answers) <= 2
        assert len(open_questions(pipe)) == len({one.leaves for _, one in pipe.memo.recordings})


def test_a_reference_alone_keeps_as_many_plans():
    model, pipe = build(2)
    reference, state = fpipe.reference(pipe), (dict(model.named_parameters()), dict(model.named_buffers()))
    for length in range(3, 9):
        inputs, targets = batch(length)
        out, grads = reference(*state, inputs, targets)
        want = loop(model, cross_entropy, inputs, targets, 2)._replace(outputs=None)
        assert_same(Result(out.loss, None, grads, {}), want)
        assert len(pipe.memo.batches) <= 3
    require_exact(model, pipe, fpipe.value_and_grad(pipe), *batch(9))
    assert len(pipe.memo.batches) == 2


def test_a_rebuilt_pipeline_keeps_as_many_plans():
    model, pipe = build(1)
    again = pipe.rebuilt(model)
    for length in LENGTHS:
        require_exact(model, again, fpipe.value_and_grad(again), *batch(length))
    assert len(again.memo.batches) == 2


@pytest.mark.parametrize("plans", [0, -1, True, 1.5, None])
def test_the_number_of_plans_must_be_positive(plans):
    with pytest.raises(fpipe.InputError, match=r"plans: got .*, expected an integer"):
        build(plans)


# --------------------------------------------------------------------------------------------------------------- ahead


def on_meta(tree):
    (inputs,), targets = tree
    return (inputs.to("meta"),), targets.to("meta")


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_what_is_prepared_is_not_captured_again(backward, monkeypatch):
    """Shapes suffice, and rows may differ in number, too."""
    model, pipe = build(4, backward=backward)
    kinds = [(3, 2), (4, 2), (4, 3), (2, 2)]
    pipe.prepare(on_meta(batch(*kind)) for kind in kinds)
    plans, step = dict(pipe.memo.batches), fpipe.value_and_grad(pipe)
    monkeypatch.setattr(type(pipe.captures), "explore", None)  # nothing is captured from here on
    monkeypatch.setattr(type(pipe.planner), "_plan", None)
    for kind in kinds:
        require_exact(model, pipe, step, *batch(*kind))
    assert pipe.memo.batches == plans


def test_examples_with_values_answer_questions():
    model, pipe = build(4, masked(2, full=True))
    (ids, mask), targets = masked(4, full=True)
    with pytest.raises(fpipe.InputError, match=r"got no values of inputs\[1\]"):
        pipe.prepare([((ids, mask.to("meta")), targets)])
    pipe.prepare([masked(4, full=True), masked(4, full=False)])
    count = len(pipe.memo.batches)
    for full in (True, False):
        require_exact(model, pipe, fpipe.value_and_grad(pipe), *masked(4, full))
    assert len(pipe.memo.batches) == count == 3


def test_autocast_is_part_of_what_is_prepared():
    model, pipe = build(4)
    with torch.autocast("cpu", torch.bfloat16):
        pipe.prepare([batch(3)])
        count = len(pipe.memo.recordings)
        fpipe.value_and_grad(pipe)(*pipe.init(model), *batch(3))
        assert len(pipe.memo.recordings) == count
    assert any(variant != TRAINING for variant, _ in pipe.memo.batches)


def test_a_schedule_without_backward_is_prepared_for_evaluation():
    model, pipe = build(2, how=forwards(gpipe(ranks=2, microbatches=2)))
    pipe.prepare([(batch(4)[0], None)])
    count = len(pipe.memo.recordings)
    fpipe.evaluate(pipe)(*pipe.init(model), batch(4)[0])
    assert len(pipe.memo.recordings) == count


@sampled(2)
@pytest.mark.parametrize(
    ("examples", "words"),
    [
        ([batch(3), batch(4), batch(5)], "got 3 kinds of batches .* at most 2, .*plans=3.* or more"),
        ([batch(3), torch.zeros(2, 3)], r"examples\[1\]: got Tensor, expected a pair of inputs and targets"),
        ([batch(3), (batch(4)[0], batch(5)[1])], r"targets|batch that the model can take"),
        ([batch(1, 0)], "one row for each microbatch"),
    ],
)
def test_examples_that_cannot_be_prepared_are_refused(examples, words):
    model, pipe = build(2)
    with pytest.raises(fpipe.InputError, match=words):
        pipe.prepare(examples)
    require_exact(model, pipe, fpipe.value_and_grad(pipe), *batch(3))


# ------------------------------------------------------------------------------------------------------------ buffers


def test_a_stage_that_modifies_buffers_runs_its_microbatches_in_order():
    how = table(rows=("0F1,0F0,0B1,0B0", "1F0,1F1,1B0,1B1"))
    with pytest.raises(fpipe.CutError, match=r"stage 0: got modified buffers .* microbatches \[1, 0\], expected asc"):
        build_case(ZOO["normalised"], how, 4)


def test_the_backwards_of_a_stage_that_modifies_buffers_may_have_any_order():
    require_exact_case(ZOO["normalised"], table(rows=("0F0,0C1,0R1,0B1,0B0", "1F0,1F1,1B1,1B0")), order=[1, 0])


def test_a_stage_that_modifies_none_runs_its_microbatches_in_any_order():
    require_exact_case(ZOO["mlp"], table(rows=("0F1,0F0,0B1,0B0", "1F0,1F1,1B0,1B1")), order=[0, 1])
