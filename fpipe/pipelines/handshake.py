# SPDX-License-Identifier: Apache-2.0
"""Make ranks agree before they act together: on what they build, on a kind of batch and its plan, and on each step.

Ranks compare fields of text (`fpipe.network.agreement`): those of the pipeline, of a kind of batch, and of a call. A
field has several lines, so that the error can show the line in which ranks differ. No field holds what differs from
rank to rank by design, such as the values of parameters.

Parameters and buffers that several ranks hold, because of ties or replicated stages, are compared by digest before a
pipeline's first step. Other values of the batch and of parameters are not compared, since each rank holds its own part.

Runs when a pipeline is built, at the first batch of a kind, and in every step: then fields of the call are made, those
of a kind of batch and of its plan only once.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fpipe.errors import InputError, TransportError
from fpipe.meshes.copies import PipelineCopies
from fpipe.network.agreement import Field
from fpipe.network.fingerprint import describe_value, digest, digest_tensor
from fpipe.network.ranks import Ranks
from fpipe.pipelines.argument_checks import require_trained
from fpipe.pipelines.batch import Batching, Signature, SplitBatch
from fpipe.pipelines.inputs import State, scatter
from fpipe.pipelines.memo import Agreement, BatchKind
from fpipe.pipelines.merge import Aux, MergeTrees
from fpipe.pipelines.modes import DEVICE_TYPES, is_autograd_watched, suspend_autocast
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.captured import Constant
from fpipe.record.variant import EVALUATION, TRAINING, Variant
from fpipe.runtime.executor import Inputs
from fpipe.tensors.arguments import require_arguments, require_pipeline, require_seed
from fpipe.tensors.settings import describe_processor, describe_settings
from schedules import Schedule
from schedules.arguments import each


def argument_fields(schedule: Schedule, batching: Batching, plans: int, copies: PipelineCopies) -> tuple[Field, ...]:
    """Return the fields of the arguments that a pipeline is built from."""
    return (
        *_environment_fields(batching.home),
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
NO_NUMBERS: Final = Field.of("numbers in the batch", ())


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


def call_fields(call: CommonArguments, device: torch.device) -> tuple[Field, ...]:
    """Return the fields of one call, on a device; they are made in every step."""
    return *_common_fields(str(call.seed), str(call), _setting_lines(device)), call.update


@lru_cache(maxsize=8)
def _common_fields(seed: str, others: str, settings: tuple[str, ...]) -> tuple[Field, ...]:
    return (
        Field.of("seed", [seed]),
        Field.of("scale, total and onto", [others]),
        Field.of("settings", settings, SETTINGS_REPAIR),
    )


def number_fields(signature: Signature) -> tuple[Field, ...]:
    """Return the field of the numbers in a batch."""
    numbers = signature.numbers
    return (Field.of("numbers in the batch", [str(numbers)]) if numbers else NO_NUMBERS,)


def _pipeline_lines(pipe: Pipeline) -> list[str]:
    """Return all lines of the pipeline as it was first agreed on."""
    kind = next(iter(pipe.memo.agreements), None)
    fields = () if kind is None else plan_fields(pipe, pipe.plan(*kind), *kind)
    return [f"{field.name}: {line}" for field in fields for line in field.lines()]


SETTINGS_REPAIR: Final = (
    "Use the same settings of torch in every process, before pipeline(), for example torch.set_num_threads(1) or "
    "OMP_NUM_THREADS=1: with other settings, results have other bits."
)
PROCESSOR_REPAIR: Final = (
    "Start every process with ATEN_CPU_CAPABILITY=avx2, or what all machines have, or use machines of one kind: "
    "kernels for other vector instructions compute other bits."
)


def _setting_lines(device: torch.device) -> tuple[str, ...]:
    """Return the lines of this thread's torch settings that affect operators, and that are compared in every step."""
    casts = [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else "off" for kind in DEVICE_TYPES]
    threads = torch.get_num_threads() if device.type == "cpu" else None
    return _format_settings(threads, torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), *casts)


@lru_cache(maxsize=1)
def _format_settings(
    threads: int | None, deterministic: bool, dtype: torch.dtype, *casts: torch.dtype | str
) -> tuple[str, ...]:
    lines = [f"autocast on {kind}: {cast}" for kind, cast in zip(DEVICE_TYPES, casts, strict=True)]
    lines += [] if threads is None else [f"threads within an operator: {threads}"]
    return f"default dtype: {dtype}", f"deterministic algorithms: {deterministic}", *lines


def _batch_lines(batching: Batching, signature: Signature) -> list[str]:
    """Return the lines of a batch's signature, one for each leaf and for each other field."""
    pairs = zip(batching.of_inputs(signature.halves[0]).leaves, signature.leaves, strict=True)
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
    yield from _environment_fields(batching.home)
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


def _environment_fields(device: torch.device) -> Iterator[Field]:
    yield Field.of("versions", [f"Python {platform.python_version()}, torch {torch.__version__}"])
    yield Field.of("settings", [*_setting_lines(device), *describe_settings(device)], SETTINGS_REPAIR)
    yield Field.of("vectors of the processor", describe_processor(device), PROCESSOR_REPAIR)


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
                reader = next((unit for unit in cut.captured.units if value in unit.reads), None)
                tensor = source.tensor
                if reader is not None:  # else code has looked at it only: what it decided is compared
                    what = f"{tensor.dtype} {list(tensor.shape)} of values {digest_tensor(tensor)}"
                    yield f"read in {reader.path or '(root)'}: {what}"


def _cut_lines(pipe: Pipeline, plan: StepPlan, variant: Variant, signature: Signature) -> Iterator[str]:
    microbatches = pipe.captures.batchings[variant.loss].split(signature)
    for assembly in dict(zip(microbatches, plan.lasts, strict=True)).values():
        yield f"before units {list(assembly.partition)}"
        yield from map(str, assembly.stages)


def _crossing_lines(plan: StepPlan) -> Iterator[str]:
    for cut in plan.cuts:
        for stage in cut.stages:
            for what, crossings in (("values", stage.gives), ("cotangents", stage.pulls), ("gradients", stage.shares)):
                for one in crossings:
                    specs = ", ".join(map(_describe_spec, one.specs))
                    yield f"stage {stage.index}, {what} for stage {one.target}: {specs}"


NO_ARGUMENTS: Final = CommonArguments()


@contextmanager
def call_together(function: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[Pipeline]:
    """Return the context of a public function that all ranks of `given["pipe"]` call, with its arguments checked.

    An error in it is raised on all ranks, until they have agreed. Raise `InputError` for an argument that is not of the
    type that the function is annotated with.
    """
    name, pipe = function.__name__, given["pipe"]
    require_pipeline(name, pipe)
    with pipe.ranks.enter_call(name):
        require_arguments(function, given)
        yield pipe


def agree_on_arguments(pipe: Pipeline, note: int = 0, /, **arguments: object) -> list[int]:
    """Raise `TransportError` on all ranks unless they call the same function with the same values of these.

    Return the note of each process.
    """
    return pipe.ranks.agree(
        lambda: [Field.of(name, describe_value(value)) for name, value in arguments.items()], note=note
    )


def agree_on_aux(pipe: Pipeline, aux: bool | MergeTrees, **arguments: object) -> Aux:
    """Agree on the other arguments, and return what becomes of the loss's aux: the ranks may ask or not."""
    notes = agree_on_arguments(pipe, int(bool(aux)), **arguments)
    having = pipe.schedule.placement.replicas(pipe.schedule.stages - 1)
    return Aux.of(aux, any(notes[place] for rank, place in enumerate(pipe.ranks.places) if rank not in having))


def require_same(pipe: Pipeline, /, **values: Any) -> None:
    """Raise `TransportError`, on every rank, unless all ranks pass the same values, by the same names.

    Steps compare only their arguments. Use this for other values of your script, such as an optimizer outside
    `fpipe.train_step`. It takes one small message. Every rank must call this.

    Numbers, strings, containers and tensors are compared by value, optimizers, functions and modules by their code and
    what they hold, other objects by their class.

    >>> import torch, fpipe
    >>> from schedules import gpipe
    >>> model = torch.nn.Linear(2, 1)
    >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 2),), loss=torch.mean, schedule=gpipe(1, 2))
    >>> adam = fpipe.optimizer(torch.optim.AdamW, lr=3e-4)
    >>> fpipe.require_same(pipe, optimizer=adam, first_seed=17)
    """
    with call_together(require_same, {"pipe": pipe}):
        agree_on_arguments(pipe, values=values)


def agree_to_build(ranks: Ranks, schedule: Schedule, batching: Batching, plans: int, copies: PipelineCopies) -> None:
    """Raise `TransportError` on all ranks unless all of them build a pipeline with these arguments."""
    ranks.agree(lambda: argument_fields(schedule, batching, plans, copies), "its arguments")


def agree_on_plan(
    pipe: Pipeline, variant: Variant, signature: Signature | None = None, call: CommonArguments = NO_ARGUMENTS
) -> StepPlan:
    """Return the plan for a kind of batch, once all ranks have agreed on it and connected its channels.

    Every rank must request the same plans in the same order. Raise `TransportError` on all of them if one doesn't.
    """
    kind = pipe.planner.kind(variant, signature)
    known = pipe.memo.batches.get(kind)
    if known is None or known.agreement is None:
        # The fields of `agree_to_step`, by name: a rank that knows this kind of batch already is there.
        pipe.ranks.agree(lambda: [*batch_fields(pipe, kind), *call_fields(call, pipe.device), *number_fields(kind[1])])
        plan, fields = pipe.plan(*kind), list[Field]()

        def record_fields() -> Sequence[Field]:
            fields.extend(plan_fields(pipe, plan, *kind))
            return fields

        pipe.ranks.agree(record_fields, "a new kind of batch")
        pipe.ranks.connect(plan.program.channels)
        summary = digest(f"{field.name} {field.digest}" for field in fields)
        user = weakref.proxy(pipe)  # what a pipeline caches must not keep it alive
        pipe.memo.agree(kind, Agreement(summary, batch_fields(user, kind, summary)))
        pipe.ranks.forget_layouts()
    return pipe.memo.batches[kind].plan


def agree_to_step(
    pipe: Pipeline, variant: Variant, params: State, buffers: State, batch: SplitBatch, call: CommonArguments
) -> tuple[StepPlan, dict[int, Inputs]]:
    """Return the plan for a batch and the inputs of each copy here, once all ranks have agreed on the step.

    If they can be known before, the agreement is only posted: its answer is awaited before anything is sent.
    """
    require_seed(call.seed)
    kind = variant, batch.signature
    plan = agree_on_plan(pipe, *kind, call)
    if variant.training and not plan.has_gradients:
        require_trained(plan.assembly, pipe.schedule)
    plan = plan.eager if variant.training and is_autograd_watched() else plan
    for watch in (*[twin.watch(plan.watch) for twin in pipe.twins], plan.watch):
        watch.require_unchanged()
    if pipe.rechecks.is_due:
        pipe.rechecks.run(pipe.captures)
    links = pipe.copies.link() if pipe.copies.count > 1 else {}
    inputs = {
        copy: scatter(part, pipe.holdings.locals(params, copy), buffers, batch, call.seed, links.get(copy))
        for copy, part in plan.parts.items()
    }
    agreed, numbers = pipe.memo.batches[kind].agreement, number_fields(batch.signature)
    assert agreed is not None, "by all ranks, just now or before"

    def fields() -> list[Field]:
        return [*agreed.fields, *call_fields(call, pipe.device), *numbers]

    if pipe.compared and batch.batching.weight is None:
        pipe.ranks.post_agreement(fields, partial(pipe.memo.use, kind))
        return plan, inputs
    skips = variant.training and any(one.skips for one in inputs.values())
    if any(pipe.ranks.agree(fields, note=int(skips))):
        inputs = _share_skips(pipe, inputs)
    pipe.memo.use(kind)
    if not pipe.compared:
        _require_same_copies(pipe, plan, {**params, **buffers})
        pipe.compared.add(kind)
    return plan, inputs


def _require_same_copies(pipe: Pipeline, plan: StepPlan, held: Mapping[str, Tensor]) -> None:
    """Raise `TransportError` on all ranks if some hold different values of the same parameter or buffer.

    Replicas on a mesh hold the same of everything. Processes with other shards, or other parts of the model's own
    parallelism, are not compared.
    """
    homes, copies = _ranks_by_name(plan), pipe.copies
    alone = len(pipe.ranks.ranks) == plan.program.schedule.ranks and copies.is_local
    shared = [name for name, ranks in homes.items() if len(ranks) > 1 or copies.replicas > 1]
    if alone or not shared:
        return
    mine = [int(digest_tensor(held[name]), 16) >> 1 if name in held else 0 for name in shared]
    rows = torch.cat(pipe.ranks.gather_rows(torch.tensor([[copies.position, *mine]])))
    for k, name in enumerate(shared):
        for position in sorted(set(rows[:, 0].tolist())):
            holders = ((rows[:, 0] == position) & (rows[:, k + 1] != 0)).nonzero().flatten().tolist()
            _require_same_digests(name, {rank: int(rows[rank, k + 1]) for rank in holders})


def _require_same_digests(name: str, found: Mapping[int, int]) -> None:
    if len(set(found.values())) > 1:
        first, other = next((a, b) for a in found for b in found if found[a] != found[b])
        raise TransportError(
            f"{name!r}, of which ranks {list(found)} hold copies: got different values on ranks {first} and "
            f"{other}, expected equal copies. Seed every process the same before it builds the model, or load the "
            "same checkpoint on all of them, and update every copy with the same gradient."
        )


def _ranks_by_name(plan: StepPlan) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for stage in plan.assembly.stages:
        for name in (*stage.parameters, *stage.buffers, *stage.unused):
            found.setdefault(name, set()).update(plan.placement.replicas(stage.index))
    return found


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
    if isinstance(example, tuple) and len(example) == 2:
        return example
    raise InputError(
        f"examples[{k}]: got {type(example).__name__}, expected a pair of inputs and targets, as a step takes them. "
        "Write ((x,), y), or ((x,), None) if there are no targets."
    )


def _share_skips(pipe: Pipeline, inputs: Mapping[int, Inputs]) -> dict[int, Inputs]:
    """Return the inputs of each copy with its units of weight 0, which the ranks that compute the loss know."""
    mine = json.dumps([(copy, list(one.skips)) for copy, one in inputs.items()])
    told = [pair for text in pipe.ranks.exchange_text(mine, "microbatches of weight 0") for pair in json.loads(text)]
    return {
        copy: one._replace(skips=frozenset(i for number, some in told if number == copy for i in some))
        for copy, one in inputs.items()
    }


def _variant(pipe: Pipeline, targets: Any, training: Variant) -> Variant:
    """Return the variant of a step: of a training step, unless the schedule has no backward."""
    if pipe.schedule.backward:
        return training
    return replace(EVALUATION, loss=pipe.captures.computes_loss or targets is not None, casts=training.casts)


def _signature(pipe: Pipeline, variant: Variant, inputs: Any, targets: Any) -> Signature:
    return pipe.captures.batchings[variant.loss].split_batch(inputs, targets).signature


def _require_room(pipe: Pipeline, kinds: Collection[BatchKind]) -> None:
    own = next(iter(pipe.memo.agreements))
    count = sum(kind != own for kind in kinds)
    if count > pipe.memo.most:
        raise InputError(
            f"examples: got {count} kinds of batches other than the pipeline's own example, expected at most "
            f"{pipe.memo.most}, as many as it keeps plans for. Build it with fpipe.Recording(plans={count}) or more, "
            "or pad batches to fewer lengths."
        )
