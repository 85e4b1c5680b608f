# SPDX-License-Identifier: Apache-2.0
"""Refuse forwards that draw random numbers from Python or numpy.

Problem. Such numbers don't depend on the step's seed. If one becomes part of the captured program, every step gets the
number drawn when the pipeline was built; otherwise it depends on which stages run in which process.

Idea. Compare the states of both global generators before and after a run. All threads share them, so a state may have
moved because a data loader's thread drew. Then the model runs again from the same state, compared around each call: the
forward draws at the same call every time, another thread does not.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from threading import active_count
from typing import Final, NamedTuple

from fpipe.errors import CaptureError

ROUNDS: Final = 10
"""How many runs must see the same draw while other threads run. Where they take the interpreter is not random."""


class Drawing(NamedTuple):
    """A draw: how many looks came before, the place that drew, and the generator it drew from."""

    look: int
    where: str
    generator: str


class Generators:
    """The states of Python's and, if imported, numpy's global generators at the last look, and the draws so far."""

    def __init__(self) -> None:
        self.states: Mapping[str, object] = {}
        self.looks = 0
        self.drawings: list[Drawing] = []

    def look(self, where: str) -> None:
        """Note that `where` has run since the last look."""
        before, self.states = self.states, _states()
        moved = [name for name, state in self.states.items() if name in before and state != before[name]]
        self.drawings += [Drawing(self.looks, where, name) for name in moved]
        self.looks += 1


class Suspects:
    """The draws that all runs so far have seen; in the first, which looks once, any of them."""

    def __init__(self) -> None:
        self.rounds = 0
        self.common: list[Drawing] = []

    @property
    def are_certain(self) -> bool:
        """True if nothing but the forward can have drawn what is left."""
        return self.rounds == ROUNDS or (self.rounds > 1 and active_count() == 1)

    def narrow(self, drawings: list[Drawing]) -> bool:
        """Keep those that a run has seen again; return whether any are left."""
        self.common = [one for one in drawings if self.rounds < 2 or one in self.common]
        self.rounds += 1
        return bool(self.common)


def drawing_error(drawing: Drawing) -> CaptureError:
    """Return the error for a forward that draws from Python's or numpy's generator."""
    return CaptureError(
        f"{drawing.where}: got a forward that draws from {drawing.generator}, expected torch's random operations, "
        "which follow the step's seed: the numbers of the build would be used in every step. Draw with torch, or turn "
        "this off; in transformers it is mostly SpecAugment, config.apply_spec_augment = False. If another thread "
        "draws all the time, give it a separate generator (random.Random(), numpy.random.default_rng())."
    )


def _states() -> Mapping[str, object]:
    """Return the state of each generator, in comparable form."""
    states: dict[str, object] = {"Python's random module": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, key, *rest = numpy.random.get_state()
        states["numpy.random"] = (kind, key.tobytes(), *rest)
    return states
