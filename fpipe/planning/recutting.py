# SPDX-License-Identifier: Apache-2.0
"""Cut a captured model elsewhere, and bind it to another schedule, without capturing it again.

Runs on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fpipe.cutting.calls import Calls
from fpipe.cutting.partition import Cuts, Explicit, Marked
from fpipe.meshes.copies import ALONE
from fpipe.pipelines.modes import isolate
from fpipe.pipelines.planner import Planner
from fpipe.pipelines.signature import Signature
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.captured import Captured
from fpipe.record.variant import Variant
from fpipe.stages.assembly import assemble
from fpipe.stages.conversion import differentiate
from schedules import Schedule, check, lower


def captured_for(planner: Planner, variant: Variant, signature: Signature) -> Captured:
    """Return the captured model for the first microbatch of a batch; it must be known already."""
    captures = planner.captures
    first = captures.batchings[variant.loss].split(signature)[0]
    return captures.of(variant, first).captured


def plan_cut(
    planner: Planner, variant: Variant, captured: Captured, positions: Sequence[int], schedule: Schedule
) -> StepPlan:
    """Return a plan of a captured model, cut before the units at `positions`; all ranks are in this process.

    Its microbatches are all like the one that was captured. It does not watch for changes of the model: run it at once.
    """
    placement = schedule.placement
    with isolate(variant):
        assembly = assemble(captured, positions, variant.outputs, placement, planner.summed)
        assembly = differentiate(assembly, planner.backend, False, range(schedule.stages))
        check(schedule, assembly.graph)
        program = lower(schedule, assembly.graph)
    return StepPlan((assembly,) * schedule.microbatches, program, tuple(range(schedule.ranks)), None)


def recut(planner: Planner, captured: Captured, positions: Sequence[int], schedule: Schedule) -> Planner:
    """Return a planner of the same model, cut before the units at `positions` of one of its captures.

    The schedule's ranks are all in this process. Captures are shared with `planner`; plans are not.
    """
    captures, calls = planner.captures, Calls.of(captured, planner.captures.model)
    marks = tuple(calls.marks(position) for position in positions)
    where = Cuts(Marked(marks) if marks else Explicit(()), captures.cuts.unsplittable, captures.cuts.whole)
    return Planner(
        schedule,
        replace(captures, cuts=where, memo=captures.memo.without_stages()),
        planner.output_dims,
        tuple(range(schedule.ranks)),
        planner.summed,
        planner.backend,
        ALONE,
    )
