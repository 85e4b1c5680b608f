# SPDX-License-Identifier: Apache-2.0
"""The front ends by name.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import cast

from fpipe.errors import InputError
from fpipe.record.captured import CaptureFunction, FrontEnd
from fpipe.record.front_ends.parts import modules
from fpipe.record.front_ends.through import capture_through
from fpipe.record.front_ends.tracers import dynamo, export_model, fx
from fpipe.record.trace.front_end import trace_model
from schedules.arguments import takes

FRONT_ENDS: Mapping[str, FrontEnd] = MappingProxyType({"export": export_model, "fx": fx, "dynamo": dynamo})
CAPTURES = ("trace", *FRONT_ENDS, "modules")


def find_capture(
    capture: str | FrontEnd | CaptureFunction, opaque: tuple[str, ...] = (), whole: tuple[str, ...] = ()
) -> CaptureFunction:
    """Return the function that captures a model in that way; raise `InputError` for anything else.

    `capture`: a name, a front end, which takes two arguments, or a function that makes a graph by hand, which takes
    three. Where modules are recorded, those named in `opaque` may branch on data, and those in `whole` stay Python.
    """
    if capture == "trace":
        return partial(trace_model, opaque=opaque, whole=whole)
    if capture == "modules":
        return modules
    through = partial(capture_through, opaque=opaque, whole=whole)
    if isinstance(capture, str) and capture in FRONT_ENDS:
        return partial(through, FRONT_ENDS[capture])
    reads, makes = (not isinstance(capture, str) and takes(capture, count) for count in (2, 3))
    if reads == makes:
        raise InputError(
            f"capture: got {capture!r}, expected one of {list(CAPTURES)}, or your own front end, a function (model, "
            "inputs) -> module, or a graph made by hand, a function (model, objective, leaves) -> Captured. Name one, "
            "or write a function of two or three arguments."
        )
    return partial(through, cast("FrontEnd", capture)) if reads else cast("CaptureFunction", capture)


def is_eager(capture: CaptureFunction) -> bool:
    """Return whether modules that no cut goes through run as Python in every step."""
    function = capture.func if isinstance(capture, partial) else capture
    return function in (trace_model, modules)


def is_tracer(capture: CaptureFunction) -> bool:
    """Return whether a front end records the model itself, with numbers as values of the record."""
    return isinstance(capture, partial) and capture.func is trace_model


def reads_bytecode(capture: CaptureFunction) -> bool:
    """Return whether a front end bypasses patches."""
    return isinstance(capture, partial) and dynamo in capture.args
