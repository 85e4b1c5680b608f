# SPDX-License-Identifier: Apache-2.0
"""Bound every plan from below: no cuts, no placement and no order of a model on so many ranks take less time.

`schedules.bound` is about given stages. Here the stages are free, too, so only what holds for all of them counts: each
block runs for every microbatch on some rank, and blocks run one after the other.

Each bound is proved in its function's docstring. Recomputation only adds work, but a checkpointed forward may end
earlier than another. Costs are those of the profile: an action takes a fixed time, and the sum over its blocks. What a
step takes outside of its actions comes on top of each bound. If microbatches are cut into slices, each slice takes its
part of all times, and the first one is the first that goes forward, and the last that comes back.

Runs when a plan is made.
"""

from __future__ import annotations

from torch import Tensor

from fpipe.planning.candidates import PlanProblem
from fpipe.planning.chain import bottleneck
from fpipe.planning.profile import Profile
from schedules import Bound
from schedules.analysis.bounds.rough import Reason


def bound_plans(problem: PlanProblem, *, split: bool, single: bool, copies: int = 1, recomputed: bool = True) -> Bound:
    """Return a lower bound on the seconds of a step, of every plan.

    - `split`: true if backwards may be split.
    - `single`: true if every rank holds a single stage; then a bound may not hold for plans with more.
    - `copies`: the most ranks that hold a stage: two in a bidirectional schedule, which share its microbatches.
    - `recomputed`: true if stages may be recomputed.
    """
    profile, ranks, microbatches = problem.profile, problem.ranks, problem.microbatches
    times = _Times(profile, split, recomputed)
    parts = [
        _bound_work(times, ranks, microbatches, copies),
        _bound_chain(times, ranks, copies),
        _bound_block(times, -(-microbatches // copies), split),
        *([_bound_stages(times, ranks, microbatches, split)] if single and copies == 1 else []),
    ]
    step = f", and a step {profile.step:.6g} s besides its actions" if profile.step else ""
    whole = [Reason(part.makespan + profile.step, part.because + step) for part in parts]
    return Bound(tuple(sorted(whole, key=lambda part: -part.makespan)))


class _Times:
    """The least times of the first k blocks, and what is fixed.

    `forward` is that of a forward that others wait for, `input_half` likewise, and `work` that of all passes. Of these,
    the first slice takes the part `first`, and the longest one `longest`.
    """

    def __init__(self, profile: Profile, split: bool, recomputed: bool) -> None:
        sums, fixed = profile.ranges.sums, profile.fixed
        fastest = min((factor for _, factor in profile.link.slow), default=1.0)
        self.first, self.longest = profile.parts[0], max(profile.parts)
        self.latency = profile.link.latency * min(1.0, fastest)
        self.forward = _least(sums["F"], sums["C"]) if recomputed else sums["F"]
        whole = sums["B"]
        halves = sums["I"] + sums["W"]
        self.backward = _least(whole, halves) if split else whole
        self.work = sums["F"] + self.backward
        self.input_half = _least(whole, sums["I"]) if split else whole
        self.fixed_forward = min(fixed.F, fixed.C) if recomputed else fixed.F
        self.fixed = fixed.F + (min(fixed.B, fixed.I + fixed.W) if split else fixed.B)
        self.fixed_input = min(fixed.B, fixed.I) if split else fixed.B


def _least(*sums: Tensor) -> Tensor:
    """Return the sums in which every block takes the least of its times."""
    steps = [one.diff() for one in sums]
    total = sums[0].new_zeros(len(sums[0]))
    total[1:] = steps[0].minimum(steps[1]).cumsum(0)
    return total


def _bound_work(times: _Times, ranks: int, microbatches: int, copies: int) -> Reason:
    """Return the mean over ranks of the least work and the least wait.

    Proof. Every block makes all its passes for every microbatch on some rank. Every rank has at least one stage, and
    `copies` ranks at most have the same one, so there are `ranks / copies` stages at least, whose passes take the fixed
    times. Order the ranks by the first block that each holds. The k-th of them, counting from 0, begins with block
    `k // copies` or a later one, so it waits for the forward of all blocks before. The sum of waits and work over all
    ranks is at most `ranks` times the makespan.
    """
    work = microbatches * (float(times.work[-1]) + -(-ranks // copies) * times.fixed)
    wait = times.first * sum(float(times.forward[min(k // copies, len(times.forward) - 1)]) for k in range(ranks))
    text = f"{ranks} ranks share {work:.6g} s of work, and wait {wait:.6g} s for their first inputs"
    return Reason((work + wait) / ranks, text)


def _bound_chain(times: _Times, ranks: int, copies: int) -> Reason:
    """Return the time of one microbatch alone, or its longest slice: every block forward, and back through all of them.

    Proof. Each pass needs the one before. With at least `ranks / copies` stages, there are as many fixed times. If each
    stage is on one rank, the microbatch visits all ranks, with a transfer between any two, forward and back; the
    fastest link is the least that it takes.
    """
    blocks = times.longest * float(times.forward[-1] + times.input_half[-1])
    fixed = times.longest * -(-ranks // copies) * (times.fixed_forward + times.fixed_input)
    transfers = 2 * (ranks - 1) * times.latency if copies == 1 else 0.0
    text = f"one microbatch takes {blocks + fixed:.6g} s from end to end, and its transfers {transfers:.6g} s"
    return Reason(blocks + fixed + transfers, text)


def _bound_block(times: _Times, microbatches: int, split: bool) -> Reason:
    """Return the time until a block has its first input, plus that of all its passes, plus that of what must follow.

    Proof. A block is on one rank, which makes its passes one after the other; or a rank makes those of so many
    `microbatches`, which is the mean over the ranks that hold the block. The first waits for the forward of all
    blocks before it; after its last backward, the cotangent goes back through them, unless the last pass is a half
    that nothing waits for.
    """
    tail = times.forward.new_zeros(()) if split else times.first * times.backward
    passes, wait = microbatches * (times.work.diff() + times.fixed), times.first * times.forward
    total = wait[:-1] + passes + (tail if split else tail[:-1])
    k = int(total.argmax())
    text = f"block {k} takes {float(passes[k]):.6g} s, after {float(wait[k]):.6g} s until its first input"
    return Reason(float(total[k]), text)


def _bound_stages(times: _Times, ranks: int, microbatches: int, split: bool) -> Reason:
    """Return the least over all cuts of the largest over ranks of wait, work, and what must follow.

    Proof. With a single stage per rank, the stage that begins with block a waits for the forward of all blocks before
    it; then come its passes, and after the last backward those of the blocks before it, unless it is a half that
    nothing waits for. All of that depends on the stage alone, so the bottleneck partition finds the least.
    """
    work = times.work[None, :] - times.work[:, None]
    cost = times.first * times.forward[:, None] + microbatches * (work + times.fixed)
    cost = cost if split else cost + times.first * times.backward[:, None]
    text = "for any cuts, a rank's wait for its first input and its work take that long"
    return Reason(bottleneck(cost, ranks), text)
