# SPDX-License-Identifier: Apache-2.0
"""The values that stages exchange, and the position of each among the arguments and outputs of a stage's function.

Problem. Routing knows which values a stage needs from another, the run on fake tensors knows their metadata, and the
placement decides which gradients must be sent at all. The executor, the stages' functions and the schedules all depend
on the result, and both ends of an edge must agree on it.

Idea. All three are joined once, by value, into one `StageCrossing` per edge. Both stages hold the same record, and
everything else is derived from it: messages, the stage graph, and the positions in `Wiring`. A value has one number in
the whole model, but a function knows only positions. This is the only place where numbers become positions.

Runs when a plan is made: once per kind of microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from fpipe.cutting.routing import Section
from fpipe.record.captured import Buffer, Captured, Parameter, Value
from fpipe.runtime.contract import StageCrossing
from fpipe.stages.interface import ArgumentIndex, BufferIndex, OutputIndex, Wiring
from fpipe.stages.metadata import Metadata
from fpipe.stages.ties import needs_gradient
from fpipe.tensors.spec import Spec
from schedules import Graph, Placement


@dataclass(frozen=True)
class Crossings:
    """All edges between stages, each from sender to receiver, in ascending order of senders, then of receivers."""

    values: tuple[StageCrossing, ...]
    cotangents: tuple[StageCrossing, ...]
    gradients: tuple[StageCrossing, ...]

    def graph(self, stages: int) -> Graph:
        """Return the stage graph; its edges point from the stage that has a value, or a gradient's sum, to its user."""
        return Graph(
            stages,
            values=frozenset((one.source, one.target) for one in self.values),
            cotangents=frozenset((one.target, one.source) for one in self.cotangents),
            gradients=frozenset((one.source, one.target) for one in self.gradients),
        )


def cross(captured: Captured, sections: Sequence[Section], metadata: Metadata, placement: Placement) -> Crossings:
    """Return everything that the stages send each other."""
    return Crossings(
        tuple(_crossings(sections, lambda s, section: section.gives, lambda s, value: metadata.specs[value])),
        tuple(_crossings(sections, metadata.pulls, lambda s, value: metadata.cotangents[s, value])),
        tuple(_gradients(captured, sections, metadata, placement)),
    )


def _crossings(
    sections: Sequence[Section],
    routes: Callable[[int, Section], Mapping[int, Sequence[Value]]],
    spec: Callable[[int, Value], Spec],
) -> Iterator[StageCrossing]:
    for s, section in enumerate(sections):
        for t, values in routes(s, section).items():
            yield StageCrossing(s, t, tuple(values), tuple(spec(s, value) for value in values))


def _gradients(
    captured: Captured, sections: Sequence[Section], metadata: Metadata, placement: Placement
) -> Iterator[StageCrossing]:
    """Yield the gradients of shared parameters that are sent to holders on other ranks, once to each rank."""
    count = len(sections) // (1 + len(captured.slices))
    for s, section in enumerate(sections):
        slice_of = range(s - s % count, s - s % count + count)
        for t, parameters in section.shares.items():
            sent = [
                value
                for value in parameters
                if value in metadata.grads[s]
                and needs_gradient(placement, s, t, [r for r in slice_of if value in sections[r].parameters])
            ]
            if sent:
                yield StageCrossing(s, t, names_of(captured, sent), tuple(metadata.totals[s, value] for value in sent))


def names_of(captured: Captured, values: Iterable[Value]) -> tuple[str, ...]:
    """Return the names of the parameters and buffers among these values."""
    sources = (captured.sources[value] for value in values)
    return tuple(source.name for source in sources if isinstance(source, Parameter | Buffer))


def wire(
    s: int,
    section: Section,
    metadata: Metadata,
    pulls: Sequence[StageCrossing],
    pulled_by: Sequence[StageCrossing],
    loss: Value | None,
    asking: bool,
    scaled: bool,
) -> Wiring:
    """Return the wiring of stage `s`, which sends the cotangents `pulls` and receives `pulled_by`.

    `loss` is the model's loss; `asking` is true if the model asks tensors for their autograd nodes. With `scaled`, the
    loss's cotangent is one that enters, before those from later stages.
    """
    starts = [v for v in (loss,) if v is not None and v in section.results and v in metadata.differentiable]
    entering = (*(starts if scaled else ()), *crossing_values(pulled_by))
    at = _Positions(section, entering)
    received = [value for value in chain.from_iterable(section.gets.values()) if value in metadata.differentiable]
    casts = s in metadata.casting or s in metadata.varying  # a branch that was not taken may cast
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
        loss=at.output[starts[0]] if starts and not scaled else None,
        roots=tuple(at.output[value] for value in entering),
        leaves=at.arguments((*crossing_values(pulls), *metadata.grads[s])),
        cotangents=tuple(spec for crossing in pulls for spec in crossing.specs),
    )


def crossing_values(crossings: Sequence[StageCrossing]) -> tuple[Value, ...]:
    """Return all values of some crossings."""
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
