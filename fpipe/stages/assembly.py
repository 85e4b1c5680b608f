# SPDX-License-Identifier: Apache-2.0
"""Build the stages, and the stage graph that schedules see, from a captured model and a partition.

The steps: choose what stages compute themselves (`cutting.repetition`, `prologue`), route other values between them
(`cutting.routing`), fuse each stage's units into a function, run all of them once on fake tensors (`metadata`),
determine what crosses, turn values into positions (`wiring`), and make graphs of the stages to be recorded
(`backends`).

Runs when a plan is made: once per kind of microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch

from fpipe.cutting.repetition import ExtraBuffers, Repetition, choose_repetitions
from fpipe.cutting.routing import Section, route
from fpipe.errors import CutError
from fpipe.record.captured import BatchLeaf, Buffer, Captured, Constant, Function, Hook, Observed, Parameter, Value
from fpipe.record.fakes.eager_types import hide_fakes
from fpipe.record.validity import observe
from fpipe.record.variant import Variant
from fpipe.runtime.contract import StageCrossing
from fpipe.stages.autograd import Autograd
from fpipe.stages.backends import GraphRequest
from fpipe.stages.interface import ArgumentIndex, StageFunctions, Wiring
from fpipe.stages.metadata import Metadata, infer, is_asking
from fpipe.stages.prologue import build_prologue
from fpipe.stages.stage import ModelStage
from fpipe.stages.uncut import build_whole
from fpipe.stages.wiring import Crossings, cross, crossing_values, names_of, wire
from fpipe.tensors.placed import Placed, require_whole_result
from fpipe.tensors.spec import OptionalSpec, Spec
from fpipe.tensors.tree import require_transparent
from schedules import Graph, Placement, linear
from schedules.status import say


@dataclass(frozen=True, eq=False)
class Assembly:
    """A model cut into stages; one slice of it, if microbatches are cut into slices.

    `build_whole()` makes `whole`. `graph` is what schedules see. `devices` are those on which random numbers are drawn,
    `undecided` those on which they may be drawn, depending on data. `sections` are the stages' units and values,
    `repetitions` what each stage repeats. `partition` are the positions of the units at which later stages begin.
    """

    captured: Captured
    stages: tuple[ModelStage, ...]
    build_whole: Callable[[], ModelStage]
    graph: Graph
    devices: tuple[torch.device, ...]
    undecided: tuple[torch.device, ...]
    sections: tuple[Section, ...]
    repetitions: tuple[Repetition, ...]
    partition: tuple[int, ...]

    @cached_property
    def whole(self) -> ModelStage:
        """The uncut model as a single stage, which computes the same as the stages.

        Built at its first use: it costs as much to build as all stages, and training alone rarely needs it.
        """
        return self.build_whole()

    @cached_property
    def parameters(self) -> Mapping[str, Spec]:
        """The spec of every parameter, by name."""
        return self._specs(Parameter)

    @cached_property
    def buffers(self) -> Mapping[str, Spec]:
        """The spec of every buffer, by name."""
        return self._specs(Buffer)

    @cached_property
    def placed(self) -> Mapping[str, Placed]:
        """The placements of the parameters and buffers that are DTensors, by name."""
        return {name: self.captured.placed[value] for name, value in self._placed_values.items()}

    @cached_property
    def placed_gradients(self) -> Mapping[str, Placed]:
        """The placements of the gradients of parameters that are DTensors, by name."""
        arrivals, placed = self.captured.arrivals, self.captured.placed
        return {name: arrivals.of(value, placed[value]) for name, value in self._placed_values.items()}

    @property
    def _placed_values(self) -> Mapping[str, Value]:
        named = [(v, one) for v, one in self.captured.sources.items() if isinstance(one, Parameter | Buffer)]
        return {one.name: value for value, one in named if value in self.captured.placed}

    @cached_property
    def extra_buffers(self) -> ExtraBuffers:
        """The names of the buffers that each stage holds for the units that it repeats."""
        sources = self.captured.sources
        return tuple(
            frozenset(one.name for v in repetition.buffers if isinstance(one := sources[v], Buffer))
            for repetition in self.repetitions
        )

    def _specs(self, kind: type[Parameter | Buffer]) -> Mapping[str, Spec]:
        fakes = self.captured.fakes
        return {s.name: Spec.of(fakes[v]) for v, s in self.captured.sources.items() if isinstance(s, kind)}


def assemble(
    captured: Captured,
    partition: Sequence[int],
    variant: Variant,
    placement: Placement,
    summed: frozenset[str],
    request: GraphRequest | None = None,
    extra: ExtraBuffers | None = None,
) -> tuple[Assembly, ...]:
    """Return the assembly of each slice of a captured model, cut before the units at `partition`, for a variant.

    A whole microbatch is one slice. The record has the calls for all slices, one after the other, so it is cut into the
    stages of the first slice, those of the second, and so on, which are on the same ranks.

    `summed` are the parameters whose gradients are summed over stages. `request` says which stages are recorded as
    graphs; autograd differentiates the others. `extra` are the buffers that stages may hold for the units that they
    repeat; `None` to let them hold any.
    """
    if variant.outputs:
        require_transparent("outputs", captured.structure)
        for value in captured.outputs:
            require_whole_result("outputs", captured.placed.get(value))
    require_transparent("the loss's aux", captured.aux_structure)
    for value in captured.aux:
        require_whole_result("the loss's aux", captured.placed.get(value))
    loss = () if captured.loss is None else (captured.loss,)
    results = (*loss, *captured.aux, *(captured.outputs if variant.outputs else ()))
    observed = observe(captured)
    repetitions = choose_repetitions(captured, observed, partition, results, extra)
    count, slices = placement.stages, 1 + len(captured.slices)
    if slices > 1:
        require_unmodified(captured, observed)
        placement = Placement(placement.ranks, placement.homes * slices, tuple(m * slices for m in placement.mirrors))
    ranks = [*zip(*placement.routes, strict=True)]
    sections = route(captured, observed, partition, results, summed, repetitions, ranks)
    functions = [captured.fuse(section.units, observed.random, section.inputs, section.outputs) for section in sections]
    stages, graph = _stages(captured, sections, functions, placement, variant, request)
    _require_sums_in_order(stages, sections, count)
    stages = tuple(
        _add_prologue(captured, *one) if one[-1].values else one[0]
        for one in zip(stages, sections, repetitions, strict=True)
    )
    devices = dict.fromkeys(device for keyed in observed.random.values() for device in keyed.devices)

    @cache
    def whole() -> ModelStage:
        with hide_fakes():  # once: what is inside enters it again and again, which is free
            again, section, function = build_whole(
                captured, observed, results, sections, functions, summed, repetitions
            )
            (stage,), _ = _stages(again, [section], [function], linear(ranks=1), variant, None)
        return stage

    return tuple(
        Assembly(
            captured,
            tuple([_number_within_slice(stage, count) for stage in stages[first : first + count]]),
            whole,
            _graph_of_slice(graph, range(first, first + count)),
            tuple(devices),
            observed.undecided,
            sections[first : first + count],
            repetitions[first : first + count],
            tuple(partition),
        )
        for first in range(0, len(stages), count)
    )


def require_unmodified(captured: Captured, observed: Observed) -> None:
    """Raise `CutError` if a forward modifies a buffer, which each slice would do once."""
    written = {storage for unit in captured.units for storage in observed.written[unit]}
    for value, source in captured.sources.items():
        if isinstance(source, Buffer) and (value in captured.reassigned or observed.storage[value] in written):
            raise CutError(
                f"buffer {source.name}: got one that a forward modifies, expected none: each slice of a microbatch "
                "would modify it once. Return what the next slice needs as the carry, or choose a schedule of whole "
                "microbatches."
            )


def _require_sums_in_order(stages: Sequence[ModelStage], sections: Sequence[Section], count: int) -> None:
    """Raise `CutError` if later stages read what a slice leaves for the next one, twice or more in its own slice.

    On one device, the cotangent from the next slice comes first in the sum. Here it comes last: its stage adds it to
    the sum of the others. With one other term, that is the same.
    """
    for stage in stages:
        first = stage.index // count * count
        carried = {v for one in stage.pulled_by if one.source >= first + count for v in one.values}
        later = range(stage.index + 1, first + count)
        for value in carried & {v for one in stage.pulled_by if one.source in later for v in one.values}:
            reads = [v for t in later for unit in sections[t].units for v in unit.reads] + [
                v for t in later for v in sections[t].results
            ]
            if reads.count(value) > 1:
                users = [t - first for t in later for unit in sections[t].units if value in unit.reads]
                raise CutError(
                    f"stage {stage.index - first}: got a carry that is read {reads.count(value)} times in stages "
                    f"{[*dict.fromkeys(users)]}, expected at most one such use: their gradients would be added in "
                    "another order than on one device. Right where it is made, make the carry a copy of it, as in "
                    "carry = state.clone(); or move the cut, so that its own stage has all of these uses but one."
                )


def _number_within_slice(stage: ModelStage, count: int) -> ModelStage:
    """Return a stage with the number that it has in its slice; what crosses from it to itself is its carry."""
    names = ("gets", "gives", "pulls", "pulled_by", "shares", "shared_by")
    if stage.index < count and not any(one.target >= count for one in (*stage.gives, *stage.pulled_by)):
        return stage
    crossings: dict[str, Any] = {
        name: tuple(
            [one._replace(source=one.source % count, target=one.target % count) for one in getattr(stage, name)]
        )
        for name in names
    }
    return replace(stage, index=stage.index % count, **crossings)


def _graph_of_slice(graph: Graph, stages: range) -> Graph:
    """Return the stage graph of one slice, given that of all of them."""
    first = stages[0]
    values, cotangents, gradients = (
        frozenset((s - first, t - first) for s, t in edges if s in stages and t in stages)
        for edges in (graph.values, graph.cotangents, graph.gradients)
    )
    return Graph(len(stages), values=values, cotangents=cotangents, gradients=gradients)


def _add_prologue(captured: Captured, stage: ModelStage, section: Section, repetition: Repetition) -> ModelStage:
    prologue, leaves = build_prologue(captured, section, repetition)
    return replace(stage, prologue=prologue, batch=(*stage.batch, *leaves))


def _stages(
    captured: Captured,
    sections: Sequence[Section],
    functions: Sequence[Function],
    placement: Placement,
    variant: Variant,
    request: GraphRequest | None,
) -> tuple[tuple[ModelStage, ...], Graph]:
    """Return the stages and the stage graph."""
    metadata = infer(captured, sections, functions, variant, request)
    crossings = cross(captured, sections, metadata, placement)
    builder = _Builder(captured, sections, metadata, crossings, variant, request)
    stages = []
    for s, function in enumerate(functions):
        say(f"making stage {s} of {len(functions)}", s / len(functions))
        stages.append(builder.stage(s, function))
    return tuple(stages), crossings.graph(len(sections))


@dataclass(frozen=True)
class _Builder:
    """The builder of stages, from their sections, their metadata, and what crosses."""

    captured: Captured
    sections: Sequence[Section]
    metadata: Metadata
    crossings: Crossings
    variant: Variant
    request: GraphRequest | None

    def stage(self, s: int, function: Function) -> ModelStage:
        """Return stage `s`, which runs `function`."""
        captured, section, metadata, crossings = self.captured, self.sections[s], self.metadata, self.crossings
        sources = [captured.sources[value] for value in section.batch]
        pulls, pulled_by = _from(s, crossings.cotangents), _to(s, crossings.cotangents)
        wiring = wire(s, section, metadata, pulls, pulled_by, captured.loss, is_asking(captured), self.variant.scaled)
        results = tuple(metadata.specs[value] for value in section.results)
        return ModelStage(
            index=s,
            parameters=names_of(captured, section.parameters),
            buffers=names_of(captured, section.buffers),
            unused=() if s % (len(self.sections) // (1 + len(captured.slices))) else self._unused_names(),
            batch=tuple(source.leaf for source in sources if isinstance(source, BatchLeaf)),
            results=results,
            gets=_to(s, crossings.values),
            gives=_from(s, crossings.values),
            pulls=pulls,
            pulled_by=pulled_by,
            shares=_from(s, crossings.gradients),
            shared_by=_to(s, crossings.gradients),
            grads=names_of(captured, metadata.grads[s]),
            totals=tuple(metadata.totals[s, value] for value in metadata.grads[s]),
            wiring=wiring,
            functions=self._functions(s, function, wiring, pulls, pulled_by),
            start=results[: len(metadata.runs[s].starts)],
            keeps=section.kept,
        )

    def _functions(
        self,
        s: int,
        function: Function,
        wiring: Wiring,
        pulls: Sequence[StageCrossing],
        pulled_by: Sequence[StageCrossing],
    ) -> StageFunctions:
        section, metadata = self.sections[s], self.metadata
        sources = [self.captured.sources[value] for value in section.constants]
        constants = tuple([source.tensor for source in sources if isinstance(source, Constant)])
        hooks, run = self._hooks(s), metadata.runs[s]
        eager = Autograd(
            function,
            wiring,
            constants,
            s in metadata.varying,
            hooks,
            in_place=self.variant.sums is None,
            enabled=self.captured.backward,
        )
        if self.request is None or s not in self.request.stages:
            return eager
        unrecordable = metadata.unrecordable[s] or ("gradients have hooks" if hooks else "")
        optional = any(isinstance(spec, OptionalSpec) for crossing in pulled_by for spec in crossing.specs)
        if optional and len(run.entering) + len(metadata.runs[s].starts) + (wiring.loss is not None) > 1:
            unrecordable = unrecordable or "data decide which cotangents it receives"
        if unrecordable:
            return replace(eager, remark=f"by autograd: {unrecordable}")
        entering = [(crossing.source, value) for crossing in pulled_by for value in crossing.values]
        with self.captured.mode:
            joint = run.joint(crossing_values(pulls), metadata.grads[s], entering)
        return self.request.make(eager, joint, optional)

    def _hooks(self, s: int) -> Mapping[ArgumentIndex, tuple[Hook, ...]]:
        """Return the hooks on gradients of the parameters that a stage owns, by argument."""
        sources = {k: self.captured.sources[value] for k, value in enumerate(self.sections[s].parameters)}
        grads = names_of(self.captured, self.metadata.grads[s])
        return {
            ArgumentIndex(k): self.captured.hooks[source.name]
            for k, source in sources.items()
            if isinstance(source, Parameter) and source.name in grads and source.name in self.captured.hooks
        }

    def _unused_names(self) -> tuple[str, ...]:
        """Return the names of parameters and buffers that no stage reads; the first stage holds them."""
        read = {value for section in self.sections for value in (*section.parameters, *section.buffers)}
        return names_of(self.captured, (value for value in self.captured.sources if value not in read))


def _from(s: int, crossings: Iterable[StageCrossing]) -> tuple[StageCrossing, ...]:
    return tuple(crossing for crossing in crossings if crossing.source == s)


def _to(s: int, crossings: Iterable[StageCrossing]) -> tuple[StageCrossing, ...]:
    return tuple(crossing for crossing in crossings if crossing.target == s)
