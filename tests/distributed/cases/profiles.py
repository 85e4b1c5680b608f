# SPDX-License-Identifier: Apache-2.0
"""Profiles that all ranks make together, and the time of transfers between them."""

from __future__ import annotations

from itertools import permutations
from unittest.mock import patch

import torch

import fpipe
from fpipe.planning.links import MESSAGE_SIZES
from schedules import Link, one_f_one_b, simulate
from tests.common.running import build
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import gather, raises
from tests.distributed.cases.registry import case

FAST = fpipe.Roofline(1e10, 1e10)


@case
def profiles_of_all_ranks(rank, size):
    """Every rank returns the same profile, of the slowest, with a link between ranks; a pipeline gives it, too."""
    one = ZOO["mlp"]
    pipe, model, inputs, targets = build(one, one_f_one_b(ranks=size, microbatches=2), 4, capture="trace")
    found = fpipe.profile(model, inputs, targets, loss=one.loss, microbatches=2, seconds=0)
    assert gather(found) == [found] * size
    assert found.link.latency > 0
    assert found.link.bandwidth < float("inf")
    again = fpipe.profile(pipe, inputs, targets, device=FAST, link=Link(latency=rank + 1.0))
    again.require(pipe)
    assert again.link == Link(latency=rank + 1.0), "what is passed is not measured"
    assert again.sizes(one.at(size), pipe.schedule.placement) == pipe.sizes
    assert simulate(pipe.schedule, found.costs(one.at(size)), pipe.program.graph).makespan > 0
    fpipe.verify(pipe, model, inputs, targets)


@case
def transfers_between_any_two_ranks(rank, size):
    pipe, *_ = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=2), 4)
    with pipe.ranks.enter_call("a test"):
        rows = pipe.ranks.measure_transfers(MESSAGE_SIZES)
    assert all(torch.equal(rows, other) for other in gather(rows))
    ends = [(a, b, bytes_) for a, b in permutations(range(size), 2) for bytes_ in MESSAGE_SIZES]
    assert sorted(tuple(map(int, row[:3])) for row in rows.tolist()) == sorted(ends)
    assert (rows[:, 3] > 0).all()


@case
def actions_and_steps_take_the_time_of_their_messages(rank, size):
    """In a profile of several ranks, but not in one that is only estimated."""
    one = ZOO["mlp"]
    pipe, *_ = build(one, one_f_one_b(ranks=size, microbatches=2), 4)
    with pipe.ranks.enter_call("a test"):
        assert pipe.ranks.measure_posting() > 0
    model, inputs, targets = one.make(8)
    slow, wait = 0.125, 0.25
    with (
        patch.object(type(pipe.ranks), "measure_posting", lambda ranks: slow),
        patch("fpipe.planning.profiler._time_agreement", lambda ranks: wait),
    ):
        found = fpipe.profile(model, inputs, targets, loss=one.loss, microbatches=2, seconds=0)
        estimated = fpipe.profile(model, inputs, targets, loss=one.loss, microbatches=2, device=FAST)
    assert min(found.fixed.F, found.fixed.B, found.fixed.I, found.fixed.C) >= slow > found.fixed.W
    assert found.step >= 2 * wait
    assert (estimated.fixed.F, estimated.step) == (0, 0)


@case
def profiles_of_different_models_are_refused(rank, size):
    """On every rank, by what differs first; the next profile is made as if nothing had happened."""
    one = ZOO["mlp"]
    model, inputs, targets = one.make(8)
    fewer = {1: ((inputs[0][:1],), targets[:1]), 4: ((inputs[0][:4],), targets[:4]), 8: (inputs, targets)}
    with raises(fpipe.InputError, "others[", "].microbatch: got float32[4, 4]", "expected float32[2, 4]"):
        fpipe.profile(model, *fewer[8 if rank else 4], loss=one.loss, microbatches=2, device=FAST)
    with raises(fpipe.InputError if rank == size - 1 else fpipe.TransportError, "expected at least 2"):
        fpipe.profile(model, *fewer[1 if rank == size - 1 else 8], loss=one.loss, microbatches=2, device=FAST)
    assert fpipe.profile(model, inputs, targets, loss=one.loss, microbatches=2, device=FAST).blocks
