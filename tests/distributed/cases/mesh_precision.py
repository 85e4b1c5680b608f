# SPDX-License-Identifier: Apache-2.0
"""Training on a mesh ends where one device ends, up to rounding.

In double precision: AdamW divides a gradient by its own size, so in single precision it turns the rounding noise of a
gradient that is zero, such as that of a key's bias in attention, into steps as large as any.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fpipe
from tests.common.tensor_parallel import whole
from tests.distributed.cases.meshes import (
    FAMILIES,
    LIMIT,
    MICROBATCHES,
    RATE,
    SPLITS,
    TASKS,
    Task,
    mesh_of,
    train_with_a_pipeline,
)
from tests.distributed.cases.registry import case

NEAR = 1e-6


def in_double(task: Task) -> Task:
    return task._replace(model=task.model.double())


def train_on_one_device(task: Task) -> dict[str, Tensor]:
    """Return the parameters and their moments after plain training with whole batches."""
    model, loss, data = task
    adam = torch.optim.AdamW(model.parameters(), lr=RATE)
    for x, y in data:
        adam.zero_grad()
        loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        adam.step()
    return flatten(dict(model.named_parameters()), {name: adam.state[p] for name, p in model.named_parameters()})


def flatten(params: Any, state: Any) -> dict[str, Tensor]:
    moments = {f"{slot} of {name}": state[name][slot] for name in params for slot in ("exp_avg", "exp_avg_sq")}
    return {name: whole(tensor.detach()) for name, tensor in (params | moments).items()}


def require_near(task: Task, wanted: dict[str, Tensor], mesh: DeviceMesh, family: str) -> None:
    """Require parameters and moments of a run on the mesh to be near those of one device."""
    how = FAMILIES[family](ranks=2, microbatches=MICROBATCHES)
    names = mesh.mesh_dim_names or ()
    options: dict[str, Any] = {"dp": "dp"} if "dp" in names else {}
    options |= {"shard": fpipe.Sharded("fsdp", gathered=1)} if "fsdp" in names else {}
    run = train_with_a_pipeline(task, mesh, how, False, **options)
    found = flatten(run.params, run.state)
    assert found, "this rank holds parameters"
    for name, tensor in found.items():
        far = (tensor - wanted[name]).abs().max().item()
        assert far < NEAR, (family, name, far)


def _make_case(**sizes: int) -> None:
    def run(rank: int, size: int) -> None:
        mesh = mesh_of(**sizes)
        for name in SPLITS if "tp" in sizes else TASKS:
            make = SPLITS[name].make if "tp" in sizes else TASKS[name]
            wanted = train_on_one_device(in_double(make()))
            for family in FAMILIES:
                task = in_double(make())
                if "tp" in sizes:
                    task = task._replace(model=SPLITS[name].over(task.model, mesh["tp"]))
                require_near(task, wanted, mesh, family)

    run.__name__ = f"one_device_in_double_on_{'_'.join(f'{size}_{name}' for name, size in sizes.items())}"
    case(run)


for _sizes in ({"dp": 2}, {"fsdp": 2}, {"dp": 2, "fsdp": 2}, {"dp": 2, "tp": 2}, {"fsdp": 2, "tp": 2}):
    _make_case(pp=2, **_sizes)
