# SPDX-License-Identifier: Apache-2.0
"""A plan: a model cut into stages for every microbatch of a batch, and the program that drives them.

Microbatches of the same shape run the same stages. One of another shape has its own stages, driven by the same program.

Runs when a plan is made and in every step; most properties are computed once, at their first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from fpipe.meshes.copies import ALONE, PipelineCopies
from fpipe.meshes.exchange import StageLayout, shard_spec
from fpipe.network.recording import add_timers
from fpipe.pipelines.merge import Merge
from fpipe.record.captured import BatchLeaf
from fpipe.record.reads.watch import Watch
from fpipe.runtime.contract import StageCrossing
from fpipe.runtime.executor import LinkedProgram
from fpipe.runtime.instructions import link
from fpipe.stages.assembly import Assembly
from fpipe.stages.stage import ModelStage
from fpipe.tensors.placed import Placed
from fpipe.tensors.spec import OptionalSpec, Spec
from fpipe.tensors.torch_private import bypass_autograd
from schedules import Action, Placement, Program, check, connect, lower, update_weights


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Stages, the program that drives them, and what this process needs to run them.

    - `assemblies`: per microbatch, or slice of one, the model cut into stages; the same object for the same shapes.
    - `ranks`: the ranks of this process.
    - `merge`: how the model's outputs are merged; `None` if they are not requested.
    - `watch`: the assumptions of the captures, which must still hold when the plan runs.
    - `copies`: the copies of the pipeline around it; `copy`: the number of the one that this plan is for.
    """

    assemblies: tuple[Assembly, ...]
    program: Program
    ranks: tuple[int, ...]
    merge: Merge | None
    watch: Watch = field(default_factory=Watch)
    copies: PipelineCopies = ALONE
    copy: int = 0

    @property
    def microbatches(self) -> int:
        """The number of microbatches of each copy."""
        return self.program.schedule.microbatches

    @property
    def slices(self) -> int:
        """The number of slices of each microbatch."""
        return self.program.schedule.slices

    @property
    def lasts(self) -> tuple[Assembly, ...]:
        """The assembly of each microbatch, or of its last slice, whose last stage returns the results."""
        return self.assemblies[self.slices - 1 :: self.slices]

    @property
    def parts(self) -> Mapping[int, StepPlan]:
        """The plan of each copy that this process plays, for its share of the microbatches."""
        return {0: self} if self.copies is ALONE else self._parts

    @cached_property
    def _parts(self) -> Mapping[int, StepPlan]:
        rows = {k: self.rows_of(k) for k in self.copies.here}
        units = {k: slice(row.start * self.slices, row.stop * self.slices) for k, row in rows.items()}
        return {k: replace(self, assemblies=self.assemblies[part], copy=k) for k, part in units.items()}

    def rows_of(self, copy: int) -> slice:
        """Return which microbatches of the batch that this process is passed belong to a copy."""
        first = 0 if self.copies.own_rows else copy * self.microbatches
        return slice(first, first + self.microbatches)

    @cached_property
    def layouts(self) -> Mapping[int, StageLayout]:
        """The cuts of the weights and gradients of each stage of this process, for the other copies."""
        copies, specs = self.copies, self.assembly.parameters
        device = next((spec.device for spec in specs.values()), torch.device("cpu"))
        return {
            stage.index: StageLayout(
                tuple(specs[name] for name in stage.parameters),
                stage.totals,
                copies.shards,
                copies.shard_of(self.copy),
                copies.replicas,
                device,
            )
            for stage in self.local_stages
        }

    @property
    def assembly(self) -> Assembly:
        """The assembly of the first microbatch."""
        return self.assemblies[0]

    @cached_property
    def cuts(self) -> tuple[Assembly, ...]:
        """The distinct assemblies."""
        return tuple(dict.fromkeys(self.assemblies))

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices on which random numbers are drawn."""
        return tuple(dict.fromkeys(device for cut in self.cuts for device in cut.devices))

    @cached_property
    def generators(self) -> tuple[torch.device, ...]:
        """The devices on which random numbers are drawn, always or depending on data."""
        return tuple(dict.fromkeys([*self.devices, *(device for cut in self.cuts for device in cut.undecided)]))

    @cached_property
    def local_stages(self) -> tuple[ModelStage, ...]:
        """The stages of this process's ranks."""
        return tuple(s for s in self.assembly.stages if set(self.placement.replicas(s.index)) & set(self.ranks))

    @property
    def local_units(self) -> list[tuple[ModelStage, ...]]:
        """The stages of this process's ranks, for each microbatch of a copy, or slice of one."""
        here = [stage.index for stage in self.local_stages]
        part = next(iter(self.parts.values()))  # whichever copy this process plays
        return [tuple([cut.stages[s] for s in here]) for cut in part.assemblies]

    @cached_property
    def below_autograd(self) -> bool:
        """True if no stage of this process needs autograd."""
        return all(cut.stages[stage.index].functions.below_autograd for cut in self.cuts for stage in self.local_stages)

    @cached_property
    def eager(self) -> StepPlan:
        """The same plan, with stages differentiated by autograd."""
        cuts = {cut: replace(cut, stages=tuple([stage.eager for stage in cut.stages])) for cut in self.cuts}
        return replace(self, assemblies=tuple([cuts[cut] for cut in self.assemblies]))

    @cached_property
    def without_outputs(self) -> StepPlan:
        """The same plan for results whose outputs have been passed on."""
        return replace(self, merge=None)

    @cached_property
    def modified_leaves(self) -> frozenset[int]:
        """The leaves of the batch that the model modifies in place."""
        pairs = [
            (cut.captured.sources.get(v), v) for cut in self.cuts for section in cut.sections for v in section.modified
        ]
        return frozenset(source.leaf for source, _ in pairs if isinstance(source, BatchLeaf))

    def context(self) -> AbstractContextManager[Any]:
        """Return the context to run the plan in.

        If no stage needs autograd, operators bypass it, which saves a tenth of their time. The only difference in the
        tensors is that views do not know their base.
        """
        return bypass_autograd() if self.below_autograd else nullcontext()

    @property
    def placement(self) -> Placement:
        """The ranks that hold each stage."""
        return self.program.schedule.placement

    @cached_property
    def params(self) -> Mapping[str, Spec]:
        """The specs of the parameters that this process holds, by name."""
        return self._select(lambda stage: (*stage.parameters, *stage.unused), self.assembly.parameters)

    @cached_property
    def buffers(self) -> Mapping[str, Spec]:
        """The specs of the buffers that this process holds, by name."""
        return self._select(lambda stage: (*stage.buffers, *stage.unused), self.assembly.buffers)

    @cached_property
    def has_gradients(self) -> bool:
        """True if some stage computes gradients of parameters."""
        return any(stage.grads for stage in self.assembly.stages)

    @cached_property
    def optional(self) -> frozenset[str]:
        """The parameters of which data may decide that they get no gradient."""
        pairs = [pair for stage in self.assembly.stages for pair in zip(stage.grads, stage.totals, strict=True)]
        return frozenset(name for name, spec in pairs if isinstance(spec, OptionalSpec))

    @property
    def placed(self) -> Mapping[str, Placed]:
        """The placements of the parameters and buffers that are DTensors, by name."""
        return self.assembly.placed

    @property
    def placed_gradients(self) -> Mapping[str, Placed]:
        """The placements of the gradients of parameters that are DTensors, by name."""
        return self.assembly.placed_gradients

    @cached_property
    def owners(self) -> Mapping[str, int]:
        """The rank that owns each parameter and buffer of the model: the first rank of the first stage to read it."""
        found: dict[str, int] = {}
        for stage in self.assembly.stages:
            for name in (*stage.parameters, *stage.buffers, *stage.unused):
                found.setdefault(name, self.placement.homes[stage.index])
        return MappingProxyType(found)

    @property
    def share(self) -> tuple[str, ...]:
        """The names of the parameters and buffers that this process holds."""
        return (*self.params, *self.buffers)

    def _select(self, names: Callable[[ModelStage], tuple[str, ...]], specs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        held = {name for stage in self.local_stages for name in names(stage)}
        return {name: spec for name, spec in specs.items() if name in held}

    @cached_property
    def programs(self) -> Mapping[int, LinkedProgram]:
        """The lowered program of each rank of this process, linked to its stages."""
        streams = zip(self.ranks, self.program.streams(self.ranks), strict=True)
        return {rank: self._link(rank, actions) for rank, actions in streams}

    @cached_property
    def timed_programs(self) -> Mapping[int, LinkedProgram]:
        """The same programs, for steps that are recorded."""
        return {rank: add_timers(program) for rank, program in self.programs.items()}

    @cached_property
    def updating(self) -> StepPlan:
        """The plan of a step that also updates every stage (`schedules.update_weights`), for the same batches."""
        schedule = update_weights(connect(self.program.schedule, self.program.graph))
        check(schedule)
        return replace(self, program=lower(schedule))

    @cached_property
    def names_by_update(self) -> Mapping[tuple[int, int], tuple[str, ...]]:
        """The parameters that each `U` of this process makes new, by its stage and microbatch.

        On each rank, that is the last `U` of a stage that holds the parameter: by then its gradient is complete, and no
        action left reads it. A parameter on different stages of several ranks, all in this process, is in no `U`:
        another rank may still read it, so it is updated after the program.
        """
        holders: dict[str, list[tuple[int, int, int]]] = {}
        for rank in self.ranks:
            for action in self.program.schedule.actions(rank):
                for name in self.assembly.stages[action.stage].parameters if action.kind == "U" else ():
                    holders.setdefault(name, []).append((rank, action.stage, action.microbatch))
        found: dict[tuple[int, int], tuple[str, ...]] = {}
        for name, updates in holders.items():
            ranks, stages = ({one[k] for one in updates} for k in (0, 1))
            if len(ranks) == 1 or len(stages) == 1:
                _, stage, microbatch = updates[-1]
                found[stage, microbatch] = (*found.get((stage, microbatch), ()), name)
        return found

    def _link(self, rank: int, actions: Iterator[Action]) -> LinkedProgram:
        homes = self.placement.stages_on(rank)
        uneven = {
            i: {s: self._shard_shares(cut.stages[s]) for s in homes}
            for i, cut in enumerate(self.assemblies)
            if cut is not self.assembly
        }
        usual = {s: self._shard_shares(self.assembly.stages[s]) for s in homes}
        return link(actions, usual, self.placement, uneven, self.copies.phases, self.slices)

    def _shard_shares(self, stage: ModelStage) -> ModelStage:
        """Return the stage; if gradients are sharded, it shares its shards of them."""
        copies = self.copies

        def cut(crossings: tuple[StageCrossing, ...]) -> tuple[StageCrossing, ...]:
            shard = copies.shard_of(self.copy)
            return tuple(
                one._replace(specs=tuple(shard_spec(spec, copies.shards, shard) for spec in one.specs))
                for one in crossings
            )

        if copies.shards == 1 or not (stage.shares or stage.shared_by):
            return stage
        return replace(stage, shares=cut(stage.shares), shared_by=cut(stage.shared_by))
