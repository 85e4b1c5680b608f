# SPDX-License-Identifier: Apache-2.0
"""The CPU time to build a pipeline, and when a recorded one has paid for its build.

    python -m benchmarks.building

A Hugging Face Llama of 8 layers, 4 stages in one process, one thread; the least of several turns. Recorded stages
(the default), and those of ZB-H1, which splits backwards, beside stages that autograd differentiates. Then the steps
after which recorded stages have saved what they cost to build.

Then Llamas of few and of many layers, all alike: the processor time of the build, and what the first step takes more
than the next one, over the time of one eager forward and backward on fake tensors of the same shapes; and what the
first step with batches of another length takes more, beside one eager forward of it. The median of three builds with 8
layers, and one with more; a build varies by 30 % between a quiet and a busy machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses import FakeTensorMode

import fpipe
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import most, row
from benchmarks.common.turns import seconds, without_collection
from benchmarks.llama import LENGTH, MICROBATCHES, ROWS, WORDS, llama
from schedules import Schedule, one_f_one_b, zb_h1

COUNTS: Final = {8: rounds(3), 80: 1}
"""How often to start, by the number of layers."""
RANKS, TURNS, STEPS = 4, rounds(3), rounds(3)
SHORT: Final = ROWS // 2
"""The rows of a batch where steps only stand beside builds."""
OTHER: Final = LENGTH - 8
"""The other length."""


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


class Started(NamedTuple):
    """Seconds of the processor.

    - `eager`, `forward`: of a step on fake tensors, and of a forward of another length.
    - `ready`, `length`: to build and begin, and to begin the other length.
    """

    eager: float
    forward: float
    ready: float
    length: float


def start(layers: int) -> Started:
    """Return the seconds of a model of so many layers."""
    with FakeTensorMode():
        fake, given = llama(layers), torch.zeros(SHORT // MICROBATCHES, LENGTH, dtype=torch.int64)
        begin = seconds()
        fake(input_ids=given, labels=given).loss.backward()
        eager = seconds() - begin
        begin = seconds()
        fake(input_ids=given[:, :OTHER], labels=given[:, :OTHER])
        forward = seconds() - begin
    model, ids = llama(layers), torch.randint(WORDS, (SHORT, LENGTH))
    batches: list[dict[str, Any]] = [{"input_ids": one, "labels": one} for one in (ids, ids[:, :OTHER])]
    begin = seconds()
    how = one_f_one_b(RANKS, MICROBATCHES)
    pipe = fpipe.pipeline(model, example=batches[0], loss=lambda out: out.loss, schedule=how)
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    times = []
    for batch in (batches[0], *batches):
        step(*state, batch)
        times.append(seconds() - begin)
        begin = seconds()
    first, again, other = times
    return Started(eager, forward, first - again, other - again)


def layered() -> Iterator[str]:
    """Yield the rows for models of few and of many layers of one kind."""
    beyond, ratios = dict[int, float](), dict[int, float]()
    fewest, most_layers = min(COUNTS), max(COUNTS)
    for layers, starts in COUNTS.items():
        many = [start(layers) for _ in range(starts)]
        eager, forward, ready, length = (statistics.median(some) for some in zip(*many, strict=True))
        beyond[layers], ratios[layers] = ready - eager, ready / eager
        title = f"processor time to build and begin, beside an eager step on fake tensors, {layers} layers"
        yield row(title, "s", ready, eager)
        title = f"a new length; torch: an eager forward of it on fake tensors, {layers} layers"
        yield row(title, "s", length, forward, most(0.1) if layers == fewest else None)
    ends, growth = f"{most_layers} over {fewest} layers", ratios[most_layers] / ratios[fewest]
    yield row(f"to build and begin / an eager step on fake tensors, {ends}", "", growth, None, most(3))
    growth = beyond[most_layers] / beyond[fewest]
    yield row(f"what build and beginning take beyond an eager step, {ends}", "", growth, None)


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
    for line in layered():
        print(line, flush=True)
    built, faster = least["graph"]
    print(f"\nRecorded stages have paid for their build after {(built - plain) / max(step - faster, 1e-9):.0f} steps.")


if __name__ == "__main__":
    main()
