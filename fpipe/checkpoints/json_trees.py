# SPDX-License-Identifier: Apache-2.0
"""Trees of Python values and tensors as JSON; the tensors are kept apart, by name.

JSON has no tuples and no tensors. Each is written as a dict with one key that begins with `$`: `{"$tuple": [...]}`,
`{"$tensor": "data.0"}`. So a dict of the user's may not have one.

Runs when a checkpoint is saved or loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from fpipe.checkpoints.shards import require_savable
from fpipe.errors import InputError
from schedules.errors import quote

DATA_PREFIX = "data."
MOST_LEVELS: Final = 100
"""More levels than any tree of a user has; a reader of JSON takes some hundred."""
MOST_BITS: Final = 4096
"""More than any integer of a user has; Python reads no text of some thousand digits as one."""


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
        _require_short(path, value)
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


def _require_short(path: str, value: object) -> None:
    """Raise `InputError` for an integer of more digits than are read again."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise InputError(
            f"{path}: got an integer of {value.bit_length()} bits, expected at most {MOST_BITS}. Save it as text."
        )


def decode_tree(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tree that `encode_tree` was given; raise `InputError` for one that it does not make.

    >>> decode_tree(*encode_tree({"epoch": 3, "shape": (2, 4)}))
    {'epoch': 3, 'shape': (2, 4)}
    """
    if isinstance(tree, list):
        return [decode_tree(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        name = tree["$tensor"]
        if not isinstance(name, str) or not name.startswith(DATA_PREFIX) or name not in tensors:
            raise InputError(
                f"data: got {quote(tree)}, expected a tensor of the checkpoint. Copy the checkpoint again."
            )
        return tensors[name]
    if "$tuple" in tree:
        return tuple(decode_tree(item, tensors) for item in _items_of(tree))
    return {key: decode_tree(item, tensors) for key, item in tree.items()}


def _items_of(tree: Mapping[str, Any]) -> list[Any]:
    """Return the items of a tuple."""
    items = tree["$tuple"]
    if not isinstance(items, list):
        raise InputError(f"data: got {quote(tree)}, expected the items of a tuple. Copy the checkpoint again.")
    return items
