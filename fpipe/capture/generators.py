# SPDX-License-Identifier: Apache-2.0
"""Refuse random numbers of Python and numpy in a forward.

Problem. Nothing keys them by the step's seed. Where one becomes part of the captured program, every step gets the
number drawn when the pipeline was built; elsewhere it depends on which stages run in which process.

Idea. Compare the states of both global generators before and after a run. A comparison takes longer than many modules,
so only a rerun, after a run that drew, compares them around each call, to name the module.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import NamedTuple

from fpipe.errors import CaptureError


class Drawing(NamedTuple):
    """The place that drew random numbers, and the generator it drew from."""

    where: str
    generator: str


class Generators:
    """The states of Python's and, if imported, numpy's global generators when last seen.

    `drawing` is the first to draw since then; `None` if nothing has.
    """

    def __init__(self) -> None:
        self.states = _states()
        self.drawing: Drawing | None = None

    def look(self, where: str) -> Drawing | None:
        """Note that `where` has run since the last look; return the first drawing, if any."""
        before, self.states = self.states, _states()
        moved = [name for name, state in self.states.items() if name in before and state != before[name]]
        if moved and self.drawing is None:
            self.drawing = Drawing(where, moved[0])
        return self.drawing


def drawing_error(drawing: Drawing) -> CaptureError:
    """Return the error for a forward that draws."""
    return CaptureError(
        f"{drawing.where}: got a forward that draws from {drawing.generator}, expected torch's random operations, "
        "which follow the step's seed: the numbers of the build would be used in every step. Draw with torch, or turn "
        "this off; in transformers that is mostly SpecAugment, config.apply_spec_augment = False."
    )


def _states() -> Mapping[str, object]:
    """Return the state of each generator, in comparable form."""
    states: dict[str, object] = {"Python's random module": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, key, *rest = numpy.random.get_state()
        states["numpy.random"] = (kind, key.tobytes(), *rest)
    return states
