# SPDX-License-Identifier: Apache-2.0
"""The torch calls of a run, numbered by *ticks* in the order in which they begin.

Calls inside another torch call, and calls that leave no unit, have ticks, too. Also here: the autocast regions of a
run, and the questions that it asks.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fpipe.record.captured import Value
from fpipe.record.questions import Answer, Ask, Reply
from fpipe.record.trace.tape import CallResult


@dataclass
class RunningCall:
    """A torch call that is running: the values passed to calls inside it, and whether it calls a collective.

    `guarded`: whether questions inside it, which only guard its arguments, are answered with no.
    """

    used: dict[Value, None] = field(default_factory=dict)
    communicates: bool = False
    guarded: bool = False

    def use(self, values: Iterable[Value]) -> None:
        """Note that these values are used inside."""
        self.used.update(dict.fromkeys(values))


class TorchCalls:
    """The torch calls of a run.

    - `tick`: the number of calls so far. `by_function`: the ticks of each function's calls.
    - `running`: the outermost running call; `None` between calls.
    - `results`: the results of outermost calls, by tick.
    """

    def __init__(self) -> None:
        self.tick = 0
        self.by_function = defaultdict[Any, list[int]](list)
        self.running: RunningCall | None = None
        self.results: dict[int, CallResult] = {}

    def begin(self, function: Any) -> int:
        """Count a call of `function`, and return its tick."""
        tick, self.tick = self.tick, self.tick + 1
        self.by_function[function].append(tick)
        return tick


class AutocastRegions:
    """The outermost autocast contexts of a run, numbered from 1: autocast caches casts until such a context exits."""

    def __init__(self) -> None:
        self.depth = self.count = 0

    def enter(self) -> None:
        """Enter an autocast context."""
        self.count += not self.depth
        self.depth += 1

    def exit(self) -> None:
        """Exit the innermost autocast context."""
        self.depth -= 1

    @property
    def current(self) -> int:
        """The number of the region that the run is in; 0 outside of any."""
        return self.count if self.depth else 0


class Questions:
    """The questions that a run asks about the batch: `ask` answers them, `replies` are the answers so far."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.replies: list[Reply] = []

    def note_reply(self, tick: int, function: Any, answer: Answer) -> None:
        """Record the answer that the torch call at `tick` got."""
        self.replies.append(Reply(tick, function, answer))

    def has_reply(self, tick: int) -> bool:
        """Return whether the torch call at `tick` was the last to get an answer."""
        return bool(self.replies) and self.replies[-1].tick == tick
