# SPDX-License-Identifier: Apache-2.0
"""Track numbers that a module stores in attributes after branching on data.

Problem. On fake tensors, a module in `unsplittable` takes one branch of many. If it stores a number in an attribute,
code that reads it elsewhere would get this branch's number in every step.

Idea. Notice such assignments and reads, and seal the innermost call that contains both. It then runs as a whole, too,
and its Python code reads the number that the step's data led to.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import nn

from fpipe.record.trace.call_stack import CallStack
from fpipe.record.trace.tape import Frame
from fpipe.tensors.patching import current, replace
from fpipe.tensors.tree import PLAIN


class Decision(NamedTuple):
    """An assignment: the path of the module, and the calls that it happened in, outermost first."""

    path: str
    calls: list[Frame]


class Decisions:
    """The attributes that hold such numbers. The first one installs a patch to notice reads, which `exits` removes."""

    def __init__(self, stack: CallStack, exits: ExitStack) -> None:
        self.stack, self.exits = stack, exits
        self.made: dict[tuple[int, str], Decision] = {}

    def note_assignment(self, module: nn.Module, name: str, value: object) -> None:
        """Track an attribute of a module if data decided what was assigned to it."""
        branching = self.stack.is_opaque and self.stack.outermost_branching.branching
        if not branching or not isinstance(value, PLAIN):
            self.made.pop((id(module), name), None)
            return
        if not self.made:
            self._notice_reads()
        self.made[id(module), name] = Decision(self.stack.paths.get(id(module), ""), [*self.stack.frames])

    def _notice_reads(self) -> None:
        get: Any = current(nn.Module, "__getattribute__")

        def get_and_notice(module: nn.Module, name: str) -> Any:
            decision = self.made.get((id(module), name))
            if decision is not None:
                self._read(name, decision)
            return get(module, name)

        self.exits.enter_context(replace(nn.Module, "__getattribute__", get_and_notice))

    def _read(self, name: str, decision: Decision) -> None:
        """Seal the innermost call that contains both the assignment and this read."""
        around = {id(frame) for frame in decision.calls}
        both = [frame for frame in self.stack.frames if id(frame) in around and not frame.checkpoint]
        if both and not both[-1].sealed:
            both[-1].sealed = f"a read of {name!r}, which module {decision.path} sets after branching on data"
