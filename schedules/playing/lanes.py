# SPDX-License-Identifier: Apache-2.0
"""Actions that go on beside a rank's other ones, in time: collectives, and moves of what forwards keep.

Each lane (`Kind.beside`) runs one action after the other. An action is posted when the rank comes to it, begins once
the one before it in its lane has ended, and stops nothing but the actions that use its result: those that read gathered
weights, the update with a reduced gradient, and whatever needs the state in which a move leaves its microbatch. They
wait at a gate, which is put before them by the first such action of their stage. So a schedule without any has no
gates.
"""

from __future__ import annotations

from collections import defaultdict

from schedules.language.actions import KINDS, Action
from schedules.own_kinds import OwnKind
from schedules.playing.dependencies import Dependency, Wire


def _users(kind: str) -> tuple[str, ...]:
    """Return the kinds of actions that use the result of an action."""
    if state := KINDS[kind].after:
        return tuple(user for user, word in KINDS.items() if word.before == state)
    return ("U",) if kind == "REDUCE_GRAD" else tuple(user for user, word in KINDS.items() if word.reads)


class GateOpening(dict[int, float]):
    """The `arrived` of a gate: the time it opens, for a unit, or else for all of them at `latest`."""

    latest = 0.0

    def get(self, unit: int, default: float | None = None) -> float | None:  # type: ignore[override]
        """Return when the gate opens."""
        return super().get(unit, self.latest)

    def __delitem__(self, unit: int) -> None:
        """Let a unit through; the gate stays open for others."""
        self.pop(unit, None)


class RankLanes:
    """The lanes of a rank.

    - `free`: per lane, when the last action ends. `gates`: by kind of action and stage.
    - `moves`: when moves will have taken or freed memory, and how much, in time order.
    """

    def __init__(self, rank: int, rows: dict[str, dict[int, Wire]], routes: int) -> None:
        self.rank, self.rows, self.routes, self.free = rank, rows, routes, defaultdict[str, float](float)
        self.gates: dict[tuple[str, int], GateOpening] = {}
        self.moves = list[tuple[float, float]]()

    def post(self, action: Action, unit: int, now: float, time: float) -> tuple[float, float]:
        """Return when an action that is posted `now` begins and ends. Weights are freed at once."""
        kind, stage = action.kind, action.stage
        word = KINDS[kind]
        if kind == "RESHARD":
            return now, now
        start = max(now, self.free[word.beside])
        self.free[word.beside] = end = start + time
        if (kind, stage) not in self.gates:
            self._add_gate(kind, stage)
        if word.after:
            self.gates[kind, stage][unit] = end
        else:
            self.gates[kind, stage].latest = end
        return start, end

    def _add_gate(self, kind: str, stage: int) -> None:
        """Make the actions that use the result wait for it."""
        gate = Dependency(kind, (stage, stage), self.rank, self.rank)
        gate.arrived = self.gates[kind, stage] = GateOpening()
        own = [one for one in self.rows if isinstance(one, OwnKind) and one.before == KINDS[kind].after != ""]
        for rows in (self.rows[user] for user in (*_users(kind), *own)):
            for key in range(stage * self.routes, (stage + 1) * self.routes):
                if key in rows:
                    rows[key] = rows[key]._replace(takes=(*rows[key].takes, gate))
