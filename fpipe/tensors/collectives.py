# SPDX-License-Identifier: Apache-2.0
"""Collectives of torch.distributed in a forward: `dist.all_reduce`, and others that wait for other processes.

Those that are waited for at once are ordinary torch calls that write to their arguments. A handle to wait for later is
not a tensor, and some calls cannot be seen; a module with either is played as a whole or not at all. No stage with
collectives is recorded as a graph. Functional collectives are ordinary operators.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import optree
import torch.distributed as dist
from torch import Tensor

from fpipe.tensors.effects import memory, written_arguments


def written_memory(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[int]:
    """Return the memory that an operator writes to."""
    leaves: list[Any] = optree.tree_leaves([*written_arguments(func, args, kwargs)])  # type: ignore[arg-type]
    return {memory(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def has_handle(out: Any) -> bool:
    """Return whether a call returned a handle to wait for later."""
    return dist.is_available() and isinstance(out, dist.Work)


@contextmanager
def preserve_python_generator() -> Iterator[None]:
    """Restore Python's generator on exit: torch draws a number for every fake handle."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
