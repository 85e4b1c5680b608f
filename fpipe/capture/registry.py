# SPDX-License-Identifier: Apache-2.0
"""The front ends by name.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from fpipe.capture.dynamo import dynamo
from fpipe.capture.export import export_model
from fpipe.capture.fx import fx
from fpipe.capture.modules import modules
from fpipe.capture.trace.front_end import trace_model
from fpipe.errors import InputError
from fpipe.ir.captured import FrontEnd
from schedules.language.arguments import takes

FRONT_ENDS: Mapping[str, FrontEnd] = MappingProxyType(
    {"trace": trace_model, "export": export_model, "fx": fx, "dynamo": dynamo, "modules": modules}
)


def find_front_end(capture: str | FrontEnd, opaque: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> FrontEnd:
    """Return the front end of that name, or the user's own; raise `InputError` for anything else.

    The front end "trace" lets modules in those named in `opaque` branch on data, and keeps those in `whole` as Python.
    """
    if capture == "trace":
        return partial(trace_model, opaque=opaque, whole=whole)
    if isinstance(capture, str) and capture in FRONT_ENDS:
        return FRONT_ENDS[capture]
    if isinstance(capture, str) or not takes(capture, 3):
        raise InputError(
            f"capture: got {capture!r}, expected one of {list(FRONT_ENDS)}, or your own front end: a function "
            "(model, objective, leaves) -> Captured. Name one of them."
        )
    return capture


def is_eager(front_end: FrontEnd) -> bool:
    """Return whether modules that no cut goes through run as Python in every step."""
    function = front_end.func if isinstance(front_end, partial) else front_end
    return function in (trace_model, modules)
