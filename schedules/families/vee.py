# SPDX-License-Identifier: Apache-2.0
"""V placement: each rank holds a stage from the front of the model and one from its back.

Idea. A microbatch goes down the ranks and back up, forward, then down and back up, backward. If its activations live
long in one chunk of a rank, they live briefly in the other, so all ranks need the same memory, as little as a third of
that of 1F1B (arXiv 2405.15362, section 3). All members repeat one building block (`schedules.families.blocks`), whose
offsets follow from the memory: the later the backwards after the forwards, the more is in flight, and the less ranks
wait.

The first blocks have slots for microbatches before the first, and the last blocks for microbatches after the last. So
on every rank the first microbatches run as early as they can, and the last backwards as late as they can without
delaying another rank. Each rank shifts the rest to follow on from these; tests show, size by size, that the orders of
all ranks still agree.

Times are in slots: a chunk's forward takes one, its `I` and its `W` one each, its `B` two.

Where passes take other times, or transfers take any, this order may make ranks wait. So every member takes `costs`, and
then is the best of that order and some others that follow these costs in the same memory
(`schedules.playing.play`). A first chunk may hold all activations but one on rank 0, and about half of them on
the last rank. What is urgent is what comes first in this order, or any forward, or any backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, count, islice, repeat
from math import inf
from typing import NamedTuple

from schedules.errors import SizeError
from schedules.families.blocks import every, merge_in_order, time_passes
from schedules.families.placements import vee
from schedules.language.actions import Action, B, F, I
from schedules.language.schedule import Limits, Schedule, schedule
from schedules.playing.costs import Costs, require_stages
from schedules.playing.engine import find_makespan
from schedules.playing.play import Rule, play, prefer
from schedules.playing.problem import Problem

CHUNK = 3  # slots that one microbatch takes on a chunk: F, I and W, or F and B
INTERVAL = 2 * CHUNK  # slots that one microbatch takes on a rank


class Block(NamedTuple):
    """The times of microbatch 0 on a rank: forward in its first and second chunk, backward in its second and first."""

    f1: int
    f2: int
    b2: int
    b1: int


def _start_up(
    rank: int, ranks: int, microbatches: int, memory: int, block: Block, length: int
) -> tuple[list[Iterator[float]], int]:
    """Return the times of each pass of the block, at first as early as possible, and the end of all forwards.

    `length` is the number of slots a cotangent takes per stage. How rank 2 of `zb_v(ranks=4, microbatches=8)` starts,
    which holds stages 2 and 5:

        slot   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18
              2F0 2F1|2F2 5F0 2F3 5F1 2F4 5F2|5I0 5W0 5F3 5I1|2I0 5W1 2W0 2F5 5F4
               alone |        in turns       | room for one  |     the block

    - Alone: first-chunk forwards, until the slot before microbatch 0 can enter the second chunk at `2P - 1 - r`.
    - In turns: a forward of each chunk, until microbatch 0 has passed the `r` remaining ranks, and its cotangent comes
      down to this rank at `down`.
    - Then every backward leaves room for one forward in `CHUNK` slots: of the second chunk while that has fewer than
      half of the activations, of the first chunk afterwards.
    - The block: when that cotangent comes back up, at `up` or later, as many passes of each kind have run as before the
      first `b1` of the block, which continues from there.
    """
    P, r, half = ranks, rank, memory // 2
    down, up = 2 * P + length * r, 2 * P + length * (2 * P - 1 - r)
    turns = min(r + 1, half)
    alone = min(2 * (P - 1 - r), memory - turns)
    front = min(alone + r + 1, memory - turns)  # first-chunk forwards before `down`
    done = Block(*(-((first - block.b1) // INTERVAL) for first in block))  # passes of the block before its first `b1`
    start = 2 * P - 2 - r  # of the turns

    def room(j: int) -> int:
        """Return the time of second-chunk forward `j`, or if they are half, of first-chunk forward `front + j - half`.

        The first `turns` of them come before `down`, the others two slots after a backward begins.
        """
        return start + 1 + 2 * j if j < turns else down + 2 + CHUNK * (j - turns)

    f1 = [*range(r, r + alone)]
    f1 += [start + 2 * j for j in range(front - alone)]
    f1 += [room(half + j) for j in range(done.f1 - front)]
    f2 = [room(j) for j in range(half)]
    b2 = [down + CHUNK * j for j in range(min(half, done.b2))]
    early = f1, f2, b2, list[int]()

    # Shift the block so that none of its passes comes before the early ones have ended, nor `b1` before `up`.
    end = max(f1[-1], f2[-1], b2[-1] + length - 1) + 1
    begin = min(first + INTERVAL * len(times) for first, times in zip(block, early, strict=True))
    shift = max(up - block.b1, end - begin)
    last = room(microbatches - 1) if microbatches <= half else block.f2 + shift + INTERVAL * (microbatches - 1)
    return [every(INTERVAL, first + shift, times) for first, times in zip(block, early, strict=True)], last + 1


def _wind_down(times: Iterator[float], microbatches: int, end: int, waiting: int) -> Iterator[float]:
    """Return `times`, capped at every second slot up to `end`; the last `waiting` microbatches are at the cap."""
    free = chain(islice(times, max(0, microbatches - waiting)), repeat(inf))
    return map(min, free, count(end - 2 * (microbatches - 1), 2))


def _order_passes(rank: int, ranks: int, microbatches: int, memory: int) -> Iterator[Action]:
    """Return the order of a rank that holds at most `memory` chunk activations, from `least_memory` to `2P`.

    The second-chunk backward follows the first-chunk forward by `lag`, and the first-chunk backward the second-chunk
    forward: as late as an even number of activations allows. If the number is odd, first-chunk forwards come one
    interval earlier. The last cotangent is at stage 0 at `end`, so at stage `s` at `end - s`.
    """
    P, M, r, half, odd = ranks, microbatches, rank, memory // 2, memory % 2
    lag, back = INTERVAL * half - 4, 2 * P - 1 - r
    f1, f2 = r + min(4 * r, lag - 2 * P), lag - 1 - r
    block = Block(f1 - INTERVAL * odd, f2, f1 + lag, f2 + lag)
    (early1, early2, late2, late1), done = _start_up(r, P, M, memory, block, length=1)
    end = done + r + 2 * P - 1 if half < M else 4 * P - 1 + CHUNK * (M - 1)
    late2 = _wind_down(late2, M, end - back, waiting=odd * min(r + 1, half))
    late1 = _wind_down(late1, M, end - r, waiting=odd * (half + 1))
    first = time_passes(F, r, early1, M), time_passes(I, r, late1, M)
    second = time_passes(F, back, early2, M), time_passes(I, back, late2, M)
    return merge_in_order(*first, *second, memory=memory)


@lru_cache(maxsize=1)  # every rank asks for its own actions in turn
def _follow_costs(fixed: Schedule, memory: int, costs: Costs, whole: bool = False) -> Sequence[Sequence[Action]]:
    """Return every rank's actions in the best order for these costs that holds at most `memory` chunk activations.

    That is the `fixed` one if none is faster, and for costs that it is made for: passes in slots, and no transfers.
    """
    costs = replace(costs, jitter=0.0)
    kinds = "FB" if whole else "FIW"
    rows, P = tuple(tuple(fixed.actions(rank)) for rank in range(fixed.ranks)), fixed.ranks
    if _takes_slots(fixed, kinds, costs):
        return rows
    places = {action: place for row in rows for place, action in enumerate(row)}
    problem = Problem(costs, fixed.placement, fixed.microbatches, memory / 2, split=not whole)
    rules = list[Rule]()
    for least in range(memory // 2, min(memory // 2 + 4, memory)):  # what the first chunk of the last rank may hold
        spare = [memory - 1 - (memory - 1 - least) * r / max(1, P - 1) for r in range(P)]
        most = {kinds[-1]: [*(max(1, round(room)) for room in spare), *[memory] * P]}
        rules += [Rule(places.__getitem__, 0.0, most)]
        rules += [Rule(prefer(order), 1.0, most) for order in ("FBIW", "BIFW")]
    best = min(fixed, play(problem, *rules), key=lambda one: find_makespan(one, costs))
    return tuple(tuple(best.actions(rank)) for rank in range(P))


def _takes_slots(schedule: Schedule, kinds: str, costs: Costs) -> bool:
    """Return whether each pass takes as long as the slots it has in the fixed order, and transfers take no time."""
    S, homes = schedule.stages, schedule.placement.homes
    slots = {costs.time(kind, s) / (2 if kind == "B" else 1) for kind in kinds for s in range(S)}
    hops = [("F", s, s + 1) for s in range(S - 1)] + [("B", s + 1, s) for s in range(S - 1)]
    return len(slots) == 1 and not any(costs.transfer(what, s, homes[s], homes[t]) for what, s, t in hops)


def _require_costs(factory: str) -> Callable[..., None]:
    def require(ranks: int, microbatches: int, costs: Costs | None) -> None:
        if costs is None:
            return
        if not isinstance(costs, Costs):
            raise SizeError.of(factory, "costs", costs, "Costs to find an order for", "Pass Costs(F=1, I=1, W=1).")
        require_stages(costs, 2 * ranks)

    return require


def least_memory(ranks: int) -> int:
    """Return the fewest chunk activations with which such a schedule runs: those of `v_min`."""
    return 2 * ((ranks + 4) // 3)


def _require_enough(ranks: int, microbatches: int, memory: int, costs: Costs | None) -> None:
    _require_costs("v_schedule")(ranks, microbatches, costs)
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < least_memory(ranks):
        expected = f"an integer of at least {least_memory(ranks)}, the chunk activations that {ranks} ranks need"
        raise SizeError.of(
            "v_schedule", "memory", memory, expected, f"Choose memory={least_memory(ranks)}, which gives v_min."
        )


def _v_memory(rank: int, ranks: int, microbatches: int, memory: int, costs: Costs | None) -> float:
    return min(memory / 2, ranks, microbatches)


@schedule(placement=vee, limits=Limits(memory=_v_memory), requires=_require_enough)
def v_schedule(
    rank: int, ranks: int, microbatches: int, memory: int = 8, costs: Costs | None = None
) -> Iterator[Action]:
    """Trade memory for waiting: `m` chunk activations of half a microbatch each (arXiv 2405.15362, section 3).

    Time a rank waits between its first and last action, in slots, if all passes take equally long and `M >= m`:
    `6P - 1 - 3m` up to `m = 2P - 2`, then 3, then none at `m = 2P`; more memory does not help. No shorter waits are
    known. Peak memory: `min(m / 2, M)` microbatches, on every rank if `M >= m`. `m` must be at least
    `2 floor((P + 4) / 3)`, which gives `v_min`; `2 floor((P + 2) / 2)` gives `v_half`, and `2P` gives `zb_v`.

    With `costs`, the order follows them, in the same memory, and takes no longer than this one. That requires playing
    all ranks: the first rank whose actions are generated pays for all.

    >>> print(v_schedule(ranks=3, microbatches=3, memory=5))
    rank 0 |0F0 0F1 0F2 .   .   5F0 5I0 5W0 5F1 5I1 5W1 .   5F2 5I2 0I0 5W2 0I1 0W0 0I2 0W1 0W2 .   |
    rank 1 |.   1F0 1F1 1F2 4F0 .   4F1 4I0 4W0 .   .   4F2 4I1 1I0 4I2 1I1 4W1 1I2 1W0 4W2 1W1 1W2 |
    rank 2 |.   .   2F0 3F0 2F1 3F1 2F2 .   3I0 3W0 3F2 2I0 .   3I1 2I1 3I2 2I2 2W0 3W1 2W1 3W2 2W2 |
    """
    m = min(memory, 2 * ranks)
    if costs is None:
        return _order_passes(rank, ranks, microbatches, m)
    return iter(_follow_costs(v_schedule(ranks, microbatches, memory), m, costs)[rank])


@schedule(
    placement=vee,
    limits=Limits(memory=lambda rank, ranks, microbatches, costs: min((ranks + 4) // 3, microbatches)),
    requires=_require_costs("v_min"),
)
def v_min(rank: int, ranks: int, microbatches: int, costs: Costs | None = None) -> Iterator[Action]:
    """V-Min: the least memory that keeps ranks busy, a third of that of 1F1B (arXiv 2405.15362, section 3).

    Time a rank waits between its first and last action, if all passes of a chunk take `F` and `M` is at least twice
    the memory: `(6P - 1 - 6 floor((P + 4) / 3)) F` for `P >= 3`, none for fewer ranks. Peak memory:
    `min(floor((P + 4) / 3), M)` microbatches, for such an `M` on every rank.

    >>> print(v_min(ranks=3, microbatches=3))
    rank 0 |0F0 0F1 0F2 .   .   5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 .   .   5F2 5I2 0I1 5W2 0W1 .   0I2 0W2 |
    rank 1 |.   1F0 1F1 .   4F0 .   4F1 4I0 4W0 .   1I0 1F2 1W0 4I1 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2 .   |
    rank 2 |.   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 .   |
    """
    if costs is None:
        return _order_passes(rank, ranks, microbatches, least_memory(ranks))
    return iter(_follow_costs(v_min(ranks, microbatches), least_memory(ranks), costs)[rank])


@schedule(
    placement=vee,
    limits=Limits(memory=lambda rank, ranks, microbatches, costs: min((ranks + 2) // 2, microbatches)),
    requires=_require_costs("v_half"),
)
def v_half(rank: int, ranks: int, microbatches: int, costs: Costs | None = None) -> Iterator[Action]:
    """V-Half: half the memory of 1F1B, and half its waiting (arXiv 2405.15362, section 3).

    Time a rank waits between its first and last action, if all passes of a chunk take `F` and `M` is at least twice
    the memory: `(6P - 1 - 6 floor((P + 2) / 2)) F` for `P >= 3`, none for fewer ranks. Peak memory:
    `min(floor((P + 2) / 2), M)` microbatches, for such an `M` on every rank.

    >>> print(v_half(ranks=4, microbatches=3))
    rank 0 |0F0 0F1 0F2 .   .   .   .   7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 0I0 7W2 0W0 .   0I1 0W1 0I2 0W2 |
    rank 1 |.   1F0 1F1 1F2 .   .   6F0 .   6F1 6I0 6W0 6F2 6I1 6W1 1I0 6I2 1W0 6W2 1I1 1W1 1I2 1W2 .   |
    rank 2 |.   .   2F0 2F1 2F2 5F0 .   5F1 .   5F2 5I0 5W0 .   2I0 5I1 2W0 5I2 2I1 5W1 2I2 5W2 2W1 2W2 |
    rank 3 |.   .   .   3F0 4F0 3F1 4F1 3F2 4F2 .   .   4I0 3I0 4W0 3W0 4I1 3I1 4I2 3I2 4W1 3W1 4W2 3W2 |
    """
    if costs is None:
        return _order_passes(rank, ranks, microbatches, 2 * ((ranks + 2) // 2))
    return iter(_follow_costs(v_half(ranks, microbatches), 2 * ((ranks + 2) // 2), costs)[rank])


@schedule(
    placement=vee,
    limits=Limits(memory=lambda rank, ranks, microbatches, costs: min(ranks, microbatches)),
    requires=_require_costs("zb_v"),
)
def zb_v(rank: int, ranks: int, microbatches: int, costs: Costs | None = None) -> Iterator[Action]:
    """ZB-V: no waiting, in the memory of 1F1B (arXiv 2401.10241, section 6; V-ZB in arXiv 2405.15362, section 3).

    Time a rank waits between its first and last action, if all passes of a chunk take equally long and `M >= 2P`:
    none. Ranks start one after another, and end one after another. Peak memory: `min(P, M)` microbatches.

    >>> print(zb_v(ranks=2, microbatches=3))
    rank 0 |0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2 .   |
    rank 1 |.   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2 |
    """
    if costs is None:
        return _order_passes(rank, ranks, microbatches, 2 * ranks)
    return iter(_follow_costs(zb_v(ranks, microbatches), 2 * ranks, costs)[rank])


@schedule(
    placement=vee,
    limits=Limits(memory=lambda rank, ranks, microbatches, costs: min(2 * ranks // 3 + 1, microbatches)),
    requires=_require_costs("v_1f1b"),
)
def v_1f1b(rank: int, ranks: int, microbatches: int, costs: Costs | None = None) -> Iterator[Action]:
    """1F1B in a V, with whole backwards: two thirds of its memory (arXiv 2405.15362, section 3).

    Backwards take two slots and forwards one, so on every third rank a backward waits half an interval for two free
    slots. Idle time per rank, if `B = 2 F` for a chunk and `M` is at least twice the memory:
    `(5 (P - 1) - (P - 1) mod 3) F`. Peak memory: `min(floor(2P / 3) + 1, M)` microbatches, for such an `M` on every
    rank.

    >>> print(v_1f1b(ranks=2, microbatches=3))
    rank 0 |0F0 0F1 0F2 3F0 3B0     3F1 3B1     .   0B0     3F2 3B2     .   0B1     .   .   0B2     |
    rank 1 |.   1F0 2F0 1F1 2F1 .   2B0     1B0     1F2 2F2 2B1     1B1     2B2     1B2     .   .   |
    """
    memory = 2 * (2 * ranks // 3 + 1)
    if costs is not None:
        return iter(_follow_costs(v_1f1b(ranks, microbatches), memory, costs, whole=True)[rank])
    P, M, r, back = ranks, microbatches, rank, 2 * ranks - 1 - rank

    def cotangent(hops: int) -> int:
        """Return when the first cotangent has passed `hops` stages: two slots for each, three more for every third."""
        return 2 * P + 2 * hops + (2 * ((P - 1) % 3) + hops) // 3 * CHUNK

    block = Block(r, back, cotangent(r), cotangent(back))
    (early1, early2, late2, late1), _ = _start_up(r, P, M, memory, block, length=2)
    first = time_passes(F, r, early1, M), time_passes(B, r, late1, M)
    second = time_passes(F, back, early2, M), time_passes(B, back, late2, M)
    return merge_in_order(*first, *second)
