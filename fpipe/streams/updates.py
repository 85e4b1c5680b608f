# SPDX-License-Identifier: Apache-2.0
"""Updates in flight: of one stage, by the gradients of one batch, while other stages compute.

Runs in every window of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch.nn.utils import get_total_norm

from fpipe.errors import InputError
from fpipe.pipelines.earlier_sums import join_sums
from fpipe.pipelines.inputs import State
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import sum_terms
from fpipe.pipelines.step_plan import StepPlan
from fpipe.runtime.transport import Payload
from fpipe.streams.corrections import LookAhead
from fpipe.streams.versions import Versions
from fpipe.tensors.placed import Placed, wrap_state
from fpipe.training.clipping import require_bound, scale_to_norm
from fpipe.training.optimizers import Optimizer, OptimizerState

OptionsOf = Callable[[int], Mapping[str, Any]]
"""Returns the options of an update, such as `lr`, given its number."""


class StageUpdates:
    """The optimizer of a stream, with the newest state; `versions` has the weights.

    `optional`: see `fpipe.pipelines.earlier_sums.find_optional`; `placed`: the places of gradients that are DTensors.
    """

    def __init__(
        self,
        plan: StepPlan,
        optimizer: Optimizer,
        versions: Versions,
        state: OptimizerState,
        options: OptionsOf,
        look_ahead: LookAhead | None,
        optional: Collection[str],
        placed: Mapping[str, Placed],
    ) -> None:
        self.plan, self.optimizer, self.versions, self.options = plan, optimizer, versions, options
        self.state, self.look_ahead, self.optional = dict(state), look_ahead, optional
        self.placed = placed

    def apply(self, s: int, number: int, total: Any, done: Sequence[int], after: int) -> None:
        """Update a stage by the sum of its gradients; the other arguments are those of `Versions.update`."""
        own = [name for name in self.plan.assembly.stages[s].grads if name not in self.versions.holders]
        self.versions.update(s, *self._update(own, number, {s: total}, {}), done, after)

    def apply_shared(
        self, stages: Sequence[int], number: int, grads: Mapping[int, Any], others: Mapping[tuple[int, int], Payload]
    ) -> None:
        """Update the parameters that these stages of a rank share, by all gradients of a batch, unless another rank of
        this process has; `grads` and `others` are as in `Outcome`."""
        kept = self.versions.kept_shared
        held = {name for s in stages for name in self.plan.assembly.stages[s].parameters}
        names = [name for name, versions in kept.items() if name in held and max(versions) == number]
        self.versions.update_shared(names, number + 1, *self._update(names, number, grads, others))

    def _update(
        self, names: Collection[str], number: int, own: Mapping[int, Any], others: Mapping[tuple[int, int], Payload]
    ) -> tuple[State, State]:
        """Return the new parameters of those of these names that have a gradient, and what forwards use of them."""
        grads = wrap_state(join_sums({}, sum_terms(self.plan, [(own, others)], names), self.optional), self.placed)
        params = {name: self.versions.params[name] for name in grads}
        state = {name: self.state[name] for name in grads}
        new, made = self.optimizer.update(grads, state, params, **self.options(number)) if grads else ({}, {})
        self.state.update(made)
        return new, {} if self.look_ahead is None else self.look_ahead(new, params)


def clip_updates(pipe: Pipeline, optimizer: Optimizer, max_norm: float | None) -> Optimizer:
    """Return an optimizer that clips the gradients of each update by their norm, if there is a limit.

    Raise `InputError` unless an update has the gradients of the whole model.
    """
    if max_norm is None:
        return optimizer
    limit = require_bound("max_norm", max_norm)
    if pipe.schedule.stages > 1 or pipe.copies.shards > 1:
        raise InputError(
            f"max_norm: got {max_norm!r} for {pipe.schedule.stages} stages and {pipe.copies.shards} shards, expected "
            "one of each: a stage is updated before other gradients exist. Clip values in the optimizer's update "
            "(fpipe.clip_value), or call fpipe.train_step with a schedule without updates."
        )

    def update(grads: State, state: OptimizerState, params: State, **options: Any) -> tuple[State, OptimizerState]:
        """Return the parameters and the state after one update."""
        own = {name: grad.clone() for name, grad in grads.items()}
        clipped = scale_to_norm(own, limit, get_total_norm(own.values()))
        return optimizer.update({name: clipped[name] for name in grads}, state, params, **options)

    return optimizer._replace(update=update)
