# SPDX-License-Identifier: Apache-2.0
"""Refuse reentrant checkpoints whose gradients would not have the bits of one device.

A pipeline differentiates a reentrant checkpoint as one node, with its arguments and parameters as inputs
(`fpipe.record.trace.reentrant`). Tensors that reach the function in any other way are refused.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from fpipe.errors import CaptureError
from fpipe.record.captured import Parameter, Source, Unit, Value
from fpipe.record.trace.tape import Frame

USE_OTHER = "Pass use_reentrant=False to checkpoint() (gradient_checkpointing_kwargs of transformers has it)."


def require_explicit_arguments(
    frame: Frame, units: Sequence[Unit], wanting: Collection[Value], args: Sequence[Value]
) -> None:
    """Raise `CaptureError` if the function reads an outside tensor that requires a gradient and is not an argument."""
    inside = units[frame.start : frame.stop]
    made = {value for unit in inside for value in unit.makes}
    hidden = [v for unit in inside for v in unit.reads if v not in made and v not in args and v in wanting]
    if hidden:
        raise CaptureError(
            f"module {frame.path or '(root)'}: got a reentrant checkpoint of a function that reads a tensor with "
            "requires_grad from a closure, a keyword argument or a tuple, expected it as a positional argument. torch "
            f"would run its backward once for each use. {USE_OTHER}"
        )


def require_own_parameters(
    frames: Sequence[Frame], units: Sequence[Unit], sources: Mapping[Value, Source], wanting: Collection[Value]
) -> None:
    """Raise `CaptureError` if a trained parameter is used both inside and outside of reentrant checkpoints.

    One device accumulates the two gradients separately, and adds them in an order that depends on both.
    """
    found = [*_reentrant_frames(frames)]
    inside = {k for frame in found for k in range(frame.start, frame.stop)}
    outside = {value for k, unit in enumerate(units) if k not in inside for value in unit.reads}
    for frame in found:
        for value in (v for unit in units[frame.start : frame.stop] for v in unit.reads):
            source = sources.get(value)
            if isinstance(source, Parameter) and value in outside and value in wanting:
                raise CaptureError(
                    f"module {frame.path or '(root)'}: got a reentrant checkpoint that uses the parameter "
                    f"{source.name!r}, which is also used outside of it, expected uses on one side only. The sum of "
                    f"its gradients would have other bits than on one device. {USE_OTHER}"
                )


def _reentrant_frames(frames: Sequence[Frame]) -> Iterator[Frame]:
    for frame in frames:
        if frame.reentrant:
            yield frame
        yield from _reentrant_frames(frame.inner)
