# SPDX-License-Identifier: Apache-2.0
"""Draw a case: a setup, a training loop, and what goes wrong in each of its runs, all of it from one seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

import schedules
from schedules import KINDS as ACTIONS
from schedules import Schedule, SizeError, offload, recompute, split_backward
from schedules.files.csv import table
from tests.common.cases import Case as Model
from tests.common.random_models import GRAPH_NESTS, KINDS, NESTS, Again, Description, Leaf, Nest, Part, case_of
from tests.common.world.network import Manners
from tests.common.zoo import ZOO

# -------------------------- Draw a setup: a model, and the pipeline that trains it, from one seed; many cases share it

FAMILIES = (
    *("gpipe", "one_f_one_b", "one_f_one_b", "eager_1f1b", "kfkb", "zb_h1", "zb_h2", "zb_auto", "zb_v", "v_half"),
    *("v_min", "v_1f1b", "interleaved_1f1b", "breadth_first", "interleaved_zero_bubble", "hanayo"),
    *("dualpipe", "dualpipe_v", "chimera"),
)
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
}
SHARDS = ("replicas", "shards")
MODIFYING = ("norm", "average")
"""Kinds of layers that modify buffers."""


@dataclass(frozen=True)
class Setup:
    """What one device would train, and the pipeline that does: drawn once for many cases.

    - `model`: a random one, or the name of one of the zoo. `copies`: those of the pipeline, on a mesh: replicas, or
      shards if `is_sharded`.
    """

    model: Description | str = field(repr=False)
    schedule: Schedule
    copies: int
    dtype: torch.dtype
    backward: str
    optimizer: str
    clips: bool
    outputs: bool
    is_sharded: bool

    @property
    def processes(self) -> int:
        """The number of processes, unless a restart changes it."""
        return self.schedule.ranks * self.copies

    @property
    def rows(self) -> int:
        """The number of rows of the batch: two in each microbatch."""
        return 2 * self.schedule.microbatches * self.copies

    def find(self) -> Model:
        """Return the model, with its batch and its loss."""
        return ZOO[self.model] if isinstance(self.model, str) else case_of(self.model)

    def __str__(self) -> str:
        model = self.model
        if isinstance(model, Description):
            kinds = sorted({leaf.kind for leaf in model.leaves})
            model = f"{len(model.leaves)} layers ({', '.join(kinds)}), {model.returns}{', sequence' * model.sequence}"
        return (
            f"{self.schedule}\n"
            f"  {model}, {self.dtype}, backward={self.backward}, {self.optimizer}{', clipped' * self.clips}"
            f"{', outputs' * self.outputs}"
            f"{f', {self.copies} {SHARDS[self.is_sharded]}' * (self.copies > 1)}"
        )


def draw_setup(random: Random) -> Setup:
    """Return a model and its pipeline."""
    how = move_some(draw_schedule(random))
    backward = random.choice(["autograd", "autograd", "autograd", "graph"])
    dtype = random.choice([torch.float32] * 4 + [torch.float64, torch.bfloat16])
    model: Description | str = draw_model(random, how.stages, dtype, backward)
    if random.random() < 0.3:
        model, dtype = random.choice([*ZOO]), torch.float32
    modifies = isinstance(model, str) or any(leaf.kind in MODIFYING for leaf in model.leaves)
    return Setup(
        model,
        how,
        2 if how.ranks < 3 and not modifies and random.random() < 0.4 else 1,
        dtype,
        backward,
        random.choice(list(OPTIMIZERS)),
        random.random() < 0.5,
        random.random() < 0.5,
        random.random() < 0.5 and dtype != torch.bfloat16,  # of which torch rounds updates of shards otherwise
    )


def draw_schedule(random: Random) -> Schedule:
    """Return a schedule of a family, perhaps transformed, or one in any correct order."""
    if random.random() < 0.3:
        return draw_order(random)
    while True:
        made = getattr(schedules, random.choice(FAMILIES))
        sizes = {
            "ranks": random.choice([1, 2, 2, 2, 3, 3]),
            "microbatches": random.randint(1, 4),
            "memory": random.randint(1, 4),
        }
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


def move_some(how: Schedule) -> Schedule:
    """Return the schedule, in one of three cases with what forwards keep moved off the device.

    The schedule decides which, so that nothing else of a seed depends on it.
    """
    return offload(how) if Random(repr(how)).random() < 1 / 3 else how


def numbers_of(made: Any) -> list[str]:
    """Return the names of the numbers that a family takes."""
    return [name for name, one in made.signature.parameters.items() if one.annotation in (int, "int")]


def draw_order(random: Random) -> Schedule:
    """Return a schedule that runs, again and again, any action whose inputs are there; any rank holds any stages."""
    S, M = random.randint(2, 4), random.randint(1, 3)
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
    if any(action.kind == "U" for action in how.actions(0)):
        return how
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


# ------------- Draw a case: a setup, a training loop, and what goes wrong in each of its runs, all of it from one seed

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

    - `kind`: an exception (`raise`, `interrupt`, `exit`, or of NCCL, `fail`), a death, a long stop, a short one
      (`nap`), a lost message, a script that ends early (`leave`), or a death while files are written (`disk`).
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
    - `batches`: how many batches each step has, as a stream under a schedule that updates weights in flight; else 0.
    - `delay`: the seconds that a message takes, on average. `is_kept`: rank 0 keeps the store.
    - `runs`: the faults of each run of the job but the last, which nothing disturbs.
    - `manners`: those of devices, if processes have them. `reads`: each loss is read. `rebuilds`: processes that have
      all survived a failure build their pipelines again.
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
    manners: Manners | None = None
    reads: bool = False
    rebuilds: bool = False
    batches: int = 0

    @property
    def schedule(self) -> Schedule:
        """The schedule of the setup."""
        return self.setup.schedule

    def __str__(self) -> str:
        saves = {"save": ", saved", "turns": ", saved to two paths", "begin": ", saved in the background"}
        faults = "\n".join(f"  faults: {' and '.join(map(str, run)) or 'none'}" for run in self.runs)
        kind = f"streams of {self.batches} batches" if self.batches else "steps"
        return (
            f"seed {self.seed}: {self.setup}\n"
            f"  {self.steps} {kind}{saves.get(self.saves, '')}{', damaged' * self.damages}"
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


def draw_stream(seed: int) -> Case:
    """Return the case of a seed, each of whose steps is a stream of batches, under another schedule and as many ranks.

    A stream has one version of the weights only when it has ended, so that is when it is saved.
    """
    case, random = draw(seed), Random(f"stream {seed // BLOCK} {draw(seed).setup!r}")
    how = draw_in_flight(random, case.setup.schedule.ranks)
    model: Description | str = draw_model(random, how.stages, case.setup.dtype, case.setup.backward)
    if random.random() < 0.3:
        model = random.choice([*ZOO])
    dtype = torch.float32 if isinstance(model, str) else case.setup.dtype
    modifies = isinstance(model, str) or any(leaf.kind in MODIFYING for leaf in model.leaves)
    copies = 1 if modifies else case.setup.copies
    setup = replace(case.setup, schedule=how, model=model, dtype=dtype, copies=copies, clips=False, outputs=False)
    is_tied = isinstance(model, str) or bool(model.ties) or "Again" in repr(model)  # refused with shards
    batches, random = random.randint(1, 6), Random(f"faults {seed}")
    runs = tuple(draw_faults(random, setup, case.steps * batches) for _ in case.runs)
    setup = replace(setup, is_sharded=setup.is_sharded and not is_tied)
    return replace(case, setup=setup, runs=runs, batches=batches)


def draw_in_flight(random: Random, ranks: int) -> Schedule:
    """Return a schedule that updates weights in flight."""
    m, late = random.randint(ranks, 4), random.randint(0, 3)
    made = (schedules.pipedream(ranks, 1), schedules.pipedream_2bw(ranks, m, accumulate=m), later(ranks, 2, late))
    how = random.choice(made)
    if random.random() < 0.3:
        how = split_backward(how)
    if random.random() < 0.3:
        how = recompute(how)
    return move_some(how)


@schedules.schedule(placement=schedules.linear)
def later(rank: int, ranks: int, microbatches: int, late: int) -> Any:
    """1F1B in which every second microbatch is followed by an update, `late` microbatches after its backward."""
    ahead = ranks - rank - 1
    for i in range(microbatches + ahead + late):
        if i < microbatches:
            yield schedules.F(rank, i)
        if 0 <= i - ahead < microbatches:
            yield schedules.B(rank, i - ahead)
        if (done := i - ahead - late) >= 0 and (done % 2 or done == microbatches - 1):
            yield schedules.U(rank, done)


def draw_on_device(seed: int, draw: Callable[[int], Case] = draw) -> Case:
    """Return the case of a seed, whose processes have devices."""
    random = Random(f"device {seed}")
    manners, case = Manners(*(random.random() < 0.5 for _ in Manners._fields)), draw(seed)

    def redraw(fault: Fault) -> Fault:
        """Let what is posted on a device fail, instead of what computes."""
        is_posted = fault.kind == "raise" and not fault.builds and random.random() < 0.4
        return replace(fault, kind="fail", what="launch", count=random.randrange(40)) if is_posted else fault

    runs = tuple(tuple(redraw(fault) for fault in run) for run in case.runs)
    return replace(case, manners=manners, reads=random.random() < 0.5, runs=runs, rebuilds=random.random() < 0.5)


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
