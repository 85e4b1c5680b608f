# SPDX-License-Identifier: Apache-2.0
"""Audits over several ranks: what is found on one ends the step on all, and nothing else changes."""

from __future__ import annotations

import time

import torch

import fpipe
from schedules import one_f_one_b, zb_h1
from tests.common.comparison import Result, assert_same
from tests.common.faults import flip_some, plant
from tests.common.running import build
from tests.common.sizes import by_day
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import case, raises

SCHEDULES = (zb_h1, one_f_one_b)


def audit(**options):
    """An audit of everything, and what it reports."""
    told = []
    return fpipe.Audit(**{"allowance": float("inf"), "report": told.append, **options}), told


@case(sizes=[2, 4])
def audited_steps_have_the_bits_of_others(rank, size):
    """Over enough steps that ranks know where they are idle, with steps without an audit in between."""
    for make in by_day(SCHEDULES, 2):
        how = make(ranks=size, microbatches=4)
        pipe, model, inputs, targets = build(ZOO["gpt_dropout"], how, 8)
        state, (wanted, told) = pipe.init(model), audit(draws=4)
        plain, step = fpipe.value_and_grad(pipe), fpipe.value_and_grad(pipe, audit=wanted)
        for number in range(7):
            found = []
            for function in (plain, step):
                out, grads = function(*state, inputs, targets, seed=number)
                found.append(Result(out.loss, out.outputs, grads, out.buffers))
            assert_same(*found)
            fpipe.clip(pipe, grads, 1.0)
        assert [one.number for one in told] == [n for n in range(7) for _ in range(4)]
        assert {one.rank for one in told} == {rank}
        assert all(one.seconds is not None for one in told)


@case(sizes=[2, 4])
def ranks_may_have_audits_of_their_own(rank, size):
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    wanted, told = audit(seed=rank)
    step = fpipe.value_and_grad(pipe, audit=None if rank == 0 else wanted)
    for _ in range(3):
        step(*pipe.init(model), inputs, targets)
    assert len(told) == (0 if rank == 0 else 3)


@case(sizes=[2, 4])
def a_wrong_action_ends_the_step_on_every_rank(rank, size):
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    wanted, _ = audit(draws=100)
    step, state = fpipe.value_and_grad(pipe, audit=wanted), pipe.init(model)
    if rank == 1:
        plant(pipe.training.assembly.stages[1], "backward", 2, flip_some)
        expected = raises(fpipe.CorruptionError, "rank 1, 1B2, stage 1, microbatch 2: got other bits in")
    else:
        expected = raises(fpipe.RankError, "The first failure: rank 1", "CorruptionError: rank 1, 1B2, stage 1")
    with expected:
        for _ in range(2):  # whoever has finished the step when it is found hears of it in the next call
            step(*state, inputs, targets)
    with raises(fpipe.TransportError, "got a pipeline that failed midway"):
        step(*state, inputs, targets)


@case(sizes=[2])
def the_drop_in_module_is_audited_on_every_rank(rank, size):
    torch.manual_seed(0)
    _, inputs, targets = ZOO["mlp"].make(8)
    wanted, told = audit()
    model, *_ = ZOO["mlp"].make(8)
    how = one_f_one_b(ranks=size, microbatches=4)
    dropped = fpipe.Pipelined(model, loss=ZOO["mlp"].loss, example=inputs, targets=targets, schedule=how, audit=wanted)
    optimizer = torch.optim.SGD(dropped.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        dropped(*inputs, targets=targets).backward()
        dropped.clip_grad_norm_(1.0)
        optimizer.step()
    assert [one.number for one in told] == [*range(6)]


@case(sizes=[2])
def whoever_waits_for_others_after_a_step_knows_for_how_long(rank, size):
    pipe, *_ = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    fpipe.require_same(pipe)
    pipe.ranks.watch_idle()
    if rank == 0:
        time.sleep(0.5)
    fpipe.require_same(pipe)
    known = pipe.ranks.idle
    fpipe.require_same(pipe)
    assert pipe.ranks.idle == known
    assert rank == 0 or known > 0.25
