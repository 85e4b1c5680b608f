# SPDX-License-Identifier: Apache-2.0
"""Call a module as its author wrote it, and take from the call the tensors that later operations read.

A whole call delivers tensors in three ways: it returns them, it assigns them to attributes, or a module inside it
returns them to a hook that collects them. The call reads only what something inside it uses; other arguments are zeros
without memory, so that a value that is merely passed through need not be sent to the stage.

Runs when a pipeline is built; the operations that it returns run in every step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fpipe.errors import InputError
from fpipe.record.captured import Operation, Tensors, Value
from fpipe.record.model.snapshot import restore_attributes
from fpipe.record.trace.branching import attach
from fpipe.record.trace.collected import InnerOutput, InnerOutputs
from fpipe.record.trace.seats import Seat
from fpipe.record.trace.tape import Attribute, Frame, pick, require_constants
from fpipe.tensors.placed import Placed, local_part


@dataclass(frozen=True)
class Outputs:
    """The new values of a call, by place: leaves of its return value, attributes, and inner modules' results.

    Each value has one place.
    """

    returned: Mapping[Value, int]
    assigned: Mapping[Value, Attribute]
    collected: Mapping[Value, InnerOutput]

    @property
    def values(self) -> tuple[Value, ...]:
        """All of the values."""
        return (*self.returned, *self.assigned, *self.collected)


def call_whole(frame: Frame, outputs: Outputs) -> Operation:
    """Return the operation that makes the call of `frame` as is."""
    picks, where = tuple(outputs.returned.values()), f"module {frame.path or '(root)'}"
    assigned, collected = tuple(outputs.assigned.values()), tuple(outputs.collected.values())

    def run_plain(key: int, *tensors: Tensor) -> Tensors:
        return pick(frame.invocation(tensors), picks, where)

    def run(key: int, *tensors: Tensor) -> Tensors:
        with restore_attributes(frame.touched), InnerOutputs(collected) as inner:
            out = frame.invocation(tensors)
            require_constants(out, frame.constants, where)
            made = pick(out, picks, where)
            return *made, *[getattr(one.module, one.name) for one in assigned], *inner.tensors

    is_plain = not (frame.touched or frame.constants or collected)
    return Operation(frame.invocation.reads, outputs.values, run_plain if is_plain else run)


def drop_unread(operation: Operation, used: Collection[Value], fakes: Mapping[Value, Tensor]) -> Operation:
    """Return the operation, reading only the `used` values; in place of the others, it gets zeros.

    `fakes` are tensors with the others' metadata.
    """
    reads = tuple(value for value in operation.reads if value in used)
    if reads == operation.reads:
        return operation
    unread = [value for value in operation.reads if value not in used]

    def run(key: int, *tensors: Tensor) -> Tensors:
        values = {value: _zeros_like(fakes[value]) for value in unread} | dict(zip(reads, tensors, strict=True))
        return operation.call(key, *[values[value] for value in operation.reads])

    return Operation(reads, operation.makes, run)


def _zeros_like(fake: Tensor) -> Tensor:
    """Return real zeros of the same shape, strides and dtype: code may ask for any of these, and whether it is fake."""
    local = local_part(fake)
    zeros = torch.empty_strided(local.shape, local.stride(), dtype=fake.dtype, device=fake.device).zero_()
    return Placed.of(fake).place(zeros) if isinstance(fake, DTensor) else zeros


def attach_outputs(frame: Frame, operation: Operation, parameters: Sequence[Seat]) -> Operation:
    """Return the operation of a call that branches on data, its outputs attached to all that they may depend on.

    It raises `InputError` in a step whose branch assigns a buffer that the branch at capture did not.
    """
    module = frame.invocation.function  # a module, or the loss
    expected = {(id(one.module._buffers), one.name) for one in frame.assigned}

    def run(key: int, *tensors: Tensor) -> Tensors:
        before = [*_buffers(module)]
        made = operation.call(key, *tensors)
        for table, name, tensor in before:
            if table.get(name) is not tensor and (id(table), name) not in expected:
                raise InputError(
                    f"module {frame.path or '(root)'}: got an assignment to the buffer {name!r}, expected none, "
                    "because the branch taken at capture assigned none. The new value would be lost. Write copy_() "
                    "instead."
                )
        return attach(made, (*tensors, *[table[name] for table, name in parameters]))

    return operation._replace(call=run)


def _buffers(module: object) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the buffers of a module and its submodules: the table, the name, and the tensor."""
    for one in module.modules() if isinstance(module, nn.Module) else ():
        yield from [(one._buffers, name, tensor) for name, tensor in one._buffers.items()]
