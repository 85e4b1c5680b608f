# SPDX-License-Identifier: Apache-2.0
"""The time to load a checkpoint, by the number of its names.

    python -m benchmarks.loading [PARAMETERS ...]

A model of so many parameters of one element each, saved with the state of AdamW: four names for each parameter. One
process holds all ranks. The figure is the processor time of `fpipe.load`, the median of five.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Final

import torch

import fpipe
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import most, row
from benchmarks.parameters import Many
from schedules import gpipe

COUNTS: Final = ("1250", "5000")
NAMES, ROUNDS = 4, rounds(5)


def measure(count: int, path: Path) -> float:
    """Return the seconds to load a checkpoint of so many parameters."""
    model = Many(count)
    pipe = fpipe.pipeline(model, example=(torch.ones(8, 4),), loss=torch.mean, schedule=gpipe(1, 2))
    params, buffers = pipe.init(model)
    init, update = fpipe.optimizer(torch.optim.AdamW, lr=1e-3)
    params, state = update({name: torch.ones_like(p) for name, p in params.items()}, init(params), params)
    fpipe.save(pipe, path, params=params, buffers=buffers, state=state)

    def seconds() -> float:
        start = process_time()
        fpipe.load(pipe, path)
        return process_time() - start

    return median(seconds() for _ in range(ROUNDS))


def main() -> None:
    torch.set_num_threads(1)
    for count in map(int, sys.argv[1:] or COUNTS):
        with TemporaryDirectory() as folder:
            found = measure(count, Path(folder) / "run")
        print(row(f"a checkpoint of {NAMES * count:,} names", "s", found, None, most(1 if count >= 5000 else 0.25)))


if __name__ == "__main__":
    main()
