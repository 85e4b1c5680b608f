# SPDX-License-Identifier: Apache-2.0
"""Agreement of ranks on the pipeline when it is built, each kind of batch at its first step, and every step.

A pipeline is described by fields, each of several lines, so that ranks that differ learn which line of which field does
(`fpipe.runtime.transport.agreement`). A step is described by a few numbers. Parameters that several ranks hold, tied
ones and those of replicated stages, are compared bit by bit when a pipeline first runs. The rest of the batch and of
the parameters may differ, since every rank holds other parts.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fpipe.batching.batch import Batch, Batching, Signature
from fpipe.errors import TransportError
from fpipe.ir.captured import Constant
from fpipe.ir.variant import Variant
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.plan import Plan
from fpipe.pipelines.step import State, scatter
from fpipe.runtime.executor import Inputs
from fpipe.runtime.fingerprint import bits, described, digest
from fpipe.runtime.ranks import Ranks
from fpipe.runtime.transport.agreement import Field
from schedules import Schedule

DEVICES = ("cpu", "cuda")


def meet(ranks: Ranks, schedule: Schedule, batching: Batching) -> None:
    """Raise `TransportError` on all ranks unless all of them build a pipeline with this schedule and batch."""

    def fields() -> list[Field]:
        return [
            *_circumstances(),
            Field.of("schedule", [repr(schedule)]),
            Field.of("batch", _batch(batching, batching.example)),
        ]

    ranks.agree(fields, "its arguments")


def connect(pipe: Pipeline, variant: Variant, signature: Signature | None = None, seed: int | None = None) -> Plan:
    """Return the plan for a variant and a batch signature, once all ranks have agreed on it, with its channels ready.

    Every rank must request the same plans in the same order. Raises `TransportError` on all of them if one doesn't.
    """
    what = variant, pipe.captures.batchings[variant.loss].example if signature is None else signature
    if what not in pipe.connections:
        pipe.ranks.agree(lambda: [*_of_batch(pipe, *what), *_of_moment(seed)])
        plan, found = pipe.plan(*what), list[Field]()

        def fields() -> list[Field]:
            found.extend(_of_plan(pipe, plan, *what))
            return found

        pipe.ranks.agree(fields, "a new kind of batch")
        pipe.ranks.connect(plan.program.channels)
        pipe.connections[what] = digest(f"{field.name} {field.digest}" for field in found)
        pipe.agreed[what] = _of_batch(pipe, *what)
    return pipe.plan(*what)


def enter(
    pipe: Pipeline, variant: Variant, params: State, buffers: State, batch: Batch, seed: int | None
) -> tuple[Plan, Inputs]:
    """Return the plan for a batch and its ranks' inputs, once all ranks have agreed to begin this step."""
    what = variant, batch.signature
    plan = connect(pipe, *what, seed)
    plan.watch.require_unchanged()
    given = scatter(plan, params, buffers, batch, seed)
    pipe.ranks.agree(lambda: [*pipe.agreed[what], *_of_moment(seed)])
    if not pipe.compared:
        _require_same_copies(pipe, plan, {**params, **buffers})
        pipe.compared[what] = None
    return plan, given


def _of_batch(pipe: Pipeline, variant: Variant, signature: Signature) -> tuple[Field, ...]:
    """Return the fields of all calls with such a batch; they are made once, since cold code is slow in every step."""
    known, first = pipe.connections.get((variant, signature), 0), next(iter(pipe.connections.values()), 0)
    batching = pipe.captures.batchings[variant.loss]
    return (
        Field("pipeline", first, lambda: _pipeline(pipe)),
        Field("batch", known or digest([str(signature)]), lambda: _batch(batching, signature)),
        Field("variant", digest([str(variant)]), lambda: [str(variant)]),
        Field("known before", bool(known), lambda: [f"a batch that was {'' if known else 'not '}seen before"]),
    )


def _of_moment(seed: int | None) -> tuple[Field, ...]:
    """Return the fields of one call; they are made in every step."""
    said, settings = str(seed), _settings()
    return Field("seed", digest([said]), lambda: [said]), Field("settings", _digest(settings), lambda: settings)


def _pipeline(pipe: Pipeline) -> list[str]:
    """Return all lines of the pipeline as it was first agreed on."""
    what = next(iter(pipe.connections), None)
    found = () if what is None else _of_plan(pipe, pipe.plan(*what), *what)
    return [f"{field.name}: {line}" for field in found for line in field.lines()]


def _settings() -> tuple[str, ...]:
    """Return torch's settings in this thread, as far as they affect operators."""
    casts = [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else "off" for kind in DEVICES]
    return _said(torch.get_default_dtype(), *casts)


@lru_cache(maxsize=1)
def _said(dtype: torch.dtype, *casts: torch.dtype | str) -> tuple[str, ...]:
    """Return settings as lines."""
    said = [f"autocast on {kind}: {cast}" for kind, cast in zip(DEVICES, casts, strict=True)]
    return f"default dtype: {dtype}", *said


_digest = lru_cache(maxsize=1)(digest)
"""The digest of lines, remembered for as long as they stay the same."""


def _batch(batching: Batching, signature: Signature) -> list[str]:
    """Return the lines of a batch's signature, one for each leaf and for each other field."""
    pairs = zip(batching.leaves, signature.leaves, strict=True)
    found = [f"{leaf.name}: {', '.join(map(_spec, specs))}" for leaf, specs in pairs]
    others = [one.name for one in dataclasses.fields(signature) if one.compare and one.name != "leaves"]
    for name in others:
        value = getattr(signature, name)
        found += (
            [f"{name}[{k}]: {one}" for k, one in enumerate(value)] if isinstance(value, tuple) else [f"{name}: {value}"]
        )
    return found


def _spec(spec: Any) -> str:
    return f"{spec} of strides {list(spec.stride)}"


def _of_plan(pipe: Pipeline, plan: Plan, variant: Variant, signature: Signature) -> Iterator[Field]:
    """Yield the fields of a pipeline and of what it does with one kind of batch."""
    captures, how = pipe.captures, pipe.schedule
    batching = captures.batchings[variant.loss]
    yield from _circumstances()
    yield Field.of("batch", [str(variant), *_batch(batching, signature)])
    yield Field.of("schedule", [repr(how)])
    yield Field.of("program", [f"rank {r}: {' '.join(map(str, how.actions(r)))}" for r in range(how.ranks)])
    yield Field.of("tied", [f"summed: {name}" for name in sorted(pipe.summed)])
    yield Field.of("loss", described(captures.loss if variant.loss else None))
    yield Field.of("batch_dims", [line for one in batching.leaves for line in (f"{one.name}:", *described(one.dim))])
    yield Field.of("weight", described(batching.weight))
    yield Field.of("output_dims", described(pipe.output_dims if variant.outputs else None))
    yield Field.of("tensors that are neither parameters nor buffers", list(_constants(plan)))
    yield Field.of("parameters", _parameters(plan))
    yield Field.of("model", list(_units(pipe, plan)))
    yield Field.of("cuts", list(_cuts(pipe, plan, variant, signature)))
    yield Field.of("what crosses the cuts", list(_crossing(plan)))


def _circumstances() -> Iterator[Field]:
    """Yield the fields of a pipeline's environment."""
    yield Field.of("versions", [f"Python {platform.python_version()}, torch {torch.__version__}"])
    yield Field.of("settings", [*_settings(), f"matmul precision: {torch.get_float32_matmul_precision()}"])


def _units(pipe: Pipeline, plan: Plan) -> Iterator[str]:
    yield type(pipe.model).__qualname__
    for cut in plan.cuts:
        for unit in cut.captured.units:
            yield f"{unit.path or '(root)'}: {unit.does} of {unit.reads} makes {unit.makes}"
        yield from (f"buffer {buffer} becomes {new}" for buffer, new in cut.captured.reassigned.items())


def _parameters(plan: Plan) -> list[str]:
    parameters, buffers, trained = plan.assembly.parameters, plan.assembly.buffers, plan.assembly.captured.trainable
    found = [f"{name}: {spec}, {'trained' if name in trained else 'frozen'}" for name, spec in parameters.items()]
    return [*found, *(f"buffer {name}: {spec}" for name, spec in buffers.items())]


def _constants(plan: Plan) -> Iterator[str]:
    for cut in plan.cuts:
        for value, source in cut.captured.sources.items():
            if isinstance(source, Constant):
                reader = next((unit.path for unit in cut.captured.units if value in unit.reads), "")
                tensor = source.tensor
                yield f"read in {reader or '(root)'}: {tensor.dtype} {list(tensor.shape)} of values {bits(tensor)}"


def _cuts(pipe: Pipeline, plan: Plan, variant: Variant, signature: Signature) -> Iterator[str]:
    microbatches = pipe.captures.batchings[variant.loss].split(signature)
    for one, assembly in dict(zip(microbatches, plan.assemblies, strict=True)).items():
        _, positions = pipe.captures.of(variant, one)
        yield f"before units {list(positions)}"
        yield from map(str, assembly.stages)


def _crossing(plan: Plan) -> Iterator[str]:
    for cut in plan.cuts:
        for stage in cut.stages:
            for what, ports in (("values", stage.gives), ("cotangents", stage.pulls), ("gradients", stage.shares)):
                for port in ports:
                    yield f"stage {stage.index}, {what} for stage {port.peer}: {', '.join(map(_spec, port.specs))}"


def _require_same_copies(pipe: Pipeline, plan: Plan, held: Mapping[str, Tensor]) -> None:
    """Raise `TransportError` on all ranks if some hold different values of the same parameter or buffer."""
    homes = _holders(plan)
    shared = [name for name, ranks in homes.items() if len(ranks) > 1]
    if not shared or len(pipe.ranks.ranks) == plan.program.schedule.ranks:
        return
    mine = [int(bits(held[name]), 16) >> 1 if name in held else 0 for name in shared]
    rows = pipe.ranks.collect(torch.tensor([mine]))
    for k, name in enumerate(shared):
        found = {rank: rows[rank][0, k].item() for rank in sorted(homes[name])}
        if len(set(found.values())) > 1:
            first, other = next((a, b) for a in found for b in found if found[a] != found[b])
            raise TransportError(
                f"{name!r}, of which ranks {list(found)} hold copies: got other values on rank {first} than on rank "
                f"{other}, expected the same. Seed every process alike before it builds the model, or load one "
                "checkpoint on all of them, and update every copy by the same gradient."
            )


def _holders(plan: Plan) -> dict[str, set[int]]:
    """Return the ranks that hold each parameter and buffer."""
    found: dict[str, set[int]] = {}
    for stage in plan.assembly.stages:
        for name in (*stage.parameters, *stage.buffers, *stage.unused):
            found.setdefault(name, set()).update(plan.placement.replicas(stage.index))
    return found
