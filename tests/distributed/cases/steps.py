# SPDX-License-Identifier: Apache-2.0
"""Steps, evaluations, predictions and updates over several processes have the bits of one device."""

from __future__ import annotations

import copy
from dataclasses import replace
from unittest.mock import patch

import optree
import torch
from torch import nn
from torch.nn import functional

import fpipe
from fpipe.network.trail import AHEAD, Trail
from fpipe.tensors.tree import same_bits
from schedules import dualpipe, lower, mirror, one_f_one_b, seq_1f1b, split_backward, zb_h1, zb_v
from tests.common.averages import Average, AverageDecoder, generate_from_scratch, texts, word_loss
from tests.common.carries import attend, make, stages_of
from tests.common.cases import WORDS
from tests.common.comparison import Result
from tests.common.loops import eval_loop, loop
from tests.common.masks import DECODER, decoder_batch
from tests.common.options import grouped
from tests.common.running import build, run, run_reference
from tests.common.sizes import NIGHTLY, by_day
from tests.common.sliced_models import count_words, make_model, pad
from tests.common.sliced_models import loop as slice_loop
from tests.common.sliced_models import word_loss as sliced_loss
from tests.common.updates import require_same_updates, require_training_of_a_plain_loop
from tests.common.waits import Clock
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import case, gather, raises, require_whole

# -------------------------------------------- Batches of other shapes, of which each rank holds the part that it needs


def words_like(rows: int, length: int):
    """Return a batch for the transformer, the same on every rank."""
    torch.manual_seed(rows * length)
    return (torch.randint(WORDS, (rows, length)),), torch.randint(WORDS, (rows, length))


def as_needed(inputs, targets, rank: int, size: int):
    """Return the inputs on the first rank, the targets on the last, and meta tensors elsewhere."""
    return (inputs if rank == 0 else (inputs[0].to("meta"),)), (targets if rank == size - 1 else targets.to("meta"))


@case(sizes=[2], day=[])
def batches_of_other_shapes(rank, size):
    """Rows and lengths change from step to step, and microbatches differ in size."""
    one = ZOO["gpt" if NIGHTLY else "tied_sequence"]
    front = "export" if NIGHTLY else "trace"
    pipe, model, *_ = build(one, one_f_one_b(ranks=size, microbatches=4), 8, capture=front)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe, outputs=True)
    for rows, length in ((7, 3), (11, 2), (7, 3)):
        inputs, targets = words_like(rows, length)
        want = loop(model, one.loss, inputs, targets, 4)
        for mine in ((inputs, targets), as_needed(inputs, targets, rank, size)):
            out, grads = step(*state, *mine)
            require_whole(Result(out.loss, out.outputs, grads, out.buffers), want, rank, size)
        out = fpipe.evaluate(pipe)(*state, *as_needed(inputs, targets, rank, size))
        want = eval_loop(model, one.loss, inputs, targets, 4)
        require_whole(Result(out.loss, out.outputs, {}, out.buffers), want, rank, size)


@case(sizes=[2])
def messages_as_on_a_device(rank, size):
    """Each is one send. The host is a few messages ahead, and after the step waits for nothing."""
    clock = Clock()
    with patch("fpipe.network.channels.make_trail", lambda device: Trail(clock.copy)):
        pipe, model, inputs, targets = build(ZOO["tied_sequence"], zb_v(ranks=size, microbatches=16), 32)
    got = run(pipe, model, inputs, targets)
    require_whole(got, run_reference(pipe, model, inputs, targets), size - 1 if rank == 0 else 0, size)
    laps, waits = len(clock.events), clock.waits
    assert 0 < waits <= laps - AHEAD
    fpipe.clip(pipe, got.grads, 1.0)
    assert clock.waits == waits


@case(day=[])
def uneven_microbatches_on_two_ranks_each(rank, size):
    one = ZOO["tied_sequence"]
    pipe, model, inputs, targets = build(one, dualpipe(ranks=size, microbatches=4), 7)
    got = run(pipe, model, inputs, targets)
    want = run_reference(pipe, model, inputs, targets)
    require_whole(got, want, size - 1 if rank in (0, size - 1) else 0, size)


@case(day=[])
def weights_where_the_loss_is(rank, size):
    """Only the last rank computes weights, and it needs only the tensors that they depend on.

    The others learn from it which microbatch has none, so that its mean is nan.
    """
    model, *_ = ZOO["tied_sequence"].make(8)
    inputs, targets = words_like(7, 3)
    targets[:, 1:] = -100
    targets[0] = inputs[0][0]
    targets[2:4] = -100

    def count(_, wanted):
        return (wanted != -100).sum()

    def mean(outputs, wanted):
        losses = nn.functional.cross_entropy(outputs.flatten(0, 1), wanted.flatten(), reduction="none")
        return losses.sum() / count(None, wanted)

    pipe = fpipe.pipeline(
        model,
        example=inputs,
        targets=targets,
        loss=mean,
        schedule=one_f_one_b(ranks=size, microbatches=4),
        cuts=ZOO["tied_sequence"].at(size),
        microbatching=fpipe.Microbatching(weight=count),
    )
    mine = (inputs if rank == 0 else None), (targets if rank == size - 1 else None)
    out, grads = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), *mine)
    want = loop(model, mean, inputs, targets, 4, weight=count)
    require_whole(Result(out.loss, out.outputs, grads, out.buffers), want, rank, size)


@case
def values_beside_the_loss(rank, size):
    """They are on every rank that asks, and no rank sends them if only the last asks, which has them."""
    model, (x,), y = ZOO["mlp"].make(8)

    def loss(out, wanted):
        value = nn.functional.mse_loss(out, wanted)
        return value, {"value": value, "odd": (out[:, 0] > 0, out.double().t()), "rows": len(out)}

    how = one_f_one_b(ranks=size, microbatches=4)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=loss, schedule=how, cuts=ZOO["mlp"].at(size))
    want = [loss(model(a), b)[1] for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    for asks in ([True] * size, [rank == 0 for rank in range(size)], [rank == size - 1 for rank in range(size)]):
        for function in (fpipe.value_and_grad(pipe, aux=asks[rank]), fpipe.evaluate(pipe, aux=asks[rank])):
            found = function(*pipe.init(model), (x,), y)
            aux = found.aux if isinstance(found, fpipe.Step) else found[0].aux
            assert (aux is None) is not asks[rank]
            if aux is not None:
                assert same_bits(aux["value"], torch.stack([one["value"] for one in want]).detach())
                assert same_bits(aux["odd"][0], torch.stack([one["odd"][0] for one in want]))
                assert same_bits(aux["odd"][1], torch.stack([one["odd"][1] for one in want]).detach())
                assert aux["rows"].tolist() == [2] * 4
    assert fpipe.verify(pipe, model, (x,), y).eager
    given = {"example": (x,), "targets": y, "loss": loss, "schedule": how, "cuts": ZOO["mlp"].at(size)}
    module = fpipe.Pipelined(model, aux=rank == 0, **grouped(given))
    for one in (module, module.eval()):
        one(x, targets=y)
        assert (one.last_aux is None) is not (rank == 0)
        assert rank != 0 or same_bits(one.last_aux["value"], torch.stack([one["value"] for one in want]).detach())


@case
def a_batch_that_the_model_cannot_take(rank, size):
    """Every rank raises before anything is sent; a valid step works afterwards."""
    pipe, model, inputs, targets = build(ZOO["tied_sequence"], one_f_one_b(ranks=size, microbatches=4), 8)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    with raises(fpipe.InputError, "targets: got 7 in dimension 0", "expected 8, as in dimension 0 of inputs[0]"):
        step(*state, *as_needed(inputs, targets[:7], rank, size))
    with raises(fpipe.InputError, "targets: got 8 in dimension 0", "expected 4, as in dimension 0 of inputs[0]"):
        step(*state, *as_needed((inputs[0][:4],), targets, rank, size))
    out, _ = step(*state, inputs, targets)
    assert same_bits(out.loss, loop(model, ZOO["tied_sequence"].loss, inputs, targets, 4).loss)


@case
def other_shapes_on_one_rank(rank, size):
    pipe, model, *_ = build(ZOO["tied_sequence"], one_f_one_b(ranks=size, microbatches=4), 8)
    inputs, targets = words_like(7 if rank else 11, 3)
    with raises(fpipe.TransportError, "- batch: got on rank 0: inputs[0]: int64[11, 3]", "on rank", "int64[7, 3]"):
        fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)


@case(sizes=[4])
def told_no_shapes(rank, size):
    """The ranks in the middle do not know the batch's new shapes: all ranks raise before anything is captured."""
    pipe, model, *_ = build(ZOO["tied_sequence"], one_f_one_b(ranks=size, microbatches=4), 8)
    inputs, targets = words_like(7, 3)
    mine = as_needed(inputs, targets, rank, size) if rank in (0, size - 1) else (None, None)
    with raises(fpipe.TransportError, "- batch: got on ranks 0, 3: inputs[0]: int64[7, 3]", "on ranks 1-2: inputs[0]"):
        fpipe.value_and_grad(pipe)(*pipe.init(model), *mine)


class Padding(nn.Module):
    """Fills the padded positions, if there are any."""

    def __init__(self, size):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(size)))

    def forward(self, x, mask):
        return self.layers(x if mask.all() else x.masked_fill(~mask[..., None], 0.5))


@case(day=[4])
def questions_that_one_rank_can_answer(rank, size):
    """Only the first rank gets the mask on which the model branches; padded and unpadded batches take turns."""
    torch.manual_seed(0)
    model, x = Padding(size), torch.randn(8, 3, 4)
    full, padded = torch.ones(8, 3, dtype=torch.bool), torch.arange(24).view(8, 3) > 7
    how, cuts = one_f_one_b(ranks=size, microbatches=4), [f"layers.{k}" for k in range(1, size)]
    pipe = fpipe.pipeline(model, example=(x, full), loss=torch.sum, schedule=how, cuts=cuts)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe, outputs=True)
    for mask in (padded, full, padded):
        mine = (x, mask) if rank == 0 else (x.to("meta"), mask.to("meta"))
        found, grads = step(*state, mine)
        want = loop(model, torch.sum, (x, mask), None, 4)
        require_whole(Result(found.loss, found.outputs, grads, found.buffers), want, rank, size)
    with raises(fpipe.InputError, "got batches on ranks", "__bool__ finds", "the same batch on every rank"):
        step(*state, (x, padded if rank else full))
    with raises(fpipe.InputError, "got no values of inputs[1]", "Pass the values on some rank"):
        step(*state, (x, mask.to("meta")))


# -------------------------------------------------------------------------------- Evaluations, with a loss and without


@case(day=[])
def evaluation_everywhere(rank, size):
    """The loss is on every rank; the outputs are on the rank of the last stage."""
    for name in ("normalised", "several"):
        one = ZOO[name]
        pipe, model, inputs, targets = build(one, one_f_one_b(ranks=size, microbatches=4), 8)
        for wanted in (targets, None):
            step = fpipe.evaluate(pipe)(*pipe.init(model), inputs, wanted)
            want = eval_loop(model, one.loss if wanted is not None else None, inputs, wanted, 4)
            assert (step.outputs is None) == (rank != size - 1)
            require_whole(Result(step.loss, step.outputs, {}, step.buffers), want, rank, size)


@case(day=[])
def evaluation_on_two_ranks(rank, size):
    one = ZOO["several"]
    pipe, model, inputs, targets = build(one, dualpipe(ranks=size, microbatches=4), 8)
    for wanted in (targets, None):
        step = fpipe.evaluate(pipe)(*pipe.init(model), inputs, wanted)
        want = eval_loop(model, one.loss if wanted is not None else None, inputs, wanted, 4)
        assert (step.outputs is None) == (rank not in (0, size - 1))
        turned = size - 1 if rank in (0, size - 1) else 0
        require_whole(Result(step.loss, step.outputs, {}, step.buffers), want, turned, size)


@case(day=[4])
def only_the_ends_hold_the_batch(rank, size):
    """Only the first rank has the inputs, and only the last the targets."""
    one = ZOO["mlp"]
    pipe, model, inputs, targets = build(one, one_f_one_b(ranks=size, microbatches=4), 8)
    params, buffers = pipe.init(model)
    mine = (inputs if rank == 0 else None), (targets if rank == size - 1 else None)
    step, grads = fpipe.value_and_grad(pipe, outputs=True)(params, buffers, *mine)
    want = loop(model, one.loss, inputs, targets, 4)
    require_whole(Result(step.loss, step.outputs, grads, step.buffers), want, rank, size)
    step = fpipe.evaluate(pipe)(params, buffers, *mine)
    want = eval_loop(model, one.loss, inputs, targets, 4)
    require_whole(Result(step.loss, step.outputs, {}, step.buffers), want, rank, size)


# ----------------------------------------------------------------------------- Outputs on every rank, and as they come


@case
def outputs_on_every_rank_and_as_they_come(rank, size):
    """Merged outputs are the same everywhere; streamed ones come on the last rank only."""
    one = ZOO["normalised"]
    pipe, model, inputs, targets = build(one, one_f_one_b(ranks=size, microbatches=4), 8)
    state, seen = pipe.init(model), {}
    want = eval_loop(model, one.loss, inputs, targets, 4).outputs
    assert same_bits(fpipe.predict(pipe)(*state, inputs if rank == 0 else None), want)
    loss = fpipe.stream(pipe, seen.__setitem__)(*state, inputs, targets)
    assert same_bits(loss, fpipe.evaluate(pipe, outputs=False)(*state, inputs, targets).loss)
    assert list(seen) == ([0, 1, 2, 3] if rank == size - 1 else [])
    assert all(same_bits(seen[i], want[2 * i : 2 * i + 2]) for i in seen)
    step, _ = fpipe.value_and_grad(pipe)(*state, inputs, targets)
    assert same_bits(step.loss, loop(model, one.loss, inputs, targets, 4).loss)
    with raises(fpipe.InputError, "params: got 0 leaves") if rank == 0 else raises(fpipe.TransportError, "0 leaves"):
        fpipe.predict(pipe)({} if rank == 0 else state[0], state[1], inputs)


@case(day=[4])
def predictions_of_two_ranks(rank, size):
    """Each replica of the last stage has the outputs of half of the microbatches; all ranks get all of them."""
    one = ZOO["mlp"]
    pipe, model, inputs, targets = build(one, mirror(one_f_one_b(ranks=size, microbatches=4)), 16)
    want = eval_loop(model, one.loss, inputs, targets, 8).outputs
    assert same_bits(fpipe.predict(pipe)(*pipe.init(model), inputs), want)


# ----------------------------------------------------------- Generated tokens, and errors of the choice, on every rank


@case(day=[])
def tokens_on_every_rank(rank, size):
    """A cache per stage, four groups in turn; every rank gets the tokens of a plain loop, and every error."""
    torch.manual_seed(0)
    model, prompts = Average(), texts(8, 5)
    cuts = {2: ["mix"], 4: ["middle", "mix", "head"]}[size]
    pipe = fpipe.pipeline(
        model,
        example=(prompts,),
        targets=prompts,
        loss=word_loss,
        schedule=one_f_one_b(ranks=size, microbatches=4),
        cuts=cuts,
    )
    state, generate = pipe.init(model), fpipe.generate(pipe, 12, decoder=AverageDecoder)
    want = generate_from_scratch(model, prompts, 7)
    assert torch.equal(generate(*state, prompts, 7), want)
    drawn = fpipe.generate(pipe, 12, decoder=AverageDecoder, choose=fpipe.sample(top=5))(*state, prompts, 6, seed=2)
    assert all(torch.equal(drawn, other) for other in gather(drawn))
    with raises(fpipe.TransportError, "prompts: got", "on rank 0"):
        generate(*state, prompts if rank else prompts.flip(0), 7)
    with raises(fpipe.TransportError, "arguments: got", "count 3"):
        generate(*state, prompts, 7 - 4 * (rank == 0))

    def fail(logits, generator):
        raise ValueError("no choice")

    last = rank == size - 1
    with raises(ValueError, "no choice") if last else raises(fpipe.TransportError, "token 0", f"on rank {size - 1}"):
        fpipe.generate(pipe, 12, decoder=AverageDecoder, choose=fail)(*state, prompts, 7)
    assert torch.equal(generate(*state, prompts, 7), want)


# ---------------------------------------------------------------------------- Plans that are forgotten, and made ahead


@case(day=[])
def plans_are_forgotten_alike(rank, size):
    """Every rank keeps the plans of the same batches, in the same order of use, whatever one rank does or refuses."""
    one = ZOO["mlp"]
    pipe, model, *_ = build(one, one_f_one_b(ranks=size, microbatches=2), 2, plans=2)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    whole = dict(model.named_parameters()), dict(model.named_buffers())
    for k, rows in enumerate((4, 6, 4, 8, 6, 4)):
        _, inputs, targets = one.make(rows)
        if k % 3 == 2:
            given = (inputs[0].double(),) if rank == k % size else inputs
            with raises(fpipe.PipelineError, "float64"):
                step(*state, given, targets)
        if rank == k % size:
            fpipe.reference(pipe)(*whole, *one.make(rows + 8)[1:])
        out, grads = step(*state, inputs, targets)
        got = Result(out.loss, None, grads, out.buffers)
        require_whole(got, loop(model, one.loss, inputs, targets, 2)._replace(outputs=None), rank, size)
        orders = gather([str(signature) for _, signature in pipe.memo.agreements])
        assert orders == [orders[0]] * size
        assert len(orders[0]) <= 3
    with raises(fpipe.TransportError, "plans: got on rank", "4", "5"):
        build(one, one_f_one_b(ranks=size, microbatches=2), 2, plans=4 + (rank == 0))


@case
def steps_are_prepared_by_all_ranks(rank, size):
    one = ZOO["mlp"]
    pipe, model, *_ = build(one, one_f_one_b(ranks=size, microbatches=2), 2, plans=3)
    with raises(fpipe.TransportError, "examples: got on rank", "1 examples", "2 examples"):
        pipe.prepare([one.make(4)[1:]] * (1 + (rank == 0)))
    with raises(fpipe.PipelineError, "got 4 kinds of batches"):
        pipe.prepare([one.make(rows)[1:] for rows in (4, 5, 6, 7)])
    pipe.prepare([one.make(rows)[1:] for rows in (4, 5, 2)])
    plans, step = dict(pipe.memo.batches), fpipe.value_and_grad(pipe)
    for rows in (5, 2, 4):
        _, inputs, targets = one.make(rows)
        out, grads = step(*pipe.init(model), inputs, targets)
        got = Result(out.loss, None, grads, out.buffers)
        require_whole(got, loop(model, one.loss, inputs, targets, 2)._replace(outputs=None), rank, size)
    assert pipe.memo.batches == plans


# ------------------------------------------------ Masks and tables that every rank computes from its part of the batch


@case(day=[])
def masks_and_tables_of_each_rank(rank, size):
    """Batches of several lengths; every rank holds the buffer, and hidden states alone are sent."""
    cuts = ("layers.1",) if size == 2 else DECODER.cuts
    pipe, model, *_ = build(DECODER, one_f_one_b(ranks=size, microbatches=3), 7, cuts, capture="trace")
    assert gather(list(pipe.training.buffers)) == [["decay"]] * size
    assert all(len(one.specs) == 1 for stage in pipe.stages for one in stage.gives)
    for length in (5, 3, 5):
        _, inputs, targets = replace(DECODER, batch=decoder_batch(length)).make(7)
        require_whole(run(pipe, model, inputs, targets), loop(model, DECODER.loss, inputs, targets, 3), rank, size)
    outputs = fpipe.predict(pipe)(*pipe.init(model), inputs)
    parts = zip(*[leaf.tensor_split(3) for leaf in inputs], strict=True)
    assert same_bits(outputs, torch.cat([model(*part) for part in parts]))


@case(sizes=[2])
def masks_in_a_vee(rank, size):
    how = zb_v(ranks=2, microbatches=4)
    pipe, model, inputs, targets = build(DECODER, how, 8, capture="trace", backward="graph")
    require_whole(run(pipe, model, inputs, targets), loop(model, DECODER.loss, inputs, targets, 4), 1 - rank, size)


@case
def a_rank_without_the_mask(rank, size):
    """A rank in the middle needs the leaf that its mask is made from, and nothing else of the batch."""
    cuts = ("layers.1",) if size == 2 else DECODER.cuts
    pipe, model, (x, mask), targets = build(DECODER, one_f_one_b(ranks=size, microbatches=4), 8, cuts, capture="trace")
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    if rank == 1:
        with raises(fpipe.InputError, "inputs[1]: got nothing", "a stage of this rank reads it"):
            step(*state, None, targets)
    else:
        with raises(fpipe.TransportError, "- rank 1: InputError: ", "inputs[1]: got nothing"):
            step(*state, (x, mask), targets)
    mine = (x if rank == 0 else x.to("meta"), mask), (targets if rank == size - 1 else None)
    out, _ = step(*state, *mine)
    assert same_bits(out.loss, loop(model, DECODER.loss, (x, mask), targets, 4).loss)


# -------------------------------------------------------- Steps that go on from earlier sums, with a total and a scale


@case(day=[])
def steps_go_on_from_earlier_sums(rank, size):
    """Three steps are one plain loop over all of their microbatches; copies of tied gradients are the same."""
    for name in ("gpt", "normalised"):
        one = ZOO[name]
        model, inputs, targets = one.make(24)
        pipe, *_ = build(one, (zb_v if size == 2 else zb_h1)(ranks=size, microbatches=4), 8, capture="trace")
        step, (params, buffers), grads = fpipe.value_and_grad(pipe), pipe.init(model), None
        for x, y in zip(inputs[0].chunk(3), targets.chunk(3), strict=True):
            out, grads = step(params, buffers, (x,), y, onto=grads, total=12)
            buffers = out.buffers
        want = loop(model, one.loss, inputs, targets, 12)
        require_whole(Result(None, None, grads, buffers), want._replace(loss=None, outputs=None), rank, size)


@case
def replicas_go_on_from_earlier_sums(rank, size):
    """Gradients are added in float32 on both replicas of a stage, and sent so."""
    one = ZOO["one_weight"]
    model, inputs, targets = one.make(8)
    model, inputs, targets = model.bfloat16(), (inputs[0].bfloat16(),), targets.bfloat16()
    how, cuts = dualpipe(ranks=size, microbatches=4), one.at(size)
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=one.loss, schedule=how, cuts=cuts)
    step, plain = fpipe.value_and_grad(pipe, sums=torch.float32), fpipe.reference(pipe, sums=torch.float32)
    state, whole = pipe.init(model), (dict(model.named_parameters()), dict(model.named_buffers()))
    got = want = None
    for scale in (2.0, 3.0):
        got = step(*state, inputs, targets, onto=got, scale=scale)[1]
        want = plain(*whole, inputs, targets, onto=want, scale=scale)[1]
    require_whole(Result(None, None, got, {}), Result(None, None, want, {}), rank, size)


# --------------------------------------------------------------------------------------------- Updates within the step


@case(day=[])
def updates_within_the_step(rank, size):
    """Training with updates in the drain is training on one device; of replicas, a step, a clip and an update."""
    require_training_of_a_plain_loop(
        ZOO["gpt" if NIGHTLY else "mlp"], (zb_v if size == 2 else zb_h1)(ranks=size, microbatches=4)
    )
    require_same_updates(ZOO["tied_sequence"], dualpipe(ranks=size, microbatches=4), None)


@case(day=[])
def updates_of_other_schedules_and_ties(rank, size):
    for how in (one_f_one_b, zb_h1):
        require_training_of_a_plain_loop(ZOO["gpt"], how(ranks=size, microbatches=4))
    for how in (dualpipe(ranks=size, microbatches=4), *[zb_v(ranks=2, microbatches=3)] * (size == 2)):
        require_same_updates(ZOO["gpt"], how, "median")
        require_same_updates(ZOO["gpt"], how, None, steps=2, tied="sum")
    require_same_updates(ZOO["dropping"], one_f_one_b(ranks=size, microbatches=4), "median")


# ------------------------------------- `fpipe.verify` on several ranks, and changes of the model after it was captured


@case(day=[4])
def verify_on_every_rank(rank, size):
    pipe, model, inputs, targets = build(ZOO["normalised"], one_f_one_b(ranks=size, microbatches=4), 8)
    found = fpipe.verify(pipe, model, inputs, targets)
    assert found.reference > 0
    assert found.eager > 0


@case(sizes=[2])
def what_is_trained_is_verified_from_shares(rank, size):
    """Each rank passes its share; `verify` puts them together for the reference and the eager model."""
    pipe, model, inputs, targets = build(ZOO["normalised"], one_f_one_b(ranks=size, microbatches=3), 6)
    params, buffers = pipe.init(model)
    moved = {name: (3 * p.detach()).requires_grad_() for name, p in params.items()}
    shifted = {name: buffer + 1 for name, buffer in buffers.items()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = fpipe.verify(pipe, model, inputs, targets, params=moved, buffers=shifted, steps=2)
    assert found.eager == found.reference > 2
    assert all(same_bits(tensor, before[name]) for name, tensor in model.state_dict().items())
    other = copy.deepcopy(model)
    next(module for module in other.modules() if isinstance(module, nn.BatchNorm1d)).eps = 0.5
    with raises(fpipe.MismatchError, "got different bits from the model run eagerly"):
        fpipe.verify(pipe, other, inputs, targets, params=moved)


@case(sizes=[2])
def a_change_that_one_rank_makes_is_raised_on_all(rank, size):
    pipe, model, inputs, targets = build(ZOO["normalised"], one_f_one_b(ranks=size, microbatches=3), 6)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    step(*state, inputs, targets)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    if rank == size - 1:
        norms[0].eps = 0.1
    with raises(fpipe.PipelineError, "attribute 'eps': got 0.1, expected 1e-05"):
        step(*state, inputs, targets)
    norms[0].eps = 0.1
    again = pipe.rebuilt(model)
    assert again.ranks is pipe.ranks
    require_whole(
        run(again, model, inputs, targets), loop(model, ZOO["normalised"].loss, inputs, targets, 3), rank, size
    )


@case
def what_is_not_finite_is_named_on_every_rank(rank, size):
    """A parameter of the last rank becomes infinite."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    params, buffers = pipe.init(model)
    assert fpipe.find_nonfinite(pipe)(params, buffers, inputs, targets) is None
    if rank == size - 1:
        name = min(params)
        params[name].data.fill_(float("inf"))
    found = fpipe.find_nonfinite(pipe)(params, buffers, inputs, targets)
    assert found[:2] == (size - 1, None)
    assert found.leaf.startswith("params['")
    assert found.got == "inf"


class _Divided(nn.Module):
    """Layers whose output is divided by a number of the batch."""

    def __init__(self, size):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)])

    def forward(self, x, n):
        return self.layers(x) / n


@case(sizes=[2])
def another_number_in_the_batch_of_one_rank(rank, size):
    torch.manual_seed(0)
    model, x, how = _Divided(size), torch.randn(8, 4), one_f_one_b(ranks=size, microbatches=2)
    pipe = fpipe.pipeline(model, example={"x": x, "n": 2}, loss=lambda out: out.square().mean(), schedule=how)
    step, held = fpipe.value_and_grad(pipe), pipe.init(model)
    for n in (2, 3, 5):
        want = sum(model(part, n).square().mean() / 2 for part in x.chunk(2))
        assert torch.equal(step(*held, {"x": x, "n": n})[0].loss, want.detach())
    assert len(pipe.memo.recordings) == 1
    with raises(fpipe.TransportError, "numbers in the batch", "(7,)"):
        step(*held, {"x": x, "n": 7 if rank == 1 else 5})


# ------------------------------------------------------------------------------------------- stages, executed as values


@case(sizes=[2])
def stages_that_are_executed_have_the_bits_of_one_process(rank, size):
    """Stages of a model, and pure functions, whose parameters on other ranks are on meta; with uneven rows."""
    transport, how = fpipe.processes(ranks=size), zb_h1(ranks=size, microbatches=3)
    one = ZOO["dropping"]
    model, inputs, targets = one.make(7)
    part = (inputs[0][:2],), targets[:2]
    stages = fpipe.cut(fpipe.capture(model, example=part[0], targets=part[1], loss=one.loss), one.at(size))
    for kind in (stages, fpipe.connect_stages([hidden, error])):
        torch.manual_seed(0)
        state = stages.init(model) if kind is stages else ([{"w": torch.randn(4, 4)}, torch.randn(4, 4)], [(), ()])
        program = lower(how, kind.graph)
        want, grads = fpipe.execute(program, kind, *state, inputs, targets, seed=3)
        mine = state if kind is stages else ([p if s == rank else on_meta(p) for s, p in enumerate(state[0])], state[1])
        for _ in range(2):
            out, got = fpipe.execute(program, kind, *mine, inputs, targets, seed=3, transport=transport)
            pairs = zip(optree.tree_leaves(got[rank]), optree.tree_leaves(grads[rank]), strict=True)
            assert all(same_bits(a, b) for a, b in pairs)
            assert (out.loss is None) == (rank < size - 1)
            assert out.loss is None or same_bits(out.loss, want.loss)
    with raises(fpipe.TransportError, "program"):
        fpipe.execute(program, kind, *mine, inputs, targets, seed=rank, transport=transport)
    transport.close()


@case(sizes=[2])
def slices_of_sequences_have_the_bits_of_one_process(rank, size):
    """What a slice leaves for the next stays on its rank; shapes of slices differ, and are known beforehand."""
    params, x, y = make([attend])
    stages = stages_of([attend])
    for how in (seq_1f1b(2, 2, slices=3), split_backward(seq_1f1b(2, 2, slices=2))):
        program, transport = lower(how, stages.graph), fpipe.processes(ranks=size)
        want, grads = fpipe.execute(program, stages, params, [(), ()], (x,), y)
        out, got = fpipe.execute(program, stages, params, [(), ()], (x,), y, transport=transport)
        assert all(same_bits(got[rank][name], grads[rank][name]) for name in params[rank])
        assert rank == 0 or same_bits(out.loss, want.loss)
        transport.close()


@case(sizes=[2])
def a_pipeline_of_slices_has_the_bits_of_a_loop_over_slices(rank, size):
    """The first rank has the inputs, the last the targets, and what a slice leaves stays where it was made."""
    model, x, whole = make_model(tied=True)
    padded = pad(whole, [9, 2, 0, 0, 4, 7])  # one microbatch has no words that count, and others slices without
    hows = (
        (split_backward(seq_1f1b(2, 3, slices=2)), [5, 4], whole, None),
        (seq_1f1b(2, 3, slices=3), [3, 3, 3], padded, count_words),
    )
    for how, lengths, y, weight in by_day(hows, 2):
        options = {"microbatching": fpipe.Microbatching(weight=weight), "cuts": ["blocks.2"]}
        pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=sliced_loss, schedule=how, **options)
        loss, outputs, wanted = slice_loop(model, x, y, 3, lengths, weight)
        given = (x,) if rank == 0 else (x.to("meta"),), y if rank == size - 1 else y.to("meta")
        out, grads = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), *given)
        assert same_bits(out.loss, loss)
        assert rank == 0 or same_bits(out.outputs, outputs)
        assert grads
        assert all(same_bits(grads[name], wanted[name]) for name in grads)
        pipe.close()


def hidden(params, inputs):
    return {"h": torch.tanh(functional.dropout(inputs[0] @ params["w"], 0.2)), "kind": "hidden"}


def error(weight, inputs):
    return functional.mse_loss(inputs[0]["h"] @ weight, inputs[1])


def on_meta(tree):
    return optree.tree_map(lambda one: one.to("meta"), tree)


@case(sizes=[2, 4], day=[2])
def every_rank_proves_the_step(rank, size):
    """Each plays all ranks with the stages of its own record, and all have proved the same."""
    for name in ("chained", "dropping"):
        pipe, model, inputs, targets = build(ZOO[name], zb_h1(size, 4), 8, capture="trace")
        found = fpipe.prove(pipe, model, inputs, targets, seed=3)
        assert found.is_complete
        assert {one.reference for one in gather(found)} == {found.reference}
        run(pipe, model, inputs, targets, seed=3)
