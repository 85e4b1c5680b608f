# SPDX-License-Identifier: Apache-2.0
"""Draw a case: a setup, a training loop, and what goes wrong in each of its runs, all of it from one seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from schedules import Schedule
from tests.common.world.setups import Setup, draw_setup

FAULTS = {"raise": 3, "interrupt": 1, "exit": 1, "die": 4, "stop": 2, "nap": 2, "lose": 2, "leave": 1, "disk": 2}
"""Kinds of faults, and how often each is drawn."""
BUILD_FAULTS = {"raise": 1, "interrupt": 1, "exit": 1, "die": 3, "stop": 2, "nap": 1, "lose": 1}
RAISED = ("raise", "interrupt", "exit")
TIMEOUT = 30.0
STEPS = 3
BLOCK, SETUPS = 120, 5
"""So many seeds, one after the other, draw from so many setups."""
APART = 0.01
"""The share of cases in which every rank captures the model itself."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    - `kind`: an exception (`raise`, `interrupt`, `exit`), a death, a long stop, a short one (`nap`), a lost message, a
      script that ends early (`leave`), or a death while files are written (`disk`).
    - `builds`: it strikes while the pipeline is built, instead of later.
    - `rank`, `what`, `count`: it strikes this process at its step number `count` of this sort; a lost message counts
      all messages.
    """

    kind: str
    builds: bool
    rank: int
    what: str
    count: int

    def __str__(self) -> str:
        when = " of the build" if self.builds else ""
        if self.kind == "lose":
            return f"lose message {self.count}{when}"
        return f"{self.kind} on rank {self.rank}, at {self.what} step {self.count}{when}"


@dataclass(frozen=True)
class Case:
    """Everything that was drawn.

    - `is_apart`: every rank captures the model itself, as real processes do; otherwise what one has made serves all.
    - `saves`: how each step is saved: not at all (""), to one path ("save"), to two in turn ("turns"), or in the
      background ("begin"). `damages`: a file of the newest checkpoint is damaged before each restart.
    - `looks`: what else is computed after each step: nothing (""), an evaluation or a prediction.
    - `delay`: the seconds that a message takes, on average. `is_kept`: rank 0 keeps the store.
    - `runs`: the faults of each run of the job but the last, which nothing disturbs.
    """

    seed: int
    setup: Setup
    is_apart: bool
    steps: int
    saves: str
    damages: bool
    looks: str
    is_kept: bool
    delay: float
    runs: tuple[tuple[Fault, ...], ...]

    @property
    def schedule(self) -> Schedule:
        """The schedule of the setup."""
        return self.setup.schedule

    def __str__(self) -> str:
        saves = {"save": ", saved", "turns": ", saved to two paths", "begin": ", saved in the background"}
        faults = "\n".join(f"  faults: {' and '.join(map(str, run)) or 'none'}" for run in self.runs)
        return (
            f"seed {self.seed}: {self.setup}\n"
            f"  {self.steps} steps{saves.get(self.saves, '')}{', damaged' * self.damages}"
            f"{f', {self.looks} after each' * bool(self.looks)}{', captured apart' * self.is_apart}; "
            f"messages take {self.delay:g} s; the store is kept by {'rank 0' if self.is_kept else 'the launcher'}\n"
            f"{faults}"
        )


def draw(seed: int) -> Case:
    """Return the case of a seed; the cases of a block of seeds share a few setups."""
    random = Random(seed)
    setup = draw_setup(Random(f"setup {random.randrange(SETUPS)} of block {seed // BLOCK}"))
    steps = random.choice([1, 1, 2, STEPS])
    runs = tuple(draw_faults(random, setup, steps) for _ in range(random.choice([1, 1, 1, 1, 2, 3])))
    is_saved = random.random() < 0.4 or any(fault.kind == "disk" for run in runs for fault in run)
    return Case(
        seed,
        setup,
        random.random() < APART,
        steps,
        random.choice(["save", "turns", "turns", "begin"]) if is_saved else "",
        random.random() < 0.5,
        random.choice(["", "", "", "evaluation", "prediction"]),
        random.random() < 0.5,
        random.choice([1e-5, 1e-3, 0.03]),
        runs,
    )


def draw_faults(random: Random, setup: Setup, steps: int) -> tuple[Fault, ...]:
    """Return what goes wrong in a run: often one thing, sometimes nothing, or two on different ranks."""
    faults = [draw_fault(random, setup, steps) for _ in range(random.choice([0, 1, 1, 1, 1, 1, 1, 2]))]
    return tuple({fault.rank: fault for fault in faults}.values())


def draw_fault(random: Random, setup: Setup, steps: int) -> Fault:
    """Return one thing that goes wrong."""
    builds = random.random() < 0.15
    kinds = BUILD_FAULTS if builds else FAULTS
    (kind,) = random.choices([*kinds], [*kinds.values()])
    what = random.choice(["any", "any", "compute", "store", "wait"])
    if kind in RAISED:
        what = "compute"
    if builds:
        what = "capture" if kind in ("raise", "exit") else "any"
    count = draw_count(random, kind, setup.schedule, steps)
    if builds:
        count = random.randrange(1 if what == "capture" else 60)
    return Fault(kind, builds, random.randrange(setup.processes), "fsync" if kind == "disk" else what, count)


def draw_count(random: Random, kind: str, how: Schedule, steps: int) -> int:
    """Return at which step a fault strikes: at any of those that there will be, more or less."""
    if kind == "disk":
        return random.randrange(6 * steps)
    computed = 2 * how.stages * how.microbatches // how.ranks * steps
    if kind in RAISED:
        return random.randrange(max(1, computed))
    return random.randrange(random.choice([3, 8 * computed]) + 1)
