# SPDX-License-Identifier: Apache-2.0
"""Predict a step: what `schedules.simulate` says of a schedule, for the costs of the stages that cuts make.

Runs when a plan is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fpipe.planning.profile import Profile
from schedules import Costs, Placement, Schedule, Sizes, critical_path, simulate
from schedules.replay.costs import of_stage


@dataclass(frozen=True)
class Prediction:
    """The predicted step: its `seconds`, its `bubble`, and the bytes that each rank holds at most."""

    seconds: float
    bubble: float
    memory: tuple[int, ...]

    def fits(self, caps: Sequence[float]) -> bool:
        """Return whether no rank holds more than its cap at any moment."""
        return all(held <= cap for held, cap in zip(self.memory, caps, strict=True))


def find_peak(schedule: Schedule, rank: int, sizes: Sizes) -> float:
    """Return the most bytes that a rank holds at any moment, without its weights; `simulate` says the same.

    It follows from the order of the rank's actions, so this takes a fraction of the time.
    """
    held = most = 0.0
    for action in schedule.actions(rank):
        held += sizes.growth(action.kind, action.stage, schedule.backward)
        most = max(most, held)
    return most


@dataclass(frozen=True)
class Predictor:
    """Predicts the steps of a model; `weights` is how often its parameters are held, optimizer state included."""

    profile: Profile
    weights: float

    def costs(self, cuts: Sequence[int]) -> Costs:
        """Return the costs of the stages, in seconds."""
        return self.profile.costs(cuts)

    def sizes(self, placement: Placement, cuts: Sequence[int]) -> Sizes:
        """Return the sizes of the stages, in bytes; weights with what is held beside them."""
        found = self.profile.sizes(cuts, placement)
        return replace(found, weight=tuple(self.weights * of_stage(found.weight, s) for s in range(placement.stages)))

    def predict(self, schedule: Schedule, cuts: Sequence[int]) -> Prediction:
        """Return the prediction of a step."""
        timeline = simulate(schedule, self.costs(cuts), sizes=self.sizes(schedule.placement, cuts))
        memory = tuple(int(-(-held // 1)) for held in timeline.peak_memory)
        return Prediction(timeline.makespan + self.profile.step, timeline.bubble, memory)

    def explain(self, schedule: Schedule, cuts: Sequence[int], most: int = 3) -> str:
        """Return what the step's time consists of: the largest shares of the critical path."""
        path = critical_path(schedule, self.costs(cuts))
        whole = sum(share.time for share in path.shares) or 1.0
        return ", ".join(f"{share.what} {100 * share.time / whole:.0f} %" for share in path.shares[:most])
