# SPDX-License-Identifier: Apache-2.0
"""Draw a case: a model, a schedule, a training loop, and one fault, all of it from one seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

import schedules
from schedules import KINDS as ACTIONS
from schedules import Schedule, SizeError, recompute, split_backward
from schedules.files.csv import table
from tests.common.random_models.description import GRAPH_NESTS, NESTS, Again, Description, Leaf, Nest, Part
from tests.common.random_models.kinds import KINDS

FAMILIES = (
    *("gpipe", "one_f_one_b", "one_f_one_b", "eager_1f1b", "kfkb", "zb_h1", "zb_h2", "zb_auto", "zb_v", "v_half"),
    *("v_min", "v_1f1b", "interleaved_1f1b", "breadth_first", "interleaved_zero_bubble", "hanayo"),
    *("dualpipe", "dualpipe_v", "chimera"),
)
FAULTS = {
    "none": 2, "raise": 3, "interrupt": 1, "exit": 1, "die": 4, "stop": 2, "nap": 2, "lose": 2, "leave": 1, "disk": 2,
}  # fmt: skip
"""Kinds of faults, and how often each is drawn."""
WHERE = ("any", "any", "compute", "store", "wait")
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
}
TIMEOUT = 30.0
STEPS = 2
BLOCK, SETUPS = 128, 8
"""So many seeds, one after the other, draw from so many setups."""
APART = 0.02
"""The share of cases in which every rank captures the model itself."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    - `kind`: an exception (`raise`, `interrupt`, `exit`), a death, a long stop, a short one (`nap`), a lost message, a
      script that ends early (`leave`), or a death while files are written (`disk`); or nothing.
    - `rank`, `what`, `count`: it strikes this rank at its step number `count` of this sort after building; a lost
      message counts all messages.
    """

    kind: str
    rank: int
    what: str
    count: int


@dataclass(frozen=True)
class Setup:
    """What one device would train, and the pipeline that does: drawn once for many cases."""

    model: Description = field(repr=False)
    schedule: Schedule
    dtype: torch.dtype
    backward: str
    optimizer: str
    clips: bool
    outputs: bool

    def __str__(self) -> str:
        kinds = sorted({leaf.kind for leaf in self.model.leaves})
        return (
            f"{self.schedule}\n"
            f"  {self.dtype}, backward={self.backward}, {len(self.model.leaves)} layers ({', '.join(kinds)}), "
            f"{self.model.returns}{', sequence' if self.model.sequence else ''}, {self.optimizer}"
            f"{', clipped' * self.clips}{', outputs' * self.outputs}"
        )


@dataclass(frozen=True)
class Case:
    """Everything that was drawn.

    - `is_apart`: every rank captures the model itself, as real processes do; otherwise what one has made serves all.
    - `delay`: the seconds that a message takes, on average. `is_kept`: rank 0 keeps the store.
    """

    seed: int
    setup: Setup
    is_apart: bool
    steps: int
    saves: bool
    is_kept: bool
    delay: float
    fault: Fault

    @property
    def schedule(self) -> Schedule:
        """The schedule of the setup."""
        return self.setup.schedule

    def __str__(self) -> str:
        fault = self.fault
        lost = f"{fault.kind} of message {fault.count}" if fault.kind == "lose" else ""
        where = lost or f"{fault.kind} on rank {fault.rank}, at {fault.what} step {fault.count}"
        return (
            f"seed {self.seed}: {self.setup}\n"
            f"  {self.steps} steps{', saved' * self.saves}{', captured apart' * self.is_apart}; "
            f"messages take {self.delay:g} s; the store is kept by {'rank 0' if self.is_kept else 'the launcher'}\n"
            f"  fault: {'none' if fault.kind == 'none' else where}"
        )


def draw(seed: int) -> Case:
    """Return the case of a seed; the cases of a block of seeds share a few setups."""
    random = Random(seed)
    setup = draw_setup(Random(f"setup {random.randrange(SETUPS)} of block {seed // BLOCK}"))
    kind, steps = random.choices([*FAULTS], [*FAULTS.values()])[0], random.randint(1, STEPS)
    saves = kind == "disk" or random.random() < 0.4
    fault = Fault(
        kind,
        random.randrange(setup.schedule.ranks),
        "fsync" if kind == "disk" else "compute" if kind in ("raise", "interrupt", "exit") else random.choice(WHERE),
        draw_count(random, kind, setup.schedule, steps),
    )
    return Case(
        seed,
        setup,
        random.random() < APART,
        steps,
        saves,
        random.random() < 0.5,
        random.choice([1e-5, 1e-3, 0.03]),
        fault,
    )


def draw_setup(random: Random) -> Setup:
    """Return a model and its pipeline."""
    how = draw_schedule(random)
    backward = random.choice(["autograd", "autograd", "autograd", "graph"])
    dtype = random.choice([torch.float32] * 4 + [torch.float64, torch.bfloat16])
    return Setup(
        draw_model(random, how.stages, dtype, backward),
        how,
        dtype,
        backward,
        random.choice(list(OPTIMIZERS)),
        random.random() < 0.5,
        random.random() < 0.5,
    )


def draw_count(random: Random, kind: str, how: Schedule, steps: int) -> int:
    """Return at which step a fault strikes: at any of those that there will be, more or less."""
    if kind == "disk":
        return random.randrange(6 * steps)
    computed = 2 * how.stages * how.microbatches // how.ranks * steps
    if kind in ("raise", "interrupt", "exit"):
        return random.randrange(max(1, computed))
    return random.randrange(random.choice([3, 8 * computed]) + 1)


def draw_schedule(random: Random) -> Schedule:
    """Return a schedule of a family, perhaps transformed, or one in any correct order."""
    if random.random() < 0.3:
        return draw_order(random)
    while True:
        made = getattr(schedules, random.choice(FAMILIES))
        sizes = {"ranks": random.randint(1, 3), "microbatches": random.randint(1, 4), "memory": random.randint(1, 4)}
        known = {name: sizes.get(name, random.randint(1, 2)) for name in numbers_of(made)}
        try:
            how = made(**known)
            if random.random() < 0.2:
                how = split_backward(how)
            if random.random() < 0.3:
                chosen = [s for s in range(how.stages) if random.random() < 0.5]
                how = recompute(how, tuple(chosen)) if chosen else how
        except SizeError:
            continue
        if how.stages <= 5:
            return how


def numbers_of(made: Any) -> list[str]:
    """Return the names of the numbers that a family takes."""
    return [name for name, one in made.signature.parameters.items() if one.annotation in (int, "int")]


def draw_order(random: Random) -> Schedule:
    """Return a schedule that runs, again and again, any action whose inputs are there; any rank holds any stages."""
    S, M = random.randint(1, 4), random.randint(1, 3)
    homes = [random.randrange(3) for _ in range(S)]
    used = sorted(set(homes))
    rows: list[list[str]] = [[] for _ in used]
    left = {}
    for s in range(S):
        for i in range(M):
            kinds = random.choice(["F", "F", "CR"]) + random.choice(["B", "IW"])
            left[s, i] = list(kinds)
    forwards, backwards = set[tuple[int, int]](), set[tuple[int, int]]()
    ascends = random.random() < 0.7  # else a model that modifies buffers is refused
    while left:
        able = [
            (s, i)
            for (s, i), kinds in left.items()
            if (kinds[0] not in "FC" or s == 0 or (s - 1, i) in forwards)
            and (kinds[0] not in "FC" or i == 0 or not ascends or (s, i - 1) in forwards)
            and (kinds[0] not in "BI" or s == S - 1 or (s + 1, i) in backwards)
        ]
        s, i = random.choice(able)
        kind = left[s, i].pop(0)
        rows[used.index(homes[s])].append(f"{s}{kind}{i}")
        if kind in "FC":
            forwards.add((s, i))
        if kind in "BI":
            backwards.add((s, i))
        if not left[s, i]:
            del left[s, i]
    return table(rows=tuple(",".join(row) for row in rows))


def draw_layout(random: Random, how: Schedule) -> Schedule:
    """Return a schedule on which to go on: another one, if both add gradients in ascending order, or the same."""
    for stage in range(how.stages):
        ranks = how.placement.replicas(stage)
        order = [a.microbatch for a in how.actions(ranks[0]) if a.stage == stage and ACTIONS[a.kind].after == "done"]
        if len(ranks) > 1 or order != sorted(order):
            return how
    made = random.choice([schedules.one_f_one_b, schedules.gpipe, schedules.zb_h1])
    return made(ranks=random.randint(1, min(3, how.stages)), microbatches=how.microbatches)


def draw_model(random: Random, stages: int, dtype: torch.dtype, backward: str) -> Description:
    """Return a model with some layers per stage."""
    plain = dtype != torch.float32
    kinds = (
        ["plain", "relu_", "mul_", "dropout", "norm", "sliced", "masked", "words"]
        if plain
        else [name for name, kind in KINDS.items() if backward == "autograd" or kind.graph]
    )
    nests = GRAPH_NESTS if plain or backward == "graph" else NESTS
    sequence = random.random() < 0.15

    def feeds() -> tuple[int, ...]:
        return tuple(random.randrange(10) for _ in range(random.choice([0, 0, 1, 2])))

    def part(depth: int) -> Part:
        if depth and random.random() < 0.2:
            return Nest(random.choice(nests), tuple(part(depth - 1) for _ in range(random.randint(1, 2))), feeds())
        if random.random() < 0.1:
            return Again(random.randrange(10), feeds())
        kind = random.choice([one for one in kinds if one != "noted" or not sequence])
        return Leaf(kind, feeds(), random.random() < 0.15, random.random() < 0.15)

    parts = tuple(part(1) for _ in range(max(2, stages + random.randint(0, 1))))
    ties = tuple((random.randrange(10), random.randrange(10)) for _ in range(random.choice([0, 0, 1])))
    returns = "tensor" if sequence else random.choice(["tensor", "tree", "loss"])
    return Description(parts, ties, returns, random.random() < 0.5, sequence)
