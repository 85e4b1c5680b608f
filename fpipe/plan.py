# SPDX-License-Identifier: Apache-2.0
"""The pipeline: a model, a loss, a schedule and a partition, bound together and checked; nothing runs yet.

A `Pipeline` holds no parameters. From its model's skeleton it makes *plans*: the model captured in train or eval mode,
with or without loss and outputs, cut into stages, and the program that drives them. A plan is made once and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fpipe import partition, random
from fpipe.assembly import Assembly, assemble
from fpipe.batch import BatchSpec
from fpipe.calls import Calls
from fpipe.capture.contract import Captured, FrontEnd
from fpipe.capture.fake import evaluation
from fpipe.capture.losses import Loss, Objective
from fpipe.capture.validity import name_of, require_valid
from fpipe.description import describe
from fpipe.errors import CutError
from fpipe.executor import Execution, Inputs, Linked, Outcome
from fpipe.initialisation import Initialiser, initialised, reset_parameters
from fpipe.linking import link
from fpipe.loading import Source, loaded
from fpipe.recording import spans_of
from fpipe.spec import Spec
from fpipe.stage import Stage
from fpipe.transport.contract import Ranks, Transport
from schedules import Placement, Program, Schedule, Span, check, forwards, lower

Cut: TypeAlias = tuple[Captured, tuple[int, ...]]


@dataclass(frozen=True)
class Variant:
    """What a plan is for: training or evaluation, with the loss or not, with the outputs or not."""

    training: bool
    loss: bool
    outputs: bool


TRAINING = Variant(training=True, loss=True, outputs=False)


@dataclass(frozen=True, eq=False)
class Plan:
    """Stages, the program that drives them, and what this process must be given for it.

    - `ranks`: the ranks of this process.
    - `batch`: the batch to be given; `outputs`: whether the model's outputs are asked for.
    """

    assembly: Assembly
    program: Program
    ranks: tuple[int, ...]
    batch: BatchSpec
    outputs: bool

    @cached_property
    def held(self) -> tuple[Stage, ...]:
        """The stages of this process's ranks."""
        return tuple(s for s in self.assembly.stages if set(self.placement.replicas(s.index)) & set(self.ranks))

    @property
    def placement(self) -> Placement:
        """Where stages live."""
        return self.program.schedule.placement

    @cached_property
    def params(self) -> Mapping[str, Spec]:
        """The parameters that this process holds."""
        return self._named(lambda stage: (*stage.parameters, *stage.unused), self.assembly.parameters)

    @cached_property
    def buffers(self) -> Mapping[str, Spec]:
        """The buffers that this process holds."""
        return self._named(lambda stage: (*stage.buffers, *stage.unused), self.assembly.buffers)

    @property
    def share(self) -> tuple[str, ...]:
        """The names of the parameters and buffers that this process holds."""
        return (*self.params, *self.buffers)

    def _named(self, names: Callable[[Stage], tuple[str, ...]], specs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        held = {name for stage in self.held for name in names(stage)}
        return {name: spec for name, spec in specs.items() if name in held}

    def stages_on(self, rank: int) -> dict[int, Stage]:
        """The stages of `rank`, by index."""
        return {s: self.assembly.stages[s] for s in self.placement.stages_on(rank)}

    @cached_property
    def linked(self) -> Mapping[int, Linked]:
        """For each rank of this process, its lowered program linked to its stages."""
        placement = self.placement
        return {rank: link(self.program.actions(rank), self.stages_on(rank), placement) for rank in self.ranks}


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A model, a loss, a schedule and a partition, checked to fit together. Made by `fpipe.pipeline`.

    `ranks` says which pipeline ranks this process runs: one of them under torch.distributed, else all. `summed` are the
    parameters whose gradients are summed over stages.
    """

    schedule: Schedule
    model: nn.Module
    loss: Loss
    example: tuple[Any, Any]
    front_end: FrontEnd
    cuts: partition.Cuts
    ranks: Ranks
    summed: frozenset[str] = frozenset()
    plans: dict[Variant, Plan] = field(default_factory=dict)
    captures: dict[Variant, Cut] = field(default_factory=dict)
    connections: dict[Variant, None] = field(default_factory=dict)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the training plan."""
        return self.training.assembly.stages

    @property
    def program(self) -> Program:
        """The schedule lowered for the training plan's stage graph."""
        return self.training.program

    @property
    def training(self) -> Plan:
        """The plan for loss and gradients."""
        return self.plan(TRAINING)

    def plan(self, variant: Variant) -> Plan:
        """The plan for a variant, made at its first use."""
        if variant not in self.plans:
            with random.preserved([torch.device("cpu")]):  # a model may seed by itself
                self.plans[variant] = self._plan(variant)
        return self.plans[variant]

    def _plan(self, variant: Variant) -> Plan:
        captured, positions = self._captured(replace(variant, outputs=True))
        assembly = assemble(captured, positions, variant.outputs, self.schedule.placement, self.summed)
        schedule = self.schedule
        if variant.training:
            check(schedule, assembly.graph)
        else:
            schedule = forwards(schedule)
        for stage in assembly.stages:
            _require_one_state(stage, schedule.placement.replicas(stage.index))
        return Plan(assembly, lower(schedule, assembly.graph), self.ranks.ranks, self.batch(variant), variant.outputs)

    def connected(self, variant: Variant) -> Plan:
        """The plan for a variant, its channels ready; every rank must ask for the same ones in the same order."""
        plan = self.plan(variant)
        if variant not in self.connections:
            captured, positions = self._captured(replace(variant, outputs=True))
            cut = f"model {_fingerprint(captured, plan)} cut before units {list(positions)} of {len(captured.units)}"
            stages = "; ".join(map(str, plan.assembly.stages))
            what = f"{variant} of {plan.program.schedule!r}, {cut}, with {stages}"
            self.ranks.prepare(what, plan.program.channels)
            self.connections[variant] = None
        return plan

    def _captured(self, variant: Variant) -> Cut:
        """The model as its front end sees it, and where it is cut; made once for with and without outputs."""
        if variant not in self.captures:
            self.captures[variant] = self._capture(variant)
        return self.captures[variant]

    def _capture(self, variant: Variant) -> Cut:
        loss = self.loss if variant.loss else None
        inputs, targets = self.example
        parts = self.batch(variant).microbatch(inputs, targets if variant.loss else None)
        with nullcontext() if variant.training else evaluation(self.model):
            objective = Objective(loss, self.batch(variant).structure, self.schedule.microbatches)
            captured = self.front_end(self.model, objective, parts)
        require_valid(captured, name_of(self.front_end), self.model, objective, parts)
        captured = captured if variant.training and self.schedule.backward else replace(captured, backward=False)
        return captured, self._positions(variant, captured)

    def _positions(self, variant: Variant, captured: Captured) -> tuple[int, ...]:
        """Where to cut; in every variant at the same modules as in training, so that ranks hold the same."""
        training = replace(TRAINING, outputs=True)
        if variant == training:
            return self.cuts.positions(captured, self.model)
        known, positions = self._captured(training)
        what = "in training" if variant.training else "in eval mode"
        calls = Calls.of(known, self.model), Calls.of(captured, self.model)
        return partition.followed(calls[0], positions, calls[1], what)

    def batch(self, variant: Variant) -> BatchSpec:
        """The batch that a plan for this variant takes."""
        inputs, targets = self.example
        return BatchSpec.of(inputs, targets if variant.loss else None, self.schedule.microbatches)

    def init(
        self, source: Source, *, fill: Initialiser | None = None, strict: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and buffers of this process's ranks, copied out of `source`: dicts keyed by the model's own names.

        - `source`: a model, or a mapping from the model's names to tensors: a state dict, or `fpipe.safetensors(path)`,
          of which only what this process holds is read. A parameter with several names may have any of them there;
          here it has the first. Values go to the pipeline's device and are not cast.
        - `fill(module)`: makes the buffers that are in no state dict since they are not persistent, where `source`
          lacks them; it is called like the function of `initialise`, with seed 0.
        - `strict`: whether names that the model does not have are refused, or ignored.

        Parameters are leaves and require a gradient where the model's did when the pipeline was built. Raises
        `InputError`, naming the leaf, for one without a value, on the meta device, or of another shape or dtype.

        >>> import torch, fpipe
        >>> from schedules import gpipe
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 4),), loss=torch.mean,
        ...                       schedule=gpipe(ranks=2, microbatches=2), cuts=["1"])
        >>> saved = {"0.weight": torch.ones(8, 4), "0.bias": torch.zeros(8),
        ...          "1.weight": torch.ones(1, 8), "1.bias": torch.zeros(1)}
        >>> params, buffers = pipe.init(saved)
        >>> fpipe.value_and_grad(pipe)(params, buffers, (torch.ones(2, 4),))[0].loss
        tensor(32.)
        """
        return self._state(loaded(self.model, self.training.share, source, fill, strict))

    def initialise(
        self, function: Initialiser = reset_parameters, *, seed: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and buffers of this process's ranks, as `function(module)` fills them; the model may be on meta.

        It is called as by `model.apply`, children first, on a copy of the model: for each module that owns leaves of
        this process, with these in place and all other tensors on meta, and for the modules around it. What it draws
        depends on the seed and on names alone, on neither ranks nor cuts. By default it calls the `reset_parameters`
        that torch's modules have; for a model of Hugging Face's, pass `model._init_weights`. Raises `InputError` for
        leaves that it does not fill.

        >>> import torch, fpipe
        >>> from schedules import gpipe
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 4),), loss=torch.mean,
        ...                       schedule=gpipe(ranks=2, microbatches=2), cuts=["1"])
        >>> params, buffers = pipe.initialise(seed=0)
        >>> [f"{name} {list(value.shape)}" for name, value in params.items()]
        ['0.weight [8, 4]', '0.bias [8]', '1.weight [1, 8]', '1.bias [1]']
        """
        return self._state(initialised(self.model, self.training.share, function, seed))

    def _state(self, values: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        plan, trainable = self.training, self.training.assembly.captured.trainable
        params = {name: values[name].requires_grad_(name in trainable) for name in plan.params}
        return params, {name: values[name] for name in plan.buffers}

    @property
    def owned(self) -> tuple[str, ...]:
        """Names of the parameters that count as this process's: each of the model's is one process's only.

        What is summed over all parameters must take each once, though tied ones are on several ranks, and replicas hold
        the same. The norm of all gradients, say:

        >>> import torch, fpipe
        >>> from schedules import gpipe
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> model[1].weight = model[0].weight
        >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 2),), loss=torch.mean, schedule=gpipe(2, 2))
        >>> pipe.owned
        ('0.weight', '0.bias', '1.bias')
        >>> _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (torch.ones(2, 2),))
        >>> squares = sum(grads[name].square().sum() for name in pipe.owned if name in grads)
        >>> if torch.distributed.is_initialized():
        ...     torch.distributed.all_reduce(squares)
        >>> norm = squares.sqrt()
        """
        owners: dict[str, int] = {}
        for stage in self.stages:
            for name in (*stage.parameters, *stage.unused):
                owners.setdefault(name, self.schedule.placement.homes[stage.index])
        return tuple(name for name in self.training.params if owners[name] in self.ranks.ranks)

    def run(self, plan: Plan, inputs: Inputs, record: Callable[[Span], None] | None = None) -> dict[int, Outcome]:
        """Run the plan's program on this process's ranks; the outcome of each. `record` gets a span per action."""

        def execution(rank: int, transport: Transport) -> Execution:
            recorded = None if record is None else spans_of(rank, record)
            return Execution(plan.linked[rank], transport, inputs, recorded)

        with random.preserved(plan.assembly.devices):
            return self.ranks.run(execution)

    def __str__(self) -> str:
        described = describe(self.training.assembly, self.model, self.schedule.placement)
        return f"Pipeline of {type(self.model).__name__} under {self.schedule!r}\n{described}"


def _require_one_state(stage: Stage, ranks: Sequence[int]) -> None:
    """Raise `CutError` if a stage on several ranks modifies a buffer: each replica would see some microbatches only."""
    modified = [name for k, name in enumerate(stage.buffers, len(stage.parameters)) if k in stage.wiring.modified]
    if modified and len(ranks) > 1:
        raise CutError(
            f"stage {stage.index}: got modified buffers {modified} on ranks {list(ranks)}, expected none: each "
            "rank sees other microbatches. Choose a schedule with each stage on one rank, or a model without such."
        )


def _fingerprint(captured: Captured, plan: Plan) -> str:
    """A digest of what a model does and of what crosses its cuts, whatever its values and devices; ranks compare it."""
    units = [(unit.path, unit.does, unit.reads, unit.makes) for unit in captured.units]
    specs = [
        (port.peer, spec.shape, spec.stride, str(spec.dtype))
        for stage in plan.assembly.stages
        for port in (*stage.gives, *stage.pulls, *stage.shares)
        for spec in port.specs
    ]
    return blake2b(repr((units, sorted(captured.trainable), specs)).encode(), digest_size=8).hexdigest()
