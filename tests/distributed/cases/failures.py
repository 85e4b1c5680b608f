# SPDX-License-Identifier: Apache-2.0
"""Lost messages, lost ranks, and a process group that is gone."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import fpipe
from fpipe.network.envelope import Envelope
from schedules import Action, one_f_one_b
from tests.common.running import build
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import raises
from tests.distributed.cases.registry import case


@case
def a_head_that_is_read_late(rank, size):
    """A wrong message that one rank reads late, as on an accelerator, raises on all ranks in the next step."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    state, step, cpu = pipe.init(model), fpipe.value_and_grad(pipe), torch.device("cpu")
    awaited, came = (Envelope(Action("SEND_F", 0, i, 1), (), cpu) for i in (2, 3))
    if rank == 1:
        pipe.ranks.transport.unread.append((awaited, came.header))
    with raises(fpipe.TransportError, "got 0SEND_F3>1 of 0 bytes, expected that of 1RECV_F2<0"):
        step(*state, inputs, targets)
    if rank == 1:
        with raises(fpipe.TransportError, "got a pipeline that failed midway"):
            step(*state, inputs, targets)


@case
def dies_in_the_middle(rank, size):
    """Rank 2 exits without notice in the middle of a step; the others fail at once, not by a timeout."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    state = pipe.init(model)
    fourth = list(pipe.schedule.actions(2))[3]

    def record(span):
        if rank == 2 and span.action == fourth:
            os._exit(7)

    try:
        fpipe.value_and_grad(pipe, record=record)(*state, inputs, targets)
    except RuntimeError as error:
        told = "imed out" not in str(error)
        raise RuntimeError(f"failed {'at once' if told else 'too late'}: {error}") from error


@case
def after_the_group_is_gone(rank, size):
    """The last case of a job: existing pipelines are refused, and so is a new one that would run all ranks in here."""
    built = [build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8) for _ in range(2)]
    found = [(fpipe.value_and_grad(pipe), pipe.init(model), batch) for pipe, model, *batch in built]
    for step, state, batch in found:
        step(*state, *batch)
    dist.barrier()  # who leaves while others still talk to it may break their connection
    dist.destroy_process_group()
    for step, state, batch in found:
        with raises(fpipe.TransportError, "its process group was destroyed"):
            step(*state, *batch)
    os.environ["WORLD_SIZE"] = str(size)
    with raises(fpipe.TransportError, f"has started {size} processes", "init_process_group"):
        build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
