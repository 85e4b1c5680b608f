# SPDX-License-Identifier: Apache-2.0
"""Check that parameters and buffers stay in place while a model runs.

A step puts tensors where modules keep their own, and takes them out again. If a forward replaces one unnoticed, or
assigns to its `.data`, the new value would be lost after the step.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fpipe.errors import CaptureError
from fpipe.record.captured import Buffer, Value
from fpipe.record.trace.recorder import Recorder
from fpipe.tensors.effects import memory


def require_in_place(recorder: Recorder, value: Value, seats: Sequence[tuple[dict[str, Any], str]]) -> None:
    """Raise `CaptureError` unless all seats of a parameter or buffer hold it, or the buffer that the run assigned."""
    values = recorder.values
    source, tensor = values.sources[value], values.tensors[recorder.reassignments.current_values.get(value, value)]
    if (
        all(table.get(name) is tensor for table, name in seats)
        and memory(values.tensors[value]) == values.storage[value]
    ):
        return
    _, name = seats[0]
    if isinstance(source, Buffer):
        kind, repair = "buffer", f"Change it in place, as in self.{name}.copy_(...)"
    else:
        kind, repair = (
            "parameter",
            "Compute a new tensor from it (torch.nn.utils.parametrize), or change it between steps",
        )
    raise CaptureError(
        f"{kind} {source[0]}: got a forward that replaces it, or assigns to its .data, expected one that leaves it in "
        f"place. The new value would be lost. {repair}."
    )
