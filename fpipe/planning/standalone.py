# SPDX-License-Identifier: Apache-2.0
"""A model as a pipeline of a single stage in this process, to be cut again and again.

Runs when a model is profiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from fpipe.cutting.calls import Selector
from fpipe.cutting.partition import parse_places
from fpipe.errors import InputError
from fpipe.network.one_process import LocalRanks
from fpipe.pipelines.argument_checks import require_buildable, require_count
from fpipe.pipelines.builder import Builder, make_batchings
from fpipe.pipelines.loss_weights import Weight
from fpipe.pipelines.modes import active_casts
from fpipe.pipelines.pipeline import Pipeline
from fpipe.planning.recutting import captured_for, recut
from fpipe.record.captured import CaptureFunction, FrontEnd
from fpipe.record.objective import Loss
from fpipe.record.variant import TRAINING, Variant
from fpipe.stages.backends import Backward, backend_of
from fpipe.stages.ties import Tied
from schedules import one_f_one_b


@dataclass(frozen=True)
class ModelArguments:
    """The arguments of `fpipe.pipeline` that matter to a single stage."""

    loss: Loss | None = None
    microbatches: int = 1
    unsplittable: Selector | Iterable[Selector] = ()
    whole: Selector | Iterable[Selector] = ()
    capture: str | FrontEnd | CaptureFunction = "trace"
    backward: Backward = "graph"
    tied: Tied = "exact"
    batch_dims: Any = 0
    weight: Weight | None = None

    def require_defaults(self) -> None:
        """Raise `InputError` for an argument besides a pipeline, which has its own."""
        for one in fields(self):
            if getattr(self, one.name) != one.default:
                raise InputError(
                    f"{one.name}: got {getattr(self, one.name)!r} besides a pipeline, which has its own, expected "
                    "none. Leave it out, or pass the model instead of the pipeline."
                )

    def build(self, module: nn.Module, example: Any, targets: Any) -> Pipeline:
        """Return the pipeline of a model as a single stage in this process."""
        require_count("microbatches", self.microbatches)
        schedule = one_f_one_b(ranks=1, microbatches=self.microbatches)
        loss: Any = self.loss
        require_buildable(module, example, loss, schedule)
        batchings = make_batchings(example, targets, self.batch_dims, self.microbatches, self.weight, self.microbatches)
        builder = Builder(
            loss,
            schedule,
            batchings,
            parse_places(None, self.unsplittable, 1, self.whole),
            self.capture,
            backend_of(self.backward),
            self.tied,
            0,
            LocalRanks(1),
            1,
        )
        return builder.build(module, batchings[True].split_batch(example, targets))


def take_alone(pipe: Pipeline, example: Any, targets: Any) -> Pipeline:
    """Return the pipeline of the same model as a single stage in this process, captured for batches like this one."""
    variant = training_variant_here()
    signature = pipe.batch(variant, example, targets).signature
    pipe.plan(variant, signature)
    captured = captured_for(pipe.planner, variant, signature)
    schedule = one_f_one_b(ranks=1, microbatches=pipe.captures.batchings[True].microbatches)
    planner = recut(pipe.planner, captured, (), schedule)
    return Pipeline(planner, LocalRanks(1), pipe.rebuild, pipe.plan_ahead)


def training_variant_here() -> Variant:
    """Return the variant of a training step under the autocast that is on."""
    return replace(TRAINING, casts=active_casts())
