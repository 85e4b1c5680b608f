# SPDX-License-Identifier: Apache-2.0
"""Processes that build many pipelines, or run many steps, hold no more threads, descriptors and objects than before."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

import fpipe
from schedules import one_f_one_b, zb_h1
from tests.common.growth import build_small, require_no_growth, uncollected
from tests.common.sizes import NIGHTLY
from tests.distributed.cases.checks import raises
from tests.distributed.cases.registry import case


@case
def dropped_and_closed_pipelines_leave_nothing(rank, size):
    """Ranks end theirs in their own ways, without waiting for each other."""

    def run(k):
        pipe, step = build_small(zb_h1(ranks=size, microbatches=3))
        for _ in range(2):
            step(6)
        if (k + rank) % 2:
            pipe.close()
            pipe.close()
            with raises(fpipe.InputError, "a step: got a closed pipeline", "build the pipeline again"):
                step(6)

    grown = require_no_growth(run, 100 if NIGHTLY else 2, 1000 if NIGHTLY else 5)
    assert not NIGHTLY or grown < 8 * 2**20


@case
def a_dropped_pipeline_leaves_the_collector_nothing(rank, size):
    """Channels, handshakes and the guards of a rank included."""

    def use():
        pipe, step = build_small(zb_h1(ranks=size, microbatches=3))
        step()
        step(6)
        return pipe, step

    use()
    held = [use()]
    with uncollected() as dropped:
        held.clear()
    assert not dropped


@case
def a_closed_pipeline_leaves_the_group_of_the_user(rank, size):
    """So do pipelines that go on: another one over the same group, and one rebuilt from what was dropped."""
    group = dist.new_group(range(size))
    how = one_f_one_b(ranks=size, microbatches=2)
    pipe, step = build_small(how, group=group)
    other, other_step = build_small(how, group=group)
    step()
    pipe.close()
    other_step()
    rebuilt = other.rebuilt(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    del other, other_step
    fpipe.value_and_grad(rebuilt)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total == size
    dist.destroy_process_group(group)


@case
def two_thousand_steps_do_not_grow_or_slow_down(rank, size):
    """Nor do they hold more of anything."""
    _, step = build_small(one_f_one_b(ranks=size, microbatches=2))
    took = []

    def run(k):
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)

    assert require_no_growth(run, 100, 2000) < 8 * 2**20
    assert statistics.median(took[-500:]) < 3 * statistics.median(took[100:600])
