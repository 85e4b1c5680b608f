# SPDX-License-Identifier: Apache-2.0
"""The CPU time to build a pipeline, and when a recorded one has paid for its build.

    python -m benchmarks.building

A Hugging Face Llama of 8 layers, 4 stages in one process, one thread; the least of several turns. Recorded stages
(the default), and those of ZB-H1, which splits backwards, beside stages that autograd differentiates. Then the steps
after which recorded stages have saved what they cost to build.
"""

from __future__ import annotations

from typing import Any

import torch

import fpipe
from benchmarks.common.rows import most, row
from benchmarks.common.turns import seconds, without_collection
from benchmarks.llama import LENGTH, MICROBATCHES, ROWS, WORDS, llama
from schedules import Schedule, one_f_one_b, zb_h1

RANKS, TURNS, STEPS = 4, 7, 3


def measure(model: Any, ids: torch.Tensor, how: Schedule, backward: str) -> tuple[float, float]:
    """Return the seconds of a build, and the least of those of a step."""
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    start = seconds()
    pipe = fpipe.pipeline(
        model, example=batch, loss=lambda out: out.loss, schedule=how, gradients=fpipe.Gradients(backward=backward)
    )
    built = seconds() - start
    step, state, times = fpipe.value_and_grad(pipe), pipe.init(model), list[float]()
    for _ in range(STEPS):
        start = seconds()
        step(*state, batch)
        times.append(seconds() - start)
    return built, min(times)


def main() -> None:
    torch.set_num_threads(1)
    model, ids = llama(), torch.randint(WORDS, (ROWS, LENGTH))
    whole, halves = one_f_one_b(RANKS, MICROBATCHES), zb_h1(RANKS, MICROBATCHES)
    sides = {"autograd": (whole, "autograd"), "graph": (whole, "graph"), "split": (halves, "graph")}
    found = dict[str, list[tuple[float, float]]]()
    with without_collection():
        for _ in range(TURNS):
            for name, how in sides.items():
                found.setdefault(name, []).append(measure(model, ids, *how))
    least = {name: tuple(map(min, zip(*times, strict=True))) for name, times in found.items()}
    plain, step = least["autograd"]
    for name, what in (("graph", "recorded stages"), ("split", "recorded stages, ZB-H1")):
        title = f"build of a Llama of 8 layers, {what}, beside autograd stages"
        print(row(title, "s", least[name][0], plain, most(1.3, of="ratio")))
    built, faster = least["graph"]
    print(f"\nRecorded stages have paid for their build after {(built - plain) / max(step - faster, 1e-9):.0f} steps.")


if __name__ == "__main__":
    main()
