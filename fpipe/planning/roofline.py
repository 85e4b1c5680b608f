# SPDX-License-Identifier: Apache-2.0
"""Estimate the times of actions without running them: count operations and bytes on fake tensors.

Problem. A model that does not fit on the device at hand can't be timed there.

Idea. An operator takes as long as its arithmetic or its memory traffic does, whichever is longer, plus the time to
launch it (the roofline model: Williams, Waterman and Patterson, 2009). FLOPs are those that `torch.utils.flop_counter`
counts; traffic is that of all arguments and results. The device's peaks are given, or measured with three operators.

Limits. Operators are assumed to run one after the other and to reach the peaks, caches are ignored, and attention
counts as if it were not causal. An estimate is good for comparing stages of one model rather than for absolute times.

Runs when a model is profiled that can't be run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from sys import float_info
from time import perf_counter
from typing import Final

import torch
from torch import Tensor

from fpipe.cutting.traffic import OperatorCosts
from fpipe.errors import InputError
from fpipe.pipelines.footprint import FakeArguments, make_arrivals
from fpipe.planning.ranges import ActionTimes
from fpipe.tensors.spec import OptionalSpec
from schedules.arguments import is_number

LONG_ENOUGH: Final = 5e-3
LARGEST: Final = 8192
VECTOR_BYTES: Final = 2**26


@dataclass(frozen=True)
class Roofline:
    """The peaks of a device: FLOPs per second, bytes of memory traffic per second, and seconds to launch an operator.

    Raise `InputError` unless the first two are above 0 and the last is finite and not negative.

    >>> Roofline(flops=1e12, bandwidth=1e11).seconds(flops=2e9, traffic=1e8)
    0.002
    """

    flops: float
    bandwidth: float
    overhead: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "overhead"):
            got, least = getattr(self, name), "at least 0" if name == "overhead" else "above 0"
            if not is_number(got) or not 0 <= got <= float_info.max or (got == 0 and name != "overhead"):
                raise InputError(f"Roofline: got {name}={got!r}, expected a finite number {least}. Correct {name}.")

    def seconds(self, flops: float, traffic: float) -> float:
        """Return the time of an operator with this many FLOPs that reads and writes this many bytes."""
        return self.overhead + max(flops / self.flops, traffic / self.bandwidth)

    def __str__(self) -> str:
        return (
            f"a roofline of {self.flops:.3g} FLOP/s, {self.bandwidth:.3g} bytes/s, {self.overhead:.2g} s per operator"
        )


def calibrate(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Measure the peaks of a device, for matrices of `dtype`; takes a fraction of a second."""
    one = torch.ones(1, dtype=dtype, device=device)
    overhead = _seconds(device, partial(torch.add, one, one))
    size = 128
    while True:
        size *= 2
        a = torch.ones(size, size, dtype=dtype, device=device)
        took = _seconds(device, partial(torch.mm, a, a))
        if took > LONG_ENOUGH or size >= LARGEST:
            break
    first, second = torch.ones(2, VECTOR_BYTES // dtype.itemsize, dtype=dtype, device=device)
    copied = _seconds(device, partial(first.copy_, second))
    return Roofline(2 * size**3 / took, 2 * VECTOR_BYTES / copied, overhead)


def _seconds(device: torch.device, work: Callable[[], object], rounds: int = 5) -> float:
    """Return the shortest time of a call, the first one not counted."""
    times = []
    for _ in range(1 + rounds):
        _synchronize(device)
        start = perf_counter()
        work()
        _synchronize(device)
        times.append(perf_counter() - start)
    return min(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def estimate_times(given: FakeArguments, roofline: Roofline) -> ActionTimes:
    """Return the estimated times of the actions of a stage, whose arguments are fake tensors."""
    stage, params, buffers, feed = given
    count = OperatorCosts(roofline.seconds).measure

    def cotangents() -> tuple[Tensor, ...]:
        return make_arrivals(stage.pulled_by)

    inputs = feed(0) + make_arrivals(stage.gets)
    sums = tuple([(spec.whole if isinstance(spec, OptionalSpec) else spec).allocate() for spec in stage.totals])
    F, (_, _, residuals) = count(lambda: stage.forward(params, buffers, inputs, 0))
    arriving = cotangents()
    B, _ = count(lambda: stage.backward(residuals, arriving, sums))
    _, _, residuals = stage.forward(params, buffers, inputs, 0)
    I, (_, deferred) = count(lambda: stage.backward_input(residuals, arriving))  # noqa: E741 - the action's name
    W, _ = count(lambda: stage.backward_weight(deferred, sums))
    C, _ = count(lambda: stage.evaluate(params, buffers, inputs, 0))
    return ActionTimes(F, B, I, W, C)
