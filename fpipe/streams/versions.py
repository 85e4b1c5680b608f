# SPDX-License-Identifier: Apache-2.0
"""The weights of a run that updates in flight: each stage's newest version, and those that microbatches still use.

Idea. The backward of a microbatch needs the weights of its forward (PipeDream's weight stashing, SOSP 2019, section
3.3). A version is a tuple of tensors that nobody modifies, so keeping one is keeping a reference. Which one a forward
takes is what the schedule declares, else the newest.

Runs in every window of a stream.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fpipe.pipelines.inputs import State
from fpipe.pipelines.step_plan import StepPlan
from fpipe.stages.assembly import Assembly
from schedules.language.schedule import VersionRule

UNCHANGED: Final[State] = {}


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
    - `params`: the newest tensors, by name; `made`: per stage, how many updates made them.
    - `kept`: per stage and version, the leaves of each cut; `used`: the version that a microbatch in flight uses.
    """

    def __init__(
        self,
        plan: StepPlan,
        params: State,
        cuts: Sequence[Assembly],
        microbatch: Callable[[int, int], int],
        rule: VersionRule | None,
    ) -> None:
        self.cuts, self.microbatch, self.rule = cuts, microbatch, rule
        self.params = dict(params)
        self.made = {stage.index: 0 for stage in plan.local_stages}
        self.kept: dict[int, dict[int, Mapping[Assembly, Any]]] = {s: {0: self._leaves(s)} for s in self.made}
        self.used: dict[tuple[int, int], int] = {}

    def slots(self) -> list[SlotWeights]:
        """Return the weights of each slot."""
        return [SlotWeights(self, slot) for slot in range(len(self.cuts))]

    def take(self, s: int, slot: int) -> Any:
        """Return the leaves that the microbatch in a slot uses of a stage; its first use decides which."""
        if (s, slot) not in self.used:
            self.used[s, slot] = self.made[s] if self.rule is None else self.rule(self.microbatch(s, slot))
        return self.kept[s][self.used[s, slot]][self.cuts[slot]]

    def update(self, s: int, new: State, ahead: State, done: Sequence[int], after: int) -> None:
        """Make a version of a stage; drop those that are of use to no microbatch.

        - `new`: its parameters; `ahead`: what forwards use in their place, if that is something else.
        - `done`: the slots of the microbatches that the update applies; `after`: the one after them. Later ones do not
          use older versions than it does.
        """
        self.params.update(new)
        self.made[s] += 1
        for slot in done:
            self.used.pop((s, slot), None)
        kept, newest = self.kept[s], self.made[s]
        kept[newest] = self._leaves(s, ahead)
        if self.rule is None:
            needed = {newest, *(version for (stage, _), version in self.used.items() if stage == s)}
        else:
            needed = {newest, *range(self.rule(after), newest)}
        self.kept[s] = {version: leaves for version, leaves in kept.items() if version in needed}

    def _leaves(self, s: int, ahead: State = UNCHANGED) -> Mapping[Assembly, Any]:
        return {cut: cut.stages[s].leaves(ChainMap(ahead, self.params)) for cut in dict.fromkeys(self.cuts)}
