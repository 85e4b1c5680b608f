# SPDX-License-Identifier: Apache-2.0
"""One rank of a step that `torch.distributed.pipelining` runs from files that we wrote; test_incumbent.py starts it."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from schedules.files.csv import read_csv


def step(path, rank):
    """Run the program in the file; the gradients must be those of one device."""
    s = read_csv(path).schedule
    torch.manual_seed(0)
    parts = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(s.stages)]
    whole, loss = torch.nn.Sequential(*copy.deepcopy(parts)), torch.nn.MSELoss()
    inputs, targets = torch.randn(2, 2 * s.microbatches, 8)
    mine = s.placement.stages_on(rank)
    runtime = _PipelineScheduleRuntime(
        [PipelineStage(parts[stage], stage, s.stages, torch.device("cpu")) for stage in mine], s.microbatches, loss
    )
    runtime._load_csv(path, "compute_comms")
    runtime.step(*([inputs] if 0 in mine else []), target=targets, losses=[])
    for some, target in zip(inputs.chunk(s.microbatches), targets.chunk(s.microbatches), strict=True):
        (loss(whole(some), target) / s.microbatches).backward()
    for stage in mine:
        for got, expected in zip(parts[stage].parameters(), whole[stage].parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad)


def main(rank: int, store: str, *paths: str) -> None:
    """Run the programs, one after the other, as one of two ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for path in paths:
        step(path, rank)
    dist.destroy_process_group()
    print("passed")
