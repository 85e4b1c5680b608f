# SPDX-License-Identifier: Apache-2.0
"""Move what forwards keep off the device, and back before their backwards.

Idea. While a rank runs other passes, its link to the host is free. Count time in its passes: a move takes `passes` of
them, and the link carries one thing at a time in each direction. What a forward keeps leaves as soon as the link is
free, and comes back as late as possible; what is needed latest chooses first. If it would come back before it has been
away for a pass, it stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from schedules.arguments import is_size
from schedules.errors import SizeError
from schedules.language.actions import BESIDE, KINDS, Action
from schedules.language.schedule import Schedule
from schedules.transforms.recompute import require_own_stages
from schedules.transforms.transform import KEPT, transform

Stay: TypeAlias = tuple[int, int, Action]
"""The numbers of the passes between which a forward's residuals are kept, and the backward that uses them."""
Move: TypeAlias = tuple[int, Action]
"""The number of the pass beside which a move begins, and the move."""


def _require(schedule: Schedule, stages: tuple[int, ...] | None, passes: int) -> None:
    require_own_stages("offload", schedule, stages)
    if not is_size(passes):
        raise SizeError.of("offload", "passes", passes, "an integer of at least 1", "Choose passes >= 1.")


@transform(limits=KEPT, requires=_require)
def offload(rank: int, schedule: Schedule, stages: tuple[int, ...] | None = None, passes: int = 1) -> Iterator[Action]:
    """Move what forwards on `stages`, by default all, keep off the device until their backwards (arXiv 2503.01328).

    - `passes`: how many passes of the rank a move takes, one way.

    One thing leaves at a time, and one comes back: `OFFLOAD` goes on beside the passes after a forward, `RELOAD` beside
    those before its backward. What would be away for less than a pass stays. A rank then holds activations of a few
    microbatches, however many are in flight: the one that it computes, those that leave, and those that come back.
    What is moved already, and schedules without backwards, stay unchanged. Raise `SizeError` for anything but a tuple
    of the schedule's stages, and a number of passes.

    >>> from schedules import Costs, one_f_one_b, simulate
    >>> s = one_f_one_b(ranks=4, microbatches=4)
    >>> print(*offload(s).actions(0))
    0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD0 0OFFLOAD2 0F3 0RELOAD1 0OFFLOAD3 0B0 0RELOAD2 0B1 0RELOAD3 0B2 0B3
    >>> simulate(s).peak_memory, simulate(offload(s), Costs(OFFLOAD=1)).peak_memory
    ((4.0, 3.0, 2.0, 1.0), (3.0, 3.0, 2.0, 1.0))
    """
    actions = [*schedule.actions(rank)]
    every = range(schedule.stages)
    chosen = (every if stages is None else stages) if schedule.backward else ()
    before = list[list[Action]]([] for _ in actions)  # the moves to post before each action
    begins = [*_list_passes(actions)]
    for leaving, coming in _plan_moves([*_find_stays(actions, begins, chosen)], passes):
        before[begins[leaving[0]]].append(leaving[1])
        before[begins[coming[0]]].append(coming[1])
    for moves, action in zip(before, actions, strict=True):
        yield from moves
        yield action


def _list_passes(actions: Sequence[Action]) -> Iterator[int]:
    """Yield the position at which each pass begins; a fused pair is one."""
    fused = False
    for position, action in enumerate(actions):
        if KINDS[action.kind].after and action.kind not in BESIDE and not fused:
            yield position
        fused = action.kind == "OVERLAP_F"


def _find_stays(actions: Sequence[Action], begins: Sequence[int], stages: Sequence[int]) -> Iterator[Stay]:
    """Yield, per unit, the passes of its forward, or recomputation, and of its backward; and the backward."""
    number, made = -1, dict[tuple[int, int, int | None], int]()
    passes = set(begins)
    for position, action in enumerate(actions):
        number += position in passes
        kind, s, i, _, part = action
        word = KINDS[kind]
        if word.after == "forward" and kind not in BESIDE and s in stages:
            made[s, i, part] = number
        elif word.before == "forward" and (s, i, part) in made:
            start = made.pop((s, i, part))
            if kind not in BESIDE:
                yield start, number, action


def _plan_moves(stays: Sequence[Stay], passes: int) -> Iterator[tuple[Move, Move]]:
    """Yield, for each unit that moves, beside which pass it leaves and comes back, with the actions.

    Those that stay longest choose first: the earliest free time to leave, and the latest to come back.
    """
    leaving, coming = set[int](), set[int]()
    for start, end, backward in sorted(stays, key=lambda stay: (stay[0] - stay[1], stay[0])):
        last = end - 2 * passes - 1  # to leave later is not worth it
        out = next((k for k in range(start + 1, last + 1) if leaving.isdisjoint(range(k, k + passes))), None)
        if out is None:
            continue
        ways = range(end - passes, out + passes, -1)
        back = next((k for k in ways if coming.isdisjoint(range(k, k + passes))), None)
        if back is not None:
            leaving.update(range(out, out + passes))
            coming.update(range(back, back + passes))
            yield (out, backward._replace(kind="OFFLOAD")), (back, backward._replace(kind="RELOAD"))
