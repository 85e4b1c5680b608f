# SPDX-License-Identifier: Apache-2.0
"""Microbatches of other shapes: captured and cut on their own, and driven by one program.

They may differ in what their stages compute and in the shapes that cross; what a rank holds, adds up and exchanges must
be the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from fpipe.assembly import Assembly
from fpipe.errors import InputError
from fpipe.stage import Stage


def require_alike(assemblies: Sequence[Assembly]) -> None:
    """Raise `InputError` unless one program can drive all these, one for each microbatch."""
    first = assemblies[0]
    for i, other in enumerate(assemblies):
        if other is first:
            continue
        if other.graph != first.graph:
            raise _unlike(i, "values between stages", other.graph, first.graph)
        if other.captured.structure.spec != first.captured.structure.spec:
            raise _unlike(i, "outputs", other.captured.structure.spec, first.captured.structure.spec)
        for mine, theirs in zip((*other.stages, other.whole), (*first.stages, first.whole), strict=True):
            if _holds(mine) != _holds(theirs):
                raise _unlike(i, f"parameters and buffers in stage {mine.index}", _holds(mine), _holds(theirs))


def _holds(stage: Stage) -> tuple[object, ...]:
    trained = tuple(stage.parameters[k] for k in sorted(stage.wiring.trained))
    return stage.parameters, stage.buffers, stage.grads, trained, stage.unused, dict(stage.shared_names)


def _unlike(i: int, what: str, got: object, expected: object) -> InputError:
    return InputError(
        f"microbatch {i}, which has other shapes than microbatch 0: got other {what}, {got}, expected {expected}: the "
        "model takes another path for these shapes. Make all microbatches of one size, or cut elsewhere."
    )
