# SPDX-License-Identifier: Apache-2.0
"""The modes that a torch call depends on besides its arguments: grad mode and autocast.

Operations run under the modes in which they were recorded. An autocast region is entered once for all of its
operations, because autocast caches casts until the outermost context exits.

Runs when a plan is made; the operations that `apply_modes` returns run in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fpipe.record.captured import Operation, Tensors, Value, compose
from fpipe.record.variant import Casts


class Modes(NamedTuple):
    """The modes in force around a torch call: grad mode, and autocast by device type.

    - `grad`, `ambient`: whether gradients are enabled, here and around the whole model.
    - `region`: the number of the outermost autocast context, which has its own cache of casts; 0 outside of all.
    """

    grad: bool
    ambient: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    region: int

    @property
    def in_ambient(self) -> Modes:
        """The same autocast, in the ambient grad mode."""
        return self._replace(grad=self.ambient)

    def inside(self, around: Modes) -> Modes:
        """Return the modes for a call that runs where the modes `around` are in force already."""
        same = (self.grad, self.autocast, self.region) == (around.grad, around.autocast, around.region)
        return Modes(around.grad, around.grad, (), 0) if same else self._replace(ambient=around.grad)


Items: TypeAlias = Sequence[tuple[Modes, Operation]]
Contexts: TypeAlias = Sequence[Callable[[], AbstractContextManager[Any]]]


def current_casts() -> Casts:
    """Return the autocast dtype of each device type for which autocast is on."""
    kinds = ("cpu", "cuda")
    return tuple([(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)])


def current_modes() -> tuple[bool, Casts]:
    """Return whether grad mode is on, and the casts of autocast."""
    return torch.is_grad_enabled(), current_casts()


def apply_modes(items: Items, outputs: tuple[Value, ...]) -> list[Operation]:
    """Return the operations; join each run that needs special modes into one operation that enters them.

    An autocast region is entered once, because it casts a weight once for all of its uses.
    """
    operations: list[Operation] = []
    for region, later in _group(items, lambda modes: modes.region, outputs):
        inner: list[Operation] = []
        for group, needed in _group(region, lambda modes: modes, later):
            inner += _join(contexts(group[0][0]), [operation for _, operation in group], needed)
        modes = region[0][0]
        operations += _join(contexts(modes.in_ambient) if modes.region else (), inner, later)
    return operations


def _group(items: Items, key: Callable[[Modes], Any], outputs: Collection[Value]) -> list[tuple[Items, set[Value]]]:
    """Return the runs of operations with equal keys, each with the values that are read after it."""
    groups = [list(group) for _, group in groupby(items, key=lambda item: key(item[0]))]
    later = {*outputs}
    found: list[tuple[Items, set[Value]]] = []
    for group in reversed(groups):
        found.append((group, set(later)))
        later |= {value for _, operation in group for value in operation.reads}
    return found[::-1]


def contexts(modes: Modes) -> Contexts:
    """Return the contexts that establish these modes; none for the ambient grad mode without autocast."""
    casts = [partial(torch.autocast, kind, dtype) for kind, dtype in modes.autocast]
    off = [partial(torch.autocast, "cpu", enabled=False)] if modes.region and not casts else []
    grads = [] if modes.grad == modes.ambient else [partial(torch.set_grad_enabled, modes.grad)]
    return [*grads, *casts, *off]


def _join(around: Contexts, operations: list[Operation], needed: Collection[Value]) -> list[Operation]:
    """Return the operations; join them into one that runs inside the contexts `around`, if there are any."""
    if not around:
        return operations
    made = tuple(value for operation in operations for value in operation.makes)
    reads = tuple(dict.fromkeys(value for operation in operations for value in operation.reads if value not in made))
    makes = tuple(value for value in made if value in needed)
    run = compose(operations, reads, makes)

    def call(key: int, *tensors: Tensor) -> Tensors:
        with ExitStack() as stack:
            for context in around:
                stack.enter_context(context())
            return run(key, *tensors)

    return [Operation(reads, makes, call)]
