# SPDX-License-Identifier: Apache-2.0
"""The rules a correct schedule obeys, one named function each, and `check`, which applies them all.

A rule is a generator that passes on one rank's actions and raises `ScheduleError` at the first that breaks it. So rules
stack like filters: one pass over each rank's generator, keeping only what is in flight. The last rule, `ordered`, is
`replay` itself, which looks at all ranks together. Programs obey further rules
(`schedules.checking.channels`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from itertools import chain
from operator import index
from typing import TypeAlias

from schedules.arguments import require_types
from schedules.arrays.gate import is_surely_correct, list_kinds_large
from schedules.checking.channels import LoweredProgram, check_transfers
from schedules.checking.collectives import require_collected, require_reductions_everywhere
from schedules.checking.posts import check_posts
from schedules.checking.progress import Progress, Work, violation
from schedules.checking.updates import require_updated, require_updates_everywhere
from schedules.errors import GraphError
from schedules.language.actions import KINDS, Action
from schedules.language.graph import Graph
from schedules.language.membership import explain_misfits, require_compute_only, require_placed
from schedules.language.schedule import Actions, Schedule, graph_of
from schedules.lowering.program import lower
from schedules.lowering.turns import TickPlace, place_at
from schedules.own_kinds import OwnKind
from schedules.playing.costs import NO_COSTS, ROUNDING, UNITS
from schedules.playing.dependencies import wires
from schedules.playing.engine import replay

ActionRule: TypeAlias = Callable[[Progress, Actions], Actions]


def require_forward_before_backward(progress: Progress, actions: Actions) -> Actions:
    """Require `F`, then `B` or `I`, then `W` after an `I`, for each stage and microbatch; nothing twice.

    A checkpointed forward `C` must be followed by its recomputation `R`, which then counts as the `F`.
    """
    life, works, once = dict(progress.life), progress.work, set[Action]()
    for position, action in enumerate(actions):
        kind, stage, unit, _, part = action
        if type(kind) is OwnKind:
            if action in once:
                problem = "has already run", f"Drop {action}: it runs once."
                raise violation("forward_before_backward", progress, position, action, *problem)
            once.add(action)
            if kind.after and progress.schedule.backward:
                life[kind] = kind.before, kind.after
        if kind in life:
            before, after = life[kind]
            work = works[stage]
            if part is not None or work.replicated:
                unit = work.unit(action)
            state = work.lives.get(unit, "")
            if state != before or (not state and unit in work.finished):
                state = "done" if unit in work.finished else state
                raise violation(
                    "forward_before_backward", progress, position, action, *_explain_disorder(work, action, state)
                )
            if after == "done":
                work.lives.pop(unit, None)
                work.finished.add(unit)
            else:
                work.lives[unit] = after
        elif KINDS[kind].after:
            raise violation("forward_before_backward", progress, position, action, *_explain_no_backward(action))
        yield action


def _explain_no_backward(action: Action) -> tuple[str, str]:
    """Return the problem with this kind of action in a schedule without backwards, and the repair."""
    problem = "serves a backward, and this schedule has no backwards"
    return problem, f"Write {action._replace(kind='F')}." if KINDS[action.kind].crosses == "F" else f"Drop {action}."


_MADE_BY = {"kept": "C", "forward": "F", "hosted": "OFFLOAD", "halved": "I"}
_BROUGHT_BY = {
    "kept": ("R", "the forward saved only its inputs"),
    "hosted": ("RELOAD", "what the forward kept is off the device"),
}
_AGE = ("", "kept", "forward", "hosted", "halved", "done")


def _explain_disorder(work: Work, action: Action, state: str) -> tuple[str, str]:
    needed = KINDS[action.kind].before
    if needed == "forward" and state in _BROUGHT_BY:
        kind, why = _BROUGHT_BY[state]
        maker = f"{action.stage}{work.name_action(kind, work.unit(action))}"
        return f"comes before {maker}, and {why}", f"Add {maker} before it."
    if not {state, needed} <= {*_AGE}:  # of an own kind
        problem = f"needs a microbatch in state {needed!r}, and finds it in state {state!r}"
        return problem, f"Run what brings it into state {needed!r} before it."
    if _AGE.index(state) < _AGE.index(needed):
        maker = f"{action.stage}{work.name_action(_MADE_BY[needed], work.unit(action))}"
        return f"comes before {maker}", f"Add {maker} before it, or move it later."
    return "has already run, or its backward has", f"Drop {action}: each runs once, as B or as I and W."


def require_complete(progress: Progress, actions: Actions) -> Actions:
    """Require every stage to run every microbatch, forward and backward."""
    length = 0
    for action in actions:
        length += 1
        yield action
    for stage, work in progress.work.items():
        if (unit := work.finished.prefix) < work.count:
            names = {kind: f"{stage}{work.name_action(kind, unit)}" for kind in (*"FBIWR", "RELOAD")}
            state = work.lives.get(unit, "")
            problem = f"{_MISSING.get(state, f'what follows state {state!r},').format(**names)} never runs"
            if not progress.schedule.backward:
                problem = f"{names['F']} never runs"
            raise violation("complete", progress, length, None, problem, f"Add it to rank {progress.rank}.")


_MISSING = {
    "": "{F}, with its backward,",
    "kept": "{R}, with its backward,",
    "forward": "{B}, or {I} and {W},",
    "hosted": "{RELOAD}, with its backward,",
    "halved": "{W}",
}


def require_fused(progress: Progress, actions: Actions) -> Actions:
    """Require a `B` or `I` of another stage or microbatch directly after every `OVERLAP_F`, to overlap with it."""
    opener, position = None, -1
    for position, action in enumerate(actions):
        if opener is not None:
            if KINDS[action.kind].crosses != "B" or action[1:3] == opener[1:3]:
                raise violation("fused", progress, position, action, f"cannot overlap with {opener}", _APART)
            opener = None
        elif action.kind == "OVERLAP_F":
            opener = action
        yield action
    if opener is not None:
        raise violation("fused", progress, position + 1, None, f"nothing overlaps with {opener}", _APART)


_APART = "Put a B or I of another stage or microbatch right after the OVERLAP_F, or make it an F."


def require_sliced(progress: Progress, actions: Actions) -> Actions:
    """Require slices to go forward in ascending order, then backward in descending order, per microbatch and stage.

    A slice attends to earlier slices, so its forward needs theirs, and its backward the cotangents of later ones.
    """
    k = progress.schedule.slices
    passed: dict[tuple[int, int, str], int] = {}  # how many slices of each microbatch in flight have run
    for position, action in enumerate(actions):
        kind, s, i, _, part = action
        if way := KINDS[kind].crosses:
            done = passed.get((s, i, way), 0)
            expected, forwards = (done if way == "F" else k - 1 - done), passed.get((s, i, "F"), 0)
            if part != expected or (way == "B" and forwards < k):
                first = f"{s}F{i}.{forwards}" if way == "B" and forwards < k else f"{s}{way}{i}.{expected}"
                repair = "Run the slices of a microbatch forward from the first, then backward from the last."
                raise violation("sliced", progress, position, action, f"comes before {first}", repair)
            passed[s, i, way] = done + 1
            if way == "B" and part == 0:
                del passed[s, i, "F"], passed[s, i, "B"]
        yield action


def require_within_memory(progress: Progress, actions: Actions) -> Actions:
    """Require the rank to hold no more activations than the schedule's limit."""
    schedule, held, position = progress.schedule, 0.0, -1
    unit = schedule.slices * schedule.stages / schedule.ranks
    limit = schedule.memory(progress.rank) * unit + ROUNDING
    growth = {kind: UNITS.growth(kind, 0) * schedule.backward for kind in KINDS}
    for position, action in enumerate(actions):
        held += growth[action.kind] if action.kind in growth else UNITS.growth(action.kind, 0)
        if held > limit:
            limit, got = schedule.memory(progress.rank), held / unit
            problem = f"needs memory for activations of {got:g} microbatches, more than the limit of {limit:g}"
            repair = "Run a backward before it, or raise the limit."
            raise violation("within_memory", progress, position, action, problem, repair)
        yield action


def require_ascending_ticks(progress: Progress, actions: Actions) -> Actions:
    """Require each pass to come after the one before it on its rank, and after what it needs, in the order of ticks."""
    schedule, graph, rank = progress.schedule, progress.graph, progress.rank
    assert schedule.ticks is not None, "the rule is for a schedule with ticks"
    ticks, home, slices = cache(schedule.ticks), schedule.placement.home, schedule.slices
    repair = "Correct the function ticks of the schedule, or leave it out."
    latest: TickPlace | None = None
    for position, action in enumerate(actions):
        kind, s, i, _, part = action
        if crosses := KINDS[kind].crosses:
            unit, is_back = i * slices + (part or 0), crosses == "B"
            try:
                place = place_at(ticks, s, unit, is_back, rank)
                index(place[0])
                is_late = latest is None or latest < place
                for peer in (graph.pulled_by if is_back else graph.fed_by)[s]:
                    is_late = is_late and place_at(ticks, peer, unit, is_back, home(peer, i)) < place
            except (IndexError, TypeError, ValueError) as error:
                raise violation("ticked", progress, position, action, f"has no tick: {error}", repair) from error
            if not is_late:
                problem = "has no later tick than the pass before it, or than what it needs"
                raise violation("ticked", progress, position, action, problem, repair)
            latest = place
        yield action


def count_versions(schedule: Schedule, rank: int) -> dict[int, int]:
    """Return, for each stage on `rank`, the most weight versions kept at once; 1 without updates.

    >>> from schedules import pipedream
    >>> count_versions(pipedream(ranks=3, microbatches=8), rank=0)
    {0: 3}
    """
    require_types(count_versions, locals())
    book = Progress(schedule, rank)
    for _ in require_updated(
        book, require_collected(book, require_forward_before_backward(book, schedule.actions(rank)))
    ):
        pass
    return {stage: work.kept for stage, work in book.work.items()}


def list_versions(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Return the weight version that each microbatch uses of each stage, by stage and microbatch.

    A version is the number of updates that made it: what the schedule declares, else the newest at the forward. So a
    loop on one device can have the same delays.

    >>> from schedules import pipedream, pipedream_2bw
    >>> [list_versions(pipedream(ranks=3, microbatches=5))[0, i] for i in range(5)]
    [0, 0, 0, 1, 2]
    >>> [list_versions(pipedream_2bw(ranks=3, microbatches=12, accumulate=3))[0, i] for i in range(12)]
    [0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    """
    require_types(list_versions, locals())
    found: dict[tuple[int, int], int] = {}
    with explain_misfits(schedule):
        for rank in range(schedule.ranks):
            made = dict.fromkeys(schedule.placement.stages_on(rank), 0)
            for kind, s, i, _, _ in schedule.actions(rank):
                if kind == "U":
                    made[s] += 1
                elif KINDS[kind].crosses == "F":
                    found.setdefault((s, i), made[s] if schedule.version is None else schedule.version(i))
    return found


@lru_cache(maxsize=64)  # several ask, one after the other, and a plan asks for all that it tries
def kinds_of(schedule: Schedule) -> frozenset[str]:
    """Return the kinds of a schedule's actions."""
    found = list_kinds_large(schedule)
    every = chain.from_iterable(map(schedule.actions, range(schedule.ranks)))
    return frozenset(action.kind for action in every) if found is None else found


RULES: tuple[ActionRule, ...] = (
    require_forward_before_backward,
    require_complete,
    require_fused,
    require_collected,
    require_updated,
)


def rules_of(schedule: Schedule) -> tuple[ActionRule, ...]:
    """Return the rules that apply to this schedule, beyond those on which actions it may contain at all."""
    further = {
        require_sliced: schedule.slices > 1,
        require_within_memory: schedule.limits.memory is not None,
        require_ascending_ticks: schedule.ticks is not None,
    }
    return RULES + tuple(rule for rule, applies in further.items() if applies)


def check(schedule: Schedule | LoweredProgram, graph: Graph | None = None, *, device: bool = False) -> None:
    """Raise `ScheduleError` unless the schedule is correct for the stage graph (by default the chain of its stages).

    A correct schedule runs every compute action exactly once, on the right rank, within its own limits, and without
    deadlock. A lowered program is checked for its own graph, including its transfers: every message is sent, received
    and used once, both ends of a channel post in the same order, and no rank waits forever. The error names the rank,
    position, action, rule and repair. `check` makes one pass over all actions and keeps only what is in flight; of a
    large schedule, with NumPy, some 80 bytes for each action.

    With `device`, the program (of a schedule, that of `lower`) must also finish on any device, even if it does only one
    thing at a time: on an accelerator, a receive that is posted too early can keep the message that it waits for from
    being made.

    >>> from schedules import B, F, check, one_f_one_b, schedule
    >>> check(one_f_one_b(ranks=4, microbatches=8))
    >>> @schedule()
    ... def impatient(rank, ranks, microbatches):
    ...     for i in range(microbatches):
    ...         yield B(rank, i)
    ...         yield F(rank, i)
    >>> check(impatient(ranks=1, microbatches=1))
    Traceback (most recent call last):
    schedules.errors.ScheduleError: rank 0, position 0, 0B0: comes before 0F0 [rule: forward_before_backward]. \
Add 0F0 before it, or move it later.
    """
    require_types(check, locals())
    if not isinstance(schedule, Schedule):
        program = schedule
        if graph not in (None, program.graph):
            raise GraphError(
                "got a program and another graph, expected the program alone: it has its own graph. "
                "Leave the graph out."
            )
        check(program.schedule, program.graph)
        check_transfers(program)
        if device:
            check_posts(program)
        return
    graph = graph_of(schedule, graph)
    if not is_surely_correct(schedule, graph):
        _require_rules(schedule, graph)
    if device:
        check_posts(lower(schedule, graph))


def _require_rules(schedule: Schedule, graph: Graph) -> None:
    """Raise `ScheduleError` unless all rules are obeyed."""
    books = [Progress(schedule, rank, graph) for rank in range(schedule.ranks)]
    streams = [_apply_rules(book) for book in books]
    for _ in replay(schedule, streams, wires(schedule, graph, NO_COSTS, UNITS), NO_COSTS, spans=False):
        pass
    require_updates_everywhere(books)
    require_reductions_everywhere(books)


def _apply_rules(book: Progress) -> Actions:
    """Return the actions of one rank, filtered through all the rules."""
    schedule, rank = book.schedule, book.rank
    actions = require_placed(schedule, rank, require_compute_only(schedule, rank, schedule.actions(rank)))
    for rule in rules_of(schedule):
        actions = rule(book, actions)
    return actions
