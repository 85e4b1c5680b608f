# SPDX-License-Identifier: Apache-2.0
"""Capture and plan steps ahead, for kinds of batches that are known to come.

Runs when `pipe.prepare` is called.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch

from fpipe.errors import InputError
from fpipe.network.agreement import Field
from fpipe.pipelines.handshake import agree_on_plan
from fpipe.pipelines.memo import BatchKind
from fpipe.pipelines.modes import suspend_autocast
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.signature import Signature
from fpipe.record.variant import EVALUATION, TRAINING, Variant
from fpipe.tensors.arguments import require_arguments
from schedules.arguments import each


def prepare_steps(pipe: Pipeline, examples: Iterable[tuple[Any, Any]]) -> None:
    """Make the plans for batches like these, pairs of inputs and targets; every rank must call this.

    Raise `InputError` if the pipeline keeps fewer plans, or if the model can't take a batch.
    """
    with torch.inference_mode(False), suspend_autocast(TRAINING) as training, pipe.ranks.enter_call("pipe.prepare"):
        require_arguments(Pipeline.prepare, {"examples": examples})
        known = [_require_pair(k, example) for k, example in enumerate(each("examples", examples, object, InputError))]
        pipe.ranks.agree(lambda: [Field.of("examples", [f"{len(known)} examples"])])
        batches = [(_variant(pipe, targets, training), inputs, targets) for inputs, targets in known]
        _require_room(pipe, {(variant, _signature(pipe, variant, *given)) for variant, *given in batches})
        for variant, inputs, targets in batches:
            batch = pipe.batch(variant, inputs, targets, pipe.ranks.exchange_text)
            plan = agree_on_plan(pipe, variant, batch.signature)
            assert plan.programs, "linked here, not in the first step"


def _require_pair(k: int, example: object) -> tuple[Any, Any]:
    """Return an example; raise `InputError` unless it is a pair."""
    if isinstance(example, tuple) and len(example) == 2:
        return example
    raise InputError(
        f"examples[{k}]: got {type(example).__name__}, expected a pair of inputs and targets, as a step takes them. "
        "Write ((x,), y), or ((x,), None) if there are no targets."
    )


def _variant(pipe: Pipeline, targets: Any, training: Variant) -> Variant:
    """Return the variant of a step: of a training step, unless the schedule has no backward."""
    if pipe.schedule.backward:
        return training
    return replace(EVALUATION, loss=pipe.captures.computes_loss or targets is not None, casts=training.casts)


def _signature(pipe: Pipeline, variant: Variant, inputs: Any, targets: Any) -> Signature:
    return pipe.captures.batchings[variant.loss].split_batch(inputs, targets).signature


def _require_room(pipe: Pipeline, kinds: Collection[BatchKind]) -> None:
    """Raise `InputError` if there are more kinds of batches than plans are kept."""
    own = next(iter(pipe.memo.agreements))
    count = sum(kind != own for kind in kinds)
    if count > pipe.memo.most:
        raise InputError(
            f"examples: got {count} kinds of batches other than the pipeline's own example, expected at most "
            f"{pipe.memo.most}, as many as it keeps plans for. Build it with plans={count} or more, or pad batches "
            "to fewer lengths."
        )
