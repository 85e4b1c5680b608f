# SPDX-License-Identifier: Apache-2.0
"""Find the side effects of units: which memory they write, and which of them draw random numbers.

For a front end that does not report them, run all units once on fake tensors, under a dispatch mode that sees every
operator with its schema.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

import torch

from fpipe.record.captured import Captured, Labels, Observed, Unit
from fpipe.record.refusals import data_dependence_error, own_generator_error, unregistered_write_error
from fpipe.record.validity import require_results
from fpipe.tensors.effects import EffectsMode, storage_id
from fpipe.tensors.random import label
from fpipe.tensors.torch_private import DataDependentOutputException, DynamicOutputShapeException


def observe(captured: Captured) -> Observed:
    """Return what the front end observed; if it observed nothing, run every unit once on fake tensors.

    Raise `CaptureError` for a unit that depends on data, draws from a generator other than the default, writes to an
    unregistered tensor, or does not return what it `makes`.
    """
    if captured.observed is not None:
        return captured.observed
    values = dict(captured.fakes)
    written: dict[Unit, frozenset[int]] = {}
    random: dict[Unit, Labels] = {}
    collective: set[Unit] = set()
    ordinals: dict[str, int] = {}
    with captured.mode, torch.no_grad():
        for unit in captured.units:
            where = f"module {unit.path or '(root)'}"
            try:
                with EffectsMode() as watch:
                    made = unit.call(*[values[value] for value in unit.reads])
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise data_dependence_error(where, error) from error
            require_results(unit, made)
            if watch.effects.unregistered:
                raise unregistered_write_error(where)
            if watch.effects.foreign:
                raise own_generator_error(where)
            values.update(zip(unit.makes, made, strict=True))
            written[unit] = frozenset(watch.effects.written)
            collective.update({unit} if watch.effects.communicates else ())
            if watch.effects.drawn:
                ordinal = ordinals[unit.path] = ordinals.get(unit.path, -1) + 1
                random[unit] = Labels(label(unit.path, ordinal), tuple(watch.effects.drawn))
    storage = {value: storage_id(tensor) for value, tensor in values.items()}
    views = frozenset(value for value, tensor in values.items() if tensor._is_view())
    return Observed(storage, written, random, views, collective=frozenset(collective))
