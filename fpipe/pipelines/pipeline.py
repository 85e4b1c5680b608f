# SPDX-License-Identifier: Apache-2.0
"""The pipeline: a model, a loss, a schedule and a partition, bound together and checked; nothing runs yet.

A `Pipeline` holds no parameters. From its model's skeleton it makes *plans*. A plan is the model captured in train or
eval mode, with or without loss and outputs, for batches of one signature, and cut into stages; and the program that
drives them.

A microbatch of another shape is captured separately: the last one of a batch that does not divide evenly, say.
Captures and plans are made once and cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fpipe.autodiff.backends import Way
from fpipe.batching.batch import Batch, Microbatch, Signature
from fpipe.batching.merge import Joining
from fpipe.capture.eager_types import hide_fakes
from fpipe.errors import CaptureError, CutError, InputError, PipelineError
from fpipe.ir.variant import TRAINING, Variant
from fpipe.pipelines.ambient import lifted
from fpipe.pipelines.answers import Answering, Tell, alone
from fpipe.pipelines.captures import Captures
from fpipe.pipelines.plan import Plan
from fpipe.report.description import describe
from fpipe.report.footprint import sizes
from fpipe.runtime.executor import Execution, Inputs, Outcome
from fpipe.runtime.ranks import Ranks
from fpipe.runtime.recording import Record, recorded
from fpipe.runtime.transport.agreement import Field
from fpipe.runtime.transport.interface import Transport
from fpipe.runtime.turns import turn
from fpipe.stages.assembly import Assembly, assemble, differentiated
from fpipe.stages.kinds import require_alike, widened
from fpipe.stages.stage import Stage
from fpipe.tensors import random
from fpipe.weights.initialization import Initialiser, initialised, reset_parameters
from fpipe.weights.loading import Source, loaded
from schedules import Program, Schedule, Sizes, check, forwards, lower


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A model, a loss, a schedule and a partition, checked to fit together. Made by `fpipe.pipeline`.

    - `captures`: the model, what is computed from it, and how batches are split and the model is cut.
    - `output_dims`: how outputs are joined.
    - `ranks`: the pipeline ranks that this process runs: one under torch.distributed, else all.
    - `rebuild`: makes a pipeline of another model from the same arguments.
    - `summed`: the parameters whose gradients are summed over stages.
    - `way`: how stages are differentiated, if not by autograd.
    - `made`: the trainable parameters that `init` and `initialise` returned, by id.
    - `plans`: the cache of plans; `connections`: those that all ranks have agreed on, by digest, and `agreed`: what
      they agree on again in every step; `compared`: the first step, before which the ranks compared the tensors that
      several of them hold.
    """

    schedule: Schedule
    captures: Captures
    output_dims: Any
    ranks: Ranks
    rebuild: Callable[[nn.Module | Sequence[Any]], Pipeline]
    summed: frozenset[str] = frozenset()
    way: Way | None = None
    made: WeakValueDictionary[int, Tensor] = field(default_factory=WeakValueDictionary)
    plans: dict[tuple[Variant, Signature], Plan] = field(default_factory=dict)
    assemblies: dict[tuple[Variant, Microbatch], Assembly] = field(default_factory=dict)
    connections: dict[tuple[Variant, Signature], int] = field(default_factory=dict)
    agreed: dict[tuple[Variant, Signature], tuple[Field, ...]] = field(default_factory=dict)
    compared: dict[tuple[Variant, Signature], None] = field(default_factory=dict)
    silent: dict[tuple[Variant, Signature], None] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        """The model without its tensors."""
        return self.captures.model

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
        """The plan for loss and gradients of a batch like the example."""
        return self.plan(TRAINING)

    @cached_property
    def sizes(self) -> Sizes:
        """The bytes that a microbatch like the example's first holds on each stage, for `schedules.simulate`.

        Measured on fake tensors; nothing is allocated. `activation`: after a forward; `inputs`: after a checkpointed
        forward; `residual`: after the input half of a backward. Only memory of the microbatch counts, not the step's
        batch, which is held throughout. `weight`: one version of the stage's parameters. Stages of other processes are
        counted as if differentiated by autograd.

        >>> import torch, fpipe
        >>> from schedules import Costs, one_f_one_b, simulate
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> pipe = fpipe.pipeline(model, example=(torch.ones(6, 4),), loss=torch.mean,
        ...                       schedule=one_f_one_b(ranks=2, microbatches=3), cuts=["2"])
        >>> pipe.sizes.activation, pipe.sizes.weight  # 2 rows of 8 and their loss, or what comes of them; 32 + 8 floats
        ((64, 68), (160, 36))
        >>> simulate(pipe.schedule, Costs(F=1, B=2), pipe.program.graph, pipe.sizes).peak_memory
        (288.0, 104.0)
        """
        with turn(), hide_fakes():
            return sizes(self.training.assembly, self.schedule.placement)

    @property
    def computes_loss(self) -> bool:
        """True if the loss is a function of the outputs alone."""
        return self.captures.batchings[True].without_targets and self.captures.loss is not None

    def batch(self, variant: Variant, inputs: Any, targets: Any, tell: Tell = alone) -> Batch:
        """Return the batch, split, with the answers to what the model asks about it in this variant.

        `tell` exchanges answers with the other ranks, which must then all call this. Without it, this process must have
        every leaf that is asked about.
        """
        batch = self.captures.batchings[variant.loss].cut(inputs, targets)
        if (variant, batch.signature) in self.silent:
            return batch
        try:
            answered = Answering(self.captures, variant, batch, tell).answered()
        except CaptureError as error:
            raise InputError(
                f"{batch.batching.difference(batch.signature)}, expected a batch that the model can take, cut as the "
                f"example is. The pipeline for this one fails: {error}"
            ) from error
        if answered.signature == batch.signature:
            self.silent[variant, batch.signature] = None
        return answered

    def plan(self, variant: Variant, signature: Signature | None = None) -> Plan:
        """Return the plan for a variant and a batch signature, by default the example's; made at its first use.

        Raises `InputError` if the model can't take a batch that differs from the example.
        """
        batching = self.captures.batchings[variant.loss]
        what = variant, batching.example if signature is None else signature
        if what not in self.plans:
            try:
                with (
                    torch.inference_mode(False),
                    lifted(variant),
                    turn(),
                    hide_fakes(),
                    random.preserve_generators([torch.device("cpu")]),
                ):
                    self.plans[what] = self._plan(*what)
            except PipelineError as error:
                if what[1] == batching.example:
                    raise
                raise InputError(
                    f"{batching.difference(what[1])}, expected a batch that the model can take, cut as the example is. "
                    f"The pipeline for this one fails: {error}"
                ) from error
        return self.plans[what]

    def _plan(self, variant: Variant, signature: Signature) -> Plan:
        microbatches = self.captures.batchings[variant.loss].split(signature)
        made = {one: self._assembled(variant, one) for one in dict.fromkeys(microbatches)}
        assemblies = widened([made[one] for one in microbatches])
        require_alike(assemblies)
        schedule, graph = self.schedule, assemblies[0].graph
        if variant.training:
            check(schedule, graph)
        else:
            schedule = forwards(schedule)
        for stage in assemblies[0].stages:
            _require_one_state(stage, schedule.placement.replicas(stage.index))
        joining = _joining(assemblies, self.output_dims, int(variant.loss)) if variant.outputs else None
        watch = self.captures.watch(variant, microbatches)
        return Plan(assemblies, lower(schedule, graph), self.ranks.ranks, joining, watch)

    def _assembled(self, variant: Variant, microbatch: Microbatch) -> Assembly:
        """Return the stages for a microbatch, made at their first use: batches combine microbatches in many ways."""
        if (variant, microbatch) not in self.assemblies:
            self.assemblies[variant, microbatch] = self._assembly(variant, microbatch)
        return self.assemblies[variant, microbatch]

    def _assembly(self, variant: Variant, microbatch: Microbatch) -> Assembly:
        placement = self.schedule.placement
        made = assemble(*self.captures.of(variant, microbatch), variant.outputs, placement, self.summed)
        if self.way is None:
            return made
        return differentiated(made, self.way, {s for rank in self.ranks.ranks for s in placement.stages_on(rank)})

    def init(
        self, source: Source, *, fill: Initialiser | None = None, strict: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return this process's parameters and buffers, copied from `source`: dicts keyed by the model's own names.

        - `source`: a model, or a mapping from the model's names to tensors: a state dict, or `fpipe.safetensors(path)`,
          of which only this process's share is read. A parameter with several names may be under any of them in
          `source`; it is returned under the first. Values are moved to the pipeline's device and are not cast.
        - `fill(module)`: initialises the non-persistent buffers, which no state dict has, if `source` lacks them;
          called like the function of `initialise`, with seed 0.
        - `strict`: if true, names that the model does not have are refused; else they are ignored.

        Parameters are leaves and require a gradient where the model's did when the pipeline was built. Raises
        `InputError`, naming the leaf, if one has no value, is on the meta device, or has another shape or dtype.

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
        with turn():
            return self._state(loaded(self.model, self.training.share, source, fill, strict))

    def initialise(
        self, function: Initialiser = reset_parameters, *, seed: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return this process's parameters and buffers as initialised by `function(module)`; the model may be on meta.

        The function is called as by `model.apply`, children first, on a copy of the model: for each module that owns
        leaves of this process (these are materialised, all other tensors are on meta), and for the modules that contain
        it. What it draws depends on the seed and on names only, not on ranks or cuts. The default calls
        `reset_parameters`, which torch's own modules have; for a Hugging Face model, pass `model._init_weights`. Raises
        `InputError` for leaves that it leaves unset.

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
        with turn():
            return self._state(initialised(self.model, self.training.share, function, seed))

    def _state(self, values: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        plan, trainable = self.training, self.training.assembly.captured.trainable
        params = {name: values[name].requires_grad_(name in trainable) for name in plan.params}
        self.made.update({id(p): p for p in params.values() if p.requires_grad})
        return params, {name: values[name] for name in plan.buffers}

    def rebuilt(self, model: nn.Module | Sequence[Any]) -> Pipeline:
        """Return a new pipeline of `model` as it is now, built with the arguments of this one.

        For changes that this pipeline can't follow: a frozen parameter, another dropout rate, a constant of the loss.
        Takes as long as a capture; the channels between ranks are reused. Under torch.distributed every rank must call
        it at the same time. Parameters, buffers and optimizer state carry over unchanged, except for the
        `requires_grad` flags of what was frozen or unfrozen.

        >>> import torch, fpipe
        >>> from schedules import gpipe
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 4),), loss=torch.mean, schedule=gpipe(2, 2))
        >>> params, buffers = pipe.init(model)
        >>> model[0].requires_grad_(False)
        Linear(in_features=4, out_features=8, bias=True)
        >>> pipe = pipe.rebuilt(model)
        >>> params = {name: p.requires_grad_(name.startswith("1.")) for name, p in params.items()}
        >>> list(fpipe.value_and_grad(pipe)(params, buffers, (torch.ones(2, 4),))[1])
        ['1.weight', '1.bias']
        """
        return self.rebuild(model)

    @property
    def owned(self) -> tuple[str, ...]:
        """The parameters that this process counts as its own; each of the model's is owned by exactly one process.

        A sum over all parameters must count each once, though tied ones are on several ranks and replicas hold the
        same. For example, the norm of all gradients:

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

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return self.captures.batchings[True].home

    def run(self, plan: Plan, inputs: Inputs, record: Record | None = None) -> dict[int, Outcome]:
        """Run the plan's program on this process's ranks; return their outcomes. `record` gets a span per action."""

        def execution(rank: int, transport: Transport) -> Execution:
            return Execution(plan.linked[rank], transport, inputs)

        with random.preserve_generators(plan.generators), plan.context():
            if record is None:
                return self.ranks.run(execution)
            return recorded(self.ranks, plan.timed, inputs, self.device, record)

    def __str__(self) -> str:
        how = self.schedule
        split = any(action.kind == "W" for rank in range(how.ranks) for action in how.actions(rank))
        described = describe(self.training.assembly, self.model, how.placement, self.sizes, split)
        return f"Pipeline of {type(self.model).__name__} under {how!r}\n{described}"


def _require_one_state(stage: Stage, ranks: Sequence[int]) -> None:
    """Raise `CutError` if a stage on several ranks modifies a buffer: each replica sees only some microbatches."""
    modified = [name for k, name in enumerate(stage.buffers) if k in stage.wiring.changed]
    if modified and len(ranks) > 1:
        raise CutError(
            f"stage {stage.index}: got modified buffers {modified} on ranks {list(ranks)}, expected none: each "
            "rank sees other microbatches. Choose a schedule with each stage on one rank, or a model without such."
        )


def _joining(assemblies: Sequence[Assembly], dims: Any, first: int) -> Joining:
    """Return how the outputs are joined; they are the last stage's results from number `first` on."""
    columns = zip(*[cut.stages[-1].results[first:] for cut in assemblies], strict=True)
    return Joining.of(assemblies[0].captured.structure, dims, list(columns))
