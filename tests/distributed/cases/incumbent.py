# SPDX-License-Identifier: Apache-2.0
"""`torch.distributed.pipelining` runs programs that we lower, of its own schedules and of ours."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

from fpipe.tensors.torch_private import VERSION
from schedules import lower, one_f_one_b, split_backward
from schedules.files import pipelining, pipelining_2_15, read_csv, write_csv
from tests.distributed.cases.checks import case


@case(sizes=[2])
def torch_runs_our_programs(rank, size):
    path, stages = f"{os.environ['REPORT']}/torch-{rank}.csv", [SimpleNamespace(submod=None)] * 2
    vars(stages[0]).update(group_rank=0, group_size=size, num_stages=2 * size)
    plans = [split_backward(one_f_one_b(size, microbatches=5))]
    vees = (theirs.ScheduleZBVZeroBubble, theirs.ScheduleDualPipeV)  # in which torch 2.11 sends to its own rank
    for kind in (theirs.ScheduleInterleaved1F1B, *(vees if VERSION >= (2, 12) else ())):
        kind(stages, 4)._dump_csv(path, "compute_only")
        plans.append(read_csv(path))
    for s in plans:
        write_csv(lower(s), path, words=pipelining_2_15 if hasattr(theirs, "WAIT_SEND_F") else pipelining)
        require_step_of_one_device(path, s, rank)


def require_step_of_one_device(path, s, rank):
    """Run the program in the file; the gradients must be those of one device."""
    torch.manual_seed(0)
    parts = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(s.stages)]
    whole, loss = torch.nn.Sequential(*copy.deepcopy(parts)), torch.nn.MSELoss()
    inputs, targets = torch.randn(2, 2 * s.microbatches, 8)
    mine = s.placement.stages_on(rank)
    runtime = theirs._PipelineScheduleRuntime(
        [PipelineStage(parts[stage], stage, s.stages, torch.device("cpu")) for stage in mine], s.microbatches, loss
    )
    runtime._load_csv(path, "compute_comms")
    runtime.step(*([inputs] if 0 in mine else []), target=targets, losses=[])
    for some, target in zip(inputs.chunk(s.microbatches), targets.chunk(s.microbatches), strict=True):
        (loss(whole(some), target) / s.microbatches).backward()
    for stage in mine:
        for got, expected in zip(parts[stage].parameters(), whole[stage].parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad)
