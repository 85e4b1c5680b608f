# SPDX-License-Identifier: Apache-2.0
"""Train through crashes: the run saves itself, and torchrun starts it again where it stopped.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/resume.py    # one process per rank, over Gloo
    python examples/resume.py                                                       # both ranks in this process

Kill any rank (`kill -9`) at any moment: torchrun restarts all from the newest checkpoint that is whole. After SIGTERM,
all save after the same step and exit, and the next start continues. The final parameters equal those of an
uninterrupted run bit for bit, on any ranks: batch and dropout depend only on the step, and the rest is saved.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fpipe
from schedules import one_f_one_b

WIDTH, ROWS, MICROBATCHES, KEPT = 16, 32, 4, 3


def build_model() -> nn.Module:
    """A network with every kind of state that a checkpoint holds; the same in every process."""
    torch.manual_seed(0)
    blocks = [[nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)] for _ in range(4)]
    return nn.Sequential(*(layer for block in blocks for layer in block), nn.Linear(WIDTH, 1))


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a step; it depends only on the step's number."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.square().mean(1, keepdim=True)


def connect() -> None:
    """Join the other ranks. Each start has its own prefix in torchrun's store, which keeps keys of dead processes."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    prefix, rank, size = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", store=dist.PrefixStore(prefix, store), rank=int(rank), world_size=int(size))


def begin(pipe: fpipe.Pipeline, path: Path) -> fpipe.Checkpoint:
    """Return the run as it was last saved, or a new one."""
    if saved := [place for place in sorted(path.glob("step-*")) if fpipe.is_checkpoint(place)]:
        return fpipe.load(pipe, saved)  # the newest that is whole
    return fpipe.Checkpoint(*pipe.init(build_model()), state=None, step=0, data=None)


def train(pipe: fpipe.Pipeline, path: Path, steps: int, every: int) -> None:
    """Run the remaining steps, or stop after a signal; save the run regularly and at the end."""
    params, buffers, state, done, _ = begin(pipe, path)
    step, (init, update) = fpipe.value_and_grad(pipe), fpipe.optimizer(torch.optim.AdamW, lr=0.01)
    state = init(params) if state is None else state
    with fpipe.catch_signals(pipe) as is_caught:
        for i in range(done, steps):
            x, y = make_batch(i)
            out, grads = step(params, buffers, (x,), y, seed=i)
            grads, norm = fpipe.clip(pipe, grads, 1.0)
            params, state = update(grads, state, params)
            buffers, is_last = out.buffers, is_caught() or i + 1 == steps  # the same on every rank
            if (i + 1) % every == 0 or is_last:
                place = path / f"step-{i + 1:06}"
                fpipe.save(pipe, place, params=params, buffers=buffers, state=state, step=i + 1)
                if 0 in pipe.ranks.ranks:
                    for old in sorted(path.glob("step-*"))[:-KEPT]:
                        shutil.rmtree(old)
                    print(f"step {i + 1:4}  loss {out.loss:.6f}  norm {norm:.6f}  saved {place}", flush=True)
            if is_last:
                break


def main(arguments: list[str] | None = None) -> None:
    """Train, alone or as one rank of several."""
    parser = argparse.ArgumentParser(description="Train a small network; resume the run if there is a checkpoint.")
    parser.add_argument("--path", type=Path, default=Path("run"), help="where the checkpoints are")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps from one save to the next")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        connect()
    (x, y), loss = make_batch(0), nn.functional.mse_loss
    how = one_f_one_b(ranks=max(2, size), microbatches=MICROBATCHES)
    pipe = fpipe.pipeline(build_model(), example=(x,), targets=y, loss=loss, schedule=how)
    train(pipe, options.path, options.steps, options.every)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
