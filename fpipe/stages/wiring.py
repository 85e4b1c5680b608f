# SPDX-License-Identifier: Apache-2.0
"""The position of each value of a stage among the arguments and outputs of its function.

A value has one number in the whole model, but a function knows only positions. This is the only place where numbers
become positions.

Runs when a plan is made: once per kind of microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from fpipe.cutting.routing import Section
from fpipe.record.captured import Value
from fpipe.runtime.contract import StageCrossing
from fpipe.stages.interface import ArgumentIndex, BufferIndex, OutputIndex, Wiring
from fpipe.stages.metadata import Metadata


def wire(
    s: int,
    section: Section,
    metadata: Metadata,
    pulls: Sequence[StageCrossing],
    pulled_by: Sequence[StageCrossing],
    loss: Value | None,
    asking: bool,
) -> Wiring:
    """Return the wiring of stage `s`, which sends the cotangents `pulls` and receives `pulled_by`.

    `loss` is the model's loss; `asking` is true if the model asks tensors for their autograd nodes.
    """
    entering = _crossing_values(pulled_by)
    at = _Positions(section, entering)
    received = [value for value in chain.from_iterable(section.gets.values()) if value in metadata.differentiable]
    casts = s in metadata.casting or s in metadata.varying  # a branch that was not taken may cast
    starts = loss is not None and loss in section.results and loss in metadata.differentiable
    return Wiring(
        parameters=len(section.parameters),
        buffers=len(section.buffers),
        trained=frozenset(at.arguments(value for value in section.parameters if value in metadata.differentiable)),
        differentiated=at.arguments(received),
        inner=at.arguments(received if casts or asking else ()),
        modified=at.arguments(value for value in section.inputs if value in section.modified),
        reassigned=tuple((at.buffer[buffer], at.output[new]) for buffer, new in section.reassigned.items()),
        passed=at.arguments(at.passed),
        outputs=tuple((at.output[value], metadata.specs[value]) for value in section.leaving),
        loss=at.output[loss] if loss is not None and starts else None,
        roots=tuple(at.output[value] for value in entering),
        leaves=at.arguments((*_crossing_values(pulls), *metadata.grads[s])),
        cotangents=tuple(spec for crossing in pulls for spec in crossing.specs),
    )


def _crossing_values(crossings: Sequence[StageCrossing]) -> tuple[Value, ...]:
    return tuple(value for crossing in crossings for value in crossing.values)


class _Positions:
    """The positions of a stage's values.

    - `argument`, `buffer`: positions among all arguments of its function, and among the buffers.
    - `passed`: arguments that are still needed after the function returns: they leave the stage, or cotangents enter
      at them.
    - `output`: positions among the function's outputs, followed by `passed`.
    """

    def __init__(self, section: Section, entering: Iterable[Value]) -> None:
        self.argument = {value: ArgumentIndex(k) for k, value in enumerate(section.inputs)}
        self.buffer = {value: BufferIndex(k) for k, value in enumerate(section.buffers)}
        self.passed = tuple(dict.fromkeys(value for value in (*section.leaving, *entering) if value in self.argument))
        self.output = {value: OutputIndex(k) for k, value in enumerate((*section.outputs, *self.passed))}

    def arguments(self, values: Iterable[Value]) -> tuple[ArgumentIndex, ...]:
        """Return the positions of these values among the arguments."""
        return tuple(self.argument[value] for value in values)
