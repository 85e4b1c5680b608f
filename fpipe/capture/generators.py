# SPDX-License-Identifier: Apache-2.0
"""Refuse forwards that draw random numbers from Python or numpy.

Problem. Such numbers don't depend on the step's seed. If one becomes part of the captured program, every step gets the
number drawn when the pipeline was built; otherwise it depends on which stages run in which process.

Idea. Compare the states of both global generators before and after a run. A comparison takes longer than many modules
do, so only if a run drew, rerun the model and compare around each call, to name the module.

Runs when a pipeline is built, and when a new kind of batch first comes.
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
    """The states of Python's and, if imported, numpy's global generators at the last look.

    `drawing`: the first draw that any look has found; `None` if there was none.
    """

    def __init__(self) -> None:
        self.states = _states()
        self.drawing: Drawing | None = None

    def look(self, where: str) -> Drawing | None:
        """Attribute any draw since the last look to `where`; return the first draw found so far, if any."""
        before, self.states = self.states, _states()
        moved = [name for name, state in self.states.items() if name in before and state != before[name]]
        if moved and self.drawing is None:
            self.drawing = Drawing(where, moved[0])
        return self.drawing


def drawing_error(drawing: Drawing) -> CaptureError:
    """Return the error for a forward that draws from Python's or numpy's generator."""
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
