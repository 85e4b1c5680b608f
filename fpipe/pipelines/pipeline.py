# SPDX-License-Identifier: Apache-2.0
"""The pipeline: a model, a loss, a schedule and a partition, bound together and checked.

A `Pipeline` holds no parameters. Its planner makes a plan for every kind of batch; `fpipe.pipelines.step` runs one.

A program may build thousands of pipelines, each with captures and with connections to other ranks. Destroying a process
group is a local call, and when a call of fpipe returns, each rank has received everything that it needs. So each rank
closes its pipelines at any time, or Python does once nothing refers to them. Groups that other pipelines on the same
processes share, over which ranks agree, stay until `destroy_process_group()`: there are two for each set of processes.
The user's groups are never destroyed.

Runs when a pipeline is built, when its methods are called, and in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fpipe.meshes.copies import PipelineCopies
from fpipe.meshes.holdings import Holdings
from fpipe.network.ranks import Ranks, require_unclosed, wait_for_turn
from fpipe.pipelines.batch import Signature, SplitBatch
from fpipe.pipelines.captures import Captures
from fpipe.pipelines.description import describe, name_schedule
from fpipe.pipelines.footprint import join_sizes, measure_sizes, shard_sizes
from fpipe.pipelines.memo import BatchKind, Memo
from fpipe.pipelines.norm_table import NormTable
from fpipe.pipelines.planner import Planner
from fpipe.pipelines.recheck import Recheck
from fpipe.pipelines.resolver import ExchangeText, own_text
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.fakes.eager_types import hide_fakes
from fpipe.record.reads.watch import Twin
from fpipe.record.variant import TRAINING, Variant
from fpipe.stages.stage import ModelStage
from fpipe.tensors.arguments import require_arguments
from fpipe.tensors.placed import require_plain, wrap_state
from fpipe.weights.initialization import Initializer, initialize, reset_parameters
from fpipe.weights.loading import ValueSource, hold, load_values
from fpipe.weights.state import Form, Forms
from schedules import Program, Schedule, Sizes


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A model, a loss, a schedule and a partition, checked to fit together. Made by `fpipe.pipeline`.

    - `planner`: the schedule, the captured model, and everything else that determines how a batch is run.
    - `ranks`: the pipeline ranks that this process runs: one under torch.distributed, else all.
    - `rebuild`: makes a pipeline of another model with the same arguments, or with another weight. `plan_ahead`: makes
      plans for examples.
    - `returned`: the trainable parameters that `init` and `initialise` returned, by id; of those rebuilt, too.
    - `norm_tables`: where norms of gradients are exchanged, by the digests of all ranks' lists of gradients.
    - `compared`: the kind of batch of the first step, when ranks have compared the tensors that several of them hold.
    - `rechecks`: when to record the model again.
    - `twins`: what steps watch in addition to the model: the copy in a drop-in module, which a script changes instead.
    """

    planner: Planner
    ranks: Ranks
    rebuild: Callable[..., Pipeline]
    plan_ahead: Callable[[Pipeline, Iterable[tuple[Any, Any]]], None]
    returned: WeakValueDictionary[int, Tensor] = field(default_factory=WeakValueDictionary)
    norm_tables: dict[tuple[int, ...], NormTable] = field(default_factory=dict)
    compared: set[BatchKind] = field(default_factory=set)
    rechecks: Recheck = field(default_factory=Recheck)
    twins: list[Twin] = field(default_factory=list)

    @property
    def schedule(self) -> Schedule:
        """The schedule that the pipeline was built with."""
        return self.planner.schedule

    @property
    def captures(self) -> Captures:
        """The captured model, for every kind of microbatch so far."""
        return self.planner.captures

    @property
    def memo(self) -> Memo:
        """The kinds of batches so far, with their plans."""
        return self.captures.memo

    @property
    def model(self) -> nn.Module:
        """The model without its tensors."""
        return self.captures.model

    @property
    def stages(self) -> tuple[ModelStage, ...]:
        """The stages of the training plan."""
        return self.training.assembly.stages

    @property
    def program(self) -> Program:
        """The schedule lowered for the training plan's stage graph."""
        return self.training.program

    @property
    def training(self) -> StepPlan:
        """The plan for loss and gradients of a batch like the example."""
        return self.plan(TRAINING)

    @cached_property
    def sizes(self) -> Sizes:
        """The bytes that a microbatch like the example's first holds on each stage, for `schedules.simulate`.

        Measured on fake tensors; nothing is allocated. `activation`: after a forward; `inputs`: after a checkpointed
        forward; `residual`: after the input half of a backward. Only memory of the microbatch counts, not the step's
        batch, which is held throughout. `weight`: one version of the stage's parameters, or its shard; `gathered`: the
        rest of them. Stages of other processes are counted as if differentiated by autograd.

        >>> import torch, fpipe
        >>> from schedules import one_f_one_b
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> pipe = fpipe.pipeline(model, example=(torch.ones(6, 4),), loss=torch.mean,
        ...                       schedule=one_f_one_b(ranks=2, microbatches=3), cuts=["2"])
        >>> pipe.sizes.activation, pipe.sizes.weight  # 2 rows of 8 floats; 32 + 8 floats
        ((64, 64), (160, 36))
        """
        with wait_for_turn(), hide_fakes():
            slices = self.training.assemblies[: self.training.slices]
            each = [measure_sizes(cut, self.schedule.placement) for cut in slices]
            return shard_sizes(join_sizes(each), self.copies.shards)

    def batch(
        self,
        variant: Variant,
        inputs: Any,
        targets: Any,
        exchange_text: ExchangeText = own_text,
        total: float | None = None,
    ) -> SplitBatch:
        """Return the batch, split into microbatches, with the answers to the model's questions in this variant.

        With `exchange_text`, all ranks call this; without it, this process has every leaf that the model asks about.
        """
        batch = self.captures.batchings[variant.loss].split_batch(inputs, targets, total)
        return self.planner.resolve(variant, batch, exchange_text)

    def plan(self, variant: Variant, signature: Signature | None = None) -> StepPlan:
        """Return the plan for a signature, by default the example's; raise `InputError` if the model can't take it."""
        require_unclosed(self.ranks, "pipe.plan")
        return self.planner.plan(variant, signature)

    def init(
        self, source: ValueSource, *, fill: Initializer | None = None, strict: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return this process's parameters and buffers, copied from `source`: dicts keyed by the model's own names.

        - `source`: a model, or a mapping from the model's names to tensors: a state dict, or `fpipe.safetensors(path)`,
          of which only this process's share is read. A parameter with several names may be under any of them in
          `source`; it is returned under the first. Values are moved to the pipeline's device and are not cast.
        - `fill(module)`: initializes the non-persistent buffers, which no state dict has, if `source` lacks them; it is
          called like the function of `initialise`, with seed 0.
        - `strict`: if true, raise for names that the model does not have; otherwise ignore them.

        Parameters are leaves and require a gradient where the model's did when the pipeline was built. Raise
        `InputError`, naming the leaf, if one has no value, is on the meta device, or has another shape or dtype.

        >>> import torch, fpipe
        >>> from schedules import gpipe
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 4),), loss=torch.mean, schedule=gpipe(2, 2))
        >>> saved = {"0.weight": torch.ones(8, 4), "0.bias": torch.zeros(8),
        ...          "1.weight": torch.ones(1, 8), "1.bias": torch.zeros(1)}
        >>> params, buffers = pipe.init(saved)
        >>> fpipe.value_and_grad(pipe)(params, buffers, (torch.ones(2, 4),))[0].loss
        tensor(32.)
        """
        require_arguments(Pipeline.init, {"fill": fill, "strict": strict})
        with wait_for_turn():
            return self.adopt(load_values(self.model, self.training.share, self.training.placed, source, fill, strict))

    def initialise(
        self, function: Initializer = reset_parameters, *, seed: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return this process's parameters and buffers, initialized by `function(module)`; the model may be on meta.

        The function is called as by `model.apply`, children first, on a copy of the model: for each module that owns
        leaves of this process (these are materialized, all other tensors are on meta), and for the modules around it.
        Its random numbers depend only on the seed and on names. The default calls `reset_parameters`, which torch's own
        modules have; for a Hugging Face model, pass `model._init_weights`. Raise `InputError` for leaves that it does
        not set, and for a model with DTensors.

        >>> import torch, fpipe
        >>> from schedules import gpipe
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 4),), loss=torch.mean, schedule=gpipe(2, 2))
        >>> params, buffers = pipe.initialise(seed=0)
        >>> [f"{name} {list(value.shape)}" for name, value in params.items()]
        ['0.weight [8, 4]', '0.bias [8]', '1.weight [1, 8]', '1.bias [1]']
        """
        require_arguments(Pipeline.initialise, locals())
        with wait_for_turn():
            require_plain("initialise", self.training.placed, "Call pipe.init(model), with values.")
            return self.adopt(initialize(self.model, self.training.share, function, seed))

    def adopt(self, values: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return this process's parameters and buffers, made of `values` without copying.

        `values` has a new tensor for each, of the right shape, dtype and device, by name; for a DTensor, the local one.
        Parameters become leaves that require a gradient where the model's did when the pipeline was built.
        """
        plan, trainable = self.training, self.training.assembly.captured.trainable
        params = {
            name: self.holdings.adopt(name, values[name]).requires_grad_(name in trainable) for name in plan.params
        }
        self.returned.update({id(p): p for p in params.values() if p.requires_grad})
        return params, wrap_state({name: values[name] for name in plan.buffers}, plan.placed)

    def module(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> nn.Module:
        """Return a copy of the model that holds `params` and `buffers`, without copying them, and else `None`.

        Use it for `state_dict`, averaged models and optimizers. A tied parameter appears under all of its names. Raise
        `InputError` for names that the model does not have.

        >>> import torch, fpipe
        >>> from schedules import gpipe
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
        >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 2),), loss=torch.mean, schedule=gpipe(2, 2))
        >>> list(pipe.module(*pipe.init(model)).state_dict())
        ['0.weight', '0.bias', '1.weight']
        """
        require_arguments(Pipeline.module, locals())
        return hold(self.model, {**params, **buffers})

    def rebuilt(self, model: nn.Module | Sequence[Any]) -> Pipeline:
        """Return a new pipeline of `model` as it is now, built with the arguments of this one.

        Use it for changes that this pipeline can't follow: a frozen parameter, another dropout rate, a constant of the
        loss. It takes as long as a capture, and every rank must call it. Parameters, buffers and optimizer state carry
        over, except for the `requires_grad` flags of what was frozen.

        >>> import torch, fpipe
        >>> from schedules import gpipe
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 4),), loss=torch.mean, schedule=gpipe(2, 2))
        >>> params, buffers = pipe.init(model)
        >>> _ = model[0].requires_grad_(False)
        >>> pipe = pipe.rebuilt(model)
        >>> params = {name: p.requires_grad_(name.startswith("1.")) for name, p in params.items()}
        >>> list(fpipe.value_and_grad(pipe)(params, buffers, (torch.ones(2, 4),))[1])
        ['1.weight', '1.bias']
        """
        return self.rebuild(model)

    def prepare(self, examples: Iterable[tuple[Any, Any]]) -> None:
        """Capture and plan training steps for batches like these now, so that no step waits for a capture.

        `examples` are pairs of inputs and targets; tensors may be on meta, unless the model asks about their values.
        Every rank must call this, with the same shapes, and under the autocast of the steps. Raise `InputError` for
        more kinds of batches than the pipeline keeps plans for.
        """
        self.plan_ahead(self, examples)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all the model's parameters, on every rank, in the order of `model.named_parameters()`."""
        return tuple(name for name, _ in self.model.named_parameters())

    @cached_property
    def owned(self) -> tuple[str, ...]:
        """The parameters that this process owns; each of the model's parameters is owned by exactly one process.

        A sum over all parameters must count each once, although tied parameters and those of replicated stages are on
        several ranks. For the norm of all gradients, call `fpipe.norm` or `fpipe.clip`: sums of squares per rank are
        off in the last bit, and under `clip_grad_norm_` on each rank, copies of a tied parameter drift apart.

        >>> import torch, fpipe
        >>> from schedules import gpipe
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> model[1].weight = model[0].weight
        >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 2),), loss=torch.mean, schedule=gpipe(2, 2))
        >>> pipe.owned
        ('0.weight', '0.bias', '1.bias')
        """
        return tuple(name for name in self.training.params if self.owners[name] in self.ranks.ranks)

    @property
    def owners(self) -> Mapping[str, int]:
        """The rank that owns each parameter and buffer of the model."""
        return self.training.owners

    @property
    def copies(self) -> PipelineCopies:
        """The copies of the pipeline, this process's among them; a single one without a mesh."""
        return self.planner.copies

    @cached_property
    def holdings(self) -> Holdings:
        """The form of the parameters that this process holds."""
        plan = self.training
        return Holdings(self.copies, plan.params, plan.placed, plan.placed_gradients)

    @cached_property
    def forms(self) -> Forms:
        """The forms of the parameters and buffers that a step takes."""
        held, plan = self.holdings, self.training
        params = Form("params", held.specs, held.placed, plan.assembly.captured.trainable)
        return Forms(params, Form("buffers", plan.buffers, held.split))

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return self.captures.batchings[True].home

    def recheck(self) -> None:
        """Record the model again, and compare the record with the one that steps run; every rank must call this.

        It takes about as long as a capture for each kind of batch so far. Steps do the same from time to time, in at
        most half a percent of their time; so do `fpipe.save` and `close` if the steps since then took longer than that.
        Raise `InputError`, naming the module and the call, if the model or its loss now behaves differently.

        >>> import itertools, torch, fpipe
        >>> from schedules import gpipe
        >>> model, x, ticks = torch.nn.Linear(4, 1), torch.ones(2, 4), itertools.count()
        >>> def loss(y):
        ...     return y.mean() * (1 + next(ticks) // 100)
        >>> pipe = fpipe.pipeline(model, example=(x,), loss=loss, schedule=gpipe(1, 2))
        >>> pipe.recheck()
        >>> ticks = itertools.count(100)
        >>> pipe.recheck()
        Traceback (most recent call last):
        fpipe.errors.InputError: module loss: got mul[2], expected mul[1], as when the model was recorded: ...
        """
        with self.ranks.enter_call("pipe.recheck"):
            self.rechecks.run(self.captures)
            self.ranks.agree(about="its record")

    def close(self) -> None:
        """Release the plans and captures, and this process's connections to other ranks, which need not call it
        together.

        Process groups that you passed stay. Later calls of the pipeline's functions raise `InputError`; so do those of
        pipelines rebuilt from it, because they share its connections. Closing again does nothing. A pipeline is also
        closed when Python frees it, and at the end of a `with` statement.

        >>> import torch, fpipe
        >>> from schedules import gpipe
        >>> model, x = torch.nn.Linear(4, 1), torch.ones(2, 4)
        >>> with fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=gpipe(1, 2)) as pipe:
        ...     step = fpipe.value_and_grad(pipe)
        ...     loss = step(*pipe.init(model), (x,))[0].loss
        >>> step({}, {}, (x,))
        Traceback (most recent call last):
        fpipe.errors.InputError: a step: got a closed pipeline, expected an open one. ...
        """
        try:
            if self.rechecks.is_worth_it and not self.ranks.is_closed:
                self.rechecks.run(self.captures)
        finally:
            with wait_for_turn():
                self.ranks.close()
                self.memo.clear()
                self.norm_tables.clear()

    def __enter__(self) -> Self:
        """Return the pipeline."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the pipeline."""
        if error[0] is not None:
            self.rechecks.spent = 0.0  # what happened must not be hidden by what recording again would find
        self.close()

    def __str__(self) -> str:
        how, leaf_name = self.schedule, self.captures.batchings[True].leaf_name
        text = describe(self.training.assembly, self.model, how, self.sizes, leaf_name, self.training.program.channels)
        return f"Pipeline of {type(self.model).__name__} under {name_schedule(how)}\n{text}"
