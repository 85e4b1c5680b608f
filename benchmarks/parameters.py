# SPDX-License-Identifier: Apache-2.0
"""What a step does besides running its stages, by the number of parameters.

    python -m benchmarks.parameters [COUNT ...]

A step checks every parameter, selects those of each stage, and sorts gradients by name. A model of so many parameters
of one element each, in two stages, all ranks in this process, one thread. The figure is the processor time of a step
before and after the program runs, per parameter: with the tensors of the last step, as an optimizer that updates in
place leaves them, and with others. Medians of ten steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from statistics import median
from time import process_time
from typing import Any, Final

import torch
from torch import Tensor, nn

import fpipe
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import most, row
from schedules import one_f_one_b

COUNTS: Final = ("1000", "20000")
STEPS: Final = rounds(10)


class Many(nn.Module):
    """A layer of many parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(1) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled input."""
        return x * torch.cat([*self.scales]).mean()


def measure(count: int) -> Iterator[tuple[str, float]]:
    """Yield the microseconds per parameter that a step takes besides its program."""
    model, x = nn.Sequential(Many(count // 2), Many(count // 2)), torch.ones(8, 4)
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=one_f_one_b(2, 2), cuts=["1"])
    step, (params, buffers), run, inside = fpipe.value_and_grad(pipe), pipe.init(model), pipe.ranks.run, [0.0]

    def timed(*arguments: Any) -> Any:
        start = process_time()
        found = run(*arguments)
        inside.append(process_time() - start)
        return found

    def besides(change: Callable[[Tensor], Tensor]) -> float:
        given = {name: change(p) for name, p in params.items()}
        start = process_time()
        step(given, buffers, (x,))
        return process_time() - start - inside[-1]

    vars(pipe.ranks)["run"] = timed
    besides(lambda p: p)  # the first step compares copies and links the program
    for what, change in (("the same tensors", lambda p: p), ("others", lambda p: p.detach().clone().requires_grad_())):
        yield what, median(besides(change) for _ in range(STEPS)) / count * 1e6


def main() -> None:
    torch.set_num_threads(1)
    for count in map(int, sys.argv[1:] or COUNTS):
        for what, microseconds in measure(count):
            print(
                row(
                    f"a step besides its program, per parameter of {count:,}, {what}", "us", microseconds, None, most(5)
                )
            )


if __name__ == "__main__":
    main()
