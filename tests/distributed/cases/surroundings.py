# SPDX-License-Identifier: Apache-2.0
"""What surrounds a run: a slow rank, workers of data loaders, many process groups, pipelines in turns, callbacks."""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, pipedream, zb_h1
from tests.common.comparison import assert_same
from tests.common.running import build, run, run_evaluation
from tests.common.sizes import NIGHTLY
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import case, raises, require_exact_across_ranks

ADAM = fpipe.optimizer(torch.optim.AdamW, lr=0.05)


def mean_square(out):
    return out.square().mean()


class Slow(nn.Module):
    """Takes long on one rank."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(4, 4)

    def forward(self, x):
        time.sleep(self.seconds)
        return self.linear(x)


@case
def a_rank_that_is_many_times_slower(rank, size):
    """It is waited for, first or last, in steps and in streams of outputs; the bits are the same."""
    for slow in (0, size - 1):
        torch.manual_seed(0)
        seconds = 0.05 if rank == slow else 0.0
        net, x = nn.Sequential(*[Slow(seconds) for _ in range(size)]), torch.randn(8, 4)
        how = zb_h1(ranks=size, microbatches=4)
        options = {"recording": fpipe.Recording(whole=Slow), "gradients": fpipe.Gradients(backward="autograd")}
        model = fpipe.Pipelined(net, loss=mean_square, example=(x,), schedule=how, **options)
        for rows in x.chunk(4):
            (mean_square(net(rows)) / 4).backward()
        for _ in range(3):
            model.zero_grad()
            model(x).backward()
        plain = dict(net.named_parameters())
        assert all(same_bits(p.grad, plain[name].grad) for name, p in model.named_parameters())


@case
def workers_of_data_loaders(rank, size):
    """However they are started, before the first capture or after it."""
    torch.manual_seed(0)
    net, data = nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)]), TensorDataset(torch.randn(24, 4))
    model = None
    for context in ("fork", "spawn", "forkserver") if NIGHTLY else ("fork", "spawn"):
        count = 2 if NIGHTLY or context == "fork" else 1  # others import torch
        loader = DataLoader(
            data, batch_size=8, num_workers=count, multiprocessing_context=context, persistent_workers=True
        )
        for _ in range(2):
            for (x,) in loader:
                if model is None:
                    how = one_f_one_b(ranks=size, microbatches=4)
                    model = fpipe.Pipelined(net, loss=mean_square, example=(x,), schedule=how)
                    parts = [(mean_square(net(rows)) / 4).detach() for rows in x.chunk(4)]
                    assert same_bits(model(x).detach(), sum(parts))
                    model.zero_grad()
                model(x).backward()
                model.zero_grad()


@case
def fifty_process_groups(rank, size):
    """Before the pipeline and between its steps; it is built on one of them."""
    groups = [dist.new_group() for _ in range(25)]
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(size, 4), 8, capture="trace", group=groups[7])
    step, held = fpipe.value_and_grad(pipe), pipe.init(model)
    first = step(*held, inputs, targets)
    groups += [dist.new_group() for _ in range(25)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
        second = step(*held, inputs, targets)
    assert same_bits(first[0].loss, second[0].loss)
    assert all(same_bits(grad, second[1][name]) for name, grad in first[1].items())
    pipe.close()
    for group in groups:
        dist.destroy_process_group(group)


@case
def two_pipelines_in_turns(rank, size):
    """Their steps and evaluations alternate, and each has the results that it has alone."""
    hows = (("mlp", zb_h1(size, 4)), ("skips", one_f_one_b(size, 4)))
    made = [build(ZOO[name], how, 8, capture="trace") for name, how in hows]
    alone = [(run(*one), run_evaluation(*one)) for one in made]
    for _ in range(2):
        for one, (step, evaluation) in zip(made, alone, strict=True):
            assert_same(run(*one), step)
            assert_same(run_evaluation(*one), evaluation)


class BrokenError(Exception):
    """Raised by callbacks of a script."""


@case
def callbacks_that_raise_on_one_rank(rank, size):
    """Whoever has raised sees its own error, others which rank it was, and the next call works."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(size, 4), 8, capture="trace")
    held = pipe.init(model)

    def raise_broken(*_):
        raise BrokenError("of the script")

    outputs = fpipe.stream(pipe, raise_broken)
    if rank == size - 1:
        with raises(BrokenError, "of the script"):
            outputs(*held, inputs, targets)
    else:
        outputs(*held, inputs, targets)
    fpipe.evaluate(pipe)(*held, inputs, targets)

    x = torch.randn(8, 4)
    net, how = nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)]), one_f_one_b(size, 4)
    pipe = fpipe.pipeline(
        net, example=(x,), loss=mean_square, schedule=how, microbatching=fpipe.Microbatching(weight=weigh_on_some)
    )
    for _ in range(2):
        with raises(fpipe.PipelineError, "BrokenError: of the script"):
            fpipe.value_and_grad(pipe)(*pipe.init(net), (x,))

    def merge(parts):
        if rank == 0:
            raise BrokenError("of the script")
        return len(parts)

    model = fpipe.Pipelined(net, loss=mean_and_sum, example=(x,), schedule=how, aux=merge)
    with raises(BrokenError, "of the script") if rank == 0 else nullcontext():
        model(x)
    model.pipe.recheck()


def mean_and_sum(out):
    return mean_square(out), out.sum()


def weigh_on_some(inputs, targets):
    if dist.get_rank() == dist.get_world_size() - 1:
        raise BrokenError("of the script")
    return 1.0


@case
def a_stream_that_all_ranks_abandon(rank, size):
    """It refuses what comes next on its pipeline, by name; others work."""
    pipe, model, inputs, targets = build(ZOO["mlp"], pipedream(size, 1), 2, capture="trace")
    params, buffers = pipe.init(model)
    stream = fpipe.train_stream(pipe, ADAM)(params, buffers, ADAM.init(params), [(inputs, targets)] * 99)
    next(stream)
    dist.barrier()
    del stream
    with raises(fpipe.TransportError, "it left its stream with microbatches in flight; call finish() on every rank"):
        fpipe.evaluate(pipe)
    require_exact_across_ranks("mlp", one_f_one_b(size, 4), rank, size)
