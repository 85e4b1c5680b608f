# SPDX-License-Identifier: Apache-2.0
"""Pipelines of sequences in slices: the bits of a loop over slices, and whole sequences but for rounding."""

import copy
from contextlib import nullcontext
from functools import partial, reduce
from operator import add

import pytest
import torch
from torch import nn

import fpipe
from fpipe.pipelines.inputs import scatter
from fpipe.record.variant import TRAINING
from fpipe.runtime.executor import Execution
from fpipe.runtime.local import LocalTransport, drive
from fpipe.tensors.tree import same_bits
from schedules import (
    B,
    F,
    U,
    gpipe,
    looped,
    lower,
    recompute,
    schedule,
    seq_1f1b,
    simulate,
    split_backward,
)
from schedules.families.one_forward_one_backward import alternate
from tests.common.meshes import SHAPES, nested, options
from tests.common.sizes import sampled
from tests.common.sliced_models import WIDTH, WORDS, LanguageModel, count_words, loop, make_model, pad, word_loss


@schedule(placement=looped)
def sliced_chunks(rank, ranks, microbatches, chunks=2, slices=2):
    """Seq1F1B with chunks, as in the gallery."""
    stages, parts, n = range(rank, ranks * chunks, ranks), range(slices), -(-ranks // slices)
    rounds = [range(first, min(first + n, microbatches)) for first in range(0, microbatches, n)]
    forwards = (F(s, i, k) for each in rounds for s in stages for i in each for k in parts)
    backwards = (B(s, i, k) for each in rounds for s in reversed(stages) for i in each for k in reversed(parts))
    return alternate((chunks - 1) * n * slices + 2 * (ranks - 1 - rank) + slices - 1, forwards, backwards)


def build(model, x, y, how, **options):
    return fpipe.pipeline(model, example=(x,), targets=y, loss=word_loss, schedule=how, **options)


def require_loop(model, x, y, how, lengths, weight=None, context=nullcontext, **options):
    """Raise unless a step has the bits of the loop, and of the reference."""
    if weight is not None:
        options["microbatching"] = fpipe.Microbatching(weight=weight)
    with context():
        pipe = build(model, x, y, how, **options)
        state = pipe.init(model)
        out, grads = fpipe.value_and_grad(pipe, outputs=True)(*state, (x,), y)
        reference, others = fpipe.reference(pipe)(*state, (x,), y)
    loss, outputs, wanted = loop(model, x, y, how.microbatches, lengths, weight, context)
    assert same_bits(out.loss, loss)
    assert same_bits(out.outputs, outputs)
    assert grads.keys() == wanted.keys()
    assert not [name for name in wanted if not same_bits(grads[name], wanted[name])]
    assert same_bits(reference.loss, loss)
    assert not [name for name in wanted if not same_bits(others[name], wanted[name])]
    return pipe


LENGTHS = {1: [9], 2: [5, 4], 3: [3, 3, 3], 4: [3, 2, 2, 2]}


@sampled(3)
@pytest.mark.parametrize("slices", LENGTHS)
@pytest.mark.parametrize("tied", [False, True])
def test_slices_have_the_bits_of_a_loop_over_slices(slices, tied):
    model, x, y = make_model(tied=tied)
    require_loop(model, x, y, seq_1f1b(2, 3, slices=slices), LENGTHS[slices], cuts=["blocks.2"])


@sampled(2)
@pytest.mark.parametrize(
    "how",
    [
        split_backward(seq_1f1b(2, 3, slices=2)),
        recompute(seq_1f1b(2, 3, slices=2)),
        seq_1f1b(1, 2, slices=2),
        sliced_chunks(2, 4),
    ],
    ids=["split", "recomputed", "one rank", "chunks"],
)
def test_other_schedules_of_slices_have_them_too(how):
    model, x, y = make_model()
    require_loop(model, x, y, how, LENGTHS[2])


def test_stages_that_are_not_recorded_have_them_too():
    model, x, y = make_model()
    options = {"gradients": fpipe.Gradients(backward="autograd")}
    require_loop(model, x, y, seq_1f1b(2, 3, slices=2), LENGTHS[2], cuts=["blocks.1"], **options)


def test_lengths_may_be_of_even_costs():
    lengths = fpipe.even_costs(linear=1, quadratic=1)
    assert [*lengths(9, 2)] == [6, 3]
    model, x, y = make_model()
    how = fpipe.Microbatching(slice_lengths=lengths)
    require_loop(model, x, y, seq_1f1b(2, 3, slices=2), [6, 3], cuts=["blocks.2"], microbatching=how)


def test_costs_are_even_to_a_token():
    for linear, quadratic in ((1, 0), (0, 1), (3, 0.5), (100, 1)):
        lengths = fpipe.even_costs(linear, quadratic)(4000, 8)
        assert (sum(lengths), len(lengths)) == (4000, 8)
        ends = [sum(lengths[:k]) for k in range(9)]
        costs = [linear * x + quadratic * x**2 / 2 for x in ends]
        largest = linear + quadratic * 4000
        assert all(abs(costs[k] - k / 8 * costs[-1]) <= largest for k in range(9))
    assert fpipe.even_costs(0, 1)(3, 3) == [1, 1, 1]
    with pytest.raises(fpipe.InputError, match="even_costs: got linear=0 and quadratic=0, expected"):
        fpipe.even_costs(0, 0)


PADDED = {"uneven": [9, 7, 9, 8, 6, 9], "slices without words": [3, 2, 9, 4, 1, 3], "none at all": [9, 5, 0, 0, 2, 3]}


@sampled(2)
@pytest.mark.parametrize("padded", PADDED)
@pytest.mark.parametrize("how", [seq_1f1b(2, 3, slices=3), split_backward(seq_1f1b(2, 3, slices=3))], ids=str)
def test_weighted_slices_have_the_bits_of_a_loop_and_the_mean_over_words(how, padded):
    model, x, y = make_model()
    y = pad(y, PADDED[padded])
    pipe = require_loop(model, x, y, how, LENGTHS[3], weight=count_words, cuts=["blocks.2"])
    found = fpipe.verify(pipe, model, (x,), y, unsplit=1e-5)  # the mean over all words, whatever the slices
    assert found.eager > 10
    out, _ = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y)
    assert torch.allclose(out.loss, word_loss(model(x)[0], y))


def test_a_weight_may_come_later_and_gradients_may_add_up():
    model, x, y = make_model()
    y = pad(y, PADDED["none at all"])
    one, how = copy.deepcopy(model), seq_1f1b(2, 3, slices=3)
    pipelined = fpipe.Pipelined(model, loss=word_loss, example=(x,), targets=y, schedule=how)
    pipelined.weigh(count_words)
    loss = pipelined(x, targets=y)
    loss.backward()
    wanted, _, grads = loop(one, x, y, 3, LENGTHS[3], count_words)
    assert same_bits(loss.detach(), wanted)
    assert all(same_bits(p.grad, grads[name]) for name, p in pipelined.named_parameters())
    state, step = pipelined.pipe.init(one), fpipe.value_and_grad(pipelined.pipe)
    total = 2 * float(count_words(x, y))
    first, half = step(*state, (x,), y, total=total)
    second, whole = step(*state, (x,), y, total=total, onto=half)
    assert torch.allclose(first.loss + second.loss, wanted)
    assert all(torch.allclose(grad, grads[name], atol=1e-6) for name, grad in whole.items())


@pytest.mark.parametrize("rows", ["whole", "own"])
def test_weighted_slices_of_copies_share_one_mean(rows):
    model, *batch = make_model()
    x, y = (torch.cat([part, part.flip(0)]) for part in batch)
    y = pad(y, [*PADDED["none at all"], *PADDED["uneven"]])
    place, how = fpipe.Place(**options(2, 2, 1), rows=rows), fpipe.Microbatching(weight=count_words)
    pipe = build(model, x, y, seq_1f1b(2, 3, slices=2), place=place, microbatching=how)
    out, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y)
    loss, _, wanted = loop(model, x, y, 6, LENGTHS[2], count_words)
    assert torch.allclose(out.loss, loss)
    assert all(torch.allclose(grads[name], wanted[name], atol=1e-6) for name in wanted)
    reference, others = fpipe.reference(pipe)(*pipe.init(model), (x,), y)
    assert same_bits(out.loss, reference.loss)
    assert not [name for name in others if not same_bits(grads[name], others[name])]


def test_a_bad_weight_is_refused_by_its_slice():
    model, x, y = make_model()
    how = fpipe.Microbatching(weight=lambda inputs, words: -1 if words.shape[1] < 5 else 1)
    pipe = build(model, x, y, seq_1f1b(2, 3, slices=2), cuts=["blocks.2"], microbatching=how)
    with pytest.raises(fpipe.InputError, match=r"weight, microbatch 0, slice 1: got -1\.0, expected a finite number"):
        fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y)
    with pytest.raises(fpipe.InputError, match="weight: got 0 for each of the 3 microbatches"):
        fpipe.reference(build(model, x, y, pipe.schedule, microbatching=fpipe.Microbatching(weight=lambda *_: 0)))(
            *pipe.init(model), (x,), y
        )


def test_dropout_is_that_of_the_reference():
    model, x, y = make_model(dropout=0.3)
    pipe = build(model, x, y, seq_1f1b(2, 3, slices=3), cuts=["blocks.2"])
    state = pipe.init(model)
    out, grads = fpipe.value_and_grad(pipe)(*state, (x,), y, seed=3)
    reference, wanted = fpipe.reference(pipe)(*state, (x,), y, seed=3)
    assert same_bits(out.loss, reference.loss)
    assert all(same_bits(grads[name], wanted[name]) for name in wanted)
    assert not same_bits(out.loss, fpipe.reference(pipe)(*state, (x,), y, seed=4)[0].loss)


def test_verify_compares_with_whole_sequences():
    model, x, y = make_model()
    pipe = build(model, x, y, seq_1f1b(2, 3, slices=3), cuts=["blocks.2"])
    assert fpipe.verify(pipe, model, (x,), y, unsplit=1e-5).eager > 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_verify_expects_half_of_the_digits_of_a_dtype(dtype):
    model, x, y = make_model()
    pipe = build(model.to(dtype), x, y, seq_1f1b(2, 3, slices=3), cuts=["blocks.2"])
    assert fpipe.verify(pipe, model, (x,), y).eager > 10


@pytest.mark.parametrize("backward", ["graph", "autograd"])
def test_each_slice_is_under_an_autocast_of_its_own(backward):
    """So a weight is cast once per slice, and its gradients are cast back before they are added."""
    model, x, y = make_model(tied=True)
    context, how = partial(torch.autocast, "cpu", torch.bfloat16), fpipe.Gradients(backward=backward)
    pipe = require_loop(model, x, y, seq_1f1b(2, 3, slices=3), [3, 3, 3], context=context, gradients=how)
    with context():
        assert fpipe.verify(pipe, model, (x,), y).eager > 10


class Averaging(nn.Module):
    """Each token sees the mean of its whole slice: not causal, though it takes a carry."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids, carry=None):
        x = self.first(ids)
        return self.last(x + x.mean(1, keepdim=True)), None


def test_verify_sees_that_tokens_depend_on_later_ones():
    _, x, y = make_model()
    torch.manual_seed(0)
    model = Averaging()
    pipe = build(model, x, y, seq_1f1b(2, 3, slices=3), cuts=["last"])
    with pytest.raises(fpipe.MismatchError, match="the model run eagerly on whole sequences"):
        fpipe.verify(pipe, model, (x,), y)


def test_other_lengths_and_fewer_rows_are_other_batches():
    model, x, y = make_model()
    pipe = build(model, x, y, seq_1f1b(2, 3, slices=2), cuts=["blocks.2"])
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    for rows, length, lengths in ((6, 5, [3, 2]), (2, 9, [5, 4])):
        out, grads = step(*state, (x[:rows, :length],), y[:rows, :length])
        loss, _, wanted = loop(model, x[:rows, :length], y[:rows, :length], min(3, rows), lengths)
        assert same_bits(out.loss, loss)
        assert all(same_bits(grads[name], wanted[name]) for name in wanted)


def test_evaluations_predictions_and_training_go_slice_by_slice():
    model, x, y = make_model()
    pipe = build(model, x, y, seq_1f1b(2, 3, slices=2), cuts=["blocks.2"])
    params, buffers = pipe.init(model)
    loss, outputs, _ = loop(model, x, y, 3, LENGTHS[2])
    out = fpipe.evaluate(pipe)(params, buffers, (x,), y)
    assert same_bits(out.loss, loss)
    assert same_bits(out.outputs, outputs)
    assert same_bits(fpipe.predict(pipe)(params, buffers, (x,)), outputs)
    seen = {}
    fpipe.stream(pipe, seen.__setitem__)(params, buffers, (x,))
    assert same_bits(torch.cat([seen[i] for i in range(3)]), outputs)


def test_training_steps_update_as_loops_over_slices_do():
    model, x, y = make_model(tied=True)
    pipe = build(model, x, y, seq_1f1b(2, 3, slices=2), cuts=["blocks.2"])
    adam = fpipe.optimizer(torch.optim.AdamW, lr=0.1)
    params, buffers = pipe.init(model)
    state, step, one = adam.init(params), fpipe.train_step(pipe, adam, max_norm=0.5), copy.deepcopy(model)
    theirs = torch.optim.AdamW(one.parameters(), lr=0.1)
    for _ in range(3):
        loss, _, grads = loop(one, x, y, 3, LENGTHS[2])
        for name, p in one.named_parameters():
            p.grad = grads[name]
        nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        theirs.step()
        out, params, state, _ = step(params, buffers, state, (x,), y)
        assert same_bits(out.loss, loss)
        assert all(same_bits(params[name].detach(), p.detach()) for name, p in one.named_parameters())


def test_the_drop_in_module_trains_slice_by_slice():
    model, x, y = make_model()
    one, how = copy.deepcopy(model), seq_1f1b(2, 3, slices=2)
    pipelined = fpipe.Pipelined(model, loss=word_loss, example=(x,), targets=y, schedule=how)
    loss = pipelined(x, targets=y)
    loss.backward()
    wanted, _, grads = loop(one, x, y, 3, LENGTHS[2])
    assert same_bits(loss.detach(), wanted)
    assert all(same_bits(p.grad, grads[name]) for name, p in pipelined.named_parameters())


@sampled(2)
@pytest.mark.parametrize("slices", LENGTHS)
def test_as_many_slices_are_held_as_simulated(slices):
    model, x, y = make_model()
    how, most = seq_1f1b(3, 3, slices=slices), {}
    pipe = build(model, x, y, how, cuts=["blocks.1", "blocks.2"])
    given = scatter(pipe.training, *pipe.init(model), pipe.batch(TRAINING, (x,), y), None)
    transport = LocalTransport()

    def counted(one):
        def handler(run, *arguments):
            made = one.handler(run, *arguments)
            most[run.rank] = max(most.get(run.rank, 0), len(run.residuals))
            return made

        return one._replace(handler=handler)

    drive(
        [
            Execution(rank, program._replace(instructions=tuple(map(counted, program.instructions))), transport, given)
            for rank, program in pipe.training.programs.items()
        ]
    )
    assert [most[rank] / slices for rank in range(3)] == pytest.approx(list(simulate(how).peak_memory))


def test_the_parts_as_values_call_a_model_with_its_carry():
    model, x, y = make_model()
    record = fpipe.capture(model, example=(x[:2],), targets=y[:2], loss=word_loss)
    stages = fpipe.cut(record, ["blocks.2"])
    state = stages.init(model)
    out, grads = fpipe.execute(lower(gpipe(2, 3), stages.graph), stages, *state, (x,), y)
    loss, _, wanted = loop(model, x, y, 3, [9])
    assert same_bits(out.loss, loss)
    assert all(same_bits(grad, wanted[name]) for part in grads for name, grad in part.items())


def test_a_pipeline_says_what_slices_hand_on_and_hold():
    model, x, y = make_model()
    pipes = {n: build(model, x, y, seq_1f1b(2, 3, slices=n), cuts=["blocks.2"]) for n in (1, 3)}
    assert "outputs     to the next slice: 448 B per microbatch, 448 B of cotangents back" in str(pipes[3])
    assert "the next slice" not in str(pipes[1])
    whole, sliced = (pipes[n].sizes.activation for n in (1, 3))
    assert all(0.8 * a < b < 1.5 * a for a, b in zip(whole, sliced, strict=True))


def test_recorded_spans_and_bad_numbers_are_of_slices():
    model, x, y = make_model()
    pipe, spans = build(model, x, y, seq_1f1b(2, 3, slices=3), cuts=["blocks.2"]), []
    params, buffers = pipe.init(model)
    fpipe.value_and_grad(pipe, record=spans.append)(params, buffers, (x,), y)
    done = [span.action for span in spans if span.action.kind in ("F", "B")]
    assert sorted(done) == sorted(action for rank in range(2) for action in pipe.schedule.actions(rank))
    assert fpipe.find_nonfinite(pipe)(params, buffers, (x,), y) is None
    params = {name: p.detach().clone() for name, p in params.items()}
    params["blocks.3.norm.weight"][0] = torch.inf
    assert "blocks.3.norm.weight" in str(fpipe.find_nonfinite(pipe)(params, buffers, (x,), y))


@sampled(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slices", [2, 3])
def test_copies_train_slice_by_slice(shape, slices):
    model, *batch = make_model(tied=True)
    count = SHAPES[shape][0] * SHAPES[shape][1]
    x, y = (torch.cat([part.roll(k) for k in range(count)]) for part in batch)
    place = fpipe.Place(**options(2, *SHAPES[shape]))
    pipe = build(model, x, y, seq_1f1b(2, 2, slices=slices), place=place)
    state = pipe.init(model)
    out, grads = fpipe.value_and_grad(pipe)(*state, (x,), y)
    reference, wanted = fpipe.reference(pipe)(*state, (x,), y)
    assert same_bits(out.loss, reference.loss)
    assert not [name for name in wanted if not same_bits(grads[name], wanted[name])]
    if count % 2 == 0:  # then it makes no difference when a loss is divided by it
        parts = zip(x.chunk(count), y.chunk(count), strict=True)
        losses, _, each = zip(*[loop(model, *part, 2, LENGTHS[slices]) for part in parts], strict=True)
        assert same_bits(out.loss, reduce(add, losses) / count)
        sums = {name: nested([one[name] for one in each], SHAPES[shape][1]) / count for name in wanted}
        assert not [name for name in wanted if not same_bits(grads[name], sums[name])]


def refusals():
    """What can't be cut into slices: the changed arguments, the error, and the repair."""
    _, x, y = make_model()
    plain = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    return {
        "no carry": ({"model": plain, "cuts": ["1"]}, "model: got Sequential, whose forward takes no carry"),
        "no sequence": ({"microbatching": fpipe.Microbatching(slice_dims=None)}, "slice_dims: got None, a dimension"),
        "too short": ({"example": (x[:, :1],), "targets": y[:, :1]}, "slice_lengths: got .* for 2 slices of 1"),
        "front end": ({"recording": fpipe.Recording(front_end="export")}, "front_end: got 'export' for 2 slices"),
        "updates": ({"schedule": updating(2, 2)}, "2 slices, with updates in flight"),
    }


@schedule(placement=looped)
def updating(rank, ranks, microbatches, chunks=1, slices=2):
    for i in range(microbatches):
        yield from (F(rank, i, k) for k in range(slices))
        yield from (B(rank, i, k) for k in reversed(range(slices)))
        yield U(rank, i)


@pytest.mark.parametrize("what", refusals())
def test_what_cannot_be_cut_is_refused_with_the_repair(what):
    changed, message = refusals()[what]
    model, x, y = make_model()
    given = {"model": model, "example": (x,), "targets": y, "loss": word_loss, "schedule": seq_1f1b(2, 2, slices=2)}
    given = {**given, "cuts": ["blocks.2"], **changed}
    with pytest.raises(fpipe.InputError, match=message):
        fpipe.pipeline(given.pop("model"), **given)


def test_a_carry_that_crosses_stages_is_refused():
    class Crossing(LanguageModel):
        def forward(self, ids, carry=None):
            x, _ = super().forward(ids, None)
            return x, x.mean() + (0 if carry is None else carry)

    class Reading(LanguageModel):
        def forward(self, ids, carry=None):
            x = self.embedding(ids) + (0 if carry is None else carry)
            for block in self.blocks:
                x, _ = block(x, None)
            return self.head(x), x.mean()

    torch.manual_seed(0)
    _, x, y = make_model()
    build(Crossing(), x, y, seq_1f1b(2, 2, slices=2), cuts=["blocks.2"])
    with pytest.raises(
        fpipe.CutError, match="in slice 1 that slice 0 made in stage 1, expected a carry to be made and"
    ):
        build(Reading(), x, y, seq_1f1b(2, 2, slices=2), cuts=["blocks.2"])


class Skips(nn.Module):
    """What its first layer makes is read by all others, and by the first one of the next slice."""

    def __init__(self, copies=True):
        super().__init__()
        self.copies, self.embed, self.head = copies, nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids, carry=None):
        before = 0 if carry is None else carry[0].mean(1, keepdim=True)
        state = self.a(self.embed(ids) + before).tanh()
        left = state.clone() if self.copies else state
        y = self.c(self.b(state).tanh()) * state
        return self.head(self.d(y).relu() + state), [left]


@pytest.mark.parametrize(
    ("how", "cuts"),
    [(seq_1f1b(4, 2, slices=3), ["b", "c", "d"]), (split_backward(seq_1f1b(3, 2, slices=2)), ["c", "d"])],
)
def test_a_copy_of_what_later_stages_read_is_a_carry(how, cuts):
    torch.manual_seed(0)
    model, (x, y) = Skips(), torch.randint(WORDS, (2, 6, 9))
    require_loop(model, x, y, how, LENGTHS[how.slices], cuts=cuts)


def test_a_carry_that_later_stages_read_twice_is_refused():
    """One such use has the bits of a loop; with more, the order of the sum would be another one."""
    torch.manual_seed(0)
    model, (x, y) = Skips(copies=False), torch.randint(WORDS, (2, 6, 9))
    require_loop(model, x, y, seq_1f1b(2, 2, slices=3), LENGTHS[3], cuts=["d"])
    for cuts, read in (["b", "c", "d"], r"3 times in stages \[1, 2, 3\]"), (["c", "d", "head"], r"2 times in stages"):
        with pytest.raises(fpipe.CutError, match=f"got a carry that is read {read}.* make the carry a copy of it"):
            build(model, x, y, seq_1f1b(4, 2, slices=2), cuts=cuts)


def test_a_buffer_that_changes_is_refused():
    class Counting(LanguageModel):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, ids, carry=None):
            self.seen += 1
            return super().forward(ids, carry)

    _, x, y = make_model()
    with pytest.raises(fpipe.CutError, match="buffer seen: got one that a forward modifies"):
        build(Counting(), x, y, seq_1f1b(2, 2, slices=2), cuts=["blocks.2"])


def test_a_model_that_returns_no_pair_is_refused():
    class Single(LanguageModel):
        def forward(self, ids, carry=None):
            return super().forward(ids, carry)[0]

    _, x, y = make_model()
    with pytest.raises(fpipe.CaptureError, match=r"expected the pair \(outputs, carry\)"):
        build(Single(), x, y, seq_1f1b(2, 2, slices=2), cuts=["blocks.2"])
    build(Single(), x, y, gpipe(2, 2), cuts=["blocks.2"])  # nothing is carried, so the argument only has this name


def test_an_argument_that_the_batch_gives_is_no_carry():
    class Carrying(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, carry):
            return self.last(torch.tanh(self.first(x) + carry))

    torch.manual_seed(0)
    model, x, carry = Carrying(), torch.randn(4, 4), torch.randn(4, 4)
    for example in ((x, carry), {"x": x, "carry": carry}):
        pipe = fpipe.pipeline(model, example=example, loss=torch.mean, schedule=gpipe(2, 2))
        fpipe.verify(pipe, model, example)


def test_generation_refuses_slices():
    model, x, y = make_model()
    pipe = build(model, x, y, seq_1f1b(2, 2, slices=2), cuts=["blocks.2"])
    with pytest.raises(fpipe.InputError, match="of 2 slices, expected whole microbatches: a prompt"):
        fpipe.generate(pipe, 12)
