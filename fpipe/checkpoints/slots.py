# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer, `{parameter: {slot: tensor or number}}`, as flat names and back.

A tensor is `state.<parameter>.<slot>` in a shard. Numbers have the same names, in the JSON beside it. Parameters are
those of the model, and no parameter's name continues another's, so the parts can be told apart.

Runs when a checkpoint is saved or loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from fpipe.checkpoints.shards import require_savable
from fpipe.errors import InputError
from fpipe.training.optimizers import OptimizerState

STATE_PREFIX = "state."


def require_slots(state: object, held: Collection[str]) -> None:
    """Raise `InputError`, naming the leaf, unless `state` is what an optimizer keeps for parameters of this process."""
    if not isinstance(state, Mapping):
        raise InputError(
            f"state: got {type(state).__name__}, expected a dict {{parameter: {{slot: tensor or number}}}}. Pass what "
            "the update of fpipe.optimizer returned, or {name: optimizer.state[p] for name, p in params.items()}."
        )
    for name, slots in state.items():
        if name not in held:
            raise InputError(
                f"state[{name!r}]: got state of a parameter that this process does not hold, expected the names of "
                f"params: {sorted(held)[:5]}. Pass the state by parameter name; optimizer.state_dict() numbers them."
            )
        if not isinstance(slots, Mapping):
            raise InputError(f"state[{name!r}]: got {type(slots).__name__}, expected a dict by slot, such as exp_avg.")
        for slot, value in slots.items():
            _require_slot(f"state[{name!r}][{slot!r}]", slot, value)


def _require_slot(where: str, slot: object, value: object) -> None:
    if not isinstance(slot, str) or not isinstance(value, Tensor | bool | int | float):
        raise InputError(
            f"{where}: got {type(value).__name__}, expected a tensor or a number under a name. Keep anything else in "
            "data=, as in fpipe.save(..., data={...})."
        )
    if isinstance(value, Tensor):
        require_savable(where, value)


def flatten_slots(state: OptimizerState, names: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the tensors, and the numbers, of these parameters by their flat names.

    >>> import torch
    >>> flatten_slots({"weight": {"step": 3, "exp_avg": torch.zeros(1)}}, ["weight", "bias"])
    ({'state.weight.exp_avg': tensor([0.])}, {'state.weight.step': 3})
    """
    flat = {f"{STATE_PREFIX}{name}.{slot}": value for name in names for slot, value in state.get(name, {}).items()}
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in flat.items() if not isinstance(value, Tensor)}


def find_parameter(flat: str, parameters: Collection[str]) -> str | None:
    """Return the parameter in a flat name, or `None`.

    >>> find_parameter("state.blocks.0.weight.exp_avg", {"blocks.0.weight"})
    'blocks.0.weight'
    """
    name = flat.removeprefix(STATE_PREFIX)
    while "." in name:
        name = name.rpartition(".")[0]
        if name in parameters:
            return name
    return None


def unflatten_slots(flat: Mapping[str, Any], parameters: Iterable[str]) -> OptimizerState:
    """Return the state of these parameters, each with its slots; `{}` for one without.

    >>> unflatten_slots({"state.weight.step": 3}, ["weight", "bias"])
    {'weight': {'step': 3}, 'bias': {}}
    """
    state: OptimizerState = {name: {} for name in parameters}
    for name, value in flat.items():
        owner = find_parameter(name, state)
        if owner is not None:
            state[owner][name.removeprefix(f"{STATE_PREFIX}{owner}.")] = value
    return state
