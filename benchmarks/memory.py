# SPDX-License-Identifier: Apache-2.0
"""Memory of four ranks that hold a quarter each of a model that none of them ever builds.

    python benchmarks/memory.py

A GPT of 118 million parameters (float32) is built on meta and cut into four stages. Every rank is a process of its own,
over Gloo, and makes its share in one of three ways: from an initialiser, from safetensors files, or, to compare, out of
the whole model. Then it runs one step of 1F1B on a small batch. The figures are peaks of resident memory (VmHWM) up to
a point, in MiB over what the process had after all imports:

- pipeline: the model is captured and cut, and the ranks are connected; most of this is torch's code for fake tensors;
- made: the rank has its share, which takes its parameters, and one tensor at a time that is read or initialised;
- step: it has run a step. On top of the parameters that takes three times their size, when the gradients of the second
  microbatch are added to those of the first, and activations.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path

sys.path.remove(str(Path(__file__).parent))  # its schedules.py is a benchmark, not the package

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import fpipe
from schedules import one_f_one_b

RANKS, BLOCKS, WIDTH, HEADS, WORDS, LENGTH = 4, 8, 1024, 16, 8192, 32
MIB = 2**20
WAYS = ("initialiser", "safetensors", "whole model")


class Block(nn.Module):
    """Attention and a feed-forward part, both residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add both parts to `x`."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feed(x)


class GPT(nn.Module):
    """A transformer; its head is a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def peak() -> float:
    """The most resident memory that this process has had, in MiB."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rank(way: str, folder: str) -> None:
    """What one rank does; writes its figures into `folder`."""
    torch.set_num_threads(1)
    peaks = {"imports": peak()}
    dist.init_process_group("gloo")
    batch = torch.zeros(RANKS, LENGTH, dtype=torch.int64)
    with torch.device("cpu" if way == "whole model" else "meta"):
        model = GPT()
    cuts = [f"blocks.{BLOCKS * k // RANKS}" for k in range(1, RANKS)]
    pipe = fpipe.pipeline(
        model,
        example=(batch,),
        targets=batch,
        loss=cross_entropy,
        schedule=one_f_one_b(ranks=RANKS, microbatches=RANKS),
        cuts=cuts,
    )
    peaks["pipeline"] = peak()
    start = time.perf_counter()
    params, buffers = pipe.initialise(seed=0) if way == "initialiser" else pipe.init(source(way, folder, model))
    seconds = time.perf_counter() - start
    peaks["share"] = peak()
    fpipe.value_and_grad(pipe)(params, buffers, (batch,), batch)
    peaks["step"] = peak()
    share = sum(value.nbytes for value in params.values()) / MIB
    found = {"rank": dist.get_rank(), "share": share, "seconds": seconds, "peaks": peaks}
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def source(way: str, folder: str, model: nn.Module) -> nn.Module | Mapping[str, Tensor]:
    """Where parameters are read from."""
    return fpipe.safetensors(Path(folder) / "model") if way == "safetensors" else model


def save(folder: str) -> None:
    """A checkpoint in two files."""
    torch.manual_seed(0)
    values = list(GPT().state_dict().items())
    (Path(folder) / "model").mkdir()
    for k in (0, 1):
        save_file(dict(values[k::2]), Path(folder) / "model" / f"{k}.safetensors")


def run(folder: str, *commands: str) -> None:
    """Run this file in other processes: one, or all ranks."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    launch = launch if commands[0] == "rank" else []
    subprocess.run([sys.executable, *launch, __file__, *commands, folder], check=True, env=ENVIRONMENT)


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
COMMANDS: dict[str, Callable[..., None]] = {"rank": rank, "save": save}


def table(folder: str) -> None:
    """Run all ways and print what was measured."""
    with torch.device("meta"):
        whole = sum(parameter.nbytes for parameter in GPT().parameters()) / MIB
    print(f"GPT of {whole:.0f} MiB on {RANKS} ranks; torch {torch.__version__}, {date.today()}\n")
    columns = ("share", "imports", "pipeline", "made", "of share", "step", "of share", "seconds")
    print(f"{'MiB':<14}{'rank':>5}" + "".join(f"{column:>10}" for column in columns))
    for way in WAYS:
        run(folder, "rank", way)
        for k in range(RANKS):
            found = json.loads((Path(folder) / f"{k}.json").read_text())
            base, share, peaks = found["peaks"]["imports"], found["share"], found["peaks"]
            over = {name: value - base for name, value in peaks.items()}
            cells = f"{share:>10.0f}{base:>10.0f}{over['pipeline']:>10.0f}"
            cells += "".join(f"{over[name]:>10.0f}{over[name] / share:>10.2f}" for name in ("share", "step"))
            print(f"{way if not k else '':<14}{k:>5}{cells}{found['seconds']:>10.1f}")


def main() -> None:
    if len(sys.argv) > 1:
        COMMANDS[sys.argv[1]](*sys.argv[2:])
        return
    with tempfile.TemporaryDirectory() as folder:
        run(folder, "save")
        table(folder)


if __name__ == "__main__":
    main()
