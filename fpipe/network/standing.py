# SPDX-License-Identifier: Apache-2.0
"""The state of this process, as far as others have to know: one state machine.

What an error here means to the others depends on one state, the `Standing` of this process:

                   enter             begin              conclude
        OUTSIDE ──────────▶ DECIDING ─────▶ MIDWAY ──────────────▶ CONCLUDED
           ▲                   ▲              │                        │
           │                   └──────────────┘ decide                 │
           └─────────────────────── leave ─────────────────────────────┘

        an error           announced      published              its own affair

An error that is published, a wait that breaks, or a wrong message leads to FAILED, from which nothing leads away. An
error that all ranks raise together, because they do not agree, concludes.

Two threads look at it: the one that makes the calls, and the lookout (`fpipe.network.lookout`).

Runs when a pipeline is built and in every step, if ranks are separate processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from threading import Lock
from types import MappingProxyType
from typing import Final

from fpipe.network.waiting import Waitable
from fpipe.runtime.executor import Execution


class Standing(Enum):
    """The standing of this process among those that make a call: what the others wait for.

    - `OUTSIDE`: no call is running.
    - `DECIDING`: they wait for it to agree. `MIDWAY`: they may wait for what it computes. `CONCLUDED`: for nothing.
    - `FAILED`: they were told that a call failed; later calls are refused.
    """

    OUTSIDE = auto()
    DECIDING = auto()
    MIDWAY = auto()
    CONCLUDED = auto()
    FAILED = auto()


RUNNING: Final = frozenset({Standing.DECIDING, Standing.MIDWAY, Standing.CONCLUDED})
"""The standings within a call."""
FOLLOWING: Final[Mapping[Standing, frozenset[Standing]]] = MappingProxyType(
    {
        Standing.OUTSIDE: frozenset({Standing.DECIDING, Standing.FAILED}),
        **dict.fromkeys(RUNNING, frozenset(Standing)),
        Standing.FAILED: frozenset({Standing.FAILED}),
    }
)
"""The standings that may follow each one."""


class Situation:
    """The state of this process in the calls that it makes together with others.

    - `call`: the name and number of the call that is running, or that ran last.
    - `execution`: the program that it runs, if it has come to that. `posted`: what it waits for, if it waits.
    - `failure`: why later calls are refused, once the standing is `FAILED`.
    - `looking`: held while the lookout uses the board on behalf of a call that is running.
    """

    def __init__(self) -> None:
        self.standing, self.call, self.failure = Standing.OUTSIDE, "", ""
        self.execution: Execution | None = None
        self.posted: Waitable | None = None
        self.looking = Lock()

    @property
    def is_running(self) -> bool:
        """True while a call is running that has not failed."""
        return self.standing in RUNNING

    @property
    def place(self) -> str:
        """The call, and the position and action of its program."""
        at = self.execution.at if self.execution is not None else None
        return self.call if at is None else f"{self.call}, position {at.position}, {at.action}"

    def move(self, standing: Standing) -> None:
        """Take another standing."""
        assert standing in FOLLOWING[self.standing], f"{self.standing} does not lead to {standing}"
        self.standing = standing

    def enter(self, call: str) -> None:
        """Begin a call."""
        self.move(Standing.DECIDING)
        self.call = call

    def leave(self) -> None:
        """End the call; the lookout has stopped looking when this returns."""
        with self.looking:
            self.execution = None
            if self.standing is not Standing.FAILED:
                self.move(Standing.OUTSIDE)

    def fail(self, why: str) -> None:
        """Refuse later calls."""
        self.move(Standing.FAILED)
        self.failure = why
