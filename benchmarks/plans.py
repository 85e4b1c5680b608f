# SPDX-License-Identifier: Apache-2.0
"""How good plans are: measured steps of plans for random uneven models, over the best that hands can choose.

    python -m benchmarks.plans              # 100 models
    python -m benchmarks.plans 10           # the first 10 of them
    python -m benchmarks.plans 10 20        # those from number 10 on, below 20
    python -m benchmarks.plans --scale 3    # sleeps that last three times as long, on a machine that is busy

Each model has 6 to 12 layers, whose forward, input half and weight half sleep for random times, for 4 ranks over Gloo
and 8 microbatches. First the ranks profile every model together. Then `fpipe.plan` chooses from the profile, and so do
hands: of every family of schedules, the best of all cuts, as simulated. Then the pipelines of the plan and of the best
families run in turns, and the fastest of those by hand is the one that counts. A step lasts from the first start on any
rank to the last end. The shortest of four counts: other work on the machine can only add to what sleeps take.

Hands do not take schedules that hold every parameter twice, and nothing limits the memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
import schedules
from benchmarks.common import ranks
from benchmarks.common.rows import most, row
from benchmarks.common.sleeping import WIDTH, Times, draw_layers, sleeping_model, weights_may_rest
from benchmarks.prediction import FAMILIES, hurry
from schedules import Schedule, SizeError, simulate

RANKS, MICROBATCHES, MODELS, TOGETHER, COMPARED, TURNS = 4, 8, 100, 10, 3, 4
LAYERS, TIMES = (6, 12), (0.001, 0.006)
PROFILING, PLANNING = 0.0, 60.0  # seconds at most; every action is timed some times in any case


class Choice(NamedTuple):
    """A way to run a model, and the seconds that its step should take."""

    schedule: Schedule
    cuts: tuple[str, ...]
    predicted: float


def square(outputs: Tensor) -> Tensor:
    """Return a loss whose cotangent depends on the outputs."""
    return (outputs**2).mean()


def example() -> tuple[Tensor]:
    """Return a batch."""
    return (torch.ones(MICROBATCHES, WIDTH),)


def by_hand(profile: fpipe.Profile) -> list[Choice]:
    """Return the best cuts of every family, the fastest first, as simulated."""
    found = [_best_cuts(profile, how) for how in families()]
    ordered = sorted((one for one in found if one is not None), key=lambda one: one.predicted)
    return list({round(one.predicted, 9): one for one in ordered}.values())  # some families are equal at this size


def families() -> Iterator[Schedule]:
    """Yield a schedule of each family that takes these sizes, and holds each parameter once."""
    for name in FAMILIES:
        try:
            how = getattr(schedules, name)(ranks=RANKS, microbatches=MICROBATCHES)
        except SizeError:
            continue
        if all(len(how.placement.replicas(s)) == 1 for s in range(how.stages)):
            yield how


def _best_cuts(profile: fpipe.Profile, how: Schedule) -> Choice | None:
    """Return the fastest cuts; those whose busiest rank works longer than the fastest step need no simulation."""
    best: tuple[float, tuple[int, ...]] = inf, ()
    every = combinations(range(1, len(profile.blocks)), how.stages - 1)
    for work, cuts in sorted((_busiest(profile, how, cuts), cuts) for cuts in every):
        if work >= best[0]:
            break
        best = min(best, (simulate(how, profile.costs(cuts)).makespan, cuts))
    seconds, cuts = best
    names = tuple(profile.blocks[cut].name for cut in cuts)
    return Choice(how, names, seconds + profile.step) if cuts else None


def _busiest(profile: fpipe.Profile, how: Schedule, cuts: Sequence[int]) -> float:
    """Return the least seconds that the busiest rank works."""
    ends = [0, *cuts, len(profile.blocks)]
    whole = [sum(one.F + min(one.B, one.I + one.W) for one in profile.times[a:b]) for a, b in pairwise(ends)]
    return how.microbatches * max(sum(whole[s] for s in how.placement.stages_on(rank)) for rank in range(how.ranks))


def choose(folder: Path, scale: float, seed: int) -> float:
    """Write the plan for a model that was profiled, and the best choices by hand; return the seconds of planning."""
    profile = fpipe.Profile.read(folder / f"{seed}.profile.json")
    begin = time.perf_counter()
    plan = fpipe.plan(
        sleeping_model(layers_of(scale, seed)),
        example(),
        loss=square,
        ranks=RANKS,
        microbatches=MICROBATCHES,
        profile=profile,
        seconds=PLANNING,
    )
    took = time.perf_counter() - begin
    plan.save(folder / f"{seed}.plan.json")
    hands = by_hand(profile)[:COMPARED]
    fields = [{"family": one.schedule.factory.__name__, "cuts": one.cuts, "predicted": one.predicted} for one in hands]
    (folder / f"{seed}.hands.json").write_text(json.dumps(fields))
    return took


def layers_of(scale: float, seed: int) -> list[Times]:
    """Return the times of the layers of a model."""
    return draw_layers(seed, *LAYERS, *[scale * seconds for seconds in TIMES])


def choices(folder: Path, seed: int) -> dict[str, Choice]:
    """Return the plan, and the choices by hand, by name."""
    plan = fpipe.Plan.read(folder / f"{seed}.plan.json")
    found = {"plan": Choice(plan.schedule, plan.cuts, plan.predicted.seconds)}
    for one in json.loads((folder / f"{seed}.hands.json").read_text()):
        how = getattr(schedules, one["family"])(ranks=RANKS, microbatches=MICROBATCHES)
        found[one["family"]] = Choice(how, tuple(one["cuts"]), one["predicted"])
    return found


def profiling_rank(folder: Path, scale: float, seeds: Sequence[int]) -> None:
    """Run one of the ranks that profile all models."""
    for seed in seeds:
        found = fpipe.profile(
            sleeping_model(layers_of(scale, seed)), example(), loss=square, microbatches=MICROBATCHES, seconds=PROFILING
        )
        if dist.get_rank() == 0:
            found.save(folder / f"{seed}.profile.json")
    ranks.report(None)


def measuring_rank(folder: Path, scale: float, seeds: Sequence[int]) -> None:
    """Run one of the ranks that measure plans and choices by hand, and report seconds by model and choice."""
    ranks.report({seed: measured(choices(folder, seed), layers_of(scale, seed)) for seed in seeds})


def measured(found: dict[str, Choice], layers: Sequence[Times]) -> dict[str, float]:
    """Return the shortest seconds of a step of each choice, run in turns."""
    model, batch = sleeping_model(layers), example()
    steps, times = {}, {name: list[float]() for name in found}
    for name, (how, cuts, _) in found.items():
        pipe = fpipe.pipeline(model, example=batch, loss=square, schedule=how, cuts=cuts)
        steps[name] = fpipe.value_and_grad(pipe), pipe.init(model)
    gc.collect()
    for turn in range(1 + TURNS):
        for name, (step, state) in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step(*state, batch)
            times[name] += [ranks.makespan(start, time.perf_counter())] * bool(turn)
    return {name: min(taken) for name, taken in times.items()}


def rank(task: str, folder: str, scale: str, *numbers: str) -> None:
    """Run one rank."""
    hurry()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with weights_may_rest():
        {"profiles": profiling_rank, "steps": measuring_rank}[task](
            Path(folder), float(scale), [int(one) for one in numbers]
        )
    dist.destroy_process_group()


class Result(NamedTuple):
    """What was chosen for a model, and the measured seconds of a step, by name; and the seconds that planning took."""

    found: dict[str, Choice]
    seconds: dict[str, float]
    planning: float

    @property
    def lost(self) -> float:
        """The measured step of the plan over the best of those by hand."""
        return self.seconds["plan"] / min(taken for name, taken in self.seconds.items() if name != "plan")

    @property
    def off(self) -> dict[str, float]:
        """Measured over predicted, by name."""
        return {name: taken / self.found[name].predicted for name, taken in self.seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=int, default=[MODELS], help="their number, or the first and the end")
    parser.add_argument("--scale", type=float, default=1.0, help="a factor of all sleeps")
    options = parser.parse_args()
    seeds, results = [*range(*options.models)], dict[int, Result]()
    for start in range(0, len(seeds), TOGETHER):
        results |= results_of(options.scale, seeds[start : start + TOGETHER])
        print(f"{len(results)} models of {len(seeds)}; {summary(results)}", file=sys.stderr, flush=True)
    print_results(results)


def results_of(scale: float, seeds: Sequence[int]) -> dict[int, Result]:
    """Profile these models, choose, and measure."""
    with TemporaryDirectory() as path, weights_may_rest():
        folder = Path(path)
        ranks.start("benchmarks.plans", RANKS, "profiles", folder, scale, *seeds)
        planning = {seed: choose(folder, scale, seed) for seed in seeds}
        (report, *_) = ranks.start("benchmarks.plans", RANKS, "steps", folder, scale, *seeds)
        return {seed: Result(choices(folder, seed), report[str(seed)], planning[seed]) for seed in seeds}


def summary(results: dict[int, Result]) -> str:
    """Return the figures in a line."""
    lost = [one.lost for one in results.values()]
    off = [ratio for one in results.values() for ratio in one.off.values()]
    near = sum(1 / 1.03 <= ratio <= 1.03 for ratio in off) / len(off)
    return (
        f"plan / best by hand: median {statistics.median(lost):.3f}, largest {max(lost):.3f}; measured / predicted: "
        f"median {statistics.median(off):.3f}, {min(off):.3f} to {max(off):.3f}, {near:.0%} within 3 %"
    )


def print_results(results: dict[int, Result]) -> None:
    """Print a row for each figure, and the models one by one."""
    lost = [one.lost for one in results.values()]
    off = [ratio for one in results.values() for ratio in one.off.values()]
    of = f"{len(results)} uneven models, sleeping layers, {RANKS} ranks"
    print(row(f"measured step of the plan / of the best by hand, {of}: median", "", statistics.median(lost), None))
    print(row("the same, the largest", "", max(lost), None, most(1.03)))
    print(row(f"measured / predicted step of {len(off)} of their pipelines: median", "", statistics.median(off), None))
    print(row("the same, the largest", "", max(off), None, most(1.03)))
    print(
        row("time to plan from a profile: median", "s", statistics.median(r.planning for r in results.values()), None)
    )
    print(f"\n## Plans of uneven models\n\nIn short, {summary(results)}.")
    print("Measured milliseconds of a step, and in parentheses measured / predicted.\n")
    print("| model | layers | plan | | by hand |\n|---|---|---|---|---|")
    for seed, one in results.items():
        cells = {name: f"{1e3 * taken:.1f} ({one.off[name]:.3f})" for name, taken in one.seconds.items()}
        hands = ", ".join(f"`{name}` {cell}" for name, cell in cells.items() if name != "plan")
        print(
            f"| {seed} | {len(layers_of(1.0, seed))} | {cells['plan']} | `{one.found['plan'].schedule!r}` | {hands} |"
        )


if __name__ == "__main__":
    rank(*sys.argv[1:]) if ranks.inside() else main()
