# SPDX-License-Identifier: Apache-2.0
"""Make DTensors of the local tensors that a stage gets, and plain tensors of those that leave it.

Modules that `parallelize_module` has changed compute with DTensors. A stage's arguments, its outputs, cotangents and
gradients are plain local tensors, so nothing else in fpipe knows of DTensors.

Runs when a plan is made; the functions that `fuse_placed` returns run in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from fpipe.record.captured import Function, Fuse, Labels, Tensors, Unit, Value
from fpipe.tensors.placed import Arrivals, Placed, enter, is_holder, leave
from fpipe.tensors.torch_private import is_dtensor, mark_as_parameter


def find_placed(tensors: Mapping[Value, Tensor]) -> dict[Value, Placed]:
    """Return how the DTensors among a run's tensors are placed."""
    return {value: Placed.of(one) for value, one in tensors.items() if is_dtensor(one)}


def has_holders(tensors: Iterable[Tensor]) -> bool:
    """Return whether one of the tensors is a DTensor, or the result of a collective that may still run."""
    return any(map(is_holder, tensors))


def fuse_placed(fuse: Fuse, placed: Mapping[Value, Placed], arrivals: Arrivals) -> Fuse:
    """Return `fuse` for functions that take and return plain local tensors; `placed` says which values are DTensors."""

    def fuse_local(
        units: Sequence[Unit],
        random_units: Mapping[Unit, Labels],
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
    ) -> Function:
        function = fuse(units, random_units, inputs, outputs)
        entering = [(k, placed[value], value) for k, value in enumerate(inputs) if value in placed]

        def make_placed(tensors: Tensors) -> Tensors:
            given = [*tensors]
            for k, how, value in entering:
                given[k] = enter(given[k], how, value, arrivals)
                if isinstance(tensors[k], nn.Parameter):
                    mark_as_parameter(given[k])
            return tuple(given)

        def run(key: int, *tensors: Tensor) -> Tensors:
            made = function.run(key, *make_placed(tensors))
            return tuple([leave(one, value, arrivals) for one, value in zip(made, outputs, strict=True)])

        def scope(tensors: Tensors) -> AbstractContextManager[None]:
            return function.backward_scope(make_placed(tensors))

        return Function(run, None if function.scope is None else scope, function.redraws)

    return fuse_local
