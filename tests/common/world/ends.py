# SPDX-License-Identifier: Apache-2.0
"""Judge how the ranks of a run ended: whole, or with errors that name the fault that struck."""

from __future__ import annotations

import fpipe
from tests.common.world.cases import NAP, PROMPT, Finding, InjectedError, Strike, Trial
from tests.common.world.drawing import TIMEOUT
from tests.common.world.fibers import Killed

SILENT = ("stop", "lose")
"""Faults of which others learn by a timeout."""
OWN: dict[str, type[BaseException]] = {
    "raise": InjectedError,
    "interrupt": KeyboardInterrupt,
    "exit": fpipe.TransportError,
    "stop": fpipe.TransportError,
    "die": Killed,
    "disk": Killed,
}
"""What the rank raises that a fault strikes."""
NAMED = {"raise": "InjectedError", "interrupt": "KeyboardInterrupt", "exit": "SystemExit"}
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
        if one.fault.kind != "lose":
            require_victim(one, errors[one.fault.rank])
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
    silent = any(one.fault.kind in SILENT for one in struck)
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
    is_placed = one.fault.builds or cause.place.endswith(one.place)  # a build has no positions
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
