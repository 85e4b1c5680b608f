# SPDX-License-Identifier: Apache-2.0
"""A stream under a schedule that updates in flight trains as a loop on one device with the same delays, bit for bit."""

import itertools
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fpipe
from fpipe.stages.ties import MODES
from fpipe.streams.versions import Versions, find_shared
from schedules import (
    B,
    F,
    Limits,
    U,
    from_rows,
    linear,
    list_versions,
    looped,
    offload,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    recompute,
    schedule,
    split_backward,
)
from schedules.checking.rules import count_versions
from schedules.endless import lengthen
from tests.common.cases import WIDTH, mse
from tests.common.comparison import require_part
from tests.common.options import grouped
from tests.common.running import SEED, build
from tests.common.sizes import NIGHTLY, covering, few, in_turn, sampled
from tests.common.streams import Trained, decay, require_equal, train, train_by_hand, whole
from tests.common.training import MODELS
from tests.common.zoo import ZOO

ADAM = fpipe.optimizer(torch.optim.AdamW, lr=0.05, weight_decay=0.01)
SCHEDULES = {
    "pipedream": pipedream(4, 1),
    "2bw": pipedream_2bw(4, 4, accumulate=4),
    "2bw of more": pipedream_2bw(2, 5, accumulate=5),
    "zero bubble": split_backward(pipedream(2, 1)),
    "recomputed": recompute(pipedream(2, 1)),
    "moved": offload(pipedream(4, 1)),
    "moved 2bw": offload(pipedream_2bw(4, 4, accumulate=4)),
    "one rank": pipedream(1, 1),
}


def batches_of(case, rows, count):
    """Batches that differ, each of two rows for every microbatch."""
    found = []
    for t in range(count):
        torch.manual_seed(SEED + t)
        found.append(case.batch(rows))
    return found


def layers(stages, draw=0.0):
    """A model of as many blocks as stages, with buffers that every microbatch changes."""
    torch.manual_seed(3)
    block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(draw), nn.Tanh())  # noqa: E731
    return nn.Sequential(*[block() for _ in range(stages)])


def pipe_of(how, draw=0.0, **options):
    model = layers(how.stages, draw)
    x, y = torch.randn(2, 4 * how.microbatches, WIDTH)
    cuts = [str(s) for s in range(1, how.stages)]
    given = {"example": (x,), "targets": y, "loss": mse, "schedule": how, "cuts": cuts, **grouped(options)}
    return fpipe.pipeline(model, **given), model


def random_batches(how, count):
    return [((x,), y) for x, y in torch.randn(count, 2, 4 * how.microbatches, WIDTH)]


@pytest.mark.parametrize(("name", "backward"), in_turn(SCHEDULES, ["graph", "autograd"]))
def test_fifty_batches_are_those_of_the_reference(name, backward):
    how = SCHEDULES[name]
    pipe, model = pipe_of(how, draw=0.1, backward=backward)
    for count in (1, 2, 3, 50):
        batches = random_batches(how, count)
        require_equal(
            *(train(make, pipe, model, batches, ADAM) for make in (fpipe.train_stream, fpipe.reference_stream))
        )


class Weighed(nn.Linear):
    """Weighs each row by its place among those of its microbatch."""

    def forward(self, x):
        return super().forward(x) * torch.linspace(0, 1, len(x))[:, None]


def test_microbatches_of_different_sizes_are_those_of_the_reference():
    how, model = pipedream_2bw(2, 3, accumulate=3), nn.Sequential(*[Weighed(WIDTH, WIDTH) for _ in range(2)])
    batches = [((x,), y) for x, y in torch.randn(6, 2, 7, WIDTH)]
    inputs, targets = batches[0]
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=["1"])
    require_equal(*(train(make, pipe, model, batches, ADAM) for make in (fpipe.train_stream, fpipe.reference_stream)))


@sampled(4)
@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if not case.random])
def test_every_model_trains_as_late_as_the_reference(name):
    case = ZOO[name]
    how = pipedream_2bw(2, 2, accumulate=2)
    pipe, model, inputs, targets = build(case, how, 4, capture="trace")
    batches = [(inputs, targets)] * 4
    got, want = (train(make, pipe, model, batches, ADAM) for make in (fpipe.train_stream, fpipe.reference_stream))
    require_equal(got, want)


TIED = ("tied_sequence", "chained", "one_weight")


@covering(
    name=TIED, how=(pipedream(4, 1), pipedream_2bw(2, 3, accumulate=3), split_backward(pipedream(2, 1))), tied=MODES
)
def test_tied_parameters_have_one_version(name, how, tied, monkeypatch):
    """On all of their stages, which is that of the stage that updates last; no more versions are held than are late."""
    held, update = [], Versions.update_shared

    def watched(self, *arguments):
        update(self, *arguments)
        held.extend(map(len, self.kept_shared.values()))

    monkeypatch.setattr(Versions, "update_shared", watched)
    pipe, model, inputs, targets = build(ZOO[name], how, 2 * how.microbatches, capture="trace", tied=tied)
    for count in (1, 6):
        batches = [(inputs, targets)] * count
        require_equal(*(train(one, pipe, model, batches, ADAM) for one in (fpipe.train_stream, fpipe.reference_stream)))
    shared = {name for name, stages in find_shared(pipe.training.assembly).items()}
    late = fpipe.delays(pipe)
    assert max(held) <= 1 + max(late.values())
    assert shared
    assert {late[name] for name in shared} == {max(late.values())}


@covering(
    name=("dropping", "tied_sequence", "skips"),
    how=(pipedream(1, 1), pipedream_2bw(2, 3, accumulate=3), split_backward(pipedream(2, 1))),
    place=({"dp": "a"}, {"shard": "a"}, {"dp": "a", "shard": "b"}),
)
def test_copies_on_a_mesh_train_as_one_device(name, how, place):
    """They reduce the gradients of every batch before its update, and gather the weights of shards after it."""
    mesh = {"pp": how.ranks, "a": 2} | ({"b": 2} if len(place) == 2 else {})
    rows = 2 * 2 ** len(place) * how.microbatches
    options = {"mesh": mesh, **place}
    pipe, model, inputs, targets = build(ZOO[name], how, rows, capture="trace", **options)
    batches = [(inputs, targets)] * 6
    if find_shared(pipe.training.assembly) and "shard" in place:
        with pytest.raises(fpipe.InputError, match="which several stages share, expected one of them"):
            fpipe.train_stream(pipe, ADAM)
        return
    require_equal(*(train(one, pipe, model, batches, ADAM) for one in (fpipe.train_stream, fpipe.reference_stream)))


@settings(max_examples=few(12))
@given(st.data())
def test_weights_that_any_stages_share_train_as_on_one_device(data):
    """Two pairs of tied weights, one or two stages to a rank, with frozen ones between."""
    how = data.draw(st.sampled_from([pipedream(4, 1), in_pairs(2, 1), pipedream_2bw(4, 4, accumulate=4)]))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    for first, other in data.draw(st.lists(st.permutations(range(4)).map(lambda order: sorted(order[:2])), max_size=2)):
        model[other].weight = model[first].weight
    for k in data.draw(st.sets(st.integers(0, 2))):
        model[k].requires_grad_(False)
    x, y = torch.randn(2, 4 * how.microbatches, WIDTH)
    tied = data.draw(st.sampled_from(MODES))
    pipe = fpipe.pipeline(
        model, example=(x,), targets=y, loss=mse, schedule=how, cuts=["1", "2", "3"], **grouped({"tied": tied})
    )
    batches = random_batches(how, data.draw(st.integers(1, 9)))
    require_equal(*(train(one, pipe, model, batches, ADAM) for one in (fpipe.train_stream, fpipe.reference_stream)))


@schedule(placement=looped)
def in_pairs(rank, ranks, microbatches, chunks=2):
    """Each rank runs one microbatch at a time through its two stages, and updates them one microbatch late."""
    first, last = rank, rank + ranks
    for i in range(microbatches):
        yield from (F(first, i), F(last, i), B(last, i))
        if i:
            yield U(last, i - 1)
        yield B(first, i)
        if i:
            yield U(first, i - 1)
    yield from (U(first, microbatches - 1), U(last, microbatches - 1))


@pytest.mark.parametrize(("name", "how"), in_turn(MODELS, (pipedream(4, 1), pipedream_2bw(2, 4, accumulate=4))))
def test_models_train_as_the_reference(name, how):
    """An MLP with BatchNorm and dropout, a GPT with tied weights, and a Llama with grouped queries; by night for 50."""
    trained = MODELS[name]
    model, some = trained.make()
    batches = [*itertools.islice(itertools.cycle(some), 50 if NIGHTLY else 9)]
    inputs, targets = batches[0]
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=trained.loss, schedule=how)
    require_equal(*(train(one, pipe, model, batches, ADAM) for one in (fpipe.train_stream, fpipe.reference_stream)))


FORMULAS = {
    "pipedream": (pipedream(3, 1), lambda s, k: max(k - (2 - s), 0)),
    "2bw": (pipedream_2bw(3, 4, accumulate=4), lambda s, k: max(k // 4 - 1, 0)),
    "synchronous": (pipedream(1, 1), lambda s, k: k),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_delays_are_those_of_the_papers(name):
    """Against a loop that knows neither fpipe nor its checker: arXiv 1806.03377, and 2006.09503, section 3.1."""
    how, version = FORMULAS[name]
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
    x, y = torch.randn(2, 4 * how.microbatches, WIDTH)
    cuts = [str(s) for s in range(1, how.stages)]
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, cuts=cuts)
    batches = random_batches(how, 12)
    got = train(fpipe.train_stream, pipe, model, batches, fpipe.optimizer(torch.optim.SGD, lr=0.1))
    stage_of = {n: min(int(n[0]), how.stages - 1) for n, _ in model.named_parameters()}
    step = lambda t, n, p, grad: torch.add(p, grad, alpha=-decay(t)["lr"])  # noqa: E731
    want = train_by_hand(model, mse, batches, stage_of, version, how.microbatches, step)
    require_equal(got, want._replace(state={n: {"momentum_buffer": None} for n in want.params}))
    counted = list_versions(lengthen(how, 12))
    assert all(counted[s, k] == version(s, k) for s, k in counted)


def test_one_rank_trains_as_steps_do():
    how = pipedream(1, 1)
    pipe, model = pipe_of(how, draw=0.1)
    batches = random_batches(how, 6)
    got = train(fpipe.train_stream, pipe, model, batches, ADAM)
    steps, model = pipe_of(one_f_one_b(1, 1), draw=0.1)
    params, buffers = steps.init(model)
    step, state = fpipe.train_step(steps, ADAM), ADAM.init(params)
    for t, batch in enumerate(batches):
        out, params, state, _ = step(params, buffers, state, *batch, seed=SEED + t, **decay(t))
        buffers = out.buffers
        require_part(out.loss, got.losses[t])
    require_part((params, state, buffers), (got.params, got.state, got.buffers))


@schedule(placement=linear)
def two_per_update(rank, ranks, microbatches, late):
    """One forward, then one backward, an update after every second, `late` microbatches after its last backward."""
    ahead = ranks - rank - 1
    for i in range(microbatches + ahead + late):
        if i < microbatches:
            yield F(rank, i)
        if 0 <= i - ahead < microbatches:
            yield B(rank, i - ahead)
        if (done := i - ahead - late) >= 0 and (done % 2 or done == microbatches - 1):
            yield U(rank, done)


@settings(max_examples=few(12))
@given(st.integers(1, 3), st.integers(0, 3), st.integers(1, 9), st.booleans())
@example(ranks=2, late=3, count=4, split=False)
def test_a_schedule_of_your_own_runs(ranks, late, count, split):
    how = two_per_update(ranks, 2, late)
    how = split_backward(how) if split else how
    pipe, model = pipe_of(how)
    batches = random_batches(how, count)
    require_equal(*(train(make, pipe, model, batches, ADAM) for make in (fpipe.train_stream, fpipe.reference_stream)))


@schedule(
    placement=linear,
    limits=Limits(versions=lambda rank, **sizes: 3),
    version=lambda microbatch, **sizes: max(microbatch - 2, 0),
)
def always_two_late(rank, ranks, microbatches):
    """On up to three ranks, every microbatch uses the weights of two updates before the one that it is for."""
    yield from pipedream.generator(rank, ranks, microbatches)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_declared_version_is_used_on_every_rank(ranks):
    how = always_two_late(ranks, 1)
    pipe, model = pipe_of(how)
    batches = random_batches(how, 8)
    require_equal(*(train(make, pipe, model, batches, ADAM) for make in (fpipe.train_stream, fpipe.reference_stream)))
    assert list_versions(lengthen(how, 8))[0, 7] == 5


@pytest.mark.parametrize("how", [pipedream(3, 1), pipedream_2bw(3, 3, accumulate=3), always_two_late(3, 1)], ids=repr)
def test_as_many_versions_are_kept_as_the_checker_counts(how, monkeypatch):
    most: dict[int, int] = {}
    update = Versions.update

    def watched(self, s, *rest):
        update(self, s, *rest)
        leaves = [version for stage, ((version, *_), _) in self.latest.items() if stage == s]
        most[s] = max(most.get(s, 1), len({*self.kept[s], *leaves}))

    monkeypatch.setattr(Versions, "update", watched)
    pipe, model = pipe_of(how)
    train(fpipe.train_stream, pipe, model, random_batches(how, 12), ADAM)
    counted = {s: n for rank in range(3) for s, n in count_versions(lengthen(how, 12), rank).items()}
    assert most == counted


@pytest.mark.parametrize("after", [1, 2, 7])
def test_a_stream_that_is_stopped_early_drains(after):
    how = pipedream(3, 1)
    pipe, model = pipe_of(how)
    batches = random_batches(how, 30)
    params, buffers = pipe.init(model)
    stream = fpipe.train_stream(pipe, ADAM)(params, buffers, ADAM.init(params), itertools.cycle(batches), options=decay)
    losses = list(itertools.islice(stream, after))
    with pytest.raises(fpipe.InputError, match="got a stream with microbatches in flight"):
        stream.end  # noqa: B018
    end = stream.finish()
    count = end.state["0.0.weight"]["step"].int().item()
    assert after <= count <= after + 4
    want = train(fpipe.reference_stream, pipe, model, batches[:count], ADAM)
    require_part((losses, end.params), (want.losses[:after], want.params))
    assert stream.finish() is end
    assert fpipe.evaluate(pipe)(end.params, end.buffers, *batches[0]).loss is not None


def test_batches_are_asked_for_as_they_are_needed():
    """Data code draws its own random numbers, and a stream has no more batches than are in flight."""
    how, asked = pipedream(2, 1), []
    pipe, model = pipe_of(how, draw=0.5)

    def draw():
        for _ in range(10):
            x = torch.rand(4, WIDTH)
            asked.append(StorageWeakRef(x.untyped_storage()))
            yield (x,), torch.rand(4, WIDTH)

    params, buffers = pipe.init(model)
    torch.manual_seed(0)
    want = [float(x.sum()) for (x,), _ in draw()]
    asked.clear()
    torch.manual_seed(0)
    seen = []
    feed = ((seen.append(float(x.sum())), ((x,), y))[1] for (x,), y in draw())
    stream = fpipe.train_stream(pipe, ADAM)(params, buffers, ADAM.init(params), feed, seed=1)
    assert asked == []
    next(stream)
    assert len(asked) <= 4
    assert max(sum(not one.expired() for one in asked) for _ in stream) <= 5  # with the one that `feed` holds
    assert seen == want


REFUSED_CALLS = {
    "value_and_grad": lambda pipe, *given: fpipe.value_and_grad(pipe),
    "train_step": lambda pipe, *given: fpipe.train_step(pipe, ADAM),
    "reference": lambda pipe, *given: fpipe.reference(pipe),
    "verify": lambda pipe, model, x, y: fpipe.verify(pipe, model, (x,), y),
}


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_what_has_one_version_of_the_weights_refuses(name):
    pipe, model = pipe_of(pipedream(2, 1))
    x, y = torch.randn(2, 4, WIDTH)
    with pytest.raises(fpipe.InputError, match=r"which updates weights while microbatches are in flight.*train_stream"):
        REFUSED_CALLS[name](pipe, model, x, y)


def test_what_cannot_be_a_stream_is_refused():
    steps, _ = pipe_of(one_f_one_b(2, 1))
    with pytest.raises(fpipe.InputError, match="without updates, expected one that updates weights"):
        fpipe.train_stream(steps, ADAM)
    rows = from_rows(((F(0, 0), B(0, 0), U(0, 0)),), linear(1), 1)
    with pytest.raises(fpipe.InputError, match="expected one whose factory takes the number of microbatches"):
        pipe_of(rows)


def start(pipe, model, batches, optimizer=ADAM, **options):
    params, buffers = pipe.init(model)
    return fpipe.train_stream(pipe, optimizer)(params, buffers, optimizer.init(params), batches, **options)


def test_bad_batches_are_refused():
    how = pipedream(2, 1)
    pipe, model = pipe_of(how)
    good = random_batches(how, 3)
    with pytest.raises(fpipe.InputError, match="batches: got none, expected at least one"):
        next(start(pipe, model, []))
    with pytest.raises(fpipe.InputError, match=r"batches\[0\]: got Tensor, expected a pair of inputs and targets"):
        next(start(pipe, model, [torch.ones(4, WIDTH)]))
    odd = [*good, ((torch.ones(6, WIDTH),), torch.ones(6, WIDTH))]
    with pytest.raises(fpipe.InputError, match=r"batches\[3\]: .*expected a batch like the first one"):
        list(start(pipe, model, odd))
    donating = fpipe.optimizer(torch.optim.SGD, lr=0.1, donate=True)
    with pytest.raises(fpipe.InputError, match=r"updates in place.*microbatches in flight still use"):
        next(start(pipe, model, good, donating))
    with pytest.raises(fpipe.InputError, match="seed: got none"):
        next(start(*pipe_of(how, draw=0.5), good))
    assert len(list(start(pipe, model, good))) == 3


def test_nothing_else_runs_while_microbatches_are_in_flight(tmp_path):
    how = pipedream(2, 1)
    pipe, model = pipe_of(how)
    batches = random_batches(how, 5)
    stream = start(pipe, model, batches)
    next(stream)
    with pytest.raises(fpipe.InputError, match="got a pipeline with a stream of updates in flight"):
        fpipe.evaluate(pipe)(*pipe.init(model), *batches[0])
    with pytest.raises(fpipe.InputError, match="begin_save: got a pipeline with a stream of updates in flight"):
        fpipe.save(pipe, tmp_path / "saved", params={}, buffers={}, state={}, step=1)
    end = stream.finish()
    fpipe.save(pipe, tmp_path / "saved", params=end.params, buffers=end.buffers, state=end.state, step=1)
    params, _, state, _, _ = fpipe.load(pipe, tmp_path / "saved")
    require_part((params, state), (end.params, end.state))
    fpipe.evaluate(pipe)(*pipe.init(model), *batches[0])
    abandoned = start(pipe, model, batches)
    next(abandoned)
    del abandoned
    assert len(list(start(pipe, model, batches))) == 5


def test_an_error_of_the_optimizer_or_of_the_data_ends_the_stream():
    how = pipedream(2, 1)
    pipe, model = pipe_of(how)
    batches = random_batches(how, 9)

    def broken():
        yield from batches[:4]
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        list(start(pipe, model, broken()))
    with pytest.raises(ZeroDivisionError):
        list(start(pipe, model, batches, options=lambda t: {"lr": 1 / (3 - t)}))
    assert len(list(start(pipe, model, batches))) == 9


def test_updates_are_clipped_where_that_is_exact():
    """By norm on one stage, as a step does; by value, and with a fixed scale of the loss, on any."""
    how, limit = pipedream(1, 1), 0.05
    pipe, model = pipe_of(how)
    batches = random_batches(how, 6)
    params, buffers = pipe.init(model)
    stream = fpipe.train_stream(pipe, ADAM, max_norm=limit)(params, buffers, ADAM.init(params), batches)
    losses, (params, buffers, state) = list(stream), stream.end
    same = fpipe.reference_stream(pipe, ADAM, max_norm=limit)(*whole(model), ADAM.init(whole(model)[0]), batches)
    require_equal(Trained(losses, *stream.end), Trained(list(same), *same.end))
    steps, model = pipe_of(one_f_one_b(1, 1))
    held, own = steps.init(model)
    slots, step, norms = ADAM.init(held), fpipe.train_step(steps, ADAM, max_norm=limit), []
    for batch in batches:
        out, held, slots, norm = step(held, own, slots, *batch)
        own = out.buffers
        norms.append(norm)
    assert all(norm > limit for norm in norms)
    require_part((held, slots, own), (params, state, buffers))
    with pytest.raises(fpipe.InputError, match=r"max_norm: got 1\.0 for 2 stages and 1 shards"):
        fpipe.train_stream(pipe_of(pipedream(2, 1))[0], ADAM, max_norm=1.0)

    def clipped(grads, state, params, **options):
        return ADAM.update(fpipe.clip_value({n: g / 1024 for n, g in grads.items()}, 1e-3), state, params, **options)

    by_value = ADAM._replace(update=clipped)
    pipe, model = pipe_of(pipedream(3, 1), loss=lambda outputs, targets: 1024 * mse(outputs, targets))
    batches = random_batches(pipe.schedule, 6)
    got, want = (train(one, pipe, model, batches, by_value) for one in (fpipe.train_stream, fpipe.reference_stream))
    require_equal(got, want)


class Reversed(nn.Module):
    """Uses its layers last first."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.a(self.b(x))


def test_norms_are_summed_in_the_order_of_the_model():
    x = torch.randn(4, WIDTH)
    pipe = fpipe.pipeline(Reversed(), example=(x,), targets=x, loss=mse, schedule=pipedream(1, 1))
    (stage,) = pipe.training.assembly.stages
    assert stage.grads == pipe.names == ("a.weight", "a.bias", "b.weight", "b.bias")


class Branching(nn.Module):
    """Its first layer asks about the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(self.a(x) * 2 if (x > 0).all() else self.a(x))


def test_a_batch_that_takes_another_branch_is_refused():
    x, y = torch.rand(4, WIDTH), torch.rand(4, WIDTH)
    model = Branching()
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=pipedream(2, 1), cuts=["b"])
    batches = [((x,), y)] * 3
    require_equal(*(train(one, pipe, model, batches, ADAM) for one in (fpipe.train_stream, fpipe.reference_stream)))
    with pytest.raises(fpipe.InputError, match=r"batches\[3\], microbatch 0: .*finds false, expected true"):
        list(start(pipe, model, [*batches, ((-x,), y)]))


CORRECTIONS = {
    "error feedback": lambda late: (fpipe.error_feedback(ADAM, 0.5), None),
    "prediction": lambda late: (ADAM, fpipe.predict_weights(late)),
    "pipemare": lambda late: (fpipe.pipemare(ADAM, late, lr=0.05, steps=4), None),
    "both": lambda late: (fpipe.error_feedback(ADAM), fpipe.predict_weights(late)),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_are_those_of_the_reference(name):
    pipe, model = pipe_of(pipedream(3, 1), draw=0.1)
    correction = CORRECTIONS[name](fpipe.delays(pipe))
    batches = random_batches(pipe.schedule, 9)
    got, want = (train(one, pipe, model, batches, *correction) for one in (fpipe.train_stream, fpipe.reference_stream))
    require_equal(got, want)
    plain = train(fpipe.train_stream, pipe, model, batches, ADAM)
    assert not torch.equal(plain.params["0.0.weight"], got.params["0.0.weight"])


OPTIMIZERS = {
    cls.__name__: cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and cls is not torch.optim.Optimizer
}
CHAINS = {
    "error feedback": lambda one, late: (fpipe.error_feedback(one, 0.5), None),
    "prediction": lambda one, late: (one, fpipe.predict_weights(late)),
    "pipemare": lambda one, late: (fpipe.pipemare(one, late, lr=0.05, steps=4), None),
    "all": lambda one, late: (
        fpipe.error_feedback(fpipe.pipemare(one, late, lr=0.05, steps=4)),
        fpipe.predict_weights(late),
    ),
}


class Sums(nn.Module):
    """Sums of rows of a table, whose gradients may be sparse; matrices are all it trains."""

    def __init__(self, sparse):
        super().__init__()
        self.table, self.rest = nn.Embedding(9, 6, sparse=sparse), nn.Linear(6, 6, bias=False)
        self.last = nn.Linear(6, 6, bias=False)
        for one in (self.rest, self.last):
            one.requires_grad_(not sparse)

    def forward(self, ids):
        return self.last(self.rest(self.table(ids).tanh()).tanh())


@sampled(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("chain", CHAINS)
def test_every_optimizer_takes_every_correction(name, chain):
    """All of them but LBFGS, which needs to run the model again, and is refused by name."""
    if name == "LBFGS":
        with pytest.raises(fpipe.InputError, match="cls: got LBFGS, whose step needs"):
            fpipe.optimizer(OPTIMIZERS[name])
        return
    torch.manual_seed(0)
    model, mse, how = Sums(sparse=name == "SparseAdam"), nn.functional.mse_loss, pipedream(3, 1)
    batches = [((torch.randint(9, (4,)),), torch.randn(4, 6)) for _ in range(7)]
    (x,), y = batches[0]
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, cuts=["rest", "last"])
    given = CHAINS[chain](fpipe.optimizer(OPTIMIZERS[name], lr=0.05), fpipe.delays(pipe))
    got, want = (train(one, pipe, model, batches, *given) for one in (fpipe.train_stream, fpipe.reference_stream))
    require_equal(got, want)
    assert all(p.isfinite().all() for p in got.params.values())


def test_feedback_goes_to_masters_and_not_past_them():
    sgd = fpipe.optimizer(torch.optim.SGD, lr=2.0**-10)
    past, params = fpipe.error_feedback(fpipe.masters(sgd)), {"w": torch.ones(1, dtype=torch.bfloat16)}
    with pytest.raises(fpipe.InputError, match=r"state\['w'\]: got a master copy .* expected none"):
        past.update({"w": torch.ones(1, dtype=torch.bfloat16)}, past.init(params), params)
    init, update = fpipe.masters(fpipe.error_feedback(sgd))
    state = init(params)
    for grad in (1.0, 3.0):  # 1 + 3 + (3 - 1)
        params, state = update({"w": torch.full((1,), grad, dtype=torch.bfloat16)}, state, params)
    assert state["w"]["master"].item() == 1 - 6 * 2.0**-10


def test_feedback_goes_on_after_a_batch_without_a_gradient():
    optimizer, params = fpipe.error_feedback(fpipe.optimizer(torch.optim.SGD, lr=1.0)), {"w": torch.zeros(1)}
    state = optimizer.init(params)
    for grads in ({"w": torch.ones(1)}, {}, {"w": torch.full((1,), 3.0)}):  # 1 + 3 + (3 - 1)
        params, state = optimizer.update(grads, state, params)
    assert params["w"].item() == -6


def test_pipemare_ends_with_the_rate_that_was_passed():
    optimizer, params = (
        fpipe.pipemare(fpipe.optimizer(torch.optim.SGD), {"w": 4}, lr=1.0, steps=2),
        {"w": torch.zeros(1)},
    )
    state, seen = optimizer.init(params), [0.0]
    for _ in range(5):
        params, state = optimizer.update({"w": torch.ones(1)}, state, params)
        seen.append(params["w"].item())
    assert [a - b for a, b in pairwise(seen)] == [0.25, 0.5, 1, 1, 1]


def test_delays_are_counted_in_updates():
    for how, want in ((pipedream(3, 1), [2, 1, 0]), (pipedream_2bw(3, 3, accumulate=3), [1, 1, 1])):
        pipe, _ = pipe_of(how)
        assert [fpipe.delays(pipe)[f"{s}.0.weight"] for s in range(3)] == want
    assert {*fpipe.delays(pipe_of(one_f_one_b(3, 3))[0]).values()} == {0}


def test_a_prediction_is_what_the_papers_say():
    """SpecTrain, arXiv 1809.02839: w - s * lr * v, with the momentum v of SGD."""
    sgd = fpipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    params = {"w": torch.randn(4)}
    state = sgd.init(params)
    for _ in range(3):
        before = params
        params, state = sgd.update({"w": torch.randn(4)}, state, params)
    want = params["w"] - 2 * 0.1 * state["w"]["momentum_buffer"]
    torch.testing.assert_close(fpipe.predict_weights({"w": 2})(params, before)["w"], want)


def test_a_correction_that_cannot_work_is_refused():
    donating = fpipe.error_feedback(fpipe.optimizer(torch.optim.SGD, lr=0.1, donate=True))
    one = {"w": torch.ones(2)}
    with pytest.raises(fpipe.InputError, match=r"updates in place.*before the update"):
        donating.update({"w": torch.ones(2)}, donating.init(one), one)
    with pytest.raises(fpipe.InputError, match="steps: got 0, expected at least 1"):
        fpipe.pipemare(ADAM, {}, lr=0.1, steps=0)
