# SPDX-License-Identifier: Apache-2.0
"""Corrections for late gradients: pure functions around an optimizer.

Problem. Under a schedule that updates in flight, a gradient is of weights some updates old. Training gets slower by
that, or diverges.

Idea. What is known of the delay can be put into the update, or into the weights that forwards use. Corrections of the
update take an optimizer and return one; so they combine, and work in a plain loop, too.

Runs in every update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fpipe.errors import InputError
from fpipe.pipelines.inputs import State
from fpipe.pipelines.pipeline import Pipeline
from fpipe.streams.versions import find_program, list_parameter_versions
from fpipe.tensors.arguments import require_arguments, require_pipeline
from fpipe.tensors.names import accept_trees, restore_like
from fpipe.training.optimizers import Optimizer, OptimizerState, require_fitting
from fpipe.training.precision import MASTER
from schedules.endless import lengthen

LAST = "last_update"
"""The slot with what the last update subtracted from a parameter, before any correction of it."""
UPDATES = "updates"
"""The slot with the number of updates of a parameter."""

Update = Callable[..., tuple[State, OptimizerState]]
LookAhead = Callable[[State, State], State]
"""Returns the weights that a forward uses, given those after and before the last update."""


def delays(pipe: Pipeline) -> dict[str, int]:
    """Return by how many updates the gradient of each parameter of the model is late, once the pipeline is full.

    Under PipeDream that is `P - 1 - s` on stage s of P, under 2BW 1, under a schedule without updates in flight 0.

    >>> import torch, fpipe
    >>> from schedules import pipedream
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    >>> how = pipedream(ranks=2, microbatches=1)
    >>> pipe = fpipe.pipeline(model, example=(torch.ones(4, 2),), loss=torch.mean, schedule=how)
    >>> fpipe.delays(pipe)
    {'0.weight': 1, '1.weight': 0}
    """
    require_pipeline("delays", pipe)
    schedule, stages = pipe.schedule, pipe.training.assembly.stages
    if not any(action.kind == "U" for action in schedule.actions(0)):
        return {name: 0 for stage in stages for name in stage.parameters}
    count = find_program(schedule, pipe.training).known
    versions = list_parameter_versions(pipe.training.assembly, lengthen(schedule, count))
    return {name: count - 1 - version[-1] for name, version in versions.items()}


def error_feedback(optimizer: Optimizer, strength: float = 1.0) -> Optimizer:
    """Return an optimizer that adds to each update its difference from the previous one:
    `p -= u + strength * (u - last)`.

    The first update of a parameter is not changed. The state has one tensor more per parameter. Source: update-level
    error feedback, arXiv 2606.30634. For parameters of low precision, call `fpipe.masters(fpipe.error_feedback(...))`;
    the other order is refused, since it would change the parameters and not their masters.

    >>> import torch, fpipe
    >>> init, update = fpipe.error_feedback(fpipe.optimizer(torch.optim.SGD, lr=1.0))
    >>> p = {"w": torch.zeros(1)}
    >>> p, state = update({"w": torch.tensor([1.0])}, init(p), p)
    >>> p, state = update({"w": torch.tensor([3.0])}, state, p)  # 3 + (3 - 1)
    >>> p["w"]
    tensor([-6.])
    """
    require_arguments(error_feedback, locals())

    def correct(name: str, old: Tensor, new: Tensor, last: Tensor | None) -> Tensor:
        return new if last is None else new - strength * ((old - new) - last)

    return optimizer._replace(update=_remember(optimizer, correct))


def predict_weights(delays: Mapping[str, int]) -> LookAhead:
    """Return the function that predicts weights, as if the next updates were like the last one: `p - delay * u`.

    Pass it to `train_stream` as `look_ahead`: forwards then use predicted weights. With momentum SGD that is SpecTrain
    (arXiv 1809.02839), with Adam XPipe (arXiv 1911.04610).

    - `delays`: updates to look ahead, by parameter name; as `fpipe.delays(pipe)` returns.

    >>> import torch, fpipe
    >>> ahead = fpipe.predict_weights({"w": 3})
    >>> ahead({"w": torch.tensor([-2.0])}, {"w": torch.tensor([0.0])})
    {'w': tensor([-8.])}
    """
    require_arguments(predict_weights, locals())
    late = {name: delay for name, delay in delays.items() if delay}

    def look_ahead(new: State, old: State) -> State:
        """Return the weights for a forward, given those after and before an update."""
        return {
            name: p if name not in late else (p + late[name] * (p.detach() - old[name].detach())).detach()
            for name, p in new.items()
        }

    return look_ahead


def pipemare(optimizer: Optimizer, delays: Mapping[str, int], lr: float, steps: int) -> Optimizer:
    """Return an optimizer whose learning rate is smaller for late parameters, at the beginning.

    Update number k of a parameter that is late by tau uses `lr / tau ** (1 - min(k / steps, 1))`. Source: PipeMare,
    arXiv 1910.05124, T1.

    - `delays`: as `fpipe.delays(pipe)` returns. `lr`: the rate, unless the update is passed one; parameters in a group
      with a rate of its own keep that. `steps`: when all parameters have it.

    >>> import torch, fpipe
    >>> init, update = fpipe.pipemare(fpipe.optimizer(torch.optim.SGD), {"late": 4}, lr=1.0, steps=2)
    >>> p = {"late": torch.zeros(1), "now": torch.zeros(1)}
    >>> p, state = update({name: torch.ones(1) for name in p}, init(p), p)
    >>> p["late"], p["now"]
    (tensor([-0.2500]), tensor([-1.]))
    """
    require_arguments(pipemare, locals())
    if steps < 1:
        raise InputError(f"steps: got {steps}, expected at least 1. Pass about a tenth of all updates.")

    @accept_trees("grads", "params", restore=restore_like("params"))
    def update(grads: State, state: OptimizerState, params: State, **options: Any) -> tuple[State, OptimizerState]:
        """Return the parameters and the state after one update."""
        require_fitting(grads, state, params)
        rate, new, kept = options.pop("lr", lr), dict(params), dict(state)
        alike = defaultdict[float, list[str]](list)
        for name in grads:
            late, done = max(delays.get(name, 0), 1), min(state[name].get(UPDATES, 0) / steps, 1.0)
            alike[rate / late ** (1 - done)].append(name)
        for own, names in alike.items():
            given = {name: {slot: v for slot, v in state[name].items() if slot != UPDATES} for name in names}
            held = {name: params[name] for name in names}
            made, slots = optimizer.update({name: grads[name] for name in names}, given, held, lr=own, **options)
            new.update(made)
            kept.update({name: {**slots[name], UPDATES: state[name].get(UPDATES, 0) + 1} for name in names})
        return new, kept

    return optimizer._replace(update=update)


def _remember(optimizer: Optimizer, correct: Callable[[str, Tensor, Tensor, Tensor | None], Tensor]) -> Update:
    """Return the update that keeps what it subtracts, and lets `correct(name, old, new, last)` change the parameter."""

    @accept_trees("grads", "params", restore=restore_like("params"))
    def update(grads: State, state: OptimizerState, params: State, **options: Any) -> tuple[State, OptimizerState]:
        """Return the parameters and the state after one update."""
        require_fitting(grads, state, params)
        mastered = [name for name, slots in state.items() if MASTER in slots]
        if mastered:
            raise InputError(
                f"state[{mastered[0]!r}]: got a master copy of the parameter, expected none: a correction would change "
                "the parameter, and the next update begin from the master. Call fpipe.masters with the corrected "
                "optimizer: fpipe.masters(fpipe.error_feedback(optimizer))."
            )
        last = {name: slots.get(LAST) for name, slots in state.items()}
        given = {name: {slot: v for slot, v in slots.items() if slot != LAST} for name, slots in state.items()}
        old = {name: params[name].detach() for name in grads}
        made, kept = optimizer.update(grads, given, params, **options)
        if any(made[name] is params[name] for name in grads):
            raise InputError(
                "optimizer: got one that updates in place, expected one that does not modify its arguments: a "
                "correction needs the weights from before the update. Leave out donate=True."
            )
        new = dict(made)
        for name, before in old.items():
            after = made[name].detach()
            kept[name] = {**kept[name], LAST: before - after}
            new[name] = correct(name, before, after, last[name]).requires_grad_(params[name].requires_grad)
        for name in state.keys() - grads.keys():
            kept[name] = dict(state[name])
        return new, kept

    return update
