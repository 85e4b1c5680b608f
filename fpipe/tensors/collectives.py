# SPDX-License-Identifier: Apache-2.0
"""Collectives of torch.distributed in a forward, such as `dist.all_reduce`.

A synchronous collective is an ordinary torch call that writes to its arguments. An asynchronous one returns a handle,
which is not a tensor; and some collectives bypass torch function modes. A module that calls either kind runs as a whole
or not at all. A stage with collectives is never recorded as a graph. Functional collectives are ordinary operators.

Runs when a pipeline is built, and when a new kind of batch first comes.
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
    """Return the memory that an operator call writes to, as identified by `memory`."""
    leaves: list[Any] = optree.tree_leaves([*written_arguments(func, args, kwargs)])  # type: ignore[arg-type]
    return {memory(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def has_handle(out: Any) -> bool:
    """Return whether a call returned the handle of an asynchronous collective."""
    return dist.is_available() and isinstance(out, dist.Work)


@contextmanager
def preserve_python_generator() -> Iterator[None]:
    """Restore Python's random generator on exit: torch draws a number from it for every fake handle."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
