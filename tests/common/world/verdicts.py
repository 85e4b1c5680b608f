# SPDX-License-Identifier: Apache-2.0
"""Judge how a case ended: bitwise as on one device, or with errors that name the fault that struck."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from torch import Tensor

import fpipe
from fpipe.pipelines.garbage import postpone_collection
from fpipe.tensors.tree import same_bits
from tests.common.comparison import Result, differences
from tests.common.world.cases import PROMPT, Finding, InjectedError, Script, Trial, Verdict
from tests.common.world.drawing import BLOCK, STEPS, TIMEOUT, Case, draw, draw_layout
from tests.common.world.fibers import Killed
from tests.common.world.sharing import Shelf


class Simulator:
    """Runs cases one after the other; keeps what the cases of a block of seeds share until the next block begins."""

    def __init__(self) -> None:
        self.block, self.shelves = -1, dict[Any, Shelf]()

    def simulate(self, seed: int) -> Verdict:
        """Run the case of a seed; raise `Finding`, or whatever was raised, unless it ends as promised."""
        case = draw(seed)
        if seed // BLOCK != self.block:
            self.block, self.shelves = seed // BLOCK, {}
        shelf = self.shelves.setdefault(case.setup, Shelf())
        with (
            postpone_collection(),  # what is collected when must not depend on what ran before
            tempfile.TemporaryDirectory() as folder,
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
    """Run a case and its restart."""
    alone = shelf.keep(("alone", case.is_apart), lambda: run_alone(case, shelf))
    if isinstance(alone, str):
        return Verdict(alone, False, 0, 0.0)
    script, random = Script(case, folder / "run", shelf), Random(case.seed + 1)
    trial = Trial(script, random, has_fault=True)
    errors = trial.run()
    require_results(script, alone)
    ended = require_ends(trial, errors)
    if ended == "exact":
        require_final(script, alone)
        return Verdict(ended, False, trial.world.switches, trial.world.now)
    setup = replace(case.setup, schedule=draw_layout(random, case.schedule))
    restart(replace(case, setup=setup), script, alone, random)
    return Verdict(ended, True, trial.world.switches, trial.world.now)


def restart(case: Case, script: Script, alone: Script, random: Random) -> None:
    """Run a script again from its last checkpoint, perhaps on another layout; raise unless nothing is lost."""
    again = Script(case, script.path, script.shelf)
    found = [error for error in Trial(again, random, has_fault=False).run() if error is not None]
    if any(isinstance(error, fpipe.CutError) for error in found) and case.schedule != script.case.schedule:
        restart(script.case, script, alone, random)  # this model can't be cut in so many stages
        return
    if found:
        raise Finding(f"after a restart on {case.schedule}: got {found[0]!r}, expected a whole run") from found[0]
    done = min((i for _, i in again.results), default=case.steps)
    if done < script.saved:
        raise Finding(f"after a restart: got step {done}, expected to go on from {script.saved}, which was saved")
    require_results(again, alone)
    require_final(again, alone)


def require_results(script: Script, alone: Script) -> None:
    """Raise unless everything that any rank computed in any step is what one device computed."""
    for (rank, i), got in script.results.items():
        want = alone.results[-1, i]
        for name in got.grads.keys() - want.grads.keys():
            raise Finding(f"rank {rank}, step {i}: got a gradient of {name}, expected none")
        outputs = got.outputs if got.outputs is None else want.outputs
        part = Result(
            want.loss,
            outputs,
            {name: want.grads[name] for name in got.grads},
            {name: want.buffers[name] for name in got.buffers},
        )
        for difference in differences(got, part):
            raise Finding(f"rank {rank}, step {i}: {difference}")
    for i in {i for _, i in script.results}:
        ranks = {rank for rank, j in script.results if i == j}
        held = {name for rank in ranks for name in script.results[rank, i].grads}
        if len(ranks) == script.case.schedule.ranks and held != alone.results[-1, i].grads.keys():
            raise Finding(f"step {i}: got gradients of {sorted(held)}, expected {sorted(alone.results[-1, i].grads)}")


def require_final(script: Script, alone: Script) -> None:
    """Raise unless the parameters, buffers and optimizer state at the end are those of one device."""
    if len(script.final) != script.case.schedule.ranks:
        raise Finding(f"got the ranks {sorted(script.final)} at the end, expected all")
    for rank, parts in script.final.items():
        for what, mine, theirs in zip(("parameter", "buffer", "state"), parts, alone.states[script.case.steps - 1], strict=True):
            for name, value in mine.items():
                if not is_same(value, theirs[name]):
                    raise Finding(f"rank {rank}, at the end: {what} {name} is {value}, expected {theirs[name]}")


def is_same(mine: Any, theirs: Any) -> bool:
    """Return whether two values, or dicts of values, have the same bits."""
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(is_same(mine[key], theirs[key]) for key in mine)
    return same_bits(mine, theirs) if isinstance(mine, Tensor) else mine == theirs


def require_ends(trial: Trial, errors: list[BaseException | None]) -> str:
    """Return how the ranks ended; raise unless each that did not finish says why, and all name the same."""
    fault, finished = trial.fault, set(trial.script.final)
    assert fault is not None, "this is the run with the fault"
    if trial.network.aborted:
        raise Finding(f"got a message of the wrong size on rank {trial.network.aborted[0]}")
    victims = {fault.rank} if fault.kind != "lose" else set[int]()
    others = {rank: error for rank, error in enumerate(errors) if rank not in victims and rank not in finished}
    if trial.struck is None or fault.kind in ("none", "nap"):
        if wrong := [error for error in errors if error is not None]:
            raise Finding(f"nothing went wrong, but got {wrong[0]!r}") from wrong[0]
        return "exact"
    if not others and (fault.kind == "lose" or fault.rank in finished):
        return "exact"
    for rank, error in others.items():
        if not isinstance(error, fpipe.RankError):
            raise Finding(f"rank {rank}: got {error!r}, expected a RankError that names {fault}") from error
        if error.rank != rank or not error.place or not error.awaited:
            raise Finding(f"rank {rank}: got {error!r}, expected its own place and what it waited for") from error
    causes = {error.cause for error in others.values() if isinstance(error, fpipe.RankError)}
    if len(causes) > 1:
        raise Finding(f"got the causes {sorted(map(str, causes))}, expected one")
    require_time(trial, others)
    for cause in causes:
        require_cause(trial, cause)
    require_victim(trial, errors)
    return fault.kind


def require_cause(trial: Trial, cause: fpipe.Cause) -> None:
    """Raise unless the cause is the fault."""
    fault = trial.fault
    assert fault is not None, "this is the run with the fault"
    if fault.kind == "lose":
        if cause.rank is None:
            raise Finding(f"got the cause {cause}, expected a rank, for the lost {trial.place}")
        return
    if cause.rank != fault.rank:
        raise Finding(f"got the cause {cause}, expected rank {fault.rank}: {fault}")
    named = {"raise": "InjectedError", "interrupt": "KeyboardInterrupt", "exit": "SystemExit"}.get(fault.kind)
    if named and not (cause.problem.startswith(named) and cause.place.endswith(trial.place)):
        raise Finding(f"got the cause {cause}, expected {named} at {trial.place}")


def require_time(trial: Trial, others: dict[int, BaseException | None]) -> None:
    """Raise unless those who wait learn of the fault soon, or, if it is silent, once the timeout is over."""
    fault, struck = trial.fault, trial.struck
    assert fault is not None, "this is the run with the fault"
    assert struck is not None, "it struck"
    limit = PROMPT + (2 * TIMEOUT if fault.kind in ("stop", "lose") else 0)
    for rank in others:
        if trial.ended[rank] - struck > limit:
            raise Finding(
                f"rank {rank}: got an error {trial.ended[rank] - struck:.1f} s after {fault}, expected {limit}"
            )


def require_victim(trial: Trial, errors: list[BaseException | None]) -> None:
    """Raise unless the rank that the fault struck says so itself, if it can."""
    fault = trial.fault
    assert fault is not None, "this is the run with the fault"
    expected: dict[str, type[BaseException]] = {
        "raise": InjectedError,
        "interrupt": KeyboardInterrupt,
        "exit": fpipe.TransportError,
        "stop": fpipe.TransportError,
        "die": Killed,
        "disk": Killed,
    }
    error = errors[fault.rank]
    if fault.kind in expected and not isinstance(error, expected[fault.kind]):
        raise Finding(f"rank {fault.rank}: got {error!r}, expected {expected[fault.kind].__name__}") from error
    if fault.kind in ("raise", "interrupt"):
        notes = getattr(error, "__notes__", [])
        if not any("the first failure" in note and trial.place in note for note in notes):
            raise Finding(f"rank {fault.rank}: got the notes {notes}, expected its place, {trial.place}") from error
