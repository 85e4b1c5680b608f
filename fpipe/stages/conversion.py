# SPDX-License-Identifier: Apache-2.0
"""Convert the stages of an assembly: other cotangents of the loss, other dtypes of sums, another backend.

Runs when a plan is made: once per kind of microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import cast

import torch

from fpipe.cutting.routing import Section
from fpipe.record.captured import Captured
from fpipe.runtime.contract import StageCrossing
from fpipe.stages.assembly import Assembly
from fpipe.stages.autograd import Autograd
from fpipe.stages.backends import AS_GRAPH, Backend
from fpipe.stages.graph.joint_graph import Examples
from fpipe.stages.interface import StageFunctions
from fpipe.stages.recorded import Recorded
from fpipe.stages.skipping import skip_absent
from fpipe.stages.stage import Stage
from fpipe.tensors.spec import OptionalSpec, Spec
from schedules import Schedule


def take_scale(assembly: Assembly) -> Assembly:
    """Return the assembly with backwards that start from a given cotangent of the loss; they started from 1."""
    return replace(
        assembly,
        stages=tuple(map(_take_scale, assembly.stages)),
        build_whole=lambda: _take_scale(assembly.build_whole()),
    )


def _take_scale(stage: Stage) -> Stage:
    """Return the stage; where the loss is, its cotangent is one that enters, before those from later stages."""
    wiring, functions = stage.wiring, cast("Autograd", stage.functions)
    if wiring.loss is None:
        return stage
    scaled = replace(wiring, loss=None, roots=(wiring.loss, *wiring.roots))
    return replace(stage, wiring=scaled, functions=replace(functions, wiring=scaled), start=stage.results[:1])


def widen_sums(assembly: Assembly, dtype: Callable[[torch.dtype], torch.dtype]) -> Assembly:
    """Return the assembly with sums of gradients in `dtype(parameter's dtype)`."""

    def widen(spec: Spec) -> Spec:
        return replace(spec, dtype=dtype(spec.dtype))

    def widen_crossings(crossings: tuple[StageCrossing, ...]) -> tuple[StageCrossing, ...]:
        return tuple(one._replace(specs=tuple(map(widen, one.specs))) for one in crossings)

    def widen_stage(stage: Stage) -> Stage:
        return replace(
            stage,
            totals=tuple(map(widen, stage.totals)),
            shares=widen_crossings(stage.shares),
            shared_by=widen_crossings(stage.shared_by),
            functions=replace(cast("Autograd", stage.functions), in_place=False),
        )

    stages = tuple(map(widen_stage, assembly.stages))
    return replace(assembly, stages=stages, build_whole=lambda: widen_stage(assembly.build_whole()))


def splits(schedule: Schedule) -> bool:
    """Return whether a schedule splits backwards."""
    return any(action.kind == "I" for rank in range(schedule.ranks) for action in schedule.actions(rank))


def differentiate(assembly: Assembly, backend: Backend | None, split: bool, held: Collection[int]) -> Assembly:
    """Return the assembly with the functions of this process's stages, `held`, converted by `backend`.

    Without a backend, autograd differentiates the stages, unless backwards are `split`: halves need a recording.
    """
    if backend is None:
        if not split:
            return assembly
        backend = AS_GRAPH
    stages = [
        replace(stage, functions=_convert(backend, assembly.captured, section, stage)) if stage.index in held else stage
        for stage, section in zip(assembly.stages, assembly.sections, strict=True)
    ]
    return replace(assembly, stages=tuple(stages))


def _convert(backend: Backend, captured: Captured, section: Section, stage: Stage) -> StageFunctions:
    eager, fakes = cast("Autograd", stage.functions), captured.fakes
    pulled = [*stage.start, *[spec for crossing in stage.pulled_by for spec in crossing.specs]]
    optional = any(isinstance(spec, OptionalSpec) for spec in pulled)
    if optional and len(pulled) + (stage.wiring.loss is not None) > 1:
        return replace(eager, remark="by autograd: data decide which cotangents it receives")
    with captured.mode:
        arriving = tuple([spec.allocate() for crossing in stage.gets for spec in crossing.specs])
        cotangents = tuple([spec.allocate() for spec in pulled])
    params, buffers, constants, batch = (
        tuple([fakes[value] for value in values])
        for values in (section.parameters, section.buffers, section.constants, section.batch)
    )
    inputs = (*batch, *section.repeats.values(), *arriving)
    examples = Examples(params, buffers, constants, inputs, cotangents, captured.mode)
    found = backend(eager, examples)
    return skip_absent(found, stage.wiring) if optional and isinstance(found, Recorded) else found
