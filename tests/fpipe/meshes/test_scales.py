# SPDX-License-Identifier: Apache-2.0
"""Losses, gradients and norms don't depend on the shape of the mesh.

Each test is for a fault that fuzzing found in combinations of data, tensor and pipeline parallelism elsewhere
(NVIDIA/Megatron-LM issue 7452, whose findings have numbers), or one of its kind.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import gpipe, one_f_one_b, zb_h1, zb_v
from tests.common import experts
from tests.common.cases import mse
from tests.common.gates import Marked, Rare
from tests.common.generators import seeded
from tests.common.meshes import SHAPES, loop_over_copies, options
from tests.common.options import grouped
from tests.common.running import build, run, run_reference
from tests.common.sizes import by_day, covering, in_turn, sampled
from tests.common.zoo import ZOO

NOTHING, WORDS = -100, 11


def close(got, wanted):
    torch.testing.assert_close(dict(got), dict(wanted), rtol=0, atol=1e-6)


def reader(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, WORDS))


def words(counts):
    """Rows of five words, of which the first so many are wanted; two batches of targets."""
    drawn = seeded(2)
    ids, first, second = (torch.randint(WORDS, (len(counts), 5), generator=drawn) for _ in range(3))
    for row, count in enumerate(counts):
        first[row, count:], second[row, : 5 - count // 2] = NOTHING, NOTHING
    return ids, first, second


def entropy(logits, wanted):
    """The sum over the wanted words."""
    return cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=NOTHING, reduction="sum")


def count_words(wanted):
    return (wanted != NOTHING).sum()


def gradients(model, loss):
    """The gradients of a loss of the whole batch, by name."""
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), grads, strict=True))


def train(model, inputs, targets, loss, how, sizes, sums=None, **more):
    """A pipeline in copies of these sizes (replicas, shards, stages gathered), and the loss and gradients of a step."""
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=loss, schedule=how, **grouped(options(2, *sizes)), **grouped(more)
    )
    step, grads = fpipe.value_and_grad(pipe, sums=sums)(*pipe.init(model), inputs, targets)
    return pipe, step.loss, grads


COUNTS = [5, 0, 1, 4, 2, 2, 5, 1, 0, 0, 3, 1]


@sampled(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_words_count_alike_wherever_they_are(shape):
    """Finding 9, and the first half of 3: the mean is over all words, and some microbatches have none."""
    model, (ids, wanted, _) = reader(), words(COUNTS)

    def mean(logits, wanted):
        return entropy(logits, wanted) / count_words(wanted).clamp(min=1)

    how, weight = one_f_one_b(2, 2), lambda inputs, wanted: count_words(wanted)
    _, found, grads = train(model, (ids,), wanted, mean, how, SHAPES[shape], weight=weight)
    loss = mean(model(ids), wanted)
    torch.testing.assert_close(found, loss.detach())
    close(grads, gradients(model, loss))


@sampled(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_two_losses_have_totals_of_their_own(shape):
    """The second half of finding 3: two losses over different words, each divided by its own total, and summed."""
    model, (ids, first, second) = reader(), words(COUNTS)
    totals = torch.stack([count_words(first), count_words(second)])

    def loss(logits, wanted):
        first, second, totals = wanted
        return entropy(logits, first) / totals[0] + 0.3 * entropy(logits, second) / totals[1]

    targets, how = (first, second, totals), {"batch_dims": (0, (0, 0, None)), "reduce": "sum"}
    _, found, grads = train(model, (ids,), targets, loss, zb_h1(2, 2), SHAPES[shape], **how)
    whole = loss(model(ids), targets)
    torch.testing.assert_close(found, whole.detach())
    close(grads, gradients(model, whole))


LAYOUTS = [(4, 1, 1), (2, 2, 1), (1, 3, 1), (2, 1, 2), (1, 2, 2), (2, 1, 3)]


@sampled(1)
@pytest.mark.parametrize(("layout", "weighted"), in_turn(LAYOUTS, [False, True]), ids=str)
def test_auxiliary_losses_have_one_scale(layout, weighted):
    """Finding 10: microbatches are all alike, so the loss of any number of them is that of one."""
    model, (x, y) = experts.Mixture(2), experts.tokens(1)
    microbatches, replicas, shards = layout
    count = microbatches * replicas * shards
    many = x.repeat(count, 1), y.repeat(count, 1)
    how, weight = zb_v(2, microbatches), (lambda inputs, targets: len(targets)) if weighted else None
    _, found, grads = train(model, many[:1], many[1], experts.loss, how, (replicas, shards), weight=weight)
    loss = experts.loss(model(x), y)
    torch.testing.assert_close(found, loss.detach())
    close(grads, gradients(model, loss))


@sampled(1)
@covering(shape=by_day(SHAPES, 2), name=["tied_sequence", "frozen_below", "unused"])
def test_norms_and_clips_count_every_parameter_once(name, shape):
    """Finding 8: parameters may be tied over stages, sharded, frozen, or unused."""
    pipe, model, inputs, targets = build(
        ZOO[name], one_f_one_b(4, 2), 24, capture="trace", **options(4, *SHAPES[shape])
    )
    grads = run(pipe, model, inputs, targets).grads
    wanted = run_reference(pipe, model, inputs, targets).grads
    assert grads.keys() == wanted.keys()
    total = torch.nn.utils.get_total_norm(wanted.values())
    torch.testing.assert_close(fpipe.norm(pipe, grads), total)
    clipped, before = fpipe.clip(pipe, grads, 0.01)
    torch.testing.assert_close(before, total)
    close(clipped, {name: grad * (0.01 / (total + 1e-6)) for name, grad in wanted.items()})


@sampled(1)
@pytest.mark.parametrize("shape", ["dp", "both", "three shards"])
def test_layers_keep_their_numbers_when_sizes_change(shape, tmp_path):
    """Finding 12: saved from one rank with copies, loaded by four ranks and by two with other copies."""
    case = ZOO["mlp"]
    adam = fpipe.optimizer(torch.optim.AdamW, lr=0.1)
    pipe, model, inputs, targets = build(case, gpipe(1, 2), 24, capture="trace", **options(1, *SHAPES[shape]))
    params, buffers = pipe.init(model)
    _, grads = fpipe.value_and_grad(pipe)(params, buffers, inputs, targets)
    params, state = adam.update(grads, adam.init(params), params)
    fpipe.save(pipe, tmp_path, params=params, state=state, step=1)
    for ranks, other in ((4, (1, 1)), (2, (3, 1)), (2, (1, 2))):
        loading, *_ = build(case, one_f_one_b(ranks, 2), 24, capture="trace", **options(ranks, *other))
        found = fpipe.load(loading, tmp_path)
        assert found.params.keys() == params.keys()
        for name, p in params.items():
            assert same_bits(found.params[name].detach(), p.detach()), name
            assert same_bits(found.state[name]["exp_avg"], state[name]["exp_avg"]), name


@sampled(2)
@pytest.mark.parametrize("shards", [2, 3, 5])
@pytest.mark.parametrize("gathered", [None, 1])
def test_shards_may_be_uneven_or_empty(shards, gathered):
    """Rows are not divisible by the number of shards, or there are fewer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2), nn.Tanh(), nn.Linear(2, 1))
    x, y = torch.randn(2 * shards, 3), torch.randn(2 * shards, 1)
    pipe, found, grads = train(model, (x,), y, mse, zb_v(2, 2), (1, shards, gathered))
    loss, wanted = loop_over_copies(model, mse, x, y, 2, 1, shards)
    assert same_bits(found, loss)
    assert all(same_bits(grads[name], wanted[name]) for name in wanted)
    torch.testing.assert_close(fpipe.norm(pipe, grads), torch.nn.utils.get_total_norm(wanted.values()))


@sampled(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_in_bfloat16_are_added_in_float32(shape):
    """Over microbatches, and then over copies: each term is rounded once, and no sum is."""
    torch.manual_seed(0)
    count = 2 * SHAPES[shape][0] * SHAPES[shape][1]
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).bfloat16()
    x, y = torch.randn(count, 4).bfloat16(), torch.randn(count, 1).bfloat16()
    _, _, grads = train(model, (x,), y, mse, one_f_one_b(2, 2), SHAPES[shape], torch.float32)
    terms = [gradients(model, mse(model(a), b) / count) for a, b in zip(x.split(1), y.split(1), strict=True)]
    for name, grad in grads.items():
        exact = torch.stack([one[name].double() for one in terms]).sum(0)
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad.double(), exact, rtol=0, atol=1e-6)


def split_over(shape, model, batch, **more):
    *inputs, y = batch
    return fpipe.pipeline(
        model,
        example=tuple(inputs),
        targets=y,
        loss=mse,
        schedule=one_f_one_b(2, 2),
        **grouped(more),
        **grouped(options(2, *SHAPES[shape])),
    )


def require_loop(pipe, shape, model, batch, **options):
    """Require the loss and gradients of a plain loop; return the gradients."""
    *inputs, y = batch
    step, grads = fpipe.value_and_grad(pipe, **options)(*pipe.init(model), tuple(inputs), y)
    count = 2 * SHAPES[shape][0] * SHAPES[shape][1]
    parts = zip(*[one.tensor_split(count) for one in batch], strict=True)
    loss = sum(mse(model(*part), wanted) for *part, wanted in parts) / count
    model.zero_grad()
    loss.backward()
    torch.testing.assert_close(step.loss, loss.detach())
    close(grads, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return grads


@sampled(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_copies_take_the_same_branch_or_are_refused(shape):
    """The batch decides: all microbatches alike, whichever copy they are of."""
    torch.manual_seed(0)
    model, x, y, marks = Marked(), torch.randn(12, 4), torch.randn(12, 1), torch.zeros(12, 1, dtype=torch.bool)
    pipe = split_over(shape, model, (x, marks, y), cuts=["last"])
    assert "rare.weight" not in require_loop(pipe, shape, model, (x, marks, y))
    assert "rare.weight" in require_loop(pipe, shape, model, (x, ~marks, y))
    marks[-1] = True
    with pytest.raises(fpipe.InputError, match="other parameters and buffers in stage 0"):
        require_loop(pipe, shape, model, (x, marks, y))


@sampled(2)
@covering(sums=[None, torch.float32], shape=[*SHAPES])
def test_parameters_may_have_gradients_on_one_copy_only(shape, sums):
    """Values decide, in a module that runs as it is; without any, there are no gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Rare(), nn.Tanh(), nn.Linear(4, 1))
    pipe = None
    for rows in ([], [0], [11], range(12)):
        x, y = torch.zeros(12, 4), torch.ones(12, 1)
        x[list(rows)] = 40 * torch.randn(4)
        pipe = pipe or split_over(shape, model, (x, y), unsplittable=[Rare])
        grads = require_loop(pipe, shape, model, (x, y), sums=sums)
        assert ("2.inner.weight" in grads) == (len(rows) > 0)
