# SPDX-License-Identifier: Apache-2.0
"""The formulas that each rank holds while a schedule or a program runs on formulas."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias

from schedules.errors import ProgramError
from schedules.language.placement import Placement
from schedules.proof.formulas import Formula
from schedules.proof.inflight import Parcel

Waits: TypeAlias = Generator[Parcel, None, None]  # yields the parcel that a rank waits for until that arrives


class Store:
    """The parcels that wait to be used, by rank; `at` describes the action that each rank is at.

    If `direct` is true there are no transfers, and a parcel is on its target's rank at once.
    """

    def __init__(self, placement: Placement, direct: bool) -> None:
        self.placement, self.direct = placement, direct
        self.parcels: list[dict[Parcel, Formula]] = [{} for _ in range(placement.ranks)]
        self.at = [""] * placement.ranks

    def put(self, rank: int, value: Formula, *parcels: Parcel) -> None:
        """Store an output of an action of `rank`. Raise `ProgramError` if it is stored already."""
        for parcel in parcels:
            home = self.placement.home(parcel.target, parcel.microbatch) if self.direct else rank
            if parcel in self.parcels[home]:
                raise self.error(rank, f"makes {parcel} again", "Make it once.")
            self.parcels[home][parcel] = value

    def wait_for(self, rank: int, *parcels: Parcel) -> Waits:
        """Wait until all these parcels are on `rank`."""
        for parcel in parcels:
            while parcel not in self.parcels[rank]:
                yield parcel

    def take(self, rank: int, *parcels: Parcel) -> Generator[Parcel, None, list[Formula]]:
        """Wait for these parcels, remove them and return them."""
        yield from self.wait_for(rank, *parcels)
        return [self.parcels[rank].pop(parcel) for parcel in parcels]

    def error(self, rank: int, problem: str, repair: str) -> ProgramError:
        """Return the error for the action that `rank` is at."""
        return ProgramError(f"rank {rank}, {self.at[rank]}: {problem}. {repair}")
