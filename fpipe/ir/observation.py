# SPDX-License-Identifier: Apache-2.0
"""The side effects of units: which memory they write, and where they draw random numbers.

All units run once on fake tensors, under a dispatch mode that sees every operator with its schema.
"""

from __future__ import annotations

import torch

from fpipe.errors import CaptureError
from fpipe.ir.captured import Captured, Labels, Observed, Unit
from fpipe.ir.validity import require_results
from fpipe.tensors.effects import EffectsMode, memory
from fpipe.tensors.random import label
from fpipe.torch_private import DataDependentOutputException, DynamicOutputShapeException


def observe(captured: Captured) -> Observed:
    """Return what the front end saw; if it did not look, run every unit once on fake tensors and watch it."""
    if captured.observed is not None:
        return captured.observed
    values = dict(captured.fakes)
    written: dict[Unit, frozenset[int]] = {}
    random: dict[Unit, Labels] = {}
    ordinals: dict[str, int] = {}
    with captured.mode, torch.no_grad():
        for unit in captured.units:
            try:
                with EffectsMode() as watch:
                    made = unit.call(*[values[value] for value in unit.reads])
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise CaptureError(
                    f"module {unit.path or '(root)'}: got the operator {error}, whose result depends on the values of "
                    "its input, expected shapes and control flow that do not. Rewrite that part."
                ) from error
            require_results(unit, made)
            if watch.effects.unregistered:
                raise CaptureError(
                    f"module {unit.path or '(root)'}: got an in-place change of a tensor that is neither parameter nor "
                    "buffer, expected registered buffers: nobody would carry the change on. Use register_buffer."
                )
            if watch.effects.foreign:
                raise CaptureError(
                    f"module {unit.path or '(root)'}: got a random operation with a generator argument, expected the "
                    "default generator, which is seeded from the step's seed. Drop the argument."
                )
            values.update(zip(unit.makes, made, strict=True))
            written[unit] = frozenset(watch.effects.written)
            if watch.effects.drawn:
                ordinal = ordinals[unit.path] = ordinals.get(unit.path, -1) + 1
                random[unit] = Labels(label(unit.path, ordinal), tuple(watch.effects.drawn))
    storage = {value: memory(tensor) for value, tensor in values.items()}
    views = frozenset(value for value, tensor in values.items() if tensor._is_view())
    return Observed(storage, written, random, views)
