# SPDX-License-Identifier: Apache-2.0
"""Run cases, and judge how they ended: bitwise as on one device, in the end, whatever has struck."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import optree
from torch import Tensor

import fpipe
from fpipe.checkpoints.manifest import read_manifest
from fpipe.pipelines.modes import postpone_collection
from fpipe.tensors.tree import same_bits
from tests.common.comparison import Result, differences
from tests.common.world.cases import Finding, Trial, Verdict
from tests.common.world.drawing import BLOCK, STEPS, Case, draw
from tests.common.world.ends import require_ends
from tests.common.world.fibers import World
from tests.common.world.scripts import Script
from tests.common.world.setups import Setup, draw_layout
from tests.common.world.sharing import Shelf

MEMORY = Path("/dev/shm")
"""Where files are written, if it is there: a sync of a disk is slow, and tells a simulation nothing."""


class Simulator:
    """Runs cases one after the other; keeps what the cases of a block of seeds share until the next block begins."""

    def __init__(self) -> None:
        self.block, self.shelves = -1, dict[Setup, Shelf]()

    def simulate(self, seed: int) -> Verdict:
        """Run the case of a seed; raise `Finding`, or whatever was raised, unless it ends as promised."""
        case = draw(seed)
        if seed // BLOCK != self.block:
            self.block, self.shelves = seed // BLOCK, {}
        shelf = self.shelves.setdefault(case.setup, Shelf())
        with (
            postpone_collection(),  # what is collected when must not depend on what ran before
            tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder,
            nullcontext() if case.is_apart else shelf.lent(),
        ):
            return judge(case, Path(folder), shelf)


def simulate(seed: int) -> Verdict:
    """Run the case of a seed alone; see `Simulator`."""
    return Simulator().simulate(seed)


def run_alone(case: Case, shelf: Shelf) -> Script | str:
    """Return the run of a setup on one device, of as many steps as any case has; or why fpipe refuses the model."""
    alone = Script(replace(case, steps=STEPS), Path(), shelf)
    try:
        alone.run_alone()
    except (fpipe.CutError, fpipe.CaptureError, fpipe.InputError) as error:
        return f"refused: {type(error).__name__}"
    return alone


def judge(case: Case, folder: Path, shelf: Shelf) -> Verdict:
    """Run a case: once for each lot of faults, and then undisturbed, until a run comes to its end."""
    alone = shelf.keep(("alone", case.is_apart), lambda: run_alone(case, shelf))
    if isinstance(alone, str):
        return Verdict(alone, 0, 0, 0.0)
    untouched = list_versions(shelf)
    random, ended, worlds, least, layout = Random(case.seed + 1), list[str](), list[World](), 0, case
    for k, faults in enumerate([*case.runs, ()]):
        script = Script(layout, folder, shelf)
        trial = Trial(script, random, faults)
        errors = trial.run()
        if k and layout.schedule != case.schedule and is_refused(errors):
            script, layout = Script(case, folder, shelf), case  # this model can't be cut in so many stages
            trial = Trial(script, random, faults)
            errors = trial.run()
        worlds.append(trial.world)
        if list_versions(shelf) != untouched:
            raise Finding("a rank has written to the user's batch")
        require_results(script, alone)
        ended.append(require_ends(trial, errors))
        first = min((i for _, i in script.results), default=least)
        if first < least:
            raise Finding(f"run {k}: got step {first}, expected to go on from {least}, which was saved")
        if ended[-1] == "exact":
            require_final(script, alone)
            break
        least = max(least, script.saved)
        if case.damages and least:
            least = damage(folder, random)
        setup = replace(case.setup, schedule=draw_layout(random, case.schedule))
        layout = replace(case, setup=setup)
    switches, seconds = sum(world.switches for world in worlds), sum(world.now for world in worlds)
    return Verdict(", ".join(ended), len(ended), switches, seconds)


def list_versions(shelf: Shelf) -> list[int]:
    """Return how often each tensor of the batch, which all ranks share, has been written to."""
    _, batch, _ = shelf.made.get("model", (None, (), None))
    return [leaf._version for leaf in optree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def is_refused(errors: Sequence[BaseException | None]) -> bool:
    """Return whether fpipe refused the layout of a run."""
    return any(isinstance(error, fpipe.CutError) for error in errors)


def damage(folder: Path, random: Random) -> int:
    """Damage a file of the newest checkpoint; return the step of the one before, from which the job can go on.

    If there is none, the user removes what is left, and starts anew.
    """
    steps = {path: read_manifest(path).step for path in sorted(folder.iterdir()) if fpipe.is_checkpoint(path)}
    newest = max(steps, key=steps.__getitem__)
    files = sorted(file for file in read_manifest(newest).folder(newest).iterdir())
    file = random.choice(files)
    data = bytearray(file.read_bytes())
    how = random.choice(["flip", "flip", "cut", "remove"])
    if how == "flip":
        start = random.choice([0, find_values(file, data)])
        data[random.randrange(start, len(data))] ^= 1 << random.randrange(8)
        file.write_bytes(data)
    elif how == "cut":
        file.write_bytes(data[: random.randrange(len(data))])
    else:
        file.unlink()
    del steps[newest]
    if not steps:
        shutil.rmtree(newest)
    return max(steps.values(), default=0)


def find_values(file: Path, data: bytearray) -> int:
    """Return where the values of tensors begin in a file, which nothing but a checksum can tell from others."""
    if file.suffix != ".safetensors":
        return 0
    start = 8 + int.from_bytes(data[:8], "little")
    return start if start < len(data) else 0


def require_results(script: Script, alone: Script) -> None:
    """Raise unless everything that any rank computed in any step is what one device computed."""
    for (rank, i), got in script.results.items():
        want = alone.results[-1, i]
        for name in got.grads.keys() - want.grads.keys():
            raise Finding(f"rank {rank}, step {i}: got a gradient of {name}, expected none")
        part = Result(
            want.loss,
            find_outputs(script, got, want),
            {name: find_part(script, rank, want.grads[name]) for name in got.grads},
            {name: want.buffers[name] for name in got.buffers},
        )
        for difference in differences(got, part):
            raise Finding(f"rank {rank}, step {i}: {difference}")
    for i in {i for _, i in script.results}:
        ranks = {rank for rank, j in script.results if i == j}
        held = {name for rank in ranks for name in script.results[rank, i].grads}
        if len(ranks) == script.case.setup.processes and held != alone.results[-1, i].grads.keys():
            raise Finding(f"step {i}: got gradients of {sorted(held)}, expected {sorted(alone.results[-1, i].grads)}")
    for (rank, i), (what, got) in script.looked.items():
        want = alone.looked[-1, i][1]
        outputs = want.outputs if what == "prediction" else find_outputs(script, got, want)
        for difference in differences(got, Result(got.loss if got.loss is None else want.loss, outputs, {}, {})):
            raise Finding(f"rank {rank}, {what} after step {i}: {difference}")


def find_outputs(script: Script, got: Result, want: Result) -> Any:
    """Return the outputs that a rank should have: those of a copy's own rows can't be told from the batch's."""
    return got.outputs if got.outputs is None or script.case.setup.copies > 1 else want.outputs


def find_part(script: Script, rank: int, value: Any) -> Any:
    """Return the rows that a rank should hold of a parameter, of a gradient, or of all tensors of an optimizer's."""
    setup = script.case.setup
    if isinstance(value, dict):
        return {name: find_part(script, rank, one) for name, one in value.items()}
    if setup.copies == 1 or not setup.is_sharded or not isinstance(value, Tensor) or not value.dim():
        return value
    chunks = value.chunk(setup.copies)
    shard = rank % setup.copies
    return chunks[shard] if shard < len(chunks) else value[:0]


def require_final(script: Script, alone: Script) -> None:
    """Raise unless the parameters, buffers and optimizer state at the end are those of one device."""
    if len(script.final) != script.case.setup.processes:
        raise Finding(f"got the ranks {sorted(script.final)} at the end, expected all")
    for rank, parts in script.final.items():
        theirs = alone.states[script.case.steps - 1]
        for what, mine, wanted in zip(("parameter", "buffer", "state"), parts, theirs, strict=True):
            for name, value in mine.items():
                want = wanted[name] if what == "buffer" else find_part(script, rank, wanted[name])
                if not is_same(value, want):
                    raise Finding(f"rank {rank}, at the end: {what} {name} is {value}, expected {want}")


def is_same(mine: Any, theirs: Any) -> bool:
    """Return whether two values, or dicts of values, have the same bits."""
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(is_same(mine[key], theirs[key]) for key in mine)
    return same_bits(mine, theirs) if isinstance(mine, Tensor) else mine == theirs
