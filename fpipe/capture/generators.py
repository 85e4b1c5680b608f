# SPDX-License-Identifier: Apache-2.0
"""Python's and numpy's random numbers, which a forward must not draw.

Problem. Nothing keys them by the step's seed. Where one becomes part of the captured program, every step gets the
number that was drawn when the pipeline was built; elsewhere it depends on which stages run in which process.

Idea. Compare the states of both global generators before and after a run. Comparing takes longer than many a module, so
only a run after one that drew compares them around each call, to name the module.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import NamedTuple

from fpipe.errors import CaptureError


class Drawing(NamedTuple):
    """Who drew random numbers, and from which generator."""

    where: str
    generator: str


class Generators:
    """The global generators of Python and, if it is imported, of numpy, as they were last seen.

    `drawing` is who was first to draw since then; `None` if nobody has.
    """

    def __init__(self) -> None:
        self.states = _states()
        self.drawing: Drawing | None = None

    def look(self, where: str) -> Drawing | None:
        """Note that `where` ran since the last look, and return who has drawn."""
        before, self.states = self.states, _states()
        moved = [name for name, state in self.states.items() if name in before and state != before[name]]
        if moved and self.drawing is None:
            self.drawing = Drawing(where, moved[0])
        return self.drawing


def refusal(drawing: Drawing) -> CaptureError:
    """Return the error for a forward that draws."""
    return CaptureError(
        f"{drawing.where}: got a forward that draws from {drawing.generator}, expected torch's random operations, "
        "which follow the step's seed: the numbers of the build would be used in every step. Draw with torch, or turn "
        "this off; in transformers that is mostly SpecAugment, config.apply_spec_augment = False."
    )


def _states() -> Mapping[str, object]:
    """By generator, its state, as a value that can be compared."""
    states: dict[str, object] = {"Python's random module": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, key, *rest = numpy.random.get_state()
        states["numpy.random"] = (kind, key.tobytes(), *rest)
    return states
