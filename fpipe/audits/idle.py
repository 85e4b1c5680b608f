# SPDX-License-Identifier: Apache-2.0
"""The time for which a rank will be idle at a place, and the time that an audit may add.

Problem. How long a rank waits for a message is known when it has waited.

Idea. Steps are alike. A rank will wait at a place for at least as long as it did in the shortest of the last few steps.
What it did meanwhile, to use the time, counts as waiting; but if it waited for nothing after that, it was late, and the
place counts as never idle for as many steps.

Invariant: a place is used only if it was idle in each of the last few steps.

Runs in every step that is audited.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from typing import Final

REMEMBERED: Final = 4
"""How many steps must have been alike."""
SHORTEST_REST: Final = 5e-4  # seconds; who waits for less after work of its own may have been late
REST_SHARE: Final = 0.05  # of the time of that work
SLOWER: Final = 1.1
"""By which factor work may take longer than it did before."""


class IdleTimes:
    """The last times for which a rank was idle, by place."""

    def __init__(self) -> None:
        self.known: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def predict(self, place: Hashable) -> float:
        """Return for how many seconds the rank will be idle there at least: 0 if too little is known."""
        known = self.known[place]
        return min(known) if len(known) == REMEMBERED else 0.0

    def add(self, place: Hashable, used: float, waited: float) -> None:
        """Add for how many seconds the rank could work there, and how long it waited after that.

        >>> times = IdleTimes()
        >>> for waited in (0.3, 0.2, 0.4):
        ...     times.add("0RECV_B1", 0.0, waited)
        >>> times.predict("0RECV_B1")
        0.0
        >>> times.add("0RECV_B1", 0.125, 0.125)
        >>> times.predict("0RECV_B1")
        0.2
        >>> times.add("0RECV_B1", 0.15, 0.0)
        >>> times.predict("0RECV_B1")
        0.0
        """
        is_late = used > 0 and waited < max(SHORTEST_REST, REST_SHARE * used)
        self.known[place].append(0.0 if is_late else used + waited)


class Allowance:
    """Time that may be spent: a share of the time that has passed.

    - `left`: what may be spent now. `most`: the most that was spent, or asked for, at once. Nothing is spent unless as
      much as that is left: else cheap actions would never leave enough for expensive ones.

    >>> time = Allowance(0.25)
    >>> time.earn(8.0)
    >>> time.allows(3.0), time.allows(1.0)
    (False, False)
    >>> time.earn(8.0)
    >>> time.allows(1.0)
    True
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.left = share if share == float("inf") else 0.0
        self.most = 0.0

    def allows(self, seconds: float = 0.0) -> bool:
        """Return whether so much may be spent; by default, whether something may."""
        self.most = max(self.most, seconds)
        return self.left > 0 and self.left >= self.most

    def earn(self, seconds: float) -> None:
        """Add what `seconds` of steps allow."""
        self.left += self.share * seconds

    def spend(self, seconds: float) -> None:
        """Subtract what was spent."""
        self.left -= seconds
        self.most = max(self.most, seconds)
