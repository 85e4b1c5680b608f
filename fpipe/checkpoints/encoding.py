# SPDX-License-Identifier: Apache-2.0
"""The rest of a checkpoint, as JSON and tensors by name: the caller's data, and optimizers' slots.

Trees of Python values are JSON, and their tensors are kept apart, by name. JSON has no tuples and no tensors. Each is
written as a dict with one key that begins with `$`: `{"$tuple": [...]}`, `{"$tensor": "data.0"}`. So a dict of the
user's may not have one.

The state of an optimizer is `{parameter: {slot: tensor or number}}`. A tensor is `state.<parameter>.<slot>` in a shard.
Numbers have the same names, in the JSON beside it. Parameters are those of the model, and no parameter's name continues
another's, so the parts can be told apart.

Runs when a checkpoint is saved or loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from torch import Tensor

from fpipe.errors import InputError
from fpipe.training.optimizers import OptimizerState
from fpipe.weights.safetensors import require_savable
from schedules.errors import quote

DATA_PREFIX: Final = "data."
STATE_PREFIX: Final = "state."
MOST_LEVELS: Final = 100
"""The deepest tree that is saved; readers of JSON stop at a few hundred levels."""
MOST_BITS: Final = 4096
"""The longest integer that is saved; Python refuses to read one of more than 4300 digits."""


def encode_tree(tree: object) -> tuple[Any, dict[str, Tensor]]:
    """Return the tree as JSON takes it, and its tensors by the names that it refers to them by.

    Raises `InputError`, naming the path, for a value that is neither JSON's nor a tuple nor a tensor.

    >>> import torch
    >>> encode_tree({"epoch": 3, "shape": (2, 4), "noise": torch.zeros(1)})
    ({'epoch': 3, 'shape': {'$tuple': [2, 4]}, 'noise': {'$tensor': 'data.0'}}, {'data.0': tensor([0.])})
    """
    tensors: dict[str, Tensor] = {}
    return _encode("data", tree, tensors, MOST_LEVELS), tensors


def _encode(path: str, value: object, tensors: dict[str, Tensor], left: int) -> Any:
    """Return a value as JSON takes it, with at most so many levels `left`."""
    if value is None or type(value) in (bool, int, float, str):
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise InputError(
                f"{path}: got an integer of {value.bit_length()} bits, expected at most {MOST_BITS}. Save it as text."
            )
        return value
    if not left:
        raise InputError(
            f"{path[:100]}...: got more than {MOST_LEVELS} levels of lists, tuples and dicts, expected fewer, and none "
            "that holds itself. Save a flatter tree."
        )
    if isinstance(value, Tensor):
        require_savable(path, value)
        name = f"{DATA_PREFIX}{len(tensors)}"
        tensors[name] = value
        return {"$tensor": name}
    if type(value) in (list, tuple):
        assert isinstance(value, list | tuple), "just seen"
        items = [_encode(f"{path}[{k}]", item, tensors, left - 1) for k, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if type(value) is dict:
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise InputError(f"{path}: got the key {key!r}, expected text that does not begin with $. Rename it.")
        return {key: _encode(f"{path}[{key!r}]", item, tensors, left - 1) for key, item in value.items()}
    raise InputError(
        f"{path}: got {type(value).__name__}, expected None, a bool, int, float, str, tensor, or a list, tuple or dict "
        "of these. Convert it: a checkpoint holds no pickles."
    )


def decode_tree(tree: Any, tensors: Mapping[str, Any], left: int = MOST_LEVELS) -> Any:
    """Return the tree that `encode_tree` was given; raise `InputError` for one that it does not make.

    It has at most so many levels `left`.

    >>> decode_tree(*encode_tree({"epoch": 3, "shape": (2, 4)}))
    {'epoch': 3, 'shape': (2, 4)}
    """
    if not isinstance(tree, list | dict):
        return tree
    if left < 0:
        raise InputError(
            f"data: got more than {MOST_LEVELS} levels of lists, tuples and dicts, expected fewer. Copy the checkpoint "
            "again."
        )
    if isinstance(tree, list):
        return [decode_tree(item, tensors, left - 1) for item in tree]
    if "$tensor" in tree:
        name = tree["$tensor"]
        if not isinstance(name, str) or not name.startswith(DATA_PREFIX) or name not in tensors:
            raise InputError(
                f"data: got {quote(tree)}, expected a tensor of the checkpoint. Copy the checkpoint again."
            )
        return tensors[name]
    if "$tuple" in tree:
        items = tree["$tuple"]
        if not isinstance(items, list):
            raise InputError(f"data: got {quote(tree)}, expected the items of a tuple. Copy the checkpoint again.")
        return tuple(decode_tree(item, tensors, left - 1) for item in items)
    return {key: decode_tree(item, tensors, left - 1) for key, item in tree.items()}


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
