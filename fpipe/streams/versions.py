# SPDX-License-Identifier: Apache-2.0
"""The weights of a run that updates in flight: each stage's newest version, and those that microbatches still use.

Idea. The backward of a microbatch needs the weights of its forward (PipeDream's weight stashing, SOSP 2019, section
3.3). A version is a tuple of tensors that nobody modifies, so keeping one is keeping a reference. Which one a forward
takes is what the schedule declares, else the newest.

Runs in every window of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fpipe.pipelines.inputs import State
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.captured import Tensors
from fpipe.stages.assembly import Assembly
from fpipe.tensors.placed import local_part
from schedules import Schedule, list_versions
from schedules.endless import EndlessProgram, list_shared_versions
from schedules.language.schedule import VersionRule


class SlotWeights:
    """The weights of the microbatch in a slot, by stage, as the executor asks for them."""

    def __init__(self, versions: Versions, slot: int) -> None:
        self.versions, self.slot = versions, slot

    def __getitem__(self, s: int) -> Any:
        """Return the leaves that the microbatch uses of stage `s`."""
        return self.versions.take(s, self.slot)


class Versions:
    """The weights of this process's stages.

    - `cuts`: the cut of the model that the microbatch of each slot runs; `microbatch` maps slots to microbatches.
    - `rule`: which version a microbatch uses, counted in updates; `None` for the newest.
    - `shared`: the parameters that several stages hold, with these; `shared_rule`: which version of them a microbatch
      uses on all stages.
    - `params`: the newest tensors, by name; `made`: per stage, how many updates made them.
    - `kept`: per stage and version, what forwards use of the parameters that only it holds; `kept_shared`: per name
      and version, the same of the others. `floors`: per stage, the oldest of those versions that is still of use.
    - `used`: the version that a microbatch in flight uses, and its leaves; `latest`: the leaves made last, per stage.
    - `is_sharded`: whether `params` are shards. Then what forwards use is gathered from the `ahead` of a stage.
    """

    def __init__(
        self,
        plan: StepPlan,
        params: State,
        cuts: Sequence[Assembly],
        microbatch: Callable[[int, int], int],
        rule: VersionRule | None,
        shared: Mapping[str, Sequence[int]],
        shared_rule: VersionRule,
    ) -> None:
        self.cuts, self.microbatch, self.rule, self.shared_rule = cuts, microbatch, rule, shared_rule
        self.params, self.is_sharded = dict(params), plan.copies.shards > 1
        self.ahead: dict[int, State] = {}
        self.made = {stage.index: 0 for stage in plan.local_stages}
        names = {s: [name for cut in cuts for name in cut.stages[s].parameters] for s in self.made}
        self.own = {s: [name for name in dict.fromkeys(names[s]) if name not in shared] for s in self.made}
        self.kept: dict[int, dict[int, State]] = {s: {0: self._select(s, {})} for s in self.made}
        self.holders = {name: [s for s in stages if s in self.made] for name, stages in shared.items()}
        self.kept_shared = {name: {0: self.params[name]} for name, here in self.holders.items() if here}
        self.floors = dict.fromkeys({s for here in self.holders.values() for s in here}, 0)
        self.used: dict[tuple[int, int], tuple[int, Any]] = {}
        self.latest: dict[int, tuple[Any, Any]] = {}

    def shard(self, s: int) -> Tensors:
        """Return the shards of the newest version of a stage, to be gathered from all that hold some."""
        ahead = self.ahead.get(s, {})
        return tuple([local_part(ahead.get(name, self.params[name])) for name in self.own[s]])

    def enter(self, s: int, tensors: Tensors) -> None:
        """Keep the newest version of a stage, which has been gathered."""
        self.kept[s][self.made[s]] = dict(zip(self.own[s], tensors, strict=True))

    def slots(self) -> list[SlotWeights]:
        """Return the weights of each slot."""
        return [SlotWeights(self, slot) for slot in range(len(self.cuts))]

    def take(self, s: int, slot: int) -> Any:
        """Return the leaves that the microbatch in a slot uses of a stage; its first use decides which."""
        if (s, slot) not in self.used:
            i = self.microbatch(s, slot)
            version = self.made[s] if self.rule is None else self.rule(i)
            key = version, self.shared_rule(i) if s in self.floors else 0, self.cuts[slot]
            if s not in self.latest or self.latest[s][0] != key:
                self.latest[s] = key, self._leaves(s, *key)
            self.used[s, slot] = version, self.latest[s][1]
        return self.used[s, slot][1]

    def update(self, s: int, new: State, ahead: State, done: Sequence[int], after: int) -> None:
        """Make a version of a stage; drop those that are of use to no microbatch.

        - `new`: its parameters; `ahead`: what forwards use in their place, if that is something else.
        - `done`: the slots of the microbatches that the update applies; `after`: the one after them. Later ones do not
          use older versions than it does.
        """
        self.params.update(new)
        self.made[s] += 1
        self.latest.pop(s, None)
        for slot in done:
            self.used.pop((s, slot), None)
        kept, newest = self.kept[s], self.made[s]
        kept[newest], self.ahead[s] = self._select(s, ahead), ahead
        if self.rule is None:
            needed = {newest, *(version for (stage, _), (version, _) in self.used.items() if stage == s)}
        else:
            needed = {newest, *range(self.rule(after), newest)}
        self.kept[s] = {version: own for version, own in kept.items() if version in needed}
        if s in self.floors:
            self.floors[s] = self.shared_rule(after)
            self._drop_shared()

    def update_shared(self, names: Collection[str], version: int, new: State, ahead: State) -> None:
        """Make a version of shared parameters, which is the same on all stages; drop those that are of no use."""
        self.params.update(new)
        for name in names:
            self.kept_shared[name][version] = ahead.get(name, self.params[name])
        self._drop_shared()

    def _drop_shared(self) -> None:
        for name, kept in self.kept_shared.items():
            oldest = min(max(kept), *(self.floors[s] for s in self.holders[name]))
            self.kept_shared[name] = {version: tensor for version, tensor in kept.items() if version >= oldest}

    def _select(self, s: int, ahead: State) -> State:
        """Return what forwards use of the parameters that only this stage holds."""
        names = () if self.is_sharded else self.own[s]
        return {name: ahead.get(name, self.params[name]) for name in names}

    def _leaves(self, s: int, version: int, of_shared: int, cut: Assembly) -> Any:
        """Return the leaves of a stage, given the versions of its own parameters and of the shared ones."""
        shared = {name: self.kept_shared[name][of_shared] for name, here in self.holders.items() if s in here}
        return cut.stages[s].leaves({**self.kept[s][version], **shared})


def find_shared(assembly: Assembly) -> Mapping[str, tuple[int, ...]]:
    """Return the trained parameters that several stages hold, with these stages."""
    holders: dict[str, list[int]] = {}
    for stage in assembly.stages:
        for name in stage.parameters:
            holders.setdefault(name, []).append(stage.index)
    trained = {name for stage in assembly.stages for name in stage.grads}
    return {name: tuple(stages) for name, stages in holders.items() if len(stages) > 1 and name in trained}


def list_parameter_versions(assembly: Assembly, schedule: Schedule) -> dict[str, Sequence[int]]:
    """Return, per parameter, the version of it that each microbatch uses under a schedule for all of them.

    A version is the number of updates that made it. Parameters that several stages share have one for all of them.
    """
    own, shared = list_versions(schedule), find_shared(assembly)
    stage_of = {name: stage.index for stage in assembly.stages for name in stage.parameters}
    common = list_shared_versions(schedule, {s for stages in shared.values() for s in stages})
    return {
        name: common if name in shared else [own[s, i] for i in range(schedule.microbatches)]
        for name, s in stage_of.items()
    }


def find_program(schedule: Schedule, plan: StepPlan) -> EndlessProgram:
    """Return the program of a stream, for the stages of a plan."""
    tied = frozenset(s for stages in find_shared(plan.assembly).values() for s in stages)
    copies = plan.copies
    return EndlessProgram(schedule, plan.program.graph, tied, reduces=copies.count > 1, gathers=copies.shards > 1)
