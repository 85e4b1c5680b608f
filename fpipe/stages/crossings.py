# SPDX-License-Identifier: Apache-2.0
"""The tensors that cross between stages, in one record per edge of the stage graph.

Problem. Cutting knows which values a stage needs from another, the run on fake tensors knows their metadata, and the
placement decides which gradients must be sent at all. The executor, the stages' functions and the schedules all depend
on the result, and both ends of an edge must agree on it.

Idea. All three are joined once, by value, into one `StageCrossing` per edge. Both stages hold the same record, and
everything else is derived from it: messages, the positions in `Wiring`, the stage graph.

Runs when a plan is made: once per kind of microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fpipe.cutting.routing import Section
from fpipe.record.captured import Buffer, Captured, Parameter, Value
from fpipe.runtime.contract import StageCrossing
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
    for s, section in enumerate(sections):
        for t, parameters in section.shares.items():
            sent = [
                value
                for value in parameters
                if value in metadata.grads[s] and needs_gradient(placement, s, t, _stages_with(sections, value))
            ]
            if sent:
                yield StageCrossing(s, t, names_of(captured, sent), tuple(metadata.totals[s, value] for value in sent))


def _stages_with(sections: Sequence[Section], parameter: Value) -> list[int]:
    return [s for s, section in enumerate(sections) if parameter in section.parameters]


def names_of(captured: Captured, values: Iterable[Value]) -> tuple[str, ...]:
    """Return the names of the parameters and buffers among these values."""
    sources = (captured.sources[value] for value in values)
    return tuple(source.name for source in sources if isinstance(source, Parameter | Buffer))
