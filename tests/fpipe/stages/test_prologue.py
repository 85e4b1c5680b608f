# SPDX-License-Identifier: Apache-2.0
"""Prologues: what stages compute before their forwards, for every kind of batch, and what they hold for it."""

import pytest
import torch

import fpipe
from fpipe.pipelines.inputs import scatter
from fpipe.record.variant import EVALUATION, TRAINING
from schedules import dualpipe, gpipe, interleaved_1f1b, one_f_one_b, recompute, zb_h1
from tests.common.cases import Case, mse
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.masks import CUTS, DECODER, WIDTH, Decoder, decoder_batch
from tests.common.memory import require_as_simulated
from tests.common.running import build, require_exact, run
from tests.common.sizes import sampled

TWO = ("layers.1", "layers.2")


def pipeline(how=None, rows=6, length=5, **options):
    case = Case(Decoder, decoder_batch(length), mse, CUTS)
    how = one_f_one_b(ranks=3, microbatches=3) if how is None else how
    return build(case, how, rows, options.pop("cuts", TWO), capture="trace", **options)


def shapes(pipe):
    """What each stage computes, and how often."""
    return [str(stage.prologue) for stage in pipe.stages]


def test_tables_are_computed_once_and_masks_for_each_microbatch():
    pipe, *_ = pipeline()
    both = "float32[5, 5] once, bool[2, 5, 5] each"
    assert shapes(pipe) == ["float32[5, 5] once", both, both]
    assert [stage.batch for stage in pipe.stages] == [(0, 1), (1,), (2, 1)], "those of the function come first"
    assert [[str(spec) for one in stage.gives for spec in one.specs] for stage in pipe.stages[:2]] == [
        ["float32[2, 5, 4]"],
        ["float32[2, 5, 4]"],
    ]


@sampled(1)
@pytest.mark.parametrize(
    "how",
    [
        one_f_one_b(ranks=4, microbatches=3),
        zb_h1(ranks=4, microbatches=3),
        recompute(gpipe(ranks=4, microbatches=3)),
        interleaved_1f1b(ranks=2, microbatches=4, chunks=2),
        dualpipe(ranks=4, microbatches=8),
    ],
    ids=lambda how: type(how).__name__,
)
def test_every_schedule_keeps_the_bits(how):
    require_exact(DECODER, how, 2 * how.microbatches + 1 if how.placement.mirrors == () else None, capture="trace")


@sampled(1)
@pytest.mark.parametrize("options", [{"backward": "graph"}, {"tied": "sum"}], ids=str)
def test_every_way_to_run_stages_keeps_the_bits(options):
    pipe, model, inputs, targets = pipeline(rows=7, **options)
    assert_same(run(pipe, model, inputs, targets), loop(model, mse, inputs, targets, 3))
    assert fpipe.verify(pipe, model, inputs, targets)


class Tied(Decoder):
    """Two layers share a weight whose gradients are summed."""

    def __init__(self):
        super().__init__()
        self.layers[2].value.weight = self.layers[0].value.weight


def test_summed_gradients_of_tied_weights_are_those_of_the_reference():
    case = Case(Tied, decoder_batch(), mse, CUTS)
    pipe, *given = build(case, one_f_one_b(ranks=3, microbatches=3), 7, TWO, capture="trace", tied="sum")
    assert shapes(pipe)[1]
    assert fpipe.verify(pipe, *given).reference


def test_what_is_shared_by_microbatches_is_the_same_memory():
    pipe, model, inputs, targets = pipeline()
    given = scatter(pipe.training, *pipe.init(model), pipe.batch(TRAINING, inputs, targets), None)
    (table, mask), (again, another) = (given.batch(1, i)[pipe.stages[1].prologue.own :] for i in range(2))
    assert table is not again, "attributes that a model sets do not last"
    assert table.data_ptr() == again.data_ptr()
    assert mask.data_ptr() != another.data_ptr()


@sampled(1)
@pytest.mark.parametrize("length", [3, 9])
def test_batches_of_other_lengths_run_on_the_same_ranks(length):
    pipe, model, *_ = pipeline(rows=7)
    inputs, targets = decoder_batch(length)(7)
    assert_same(run(pipe, model, inputs, targets), loop(model, mse, inputs, targets, 3))


def test_microbatches_of_two_sizes_share_a_program():
    pipe, model, inputs, targets = pipeline(rows=8)
    assert_same(run(pipe, model, inputs, targets), loop(model, mse, inputs, targets, 3))
    first, last = (pipe.training.assemblies[k].stages[1] for k in (0, 2))
    assert first.prologue is not last.prologue


class Costly(Decoder):
    """Computes its table in many operations, which is worth it for short sequences only."""

    def forward(self, x, mask):
        places = torch.arange(x.shape[1]).float()
        table = torch.exp(-self.decay * places)
        for _ in range(60):
            table = (table + 1).sqrt()
        y = self.enter(x[..., None])
        for layer in self.layers:
            y = y + layer.value(y) * table[:, None] * mask[..., None]
        return y.sum(-1)


@sampled(1)
@pytest.mark.parametrize(("length", "other"), [(8, 20_000), (20_000, 8)])
def test_each_rank_holds_the_same_buffers_for_every_length(length, other):
    """The first kind of batch decides which stages hold the buffer; the others compute the table only there."""
    case = Case(Costly, decoder_batch(length), mse, CUTS)
    pipe, model, inputs, targets = build(case, one_f_one_b(ranks=3, microbatches=2), 4, TWO, capture="trace")
    held = [stage.buffers for stage in pipe.stages]
    assert held == ([("decay",)] * 3 if length < other else [("decay",), (), ()])
    for size in (length, other):
        inputs, targets = decoder_batch(size)(4)
        assert_same(run(pipe, model, inputs, targets), loop(model, mse, inputs, targets, 2))
        plan = pipe.plan(TRAINING, pipe.batch(TRAINING, inputs, targets).signature)
        assert [stage.buffers for stage in plan.assembly.stages] == held
        repeats = [bool(stage.prologue.specs) for stage in plan.assembly.stages]
        assert repeats == [length < other and size == length] * 3


def evaluate_rows(pipe, model, inputs):
    """Evaluate three microbatches, compare the outputs with the model's, and return the stages."""
    outputs = fpipe.evaluate(pipe)(*pipe.init(model), inputs).outputs
    parts = zip(*[leaf.tensor_split(3) for leaf in inputs], strict=True)
    assert torch.equal(outputs, torch.cat([model(*part) for part in parts]))
    return pipe.plan(EVALUATION, pipe.batch(EVALUATION, inputs, None).signature).assembly.stages


def test_small_values_are_sent_if_nothing_is_differentiated():
    """Launching their operations takes longer; the buffers are still held where training needs them."""
    pipe, model, inputs, _ = pipeline()
    evaluated = evaluate_rows(pipe, model, inputs)
    assert not any(stage.prologue.specs for stage in evaluated)
    assert [stage.buffers for stage in evaluated] == [stage.buffers for stage in pipe.stages]


def test_large_values_are_computed_in_evaluation_too():
    pipe, model, inputs, _ = pipeline(length=700, rows=3)
    assert all(stage.prologue.specs for stage in evaluate_rows(pipe, model, inputs))


def test_memory_is_what_the_simulation_says():
    """What is shared by microbatches is the step's; a mask lives from a forward on, and not before a recomputation."""
    for how in (one_f_one_b(ranks=3, microbatches=3), recompute(one_f_one_b(ranks=3, microbatches=3))):
        require_as_simulated(*pipeline(how))
    pipe, *_ = pipeline()
    assert pipe.sizes.inputs[1] == 2 * 5 * WIDTH * 4, "what the stage received, and no mask"


def test_printed():
    pipe, *_ = pipeline()
    lines = str(pipe).splitlines()
    second = lines[lines.index("stage 1 on rank 1") :]
    assert second[3:9] == [
        "  buffers     1 (4 B)",
        "  reads       inputs[1]",
        "  computes    100 B once a step, 50 B per microbatch, from inputs[1]",
        "                float32[5, 5]  as in the model itself, once a step",
        "                bool[2, 5, 5]  as in the model itself, per microbatch",
        "  outputs     to stage 2: 160 B per microbatch, 160 B of cotangents back",
    ]
