# SPDX-License-Identifier: Apache-2.0
"""Run cases, and judge how they ended: as on one device, bit for bit, whatever has struck; errors name the fault."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import optree
from torch import Tensor
from torch.distributed import DistBackendError

import fpipe
from fpipe.checkpoints.manifest import read_manifest
from fpipe.pipelines.modes import postpone_collection
from fpipe.tensors.tree import same_bits
from tests.common.comparison import Result, differences
from tests.common.world.cases import NAP, PROMPT, Finding, InjectedError, Script, Strike, Trial, Verdict
from tests.common.world.drawing import BLOCK, STEPS, TIMEOUT, Case, Setup, draw, draw_layout
from tests.common.world.fibers import Killed, World
from tests.common.world.sharing import Shelf

# --------------------------- Judge how the ranks of a run ended: whole, or with errors that name the fault that struck

SILENT = ("stop", "lose")
"""Faults of which others learn by a timeout."""
OWN: dict[str, type[BaseException]] = {
    "raise": InjectedError,
    "fail": DistBackendError,
    "interrupt": KeyboardInterrupt,
    "exit": fpipe.TransportError,
    "stop": fpipe.TransportError,
    "die": Killed,
    "disk": Killed,
}
"""What the rank raises that a fault strikes."""
NAMED = {"raise": "InjectedError", "fail": "DistBackendError", "interrupt": "KeyboardInterrupt", "exit": "SystemExit"}
"""What the others say of it."""


def require_ends(trial: Trial, errors: list[BaseException | None]) -> str:
    """Return how the ranks ended; raise unless each that did not finish says why, and all name the same."""
    if trial.network.aborted:
        raise Finding(f"got a message of the wrong size on rank {trial.network.aborted[0]}")
    struck, finished = trial.struck, set(trial.script.final)
    victims = {one.fault.rank for one in struck if one.fault.kind != "lose"}
    others = {rank: error for rank, error in enumerate(errors) if rank not in victims and rank not in finished}
    if not struck:
        if wrong := [error for error in errors if error is not None]:
            raise Finding(f"nothing went wrong, but got {wrong[0]!r}") from wrong[0]
        return "exact"
    if not others and victims <= finished:
        return "exact"
    for rank, error in others.items():
        require_error(trial, rank, error)
        require_time(trial, rank)
    require_causes(trial, [error.cause for error in others.values() if isinstance(error, fpipe.RankError)])
    for one in struck:
        error = None if one.fault.kind == "lose" else errors[one.fault.rank]
        is_told = one.fault.kind == "fail" and len(struck) > 1 and isinstance(error, fpipe.RankError)
        if one.fault.kind != "lose" and not is_told:  # what is posted after another's failure fails anyway
            require_victim(one, error)
    return " and ".join(f"{one.fault.kind}{' in a build' * one.fault.builds}" for one in struck)


def require_error(trial: Trial, rank: int, error: BaseException | None) -> None:
    """Raise unless a rank that did not finish says what it was doing and what it waited for."""
    if is_refusal(trial, error):
        return
    if not isinstance(error, fpipe.RankError):
        raise Finding(f"rank {rank}: got {error!r}, expected a RankError") from error
    if error.rank != rank or not error.place or not error.awaited:
        raise Finding(f"rank {rank}: got {error!r}, expected its own place and what it waited for") from error


def is_refusal(trial: Trial, error: BaseException | None) -> bool:
    """Return whether all ranks refused to build together, because of an exception in the build of one of them."""
    if not isinstance(error, fpipe.TransportError):
        return False
    raised = [one.fault for one in trial.struck if one.fault.builds and one.fault.kind == "raise"]
    return any(f"- rank {one.rank}: {NAMED[one.kind]}" in str(error) for one in raised)


def require_time(trial: Trial, rank: int) -> None:
    """Raise unless a rank that waits learns of a fault soon, or, if it is silent, once the timeout is over."""
    struck = trial.struck
    last = max(one.time for one in struck if one.time is not None and one.time <= trial.ended[rank])
    manners = trial.case.manners
    is_deaf = manners is not None and not manners.has_gloo  # until a build has made the group for agreements
    silent = any(one.fault.kind in SILENT or (is_deaf and one.fault.builds) for one in struck)
    naps = sum(one.time is not None and one.fault.kind == "nap" for one in trial.strikes)
    limit = PROMPT + NAP * naps + 2 * TIMEOUT * silent
    if trial.ended[rank] - last > limit:
        faults = ", ".join(str(one.fault) for one in struck)
        raise Finding(f"rank {rank}: got an error {trial.ended[rank] - last:.1f} s after {faults}, expected {limit}")


def require_causes(trial: Trial, causes: list[fpipe.Cause]) -> None:
    """Raise unless all ranks name one cause, and that is a fault.

    If two things go wrong and the store is lost with one of them, ranks may name either. A short stop is such a thing:
    meanwhile, the keeper of the store may have left with the others. If the keeper is the one that stops, nobody can
    say why it leaves. A rank whose script has ended can't be told from one that died at the same time.
    """
    happened = [one.fault for one in trial.strikes if one.time is not None]
    naps = trial.case.is_kept and len(happened) > 1 and any(fault.kind == "nap" for fault in happened)
    is_lost = naps or (trial.case.is_kept and any(one.fault.rank == 0 for one in trial.struck))
    if len(set(causes)) > 1 and not (is_lost and len(happened) > 1):
        raise Finding(f"got the causes {sorted(map(str, causes))}, expected one")
    known = {*trial.script.final, *((0, *(fault.rank for fault in happened)) if naps else ())}
    if naps and any(fault.kind == "nap" and fault.rank == 0 for fault in happened):
        return
    for cause in causes:
        if cause.rank not in known and not any(is_named(one, cause) for one in trial.struck):
            raise Finding(f"got the cause {cause}, expected one of {[str(one.fault) for one in trial.struck]}")


def is_named(one: Strike, cause: fpipe.Cause) -> bool:
    """Return whether a cause is a fault."""
    if one.fault.kind == "lose":
        return cause.rank is not None
    if cause.rank != one.fault.rank:
        return False
    named = NAMED.get(one.fault.kind)
    is_free = one.fault.builds or one.fault.kind == "fail"  # a build has no positions
    is_placed = is_free or cause.place.endswith(one.place)
    return named is None or (cause.problem.startswith(named) and is_placed)


def require_victim(one: Strike, error: BaseException | None) -> None:
    """Raise unless the rank that a fault struck says so itself, if it can."""
    rank, kind = one.fault.rank, one.fault.kind
    own = OWN.get(kind)
    if own is not None and not isinstance(error, own):
        raise Finding(f"rank {rank}: got {error!r}, expected {own.__name__}") from error
    if kind in ("raise", "interrupt") and not one.fault.builds:
        notes = getattr(error, "__notes__", [])
        if not any("the first failure" in note and one.place in note for note in notes):
            raise Finding(f"rank {rank}: got the notes {notes}, expected its place, {one.place}") from error


# ---------------------- Run cases, and judge how they ended: bitwise as on one device, in the end, whatever has struck

MEMORY = Path("/dev/shm")
"""Where files are written, if it is there: a sync of a disk is slow, and tells a simulation nothing."""


class Simulator:
    """Runs cases one after the other; keeps what the cases of a block of seeds share until the next block begins."""

    def __init__(self) -> None:
        self.block, self.shelves = -1, dict[Setup, Shelf]()

    def simulate(self, seed: int, draw: Callable[[int], Case] = draw) -> Verdict:
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


def simulate(seed: int, draw: Callable[[int], Case] = draw) -> Verdict:
    """Run the case of a seed alone; see `Simulator`."""
    return Simulator().simulate(seed, draw)


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
        if len(trial.survived) == layout.setup.processes:
            require_again(trial, alone)
        for rank in trial.survived:
            script.final.pop(rank, None)  # how its first attempt ended is left to judge
        ended.append(require_ends(trial, errors) + ", rebuilt" * bool(trial.survived))
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


def require_again(trial: Trial, alone: Script) -> None:
    """Raise unless processes that have built their pipelines again have trained to the end."""
    for rank, error in enumerate(trial.again):
        if error is not None:
            raise Finding(f"rank {rank}: got {error!r} after all have survived, expected that they go on") from error
    require_final(trial.script, alone)


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
