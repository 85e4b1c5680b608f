# SPDX-License-Identifier: Apache-2.0
"""The cost of each front end: to build a pipeline with it, and in every step.

    python -m benchmarks.front_ends

A transformer of 8 layers, once of width 32, where Python dominates, and once of width 128. Four stages in one process
run 4 microbatches, forward and backward; for comparison, a plain loop calls the user's own model and `.backward()`.
One thread, CPU time, medians of several interleaved rounds.
"""

from __future__ import annotations

import datetime
import gc
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fpipe
from schedules import gpipe

LAYERS, STAGES, MICROBATCHES, ROUNDS = 8, 4, 4, 9
WIDTHS = {32: (2, 8), 128: (4, 32)}  # width: rows of a microbatch, positions
loss = nn.functional.mse_loss


def model(width: int) -> nn.Module:
    layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def timed(function: Callable[[], object]) -> float:
    """Return the CPU time of a call in seconds."""
    gc.collect()
    start = time.process_time()
    function()
    return time.process_time() - start


def plain(net: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        net.zero_grad()
        for part in x.chunk(MICROBATCHES):
            (loss(net(part), part) / MICROBATCHES).backward()

    return step


def piped(net: nn.Module, x: Tensor, capture: str) -> Callable[[], object]:
    how = gpipe(ranks=STAGES, microbatches=MICROBATCHES)
    cuts = [str(k * LAYERS // STAGES) for k in range(1, STAGES)]
    pipe = fpipe.pipeline(
        net, example=(x,), targets=x, loss=loss, schedule=how, cuts=cuts, recording=fpipe.Recording(front_end=capture)
    )
    step, state = fpipe.value_and_grad(pipe), pipe.init(net)
    return lambda: step(*state, (x,), x)


def rows(width: int) -> None:
    batch, positions = WIDTHS[width]
    net, x = model(width), torch.randn(batch * MICROBATCHES, positions, width)
    steps: dict[str, Callable[[], object]] = {"plain loop": plain(net, x)}
    built = {}
    for capture in ("trace", "modules", "export", "dynamo", "fx"):
        try:
            built[capture] = timed(lambda: steps.update({capture: piped(net, x, capture)}))  # noqa: B023
        except fpipe.CaptureError as error:
            print(f"| {capture} | {width} | {str(error).split(',')[0]} | |")
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(ROUNDS + 1):
        for name, step in steps.items():
            took = timed(step)
            times[name] += [took] * bool(round_)  # the first one warms up
    least = statistics.median(times["plain loop"])
    for name in steps:
        took, build = statistics.median(times[name]), f"{built[name]:.1f}" if name in built else ""
        print(f"| {name} | {width} | {build} | {took * 1e3:.1f} | {took / least:.3f} |")


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )
    print("| front end | width | building, s | a step, ms | over the plain loop |\n|---|---|---|---|---|")
    for width in WIDTHS:
        rows(width)


if __name__ == "__main__":
    main()
