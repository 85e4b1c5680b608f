# SPDX-License-Identifier: Apache-2.0
"""Run a plan on the ranks of this process.

Runs in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.step_plan import StepPlan
from fpipe.runtime.executor import Execution, Inputs, Outcome
from fpipe.runtime.recording import Record, run_recorded
from fpipe.runtime.transport.interface import Transport
from fpipe.tensors import random


def run_plan(pipe: Pipeline, plan: StepPlan, inputs: Inputs, record: Record | None = None) -> dict[int, Outcome]:
    """Run the plan's program on this process's ranks; return their outcomes. `record` gets each measured span."""
    return run_copies(pipe, plan, {plan.copy: inputs}, record)[plan.copy]


def run_copies(
    pipe: Pipeline, plan: StepPlan, inputs: Mapping[int, Inputs], record: Record | None = None
) -> dict[int, dict[int, Outcome]]:
    """Run the plan's program for each copy of the pipeline that this process plays; return outcomes by copy."""

    def execution(copy: int, rank: int, transport: Transport) -> Execution:
        return Execution(rank, plan.parts[copy].programs[rank], transport, inputs[copy])

    with random.preserve_generators(plan.generators), plan.context():
        if record is None:
            found = pipe.ranks.run([partial(execution, copy) for copy in inputs])
        else:
            timed = [(plan.parts[copy].timed_programs, given) for copy, given in inputs.items()]
            found = run_recorded(pipe.ranks, timed, pipe.device, record)
    return dict(zip(inputs, found, strict=True))
