# SPDX-License-Identifier: Apache-2.0
"""Places in the user's code, as text for errors: the module, the file and the line; and how to repair what is there.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from linecache import getline
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType

from torch import nn

LOSS = "loss"
"""The name of the loss in `unsplittable`."""


def module_place(path: str, module: nn.Module) -> str:
    """Return text that names a module, and its class, in errors."""
    return f"module {path or '(root)'} ({type(module).__name__})"


def places(model: nn.Module, prefix: str = "") -> dict[int, str]:
    """Return text that names each module of `model` in errors, by `identity`."""
    return {identity(module): module_place(path, module) for path, module in model.named_modules(prefix=prefix)}


def identity(module: object) -> int:
    """Return a key unique among live modules; export runs short-lived proxies, which share a module's `__dict__`."""
    return id(getattr(module, "__dict__", module))


def current_place(modules: Mapping[int, str], otherwise: str = "the loss") -> str:
    """Return the innermost of `modules` (see `places`) in whose method the caller runs, or `otherwise`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        place = modules.get(identity(frame.f_locals.get("self")))
        if place:
            return place
        frame = frame.f_back
    return otherwise


def blame(traceback: TracebackType | None, model: nn.Module, otherwise: str = "the loss") -> str:
    """Return the innermost module of `model` in whose method an exception was raised; if in none, `otherwise`."""
    modules = places(model)
    place = otherwise
    while traceback is not None:
        place = modules.get(identity(traceback.tb_frame.f_locals.get("self")), place)
        traceback = traceback.tb_next
    return place


def traceback_line(traceback: TracebackType | None) -> str:
    """Return the innermost line of the user's code in a traceback: `" in model.py, line 3: if x.sum() > 0"`."""
    lines = [(frame, line) for frame, line in walk_tb(traceback) if _is_users(frame)]
    return _line_text(*lines[-1]) if lines else ""


def differentiates(traceback: TracebackType | None) -> bool:
    """Return whether an exception was raised by a backward that code of the user's asked torch for."""
    return any(frame.f_globals.get("__name__") == "torch.autograd" for frame, _ in walk_tb(traceback))


def current_line() -> str:
    """Return the innermost line of the user's code on the current stack, in the form of `traceback_line`."""
    return next((_line_text(frame, line) for frame, line in walk_stack(None) if _is_users(frame)), "")


def _is_users(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").split(".")[0] not in ("torch", "fpipe", "optree", "contextlib")


def _line_text(frame: FrameType, line: int) -> str:
    path = frame.f_code.co_filename
    return f" in {Path(path).name}, line {line}: {getline(path, line).strip()}"


def advise_on_values(where: str, unsplittable: Collection[str] = ()) -> str:
    """Return the repair for a forward that reads values.

    `where`: the place of the error, as `fpipe.record.model.places.module_place` writes it. `unsplittable`: names of
    modules that run as is.
    """
    if re.match(r"module \S+ \(", where) is None:
        where, loss = "module loss (loss)", "pass fpipe.Recording(unsplittable=['loss']), and it runs as Python."
        out = "Take control flow and shapes that depend on data out of the loss; or, if shapes do not depend on it,"
        return advise_on_values(where, unsplittable) if LOSS in unsplittable else f"{out} {loss}"
    path = where.split(" ")[1]
    if any(f"{path}.".startswith(f"{name or '(root)'}.") for name in unsplittable):
        return (
            "It already runs as Python, because unsplittable names it, and may read values, but shapes may not depend "
            "on them: move such shapes out of it."
        )
    outside = "Take control flow and shapes that depend on data out of the model; or, if shapes do not depend on it, "
    if path == "(root)":
        return (
            f"{outside}put that part into a separate module, and name this in unsplittable (not the model "
            "itself, which has to be cut)."
        )
    return f"{outside}name the module in unsplittable, and it runs as Python."


def advise_on_errors() -> str:
    """Return the repair for an exception that missing values do not explain, such as a failed lookup."""
    return (
        "Call the model with the example: if it raises the same error, the cause is in the model. If not, the model "
        "may look up an object of the original, by id, in a closure or a global: access it through self. Or it passes "
        "tensors to another library, which reads their values: do that before the step, and pass the result."
    )
