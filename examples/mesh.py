# SPDX-License-Identifier: Apache-2.0
"""Train two copies of a pipeline of two stages on a mesh, with the bits of the plain module on one device.

    torchrun --standalone --nproc-per-node 4 examples/mesh.py    # one process per place of the mesh, over Gloo
    python examples/mesh.py                                      # the whole mesh in this process

Each copy trains on half of the rows, and the schedule reduces gradients over the copies. Losses, norms and parameters
are the same either way. With `shard` instead of `dp`, processes hold shards, as with `fully_shard`.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import fpipe
from schedules import zb_h1

WIDTH, ROWS, STAGES, COPIES, MICROBATCHES = 16, 16, 2, 2, 4
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def build_model() -> nn.Module:
    """Return the same model in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return a whole batch, which depends only on the step; every copy takes its rows."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, 1).sin()


def build_pipeline() -> fpipe.Pipeline:
    """Return the pipeline on a mesh of stages and copies: processes, or all of it in this one."""
    sizes, (x, y) = {"pp": STAGES, "copies": COPIES}, make_batch(0)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)) if SIZE > 1 else sizes
    how, place = zb_h1(ranks=STAGES, microbatches=MICROBATCHES), fpipe.Place(mesh=mesh, dp="copies")
    return fpipe.pipeline(build_model(), example=(x,), targets=y, loss=mse_loss, schedule=how, place=place)


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Train the module itself for a step: add up each copy's microbatches, then the copies. Return loss and norm."""
    losses, grads = list[Tensor](), list[list[Tensor]]()
    for rows, targets in zip(x.chunk(COPIES), y.chunk(COPIES), strict=True):
        optimizer.zero_grad()
        losses.append(torch.zeros(()))
        for a, b in zip(rows.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            part = mse_loss(model(a), b) / (COPIES * MICROBATCHES)
            part.backward()
            losses[-1] += part.detach()
        grads.append([parameter.grad for parameter in model.parameters()])
    for parameter, *parts in zip(model.parameters(), *grads, strict=True):
        parameter.grad = sum(parts)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return sum(losses), norm


def train(pipe: fpipe.Pipeline, steps: int) -> None:
    """Train both; raise unless the values of this process equal those of the plain module."""
    params, buffers = pipe.init(build_model())
    step, adam = fpipe.value_and_grad(pipe), fpipe.optimizer(torch.optim.AdamW, lr=0.01)
    state, plain = adam.init(params), build_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for i in range(steps):
        x, y = make_batch(i)
        out, grads = step(params, buffers, (x,), y)  # reduced over the copies
        grads, norm = fpipe.clip(pipe, grads, 0.1)  # by the norm over all stages; each parameter counts once
        params, state = adam.update(grads, state, params)
        expected = train_plainly(plain, optimizer, x, y)
        assert all(map(torch.equal, (out.loss, norm), expected)), f"step {i}: got {out.loss}, {norm}, not {expected}"
        if RANK == 0:
            print(f"step {i:4}  loss {out.loss:.6f}  norm {norm:.6f}", flush=True)
    assert all(torch.equal(p, plain.get_parameter(name)) for name, p in params.items())
    print(f"process {RANK} of {SIZE}: {len(params)} parameters equal those of one device, bit for bit", flush=True)


def main() -> None:
    """Train, alone or as one process of four."""
    parser = argparse.ArgumentParser(description="Train a small network as two copies of a pipeline.")
    parser.add_argument("--steps", type=int, default=20)
    torch.set_num_threads(1)
    if SIZE > 1:
        dist.init_process_group("gloo")
    train(build_pipeline(), parser.parse_args().steps)
    if SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
