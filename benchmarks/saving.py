# SPDX-License-Identifier: Apache-2.0
"""Steps beside a save in flight, and the time until `fpipe.begin_save` returns.

    python -m benchmarks.saving [WIDTH]

A model of twelve square layers, 201 MB in float32, in one process that computes with one thread; on two cores, the
other is left to the thread that writes. Rounds alternate: steps alone, then a save begins, and as many steps run as fit
into its writing. The figure is the median of the ratios of the rounds, each of two medians. It depends on the disk, and
on whatever else the machine does. `begin_save` copies the values before it returns; torch of that row is a copy
of the same tensors by `torch.Tensor.clone`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Final

import torch
from torch import nn

import fpipe
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import most, row
from schedules import one_f_one_b

WIDTH: Final = "2048"
LAYERS, ROWS, ROUNDS, ALONE = 12, 64, rounds(3), rounds(3)


def time_once(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = perf_counter()
    call()
    return perf_counter() - start


def measure(width: int, home: Path) -> tuple[float, float, float, float]:
    """Return the ratio of steps beside a save to steps alone; then seconds: until it returns, of a copy, of writing."""
    model, x = nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)]), torch.randn(ROWS, width)
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=one_f_one_b(2, 4))
    params, buffers = pipe.init(model)
    step = fpipe.value_and_grad(pipe)
    ratios, returned, copied, written = list[float](), list[float](), list[float](), list[float]()
    for number in range(1, ROUNDS + 1):
        alone = median(time_once(lambda: step(params, buffers, (x,))) for _ in range(ALONE))
        copied.append(time_once(lambda: [one.detach().clone() for one in params.values()]))
        start = perf_counter()
        finish = fpipe.begin_save(pipe, home, params=params, step=number)
        returned.append(perf_counter() - start)
        last, beside = home / f"save-{number}" / "model-00001-of-00001.json", list[float]()
        while not last.exists() or not beside:  # the file that is written last
            beside.append(time_once(lambda: step(params, buffers, (x,))))
        written.append(perf_counter() - start)
        finish()
        ratios.append(median(beside[:-1] or beside) / alone)  # during the last one, the writing ended
    return median(ratios), median(returned), median(copied), median(written)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        ratio, returned, copied, written = measure(int((sys.argv[1:] or [WIDTH])[0]), Path(folder) / "run")
    print(row("steps beside a save over steps alone", "ratio", ratio, None, most(2)))
    print(row("until a save of 201 MB returns; a copy", "s", returned, copied, most(5, of="ratio")))
    print(row("until it is written, beside steps", "s", written, None, most(10)))


if __name__ == "__main__":
    main()
