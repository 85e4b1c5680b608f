# SPDX-License-Identifier: Apache-2.0
"""The rules on what ranks that hold the same stage do together: sum its gradients, gather its weights, reduce.

Problem. A stage may live on two ranks of the pipeline (replicas), and all of it again in every copy of the pipeline (a
data-parallel group, which keeps it whole or in shards). A pass with weights that are not there, or an update with a
gradient that lacks the terms of others, shows in no microbatch.

Idea. `G`, `UNSHARD`, `RESHARD` and `REDUCE_GRAD` are rare, so the rule looks a kind up in a table and does nothing for
most actions. The first `UNSHARD` of a rank adds the actions that read or update weights to its table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from schedules.checking.progress import Progress, Work, violation
from schedules.language.actions import KINDS, Action
from schedules.language.schedule import Actions

Flaw: TypeAlias = tuple[str, str, str]
"""The name of the broken rule, the problem and the repair; empty if there is none."""
_Judge: TypeAlias = Callable[[Progress, Work, Action], Flaw]
_FINE: Flaw = ("", "", "")


def require_collected(progress: Progress, actions: Actions) -> Actions:
    """Require sums and reductions of whole gradients, and gathered weights where they are read.

    - `summed`: each rank of a replicated stage sums the gradients once, by `G` after its last weight gradient.
    - `reduced`: a `REDUCE_GRAD` comes once, after the last weight gradient, after the `G`, and before the update.
    - `gathered`: a stage that is ever gathered is gathered whenever its weights are read, never twice at a time, and
      freed before it is updated and at the end. Gatherings are numbered in order.
    """
    judges, position = dict(_ONCE), -1
    for position, action in enumerate(actions):
        if action.kind in judges:
            rule, problem, repair = judges[action.kind](progress, progress.work[action.stage], action)
            if rule:
                raise violation(rule, progress, position, action, problem, repair)
            if action.kind == "UNSHARD":
                judges.update(_READS)
        yield action
    for stage, work in progress.work.items():
        if work.replicated and not work.summed and progress.schedule.backward:
            missing = Action("G", stage, work.last)
            why = f"{missing} never runs: the gradients of the replicas are not summed"
            raise violation("summed", progress, position + 1, None, why, f"Add it to rank {progress.rank}.")
        if work.gathered:
            missing = Action("RESHARD", stage, work.number_gathering(work.gatherings - 1))
            why = f"{missing} never runs: the weights stay gathered"
            raise violation("gathered", progress, position + 1, None, why, f"Add it to rank {progress.rank}.")


def _judge_sum(progress: Progress, work: Work, action: Action) -> Flaw:
    last = action._replace(microbatch=work.last)
    if not work.replicated or not progress.schedule.backward:
        return "summed", f"stage {action.stage} has no replicas whose gradients could be summed", f"Drop {action}."
    if work.summed:
        return "summed", "has already run", f"Drop {action}: gradients are summed once."
    if action != last:
        return "summed", f"is not named after the last microbatch that this rank runs, {work.last}", f"Write {last}."
    if len(work.finished) < work.count:
        return "summed", f"comes before the backward of microbatch {work.first_unfinished}", "Move it later."
    work.summed = True
    return _FINE


def _judge_reduction(progress: Progress, work: Work, action: Action) -> Flaw:
    last = action._replace(microbatch=work.last)
    if not progress.schedule.backward:
        return "reduced", "has no gradient to reduce: this schedule has no backwards", f"Drop {action}."
    if work.reduced:
        return "reduced", "has already run", f"Drop {action}: a gradient is reduced once."
    if action != last:
        return "reduced", f"is not named after the last microbatch that this rank runs, {work.last}", f"Write {last}."
    if len(work.finished) < work.count:
        return "reduced", f"comes before the backward of microbatch {work.first_unfinished}", "Move it later."
    if work.replicated and not work.summed:
        summing = Action("G", action.stage, work.last)
        return "reduced", f"comes before {summing} has summed the gradients of the replicas", "Move it later."
    if work.versions:
        update = Action("U", action.stage, work.applied)
        return (
            "reduced",
            f"comes after {update}, which updated with a gradient that was not reduced",
            "Move it earlier.",
        )
    work.reduced = True
    return _FINE


def _judge_gathering(progress: Progress, work: Work, action: Action) -> Flaw:
    expected = action._replace(microbatch=work.number_gathering(work.gatherings))
    if work.gathered:
        return "gathered", "gathers weights that are gathered already", f"Free them before it, or drop {action}."
    if not work.gatherings and (work.lives or work.finished):
        problem = f"comes after a pass through stage {action.stage}, which read weights that were not gathered"
        return "gathered", problem, "Move it before the stage's first pass."
    if action != expected:
        return "gathered", f"is not numbered as gathering {work.gatherings} of its stage", f"Write {expected}."
    work.gathered, work.gatherings = True, work.gatherings + 1
    return _FINE


def _judge_freeing(progress: Progress, work: Work, action: Action) -> Flaw:
    expected = action._replace(microbatch=work.number_gathering(work.gatherings - 1))
    if not work.gathered:
        return "gathered", "frees weights that are not gathered", f"Drop {action}, or gather them before it."
    if action != expected:
        return (
            "gathered",
            f"does not have the number of the gathering that it ends, {expected.microbatch}",
            (f"Write {expected}."),
        )
    work.gathered = False
    return _FINE


def _judge_reading(progress: Progress, work: Work, action: Action) -> Flaw:
    if work.gatherings and not work.gathered:
        missing = Action("UNSHARD", action.stage, work.number_gathering(work.gatherings))
        return "gathered", "reads weights that are not gathered", f"Add {missing} before it, or free them later."
    return _FINE


def _judge_update(progress: Progress, work: Work, action: Action) -> Flaw:
    if work.gathered:
        missing = Action("RESHARD", action.stage, work.number_gathering(work.gatherings - 1))
        problem = "updates the shards while the weights are gathered, which would then be out of date"
        return "gathered", problem, f"Put {missing} before it."
    return _FINE


_ONCE: Mapping[str, _Judge] = MappingProxyType(
    {
        "G": _judge_sum,
        "REDUCE_GRAD": _judge_reduction,
        "UNSHARD": _judge_gathering,
        "RESHARD": _judge_freeing,
    }
)
_READS: Mapping[str, _Judge] = MappingProxyType(
    {**{kind: _judge_reading for kind, word in KINDS.items() if word.reads}, "U": _judge_update}
)


def require_reductions_everywhere(books: Sequence[Progress]) -> None:
    """Raise `ScheduleError` unless the gradients of all stages are reduced within the step, or none is."""
    works = [(book, stage, work) for book in books for stage, work in book.work.items()]
    if any(work.reduced for _, _, work in works):
        for book, stage, work in works:
            if not work.reduced:
                missing = Action("REDUCE_GRAD", stage, work.last)
                problem = f"{missing} never runs, though the gradients of other stages are reduced"
                length = sum(1 for _ in book.schedule.actions(book.rank))
                raise violation("reduced", book, length, None, problem, f"Add it to rank {book.rank}.")
