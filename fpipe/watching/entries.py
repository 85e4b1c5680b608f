# SPDX-License-Identifier: Apache-2.0
"""The entries of a value: the elements of a container, or the attributes of a user's object.

Runs when a pipeline is built or a plan is made, and in every step.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch

MAPPINGS = (dict, OrderedDict, defaultdict)
SEQUENCES = (list, tuple, torch.Size, deque)
MAX_DEPTH, MAX_SIZE = 4, 256
"""The nesting depth and the number of entries up to which containers and objects are inspected."""
OPEN_MODULES = frozenset({"argparse", "types", "dataclasses", "collections"})
"""Modules of the standard library whose instances hold users' values."""
CLOSED_PACKAGES = (sys.stdlib_module_names - OPEN_MODULES) | {
    *("torch", "numpy", "optree", "packaging"),
    *("fpipe", "schedules"),
}
"""Packages whose objects are not inspected."""


def has_entries(value: Any) -> bool:
    """Return whether a value is a container, or an object with attributes and of a user's class."""
    kind = type(value)
    if is_container(kind):
        return True
    if isinstance(value, type | ModuleType | FunctionType) or kind.__module__.partition(".")[0] in CLOSED_PACKAGES:
        return False
    return hasattr(value, "__dict__") or bool(_slot_names(kind))


def is_container(kind: type) -> bool:
    """Return whether instances of a class have elements rather than attributes."""
    return kind in MAPPINGS or kind in SEQUENCES


def entries(value: Any) -> Mapping[Any, Any]:
    """Return the elements of a container by key or position, or the attributes of an object by name."""
    kind = type(value)
    if kind in MAPPINGS:
        mapping: Mapping[Any, Any] = value
        return mapping
    if kind in SEQUENCES:
        return dict(enumerate(value))
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    slots = _slot_names(kind)
    return {**attributes, **{name: getattr(value, name, None) for name in slots}} if slots else attributes


def _slot_names(kind: type) -> Sequence[str]:
    declared = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__")]
