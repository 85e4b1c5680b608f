# SPDX-License-Identifier: Apache-2.0
"""Gradients in a run on formulas: terms are added, replicas summed, weights updated.

Each rank that holds a stage has its own sum; a place is a stage on a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from schedules.errors import ProgramError
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule
from schedules.proof.formulas import Formula, Formulas, formula, total

Replica: TypeAlias = tuple[int, int]
MicrobatchSlice: TypeAlias = tuple[int, int | None]  # a microbatch, and its slice if the schedule has slices


class Sums:
    """The gradients of one run.

    - `terms`: by place, in the order they were added; `added`: the parts they are from.
    - `totals`: by place, the sum over all replicas once computed.
    - `reduced`: the places whose gradient is reduced over the data-parallel group.
    - `applied`: by place, the last microbatch whose gradients have been applied; `updates`: the number of updates;
      `seen`: the gradient that the last of them found.
    """

    def __init__(self, schedule: Schedule, stages: int) -> None:
        self.schedule, self.placement, self.stages = schedule, schedule.placement, stages
        places = [(s, rank) for s in range(stages) for rank in self.placement.replicas(s)]
        self.terms: dict[Replica, list[Formula]] = {place: [] for place in places}
        self.added: dict[Replica, set[MicrobatchSlice]] = {place: set() for place in places}
        self.totals: dict[Replica, Formula] = {}
        self.reduced = set[Replica]()
        actions = (action for rank in range(schedule.ranks) for action in schedule.actions(rank))
        self.reduces = any(action.kind == "REDUCE_GRAD" for action in actions)
        self.applied, self.updates = dict.fromkeys(places, -1), dict.fromkeys(places, 0)
        self.seen: dict[Replica, Formula] = {}
        self.versions: dict[tuple[Replica, int], int] = {}  # the number of updates before a microbatch began

    def add(self, s: int, rank: int, part: MicrobatchSlice, term: Formula) -> None:
        """Add the gradient term of a part."""
        self.terms[s, rank].append(term)
        self.added[s, rank].add(part)

    def partial_sum(self, s: int, rank: int) -> Formula:
        """Return the sum of the terms added on one rank so far."""
        return formula("sum", *self.terms[s, rank])

    def is_complete(self, s: int, rank: int) -> bool:
        """Return whether all terms of stage `s` on a rank have been added."""
        return self.added[s, rank] == self._expected(s, rank)

    def is_settled(self, s: int, rank: int) -> bool:
        """Return whether the gradient of stage `s` on a rank is complete, and summed if there are replicas."""
        return (s, rank) in self.totals if self.other_replicas(s, rank) else self.is_complete(s, rank)

    def is_final(self, s: int, rank: int) -> bool:
        """Return whether the gradient of stage `s` on a rank is settled, and reduced if the schedule reduces any."""
        return self.is_settled(s, rank) and ((s, rank) in self.reduced or not self.reduces)

    def last_microbatch(self, s: int, rank: int) -> int:
        """Return the last microbatch that stage `s` runs on a rank."""
        return max(self._expected(s, rank))[0]

    def other_replicas(self, s: int, rank: int) -> list[int]:
        """Return the other ranks whose gradients of stage `s` are summed with this one's."""
        return [other for other in self.placement.replicas(s) if other != rank and self.schedule.backward]

    def settle(self, s: int, rank: int, partials: Mapping[int, Formula]) -> None:
        """Record the total over all replicas, given the sum of each."""
        self.totals[s, rank] = formula("total", *(partials[replica] for replica in self.placement.replicas(s)))

    def reduce(self, s: int, rank: int, i: int) -> bool:
        """Reduce the gradient up to microbatch `i`. Return false if that is not all of it, or it is too late."""
        whole = self.is_settled(s, rank) and self.is_complete(s, rank) and i == self.last_microbatch(s, rank)
        allowed = self.schedule.backward and whole and (s, rank) not in self.reduced and not self.updates[s, rank]
        if allowed:
            self.reduced.add((s, rank))
        return allowed

    def full_gradient(self, s: int, rank: int) -> Formula:
        """Return the gradient of stage `s` on a rank, summed over its replicas and reduced, if that was done."""
        gradient = self._summed_gradient(s, rank)
        return formula("reduced", gradient) if (s, rank) in self.reduced else gradient

    def _summed_gradient(self, s: int, rank: int) -> Formula:
        """Return the gradient of stage `s` on a rank, summed over its replicas if there are several.

        Raise `ProgramError` if they were never summed.
        """
        if len(self.placement.replicas(s)) == 1 or not self.schedule.backward:
            return total([self.terms[s, rank]])
        if (s, rank) not in self.totals:
            raise ProgramError(f"rank {rank} never sums the gradients of stage {s} over its replicas. Add its G.")
        return self.totals[s, rank]

    def update(self, s: int, rank: int, i: int) -> bool:
        """Apply the gradients up to microbatch `i`. Return false if some are missing or none is new.

        Once reduced, they are one sum: there is no formula for a part of it.
        """
        needed = {(j, part) for j, part in self._expected(s, rank) if j <= i}
        summed = len(self.placement.replicas(s)) == 1 or (s, rank) in self.totals
        later = self.applied[s, rank] < i < self.schedule.microbatches
        exists = needed == self._expected(s, rank) or (s, rank) not in self.reduced
        allowed = self.schedule.backward and summed and later and exists and needed <= self.added[s, rank]
        if allowed:
            self.applied[s, rank] = i
            self.updates[s, rank] += 1
            self.seen[s, rank] = self.full_gradient(s, rank)
        return allowed

    def begin(self, s: int, rank: int, i: int) -> bool:
        """Record the weight version a microbatch goes forward with: the one that is declared, else the newest.

        Return false if that has not been made yet, or if an earlier slice used another.
        """
        newest, rule = self.updates[s, rank], self.schedule.version
        version = newest if rule is None else rule(i)
        return 0 <= version <= newest and self.versions.setdefault(((s, rank), i), version) == version

    def gradients(self) -> Formulas:
        """Return the terms of every stage, replica by replica."""
        replicas = self.placement.replicas
        return tuple(tuple(term for rank in replicas(s) for term in self.terms[s, rank]) for s in range(self.stages))

    def full_gradients(self) -> Formulas:
        """Return the gradient of every stage, on each rank that holds it."""
        return tuple(
            tuple(self.full_gradient(s, rank) for rank in self.placement.replicas(s)) for s in range(self.stages)
        )

    def gradients_updated_with(self) -> Formulas:
        """Return the gradient that the update of every stage found, on each rank; none if that is not one update."""
        return tuple(
            tuple(self.seen[s, rank] for rank in self.placement.replicas(s) if self.updates[s, rank] == 1)
            for s in range(self.stages)
        )

    def require_all_applied(self) -> None:
        """Raise `ProgramError` if there are updates, but some gradient is in none."""
        if max(self.applied.values()) < 0:
            return
        for (s, rank), i in self.applied.items():
            if any(j > i for j, _ in self.added[s, rank]):
                raise ProgramError(
                    f"rank {rank}: no update applies the gradients of stage {s} after microbatch {i}. Add one."
                )

    def require_equal_copies(self, graph: Graph) -> None:
        """Raise `ProgramError` if copies of weights were updated with different gradients.

        The gradient of replicas, and of a parameter that two stages share, is one sum at the end. A copy that was
        updated twice has not made the same update as the other copy.
        """
        tied = {s for edge in graph.gradients for s in edge}
        for (s, rank), steps in self.updates.items():
            if steps > 1 and (s in tied or len(self.placement.replicas(s)) > 1):
                raise ProgramError(
                    f"rank {rank}: copies of stage {s}'s weights drift apart. Update them once, at the end."
                )

    def require_all_reduced(self) -> None:
        """Raise `ProgramError` if some gradients are reduced and others are not."""
        left = sorted({*self.terms} - self.reduced)
        if self.reduced and left:
            s, rank = left[0]
            raise ProgramError(f"rank {rank} never reduces the gradient of stage {s}. Add its REDUCE_GRAD.")

    def require_sums_last(self) -> None:
        """Raise `ProgramError` if a sum misses terms that were added later."""
        for s in range(self.stages if self.schedule.backward else 0):
            replicas = self.placement.replicas(s)
            found = {self._summed_gradient(s, rank) for rank in replicas}
            if found != {total([self.terms[s, rank] for rank in replicas])}:
                raise ProgramError(f"stage {s}: its gradients were summed too early. Put each G after all backwards.")

    def _expected(self, s: int, rank: int) -> set[MicrobatchSlice]:
        """Return the parts whose gradients stage `s` adds on `rank`."""
        parts = [None] if self.schedule.slices == 1 else [*range(self.schedule.slices)]
        microbatches = range(self.schedule.microbatches)
        return {(i, part) for i in microbatches if self.placement.home(s, i) == rank for part in parts}
