# SPDX-License-Identifier: Apache-2.0
"""One microbatch alone: when each of its passes can start at the earliest, and how long the step lasts after it."""

from __future__ import annotations

from dataclasses import dataclass

from schedules.analysis.bounds.problem import Problem


@dataclass(frozen=True)
class ChainTimes:
    """Per stage, the time before the first `forward` and `input_half`, and the time `after` them."""

    forward: tuple[float, ...]
    input_half: tuple[float, ...]
    after_forward: tuple[float, ...]
    after_input_half: tuple[float, ...]

    @property
    def longest(self) -> float:
        """The time of the longest path through one microbatch, from the first forward to the last weight half."""
        return max((start + after for start, after in zip(self.forward, self.after_forward, strict=True)), default=0.0)


def time_chain(problem: Problem) -> ChainTimes:
    """Return the earliest starts of the passes of one microbatch, and the least time from each start to the end.

    A forward needs the values of the stages that feed it; an input half needs its own forward, and the cotangents of
    the stages that use its values; a weight half needs its input half. Each needs the transfer of what comes from
    another rank. No order of a rank changes that, so every path of passes and transfers is a bound.
    """
    stages = problem.stages
    forward, half = [0.0] * len(stages), [0.0] * len(stages)
    for n, one in enumerate(stages):
        arrivals = (forward[m] + stages[m].forward + transfer for m, transfer in one.fed_by)
        forward[n] = max(arrivals, default=0.0)
    for n in reversed(range(len(stages))):
        arrivals = (half[m] + stages[m].input_half + transfer for m, transfer in stages[n].pulled_by)
        half[n] = max(forward[n] + stages[n].forward, *arrivals, 0.0)
    after_forward, after_half = [0.0] * len(stages), [0.0] * len(stages)
    for n, one in enumerate(stages):
        waits = (transfer + after_half[m] for m, transfer in one.pulls)
        after_half[n] = one.input_half + max(one.weight_half, *waits, 0.0)
    for n in reversed(range(len(stages))):
        waits = (transfer + after_forward[m] for m, transfer in stages[n].feeds)
        after_forward[n] = stages[n].forward + max(after_half[n], *waits, 0.0)
    return ChainTimes(tuple(forward), tuple(half), tuple(after_forward), tuple(after_half))
