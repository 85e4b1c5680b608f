# SPDX-License-Identifier: Apache-2.0
"""Orders that follow costs: play all ranks of a chain in time, and let each free rank run its most urgent pass.

Problem. An order made for passes that take equally long makes ranks wait where they do not.

Idea. Play all ranks forward. A rank that is free runs, of the passes whose inputs are there and that fit into its
memory, the most urgent one. A patient rank does not begin one if a more urgent pass can begin before that would end; it
waits for it, and fills the gap with weight halves that fit.

Invariant: no early stage of a rank takes the last activation that the rank may hold (`rooms`), so the later stages
always get on, and give back what they hold without help from the early stages of any rank. Nothing gets stuck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any, TypeAlias

from schedules.language.actions import KINDS, Action
from schedules.language.placement import Placement
from schedules.playing.costs import Costs

Priority: TypeAlias = Callable[[Action], Any]


class PriorityPlay:
    """All ranks of a chain of stages on one route, played forward in time; `rows` are their actions in order.

    - `kinds`: the passes of a microbatch on a stage, in order: `FB` or `FIW`.
    - `priority`: a function of a pass; the one for which it is least is the most urgent.
    - `patient`: true if ranks wait for more urgent passes.
    - `memory`: the most activations that a rank holds; `rooms`: the most of each stage.
    - `ends`: by kind and stage, the ends of the passes that have begun, microbatch by microbatch.
    """

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        costs: Costs,
        kinds: str,
        priority: Priority,
        patient: bool,
        memory: int,
        rooms: Sequence[int],
    ) -> None:
        self.placement, self.microbatches, self.costs = placement, microbatches, costs
        self.kinds, self.priority, self.patient, self.memory, self.rooms = kinds, priority, patient, memory, rooms
        self.ends: dict[str, list[list[float]]] = {kind: [[] for _ in range(placement.stages)] for kind in kinds}
        self.rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
        self.free = [0.0] * placement.ranks
        self._queue = [(0.0, rank) for rank in range(placement.ranks)]  # when ranks look for a pass
        self._play()

    @property
    def makespan(self) -> float:
        """The end of the last pass."""
        return max(self.free)

    def _play(self) -> None:
        while self._queue:
            now, rank = heappop(self._queue)
            if self.free[rank] <= now and (action := self._choose(rank, now)) is not None:
                self._run(rank, action, now)
        stages = range(self.placement.stages)
        assert all(len(self.ends[self.kinds[-1]][s]) == self.microbatches for s in stages), "nothing gets stuck"

    def _choose(self, rank: int, now: float) -> Action | None:
        """Return the pass that a rank begins now, or `None` if it waits."""
        arrivals = dict(self._list_next(rank))
        ready = [action for action, arrival in arrivals.items() if arrival <= now]
        best = min(ready, key=self.priority, default=None)
        if best is None or not self.patient:
            return best
        end, urgency = now + self._time(best), self.priority(best)
        awaited = [
            arrival for action, arrival in arrivals.items() if now < arrival < end and self.priority(action) < urgency
        ]
        if not awaited:
            return best
        fits = (action for action in ready if action.kind == "W" and now + self._time(action) <= min(awaited))
        return min(fits, key=self.priority, default=None)

    def _list_next(self, rank: int) -> Iterator[tuple[Action, float]]:
        """Yield the next pass of each kind on each stage of a rank that fits into its memory, and when it can begin."""
        stages = self.placement.stages_on(rank)
        full = sum(map(self._held, stages)) == self.memory
        for kind in self.kinds:
            for s in stages:
                if kind != "F" or not (full or self._held(s) == self.rooms[s]):
                    yield Action(kind, s, len(self.ends[kind][s])), self._arrival(kind, s)

    def _time(self, action: Action) -> float:
        return self.costs.time(action.kind, action.stage)

    def _held(self, s: int) -> int:
        """Return how many activations a stage holds."""
        return len(self.ends["F"][s]) - len(self.ends[self.kinds[-1]][s])

    def _arrival(self, kind: str, s: int) -> float:
        """Return when the inputs of the next pass of this kind are there; infinity if that is not known yet."""
        i, ready = len(self.ends[kind][s]), 0.0
        if i == self.microbatches:
            return inf
        if kind != "F":
            before = self.ends[self.kinds[self.kinds.index(kind) - 1]][s]
            ready = before[i] if i < len(before) else inf
        source = s + {"F": -1, "B": 1, "": 0}[KINDS[kind].crosses]
        if source == s or not 0 <= source < self.placement.stages:
            return ready
        ends = self.ends[kind][source]
        return max(ready, ends[i] + self._transfer(kind, source, s)) if i < len(ends) else inf

    def _transfer(self, kind: str, source: int, target: int) -> float:
        homes = self.placement.homes
        return self.costs.transfer(KINDS[kind].crosses, source, homes[source], homes[target])

    def _run(self, rank: int, action: Action, now: float) -> None:
        """Run a pass, and wake its rank at its end, and the rank that uses its output when that arrives."""
        kind, s, _, _, _ = action
        end = now + self._time(action)
        self.ends[kind][s].append(end)
        self.rows[rank].append(action)
        self.free[rank] = end
        heappush(self._queue, (end, rank))
        target = s + {"F": 1, "B": -1, "": 0}[KINDS[kind].crosses]
        if target != s and 0 <= target < self.placement.stages:
            heappush(self._queue, (end + self._transfer(kind, s, target), self.placement.homes[target]))
