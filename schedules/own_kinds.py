# SPDX-License-Identifier: Apache-2.0
"""Kinds of actions that users add.

Problem. A rank may have more to do than passes: collect garbage, compress what a forward keeps, save a checkpoint.

Idea. A kind of a user's own is a value that comes with all about it: its row of the vocabulary, its costs, and the
function that runs it. Whatever takes actions takes its actions too, and nothing has to be registered.

Invariant: such an action exchanges nothing with other stages. What does is a stage of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedules.errors import VocabularyError, quote
from schedules.language.actions import KINDS, Action, Kind


@dataclass(frozen=True, eq=False, repr=False)
class OwnKind(str):
    """A kind of action that is not in `KINDS`: its name, in capitals, with all about it. Call it to make its actions.

    - `before`, `after`: as in `Kind`, if it changes what a stage keeps of a unit: one of them, or both, is a state of
      your own. Without states it changes nothing. In any case, it runs at most once for each unit of a stage.
    - `time`, `growth`: what it takes in simulations, and, with states, what its rank then holds in addition, as a share
      of what a forward saves; it is negative if the action frees memory.
    - `handler`: the function that runs it, an `fpipe.runtime.executor.ActionHandler`.

    >>> COLLECT = OwnKind("COLLECT", "collect garbage while the rank waits", time=0.5)
    >>> str(COLLECT(3, 0)), KINDS[COLLECT].meaning
    ('3COLLECT0', 'collect garbage while the rank waits')
    """

    name: str
    meaning: str
    before: str = ""
    after: str = ""
    time: float = 0
    growth: float = 0
    handler: Callable[..., Any] | None = None

    def __new__(cls, name: str, *others: Any, **named: Any) -> OwnKind:
        """Return the name, without the rest."""
        return super().__new__(cls, name)

    def __post_init__(self) -> None:
        states, known = {self.before, self.after}, {"", *(state for word in KINDS.values() for state in word[1:3])}
        changes = len(states) == 2 and not states & {"", "done"} and not states <= known
        fits = changes or (states == {""} and not self.growth)
        if not re.fullmatch("[A-Z][A-Z_]*", self) or self in KINDS or not fits:
            raise VocabularyError(
                f"OwnKind: got {quote(self)} from state {quote(self.before)} to {quote(self.after)}, expected a name "
                "in capitals that no kind has, and two states, one of them your own, or none and no growth. Correct "
                "these."
            )

    @property
    def row(self) -> Kind:
        """Its row of the vocabulary."""
        return Kind(self.meaning, self.before, self.after)

    def __call__(self, stage: int, microbatch: int, slice: int | None = None) -> Action:
        """Return the action on one microbatch, or on one slice of it."""
        return Action(self, stage, microbatch, None, slice)
