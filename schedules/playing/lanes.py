# SPDX-License-Identifier: Apache-2.0
"""The collectives of one rank in time: one after the other, beside the rank's other actions.

A collective is posted when the rank comes to it, begins once the one before it has ended, and stops nothing but the
actions that use its result: those that read gathered weights, and the update with a reduced gradient. They wait at a
gate, which is put before them by the first collective of their stage. So a schedule without collectives has no gates.
"""

from __future__ import annotations

from schedules.language.actions import KINDS, Action
from schedules.playing.dependencies import Dependency, Wire

_READERS = tuple(kind for kind, word in KINDS.items() if word.reads)
_USERS = {"UNSHARD": _READERS, "REDUCE_GRAD": ("U",)}


class GateOpening(dict[int, float]):
    """The `arrived` of a gate: the time it opens, whichever unit is asked for, however often."""

    latest = 0.0

    def get(self, unit: int, default: float | None = None) -> float | None:  # type: ignore[override]
        """Return when the gate opens."""
        return self.latest

    def __delitem__(self, unit: int) -> None:
        """Do nothing: the gate stays open."""


class CollectiveLane:
    """The collectives of a rank: `free` is when the last one ends, `gates` are by kind of collective and stage."""

    def __init__(self, rank: int, rows: dict[str, dict[int, Wire]], routes: int) -> None:
        self.rank, self.rows, self.routes, self.free = rank, rows, routes, 0.0
        self.gates: dict[tuple[str, int], GateOpening] = {}

    def post(self, action: Action, now: float, time: float) -> tuple[float, float]:
        """Return when a collective that is posted `now` begins and ends. Weights are freed at once."""
        kind, stage = action.kind, action.stage
        if kind == "RESHARD":
            return now, now
        start = max(now, self.free)
        self.free = start + time
        if (kind, stage) not in self.gates:
            self._add_gate(kind, stage)
        self.gates[kind, stage].latest = self.free
        return start, self.free

    def _add_gate(self, kind: str, stage: int) -> None:
        """Make the actions that use the result wait for it."""
        gate = Dependency(kind, (stage, stage), self.rank, self.rank)
        gate.arrived = self.gates[kind, stage] = GateOpening()
        for rows in (self.rows[user] for user in _USERS[kind]):
            for key in range(stage * self.routes, (stage + 1) * self.routes):
                if key in rows:
                    rows[key] = rows[key]._replace(takes=(*rows[key].takes, gate))
