# SPDX-License-Identifier: Apache-2.0
"""A process that runs forever does not grow: pipelines end, and what they cache is bounded."""

import statistics
import time

import pytest
import torch
from torch import nn

import fpipe
from schedules import gpipe, one_f_one_b, zb_h1
from tests.common.averages import Average, AverageDecoder, texts, word_loss
from tests.common.growth import build_small, require_no_growth, uncollected
from tests.common.running import open_questions
from tests.common.sizes import NIGHTLY, by_night, sampled

HOW = one_f_one_b(ranks=2, microbatches=2)
MIB = 2**20


def test_a_closed_pipeline_refuses_steps_and_closes_again():
    pipe, step = build_small(HOW)
    step()
    with pipe as same:
        assert same is pipe
    pipe.close()
    assert not pipe.memo.batches
    assert not pipe.memo.recordings
    for call in (
        step,
        lambda: fpipe.value_and_grad(pipe),
        lambda: fpipe.evaluate(pipe)({}, {}, ()),
        lambda: pipe.training,
    ):
        with pytest.raises(
            fpipe.InputError, match=r"got a closed pipeline, expected an open one\. .* build the pipeline"
        ):
            call()


def test_closing_also_closes_what_was_rebuilt_and_dropping_does_not():
    model = nn.Linear(4, 1)
    old = fpipe.pipeline(model, example=(torch.ones(4, 4),), loss=torch.mean, schedule=gpipe(1, 2))
    new = old.rebuilt(model)
    del old
    step = fpipe.value_and_grad(new)
    step(*new.init(model), (torch.ones(4, 4),))
    newer = new.rebuilt(model)
    new.close()
    with pytest.raises(fpipe.InputError, match="closed"):
        fpipe.value_and_grad(newer)


def test_a_closed_module_refuses_forwards():
    x = torch.ones(4, 4)
    model = fpipe.Pipelined(nn.Linear(4, 1), example=(x,), loss=torch.mean, schedule=gpipe(1, 2))
    model(x).backward()
    model.eval()
    model(x)
    model.close()
    model.close()
    with pytest.raises(fpipe.InputError, match="the model: got a closed pipeline"):
        model(x)


X = torch.ones(4, 4)


class Asking(nn.Module):
    """Asks about its batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.b(self.a(x if x.sum() > 0 else -x))


def stepped():
    pipe, step = build_small(HOW)
    step()
    step(6)
    return pipe, step


def trained():
    pipe, _ = build_small(HOW)
    params, buffers = pipe.init(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    adam = fpipe.optimizer(torch.optim.AdamW, lr=0.1)
    step = fpipe.train_step(pipe, adam, max_norm=1.0)
    return pipe, step, step(params, buffers, adam.init(params), (X,))


def asked():
    model = Asking()
    pipe = fpipe.pipeline(model, example=(X,), loss=torch.mean, schedule=HOW)
    assert open_questions(pipe)
    return pipe, [fpipe.value_and_grad(pipe)(*pipe.init(model), (x,)) for x in (X, -X)]


def verified():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    pipe = fpipe.pipeline(model, example=(X,), loss=torch.mean, schedule=zb_h1(ranks=2, microbatches=2))
    fpipe.verify(pipe, model, (X,))
    return pipe, fpipe.evaluate(pipe)(*pipe.init(model), (X,))


def dropped_in():
    model = fpipe.Pipelined(nn.Linear(4, 1), example=(X,), loss=torch.mean, schedule=gpipe(1, 2))
    model(X).backward()
    return model


def copied():
    pipe, step = build_small(HOW, mesh={"pp": 2, "dp": 2}, dp="dp")
    return pipe, step(8)


def generated():
    model, ids = Average(), texts(4, 5)
    pipe = fpipe.pipeline(
        model, example=(ids,), targets=ids, loss=word_loss, schedule=gpipe(ranks=2, microbatches=2), cuts=["mix"]
    )
    return pipe, fpipe.generate(pipe, 8, decoder=AverageDecoder)(*pipe.init(model), ids, 2)


@sampled(1)
@pytest.mark.parametrize("use", [stepped, trained, asked, verified, dropped_in, copied, generated])
def test_a_dropped_pipeline_is_freed_at_once_and_leaves_the_collector_nothing(use):
    use()  # what torch imports on first use keeps the frames that called it
    held = [use()]
    with uncollected() as left:
        held.clear()
    assert not left


def test_a_capture_leaves_the_collector_nothing_of_ours():
    stepped()
    with uncollected() as left:
        held = stepped()
    assert held
    assert not [kind for kind in left if kind.__module__.startswith(("fpipe", "schedules"))], left


def test_pipelines_that_are_built_and_dropped_leave_nothing():
    def run(k):
        pipe, step = build_small(HOW)
        step()
        if k % 2:
            pipe.close()

    grown = require_no_growth(run, 3, 1000 if NIGHTLY else 12)
    assert grown < 8 * MIB


@by_night
def test_steps_of_changing_sizes_keep_as_many_plans_as_asked_for():
    pipe, step = build_small(HOW, plans=2)

    def run(k):
        step(6 + 2 * (k % 5))
        sizes = [
            len(pipe.memo.batches),
            sum(len(one.assemblies) for one in pipe.memo.recordings.values()),
            len(pipe.memo.recordings),
        ]
        sizes += [len(pipe.memo.agreements)]
        assert max(sizes) <= 3, sizes

    require_no_growth(run, 5, 300 if NIGHTLY else 5)


def test_batches_that_are_refused_leave_nothing():
    pipe, step = build_small(HOW)

    def run(k):
        with pytest.raises(fpipe.InputError):
            step(0)
        with pytest.raises(fpipe.InputError):
            fpipe.value_and_grad(pipe)(
                *pipe.init(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))), (torch.ones(4, 5 + k),)
            )

    require_no_growth(run, 2, 8)
    assert len(pipe.memo.recordings) == 1


@by_night
def test_ten_thousand_steps_do_not_grow_or_slow_down():
    _, step = build_small(HOW)
    took = []

    def run(k):
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)

    assert require_no_growth(run, 500, 10_000) < 8 * MIB
    assert statistics.median(took[-1000:]) < 3 * statistics.median(took[500:1500])
