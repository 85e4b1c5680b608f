# SPDX-License-Identifier: Apache-2.0
"""Caches of functions, as `functools.lru_cache` makes them.

Problem. A forward may call a cached function that makes a mask or a table. On fake tensors it makes fakes, and the
cache keeps them: for the next run of a capture, and for the user after it.

Idea. Most models have none, so look for them only if a run has failed, as the second run of a capture does when it
finds a fake in a cache. All cached functions are known to the garbage collector. Empty those that hold fakes, and then
do so after every run on fakes.
"""

from __future__ import annotations

import functools
import gc
from typing import Any, Final

from torch._subclasses.fake_tensor import FakeTensor

CACHED: Final = type(functools.lru_cache(id))
DEPTH: Final = 4


def emptied() -> list[Any]:
    """Empty the caches of functions that hold fake tensors, and return these functions."""
    found = [one for one in gc.get_objects() if type(one) is CACHED and any(_holds_fakes(held) for held in _held(one))]
    for one in found:
        one.cache_clear()
    return found


def _held(function: Any) -> list[Any]:
    """Return what a cached function refers to: keys and results, or a dict of them."""
    return gc.get_referents(function)


def _holds_fakes(value: Any, depth: int = DEPTH) -> bool:
    """Return whether a value is, or has inside, a fake tensor."""
    if type(value) is FakeTensor:
        return True
    if not depth or not isinstance(value, dict | list | tuple):
        return False
    inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return any(_holds_fakes(one, depth - 1) for one in inside)
