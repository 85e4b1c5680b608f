# SPDX-License-Identifier: Apache-2.0
"""The fields of text that ranks compare: those of the pipeline, of a kind of batch, and of a call.

A field has several lines, so that the error can show the line in which ranks differ
(`fpipe.network.agreement`). No field holds what differs from rank to rank by design, such as the values of
parameters.

Runs when ranks agree: fields of a call are made in every step, those of a kind of batch and of its plan once.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from fpipe.meshes.copies import PipelineCopies
from fpipe.network.agreement import Field
from fpipe.network.fingerprint import describe_value, digest, digest_tensor
from fpipe.pipelines.batch import Batching
from fpipe.pipelines.memo import BatchKind
from fpipe.pipelines.modes import DEVICE_TYPES
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.signature import Signature
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.captured import Constant
from fpipe.record.variant import Variant
from schedules import Schedule


def argument_fields(schedule: Schedule, batching: Batching, plans: int, copies: PipelineCopies) -> tuple[Field, ...]:
    """Return the fields of the arguments that a pipeline is built from."""
    return (
        *_environment_fields(),
        Field.of("schedule", [repr(schedule)]),
        Field.of("batch", _batch_lines(batching, batching.example)),
        Field.of("plans", [str(plans)]),
        Field.of("mesh", [str(copies)]),
    )


def batch_fields(pipe: Pipeline, kind: BatchKind, known: int = 0) -> tuple[Field, ...]:
    """Return the fields of all calls with a kind of batch; `known` is the digest of its plan, 0 if there is none yet.

    Make them once per kind: in every step, they would cost too much.
    """
    variant, signature = kind
    first = next((agreement.digest for agreement in pipe.memo.agreements.values()), known)
    batching = pipe.captures.batchings[variant.loss]
    return (
        Field("pipeline", first, lambda: _pipeline_lines(pipe)),
        Field("batch", known or digest([str(signature)]), lambda: _batch_lines(batching, signature)),
        Field("variant", digest([str(variant)]), lambda: [str(variant)]),
        Field("known before", bool(known), lambda: [f"a batch that was {'' if known else 'not '}seen before"]),
    )


NO_UPDATE: Final = Field.of("update", ())


class CommonArguments(NamedTuple):
    """The arguments of a call that are the same on every rank.

    `onto`: whether it adds to earlier sums; `update`: the field of the update within a training step, if there is one.
    """

    seed: int | None = None
    scale: float | None = None
    total: float | None = None
    onto: bool = False
    update: Field = NO_UPDATE

    def __str__(self) -> str:
        return f"scale={self.scale}, total={self.total}, {'with' if self.onto else 'without'} onto"


def call_fields(call: CommonArguments) -> tuple[Field, ...]:
    """Return the fields of one call; they are made in every step."""
    seed, others, settings = str(call.seed), str(call), _setting_lines()
    return (
        Field("seed", digest([seed]), lambda: [seed]),
        Field("scale, total and onto", _cached_digest((others,)), lambda: [others]),
        Field("settings", _cached_digest(settings), lambda: settings),
        call.update,
    )


def number_fields(signature: Signature) -> tuple[Field, ...]:
    """Return the field of the numbers in a batch."""
    lines = [str(signature.numbers)] if signature.numbers else []
    return (Field("numbers in the batch", digest(lines), lambda: lines),)


def _pipeline_lines(pipe: Pipeline) -> list[str]:
    """Return all lines of the pipeline as it was first agreed on."""
    kind = next(iter(pipe.memo.agreements), None)
    fields = () if kind is None else plan_fields(pipe, pipe.plan(*kind), *kind)
    return [f"{field.name}: {line}" for field in fields for line in field.lines()]


def _setting_lines() -> tuple[str, ...]:
    """Return the lines of this thread's torch settings that affect operators."""
    casts = [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else "off" for kind in DEVICE_TYPES]
    return _format_settings(torch.get_default_dtype(), *casts)


@lru_cache(maxsize=1)
def _format_settings(dtype: torch.dtype, *casts: torch.dtype | str) -> tuple[str, ...]:
    """Return settings as lines."""
    lines = [f"autocast on {kind}: {cast}" for kind, cast in zip(DEVICE_TYPES, casts, strict=True)]
    return f"default dtype: {dtype}", *lines


_cached_digest = lru_cache(maxsize=8)(digest)
"""Returns the digest of lines, cached for as long as they stay the same."""


def _batch_lines(batching: Batching, signature: Signature) -> list[str]:
    """Return the lines of a batch's signature, one for each leaf and for each other field."""
    pairs = zip(batching.leaves, signature.leaves, strict=True)
    found = [f"{leaf.name}: {', '.join(map(_describe_spec, specs))}" for leaf, specs in pairs]
    others = [one.name for one in dataclasses.fields(signature) if one.compare and one.name != "leaves"]
    for name in others:
        value = getattr(signature, name)
        found += (
            [f"{name}[{k}]: {one}" for k, one in enumerate(value)] if isinstance(value, tuple) else [f"{name}: {value}"]
        )
    return found


def _describe_spec(spec: Any) -> str:
    return f"{spec} of strides {list(spec.stride)}"


def plan_fields(pipe: Pipeline, plan: StepPlan, variant: Variant, signature: Signature) -> Iterator[Field]:
    """Yield the fields of a pipeline and of its plan for one kind of batch."""
    captures, how = pipe.captures, pipe.schedule
    batching = captures.batchings[variant.loss]
    yield from _environment_fields()
    yield Field.of("batch", [str(variant), *_batch_lines(batching, signature)])
    yield Field.of("schedule", [repr(how)])
    yield Field.of("program", [f"rank {r}: {' '.join(map(str, how.actions(r)))}" for r in range(how.ranks)])
    yield Field.of("tied", [f"summed: {name}" for name in sorted(pipe.planner.summed)])
    yield Field.of("loss", describe_value(captures.loss if variant.loss else None))
    yield Field.of(
        "batch_dims", [line for one in batching.leaves for line in (f"{one.name}:", *describe_value(one.dim))]
    )
    yield Field.of("weight", describe_value(batching.weight))
    yield Field.of("output_dims", describe_value(pipe.planner.output_dims if variant.outputs else None))
    yield Field.of("tensors that are neither parameters nor buffers", list(_constant_lines(plan)))
    yield Field.of("parameters", _parameter_lines(plan))
    yield Field.of("model", list(_unit_lines(pipe, plan)))
    yield Field.of("cuts", list(_cut_lines(pipe, plan, variant, signature)))
    yield Field.of("what crosses the cuts", list(_crossing_lines(plan)))


def _environment_fields() -> Iterator[Field]:
    """Yield the fields of a pipeline's environment."""
    yield Field.of("versions", [f"Python {platform.python_version()}, torch {torch.__version__}"])
    yield Field.of("settings", [*_setting_lines(), f"matmul precision: {torch.get_float32_matmul_precision()}"])


def _unit_lines(pipe: Pipeline, plan: StepPlan) -> Iterator[str]:
    yield type(pipe.model).__qualname__
    for cut in plan.cuts:
        for unit in cut.captured.units:
            yield f"{unit.path or '(root)'}: {unit.does} of {unit.reads} makes {unit.makes}"
        yield from (f"buffer {buffer} becomes {new}" for buffer, new in cut.captured.reassigned.items())


def _parameter_lines(plan: StepPlan) -> list[str]:
    parameters, buffers, trained = plan.assembly.parameters, plan.assembly.buffers, plan.assembly.captured.trainable
    found = [f"{name}: {spec}, {'trained' if name in trained else 'frozen'}" for name, spec in parameters.items()]
    return [*found, *(f"buffer {name}: {spec}" for name, spec in buffers.items())]


def _constant_lines(plan: StepPlan) -> Iterator[str]:
    for cut in plan.cuts:
        for value, source in cut.captured.sources.items():
            if isinstance(source, Constant):
                reader = next((unit.path for unit in cut.captured.units if value in unit.reads), "")
                tensor, where = source.tensor, reader or "(root)"
                yield f"read in {where}: {tensor.dtype} {list(tensor.shape)} of values {digest_tensor(tensor)}"


def _cut_lines(pipe: Pipeline, plan: StepPlan, variant: Variant, signature: Signature) -> Iterator[str]:
    microbatches = pipe.captures.batchings[variant.loss].split(signature)
    for assembly in dict(zip(microbatches, plan.assemblies, strict=True)).values():
        yield f"before units {list(assembly.partition)}"
        yield from map(str, assembly.stages)


def _crossing_lines(plan: StepPlan) -> Iterator[str]:
    for cut in plan.cuts:
        for stage in cut.stages:
            for what, crossings in (("values", stage.gives), ("cotangents", stage.pulls), ("gradients", stage.shares)):
                for one in crossings:
                    specs = ", ".join(map(_describe_spec, one.specs))
                    yield f"stage {stage.index}, {what} for stage {one.target}: {specs}"
