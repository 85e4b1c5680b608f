# SPDX-License-Identifier: Apache-2.0
"""The memory of four ranks, each holding a quarter of a model that none of them ever builds in full.

    python -m benchmarks.memory                              # all ways to get parameters
    python -m benchmarks.memory safetensors "whole model"    # some

A GPT of 118 million parameters (float32) is built on the meta device and cut into four stages. Every rank is a separate
process over Gloo, and creates its share in one of three ways: from an initializer, from safetensors files, or, for
comparison, from the whole model. Then it runs one step of 1F1B on a small batch. The figures are peaks of resident
memory (VmHWM) up to a point, in MiB beyond what the process had after all imports:

- pipeline: the model is captured and cut, and the ranks are connected; most of this is torch's code for fake tensors;
- share: the rank has its share, which takes its parameters, plus one tensor at a time being read or initialized;
- step: it has run a step. Beyond the parameters, that takes three times their size, when the gradients of the second
  microbatch are added to those of the first, plus activations.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import fpipe
from benchmarks.common import ranks
from benchmarks.common.models import cross_entropy, gpt, starts
from benchmarks.common.rows import row
from schedules import one_f_one_b

RANKS, BLOCKS, WIDTH, HEADS, WORDS, LENGTH = 4, 8, 1024, 16, 8192, 32
MIB = 2**20
WAYS = ("initializer", "safetensors", "whole model")


def made() -> nn.Sequential:
    return gpt(BLOCKS, WIDTH, HEADS, WORDS, LENGTH)


def peak() -> float:
    """Return the peak resident memory of this process in MiB."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def rank(way: str, folder: str) -> None:
    """Run one rank, and report its figures."""
    torch.set_num_threads(1)
    peaks = {"imports": peak()}
    dist.init_process_group("gloo")
    batch = torch.zeros(RANKS, LENGTH, dtype=torch.int64)
    with torch.device("cpu" if way == "whole model" else "meta"):
        model = made()
    cuts = [str(layer) for layer in starts(BLOCKS, RANKS)]
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
    params, buffers = pipe.initialise(seed=0) if way == "initializer" else pipe.init(source(way, folder, model))
    seconds = time.perf_counter() - start
    peaks["share"] = peak()
    fpipe.value_and_grad(pipe)(params, buffers, (batch,), batch)
    peaks["step"] = peak()
    share = sum(value.nbytes for value in params.values()) / MIB
    over = {name: value - peaks["imports"] for name, value in peaks.items() if name != "imports"}
    ranks.report({"holds": share, **over, "seconds": seconds})
    dist.destroy_process_group()


def source(way: str, folder: str, model: nn.Module) -> nn.Module | Mapping[str, Tensor]:
    """Return where to read the parameters from."""
    return fpipe.safetensors(Path(folder) / "model") if way == "safetensors" else model


def save(folder: str) -> None:
    """Write a checkpoint in two files."""
    torch.manual_seed(0)
    values = list(made().state_dict().items())
    (Path(folder) / "model").mkdir()
    for k in (0, 1):
        save_file(dict(values[k::2]), Path(folder) / "model" / f"{k}.safetensors")


def main() -> None:
    with TemporaryDirectory() as folder:
        save(folder)
        found = {way: ranks.start_fresh("benchmarks.memory", RANKS, way, folder) for way in sys.argv[1:] or WAYS}
    with torch.device("meta"):
        whole = sum(parameter.nbytes for parameter in made().parameters()) / MIB
    for way, reports in found.items():
        most = ranks.maxima(reports)["step"]
        print(row(f"peak memory of a rank in a step, over imports, GPT of {whole:.0f} MiB, {way}", "MiB", most, None))
    print(f"\n## Memory of {RANKS} ranks\n\nGPT of {whole:.0f} MiB; peaks in MiB, over imports.\n")
    columns = ("holds", "pipeline", "share", "step", "seconds")
    print(f"| parameters from | rank | {' | '.join(columns)} |\n|---|---|---|---|---|---|---|")
    for way, reports in found.items():
        for k, report in enumerate(reports):
            cells = " | ".join(f"{report[column]:.0f}" for column in columns[:-1])
            print(f"| {way} | {k} | {cells} | {report['seconds']:.1f} |")


if __name__ == "__main__":
    rank(*sys.argv[1:]) if ranks.inside() else main()
