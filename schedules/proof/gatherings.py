# SPDX-License-Identifier: Apache-2.0
"""Gathered weights in a run on formulas: a parcel that lies on a rank from its `UNSHARD` to its `RESHARD`.

A stage that is never gathered has its weights at all times.
"""

from __future__ import annotations

from collections import Counter
from itertools import count, islice

from schedules.language.actions import Action
from schedules.proof.formulas import formula
from schedules.proof.inflight import Parcel
from schedules.proof.store import Store


class Gatherings:
    """Counts of the gatherings of each stage on each rank, and the stages that a rank has read as a whole."""

    def __init__(self, store: Store) -> None:
        self.store, self.gathered, self.whole = store, Counter[tuple[int, int]](), set[tuple[int, int]]()

    def gather(self, rank: int, action: Action) -> None:
        """Put the weights on the rank. Raise `ProgramError` if they were there in some other way."""
        s, number = action.stage, action.microbatch
        numbers = (i for i in count() if self.store.placement.home(s, i) == rank)
        expected = next(islice(numbers, self.gathered[s, rank], None))
        if self._current(s, rank) or (s, rank) in self.whole or number != expected:
            repair = "Gather a stage before its first pass, and only while it is not gathered; count its gatherings."
            raise self.store.error(rank, "gathers weights that are already gathered, or has the wrong number", repair)
        self.gathered[s, rank] += 1
        self.store.put(rank, formula("weights", s), Parcel("weights", s, s, number))

    def free(self, rank: int, action: Action) -> None:
        """Take the weights away. Raise `ProgramError` if they are not there."""
        parcel = Parcel("weights", action.stage, action.stage, action.microbatch)
        if parcel not in self.store.parcels[rank]:
            raise self.store.error(
                rank, "frees weights that are not gathered", "Free each gathering once, by its number."
            )
        del self.store.parcels[rank][parcel]

    def read(self, rank: int, s: int) -> None:
        """Read the weights. Raise `ProgramError` if they are not there."""
        if not self.gathered[s, rank]:
            self.whole.add((s, rank))
        elif not self._current(s, rank):
            raise self.store.error(rank, "reads weights that are not gathered", "Gather them before it.")

    def write(self, rank: int, s: int) -> None:
        """Update the shards. Raise `ProgramError` if that leaves gathered weights out of date."""
        if self._current(s, rank):
            raise self.store.error(rank, "leaves gathered weights out of date", "Free them before it.")

    def _current(self, s: int, rank: int) -> bool:
        return any(parcel.kind == "weights" and parcel.source == s for parcel in self.store.parcels[rank])
