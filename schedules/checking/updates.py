# SPDX-License-Identifier: Apache-2.0
"""The rules on weight updates.

Problem. A gradient is complete once its last term is, and copies of weights stay equal only if all of them are updated
with the same gradient. Neither shows in the life of a single microbatch.

Idea. As in `schedules.checking.rules`, a rule passes on one rank's actions and raises at the first that breaks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from schedules.checking.progress import Progress, violation
from schedules.language.actions import KINDS, Action
from schedules.language.schedule import Actions


def require_updated(progress: Progress, actions: Actions) -> Actions:
    """Require every update `U(s, i)` after all gradients up to microbatch `i`; it applies those not yet applied.

    If a stage has replicas, that is after the `G` that sums their gradients; otherwise the replicas would drift apart.
    That sum is complete only once, and so is the gradient of parameters that stages share: such stages are updated
    once, with the gradients of all microbatches, after those of the stages they share with have arrived (`ordered`).
    A gradient that was reduced is one sum, too: no update can apply a part of it.
    A microbatch's backward uses the weight version its forward began with, so that version is kept (PipeDream's weight
    stashing, SOSP 2019, section 3.3), but no more versions than the schedule's limit. All slices of a microbatch use
    one version, so no update may come between them. A version that the schedule declares for a microbatch must have
    been made before its forward, and is kept until the last microbatch that uses it is finished.
    """
    rule, position = progress.schedule.version, -1
    stashes = {} if rule is None else {stage: Stash(map(rule, work.own())) for stage, work in progress.work.items()}
    for position, action in enumerate(actions):
        if action.kind == "U":
            _record_update(progress, position, action, stashes.get(action.stage))
        elif rule is not None and (word := KINDS[action.kind]).after:
            _use_version(progress, position, action, rule(action.microbatch), stashes[action.stage])
            if word.after == "done":
                stashes[action.stage].finish(rule(action.microbatch))
        yield action
    for stage, work in progress.work.items():
        if work.versions and work.applied < work.last:
            missing = Action("U", stage, work.microbatch(work.count - 1))
            problem = f"{missing} never runs: no update applies the gradients after microbatch {work.applied}"
            raise violation("updated", progress, position + 1, None, problem, f"Add it to rank {progress.rank}.")


class Stash:
    """The versions of a stage's weights that a rank keeps if the schedule declares them.

    - `needed`: how many unfinished units use each version; `old`: the versions before the newest that some still use.
    """

    def __init__(self, versions: Iterable[int]) -> None:
        self.needed, self.old, self.newest = Counter(versions), set[int](), 0

    def update(self) -> int:
        """Record a new version; return how many are kept."""
        if self.needed[self.newest]:
            self.old.add(self.newest)
        self.newest += 1
        return len(self.old) + 1

    def finish(self, version: int) -> None:
        """Record that a unit is finished that used a version."""
        self.needed[version] -= 1
        if not self.needed[version]:
            self.old.discard(version)


def _use_version(progress: Progress, position: int, action: Action, version: int, stash: Stash) -> None:
    """Raise `ScheduleError` if a microbatch begins with a version of the weights that has not been made."""
    if not 0 <= version <= stash.newest:
        problem = f"uses version {version} of the weights, and the rank has made versions 0 to {stash.newest}"
        repair = "Put it after the update that makes this version, or declare an older one."
        raise violation("updated", progress, position, action, problem, repair)


def _record_update(progress: Progress, position: int, action: Action, stash: Stash | None) -> None:
    """Record an update: microbatches in flight keep the version they began with. Raise if it breaks a rule."""
    work, i = progress.work[action.stage], action.microbatch
    if not progress.schedule.backward:
        problem = "has no gradient to use: this schedule has no backwards"
        raise violation("updated", progress, position, action, problem, f"Drop {action}.")
    first = work.finished.prefix  # the first unit that is not finished
    late = first if first < work.count and work.microbatch(first) <= i else None
    if late is not None or i <= work.applied:
        problem = f"comes before the backward of microbatch {work.microbatch(late or 0)}"
        if late is None:
            problem = f"has no new gradient to use: an earlier update applied microbatch {work.applied}"
        repair = "Put one update after the last backward of the microbatches that it applies."
        raise violation("updated", progress, position, action, problem, repair)
    if work.replicated and not work.summed:
        problem = "comes before the gradients of the replicas are summed, and they would drift apart"
        summing = Action("G", action.stage, work.microbatch(work.count - 1))
        raise violation("updated", progress, position, action, problem, f"Put it after {summing}.")
    _require_consistent(progress, position, action)
    work.versions, work.applied = work.versions + 1, i
    if stash is None:
        work.began = {unit: work.began.get(unit, work.versions - 1) for unit in work.lives}
    kept = len({work.versions, *work.began.values()}) if stash is None else stash.update()
    limit = progress.schedule.versions(progress.rank)
    work.kept = max(work.kept, kept)
    if kept > limit:
        problem = f"would make {kept} versions of the weights to keep, more than the limit of {limit:g}"
        repair = "Let microbatches in flight finish first, or raise the limit."
        raise violation("updated", progress, position, action, problem, repair)


def _require_consistent(progress: Progress, position: int, action: Action) -> None:
    """Raise `ScheduleError` if the update lets copies of weights drift apart, or splits a sum or a microbatch."""
    work = progress.work[action.stage]
    last = action._replace(microbatch=work.last)
    if (work.replicated or work.tied) and action != last:
        shared = "another rank holds the stage too" if work.replicated else "another stage holds some of its parameters"
        problem = f"updates before microbatch {work.last}, but {shared}: its gradient is complete only at the end"
        raise violation("updated", progress, position, action, problem, f"Write one {last}, after the last backward.")
    if work.reduced and action != last:
        reduction = last._replace(kind="REDUCE_GRAD")
        problem = f"updates before microbatch {work.last}, but {reduction} has reduced the gradient of all as one sum"
        raise violation("updated", progress, position, action, problem, f"Write one {last}, after {reduction}.")
    if (parted := work.first_partial_microbatch()) is not None:
        problem = f"comes between the slices of microbatch {parted}, which would use different weights"
        repair = f"Move it before the first forward of microbatch {parted}, or after the last."
        raise violation("updated", progress, position, action, problem, repair)


def require_updates_everywhere(books: Sequence[Progress]) -> None:
    """Raise `ScheduleError` unless all stages update their weights within the step, or none does."""
    works = [(book, stage, work) for book in books for stage, work in book.work.items()]
    if any(work.versions for _, _, work in works):
        for book, stage, work in works:
            if not work.versions:
                missing = Action("U", stage, work.last)
                problem = f"{missing} never runs, though other stages update their weights"
                length = sum(1 for _ in book.schedule.actions(book.rank))
                raise violation("updated", book, length, None, problem, f"Add it to rank {book.rank}.")
