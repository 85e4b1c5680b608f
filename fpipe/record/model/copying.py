# SPDX-License-Identifier: Apache-2.0
"""Copies of functions that hold parts of a model, for a copy of that model.

Problem. `copy.deepcopy` does not copy functions. A hook that closes over `self` would still use the original model: a
capture would see its buffers as constants, and what the hook collects would be lost.

Idea. Copy such a function with empty cells. Once the model has been copied, fill the cells with copies of their
original contents, made with the same memo. Functions that hold no part of the model are shared.

Runs when a pipeline is built, when a plan is made, and in `pipe.initialise`: whenever a model is copied.
"""

from __future__ import annotations

import copy
import dis
from collections.abc import Collection
from types import CellType, FunctionType
from typing import Any

from torch import nn

from fpipe.errors import CaptureError
from fpipe.record.captured import Buffer, Captured, Constant
from fpipe.record.model.walk import Walk, code_names, codes, visible
from fpipe.record.observation import observe
from fpipe.record.refusals import original_state_error


class FunctionCopies:
    """Copies of the functions that a model reaches and that hold parts of it: `made`, by the original's id."""

    def __init__(self, model: nn.Module) -> None:
        walk = Walk()
        walk.follow([model])
        own = {id(one) for one in walk.containers.values()}
        walk.enter()
        tensors = {id(one) for one in (*model.modules(), *model.parameters(), *model.buffers())}
        for function in walk.functions:
            _require_no_globals(function, tensors)
        self.parts = tensors | own
        self.cells: dict[int, tuple[CellType, CellType]] = {}
        self.found = [one for one in walk.functions if self._holds_part(one)]
        self.made: dict[int, Any] = {id(one): self._copy(one) for one in self.found}

    def fill(self, memo: dict[int, Any]) -> None:
        """Fill cells and defaults with copies of the originals', made with the `memo` used for the model."""
        for old, new in self.cells.values():
            new.cell_contents = copy.deepcopy(old.cell_contents, memo)
        for function in self.found:
            made = self.made[id(function)]
            made.__defaults__ = copy.deepcopy(function.__defaults__, memo)
            made.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)

    def _copy(self, function: FunctionType) -> FunctionType:
        """Return a copy of the function without defaults; cells that hold a part of the model are empty in it."""
        cells = tuple([self._cell(cell) for cell in function.__closure__ or ()])
        made = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        vars(made).update(vars(function))
        return made

    def _cell(self, cell: CellType) -> CellType:
        """Return the cell or, if it holds a part, an empty one, the same for all functions that share the cell."""
        return self.cells.setdefault(id(cell), (cell, CellType()))[1] if self._holds_part(cell) else cell

    def _holds_part(self, holder: Any) -> bool:
        """Return whether a function or cell holds a part of the model, directly or through containers and functions."""
        return any(id(one) in self.parts or id(getattr(one, "__dict__", None)) in self.parts for one in visible(holder))


def _require_no_globals(function: FunctionType, parts: Collection[int]) -> None:
    """Raise `CaptureError` if a function uses a global that is a part of the model."""
    for name in [name for name in sorted(code_names(function)) if id(function.__globals__.get(name)) in parts]:
        steps = (step for code in codes(function.__code__) for step in dis.get_instructions(code))
        if any(step.opname == "LOAD_GLOBAL" and step.argval == name for step in steps):
            raise CaptureError(
                f"{function.__qualname__}: got the global {name!r}, which is a part of the model, expected none: "
                "stages run a copy of the model, and this would use the original. Use the arguments (a hook's first "
                "is the module), or a method or a function inside one, which are copied with the model."
            )


def require_own_buffers(model: nn.Module, captured: Captured) -> None:
    """Raise `CaptureError` if the captured copy of `model` reads a buffer of the original that a forward changes."""
    observed, sources = observe(captured), captured.sources
    written = frozenset().union(*observed.written.values())
    changed = {
        source.name
        for value, source in sources.items()
        if isinstance(source, Buffer) and (observed.storage[value] in written or value in captured.reassigned)
    }
    buffers = {id(buffer): name for name, buffer in model.named_buffers() if name in changed}
    for source in sources.values():
        if isinstance(source, Constant) and id(source.tensor) in buffers:
            raise original_state_error(f"buffer {buffers[id(source.tensor)]}")
