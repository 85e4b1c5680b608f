# SPDX-License-Identifier: Apache-2.0
"""Call a module as its author wrote it, and take from the call the tensors that later operations read.

The modules of a segment belong to a skeleton of the model, which holds no tensors. While a segment runs, the tensors
passed to it are in their *seats*: the tables in which modules keep parameters and buffers. Afterwards the tables are
restored.

A whole call delivers tensors in three ways: it returns them, it assigns them to attributes, or a module inside it
returns them to a hook that collects them, such as a router's logits or attention weights that the user's own forward
hooks save. The call reads only what something inside it uses; other arguments are zeros without memory, so that a value
that is merely passed through need not be sent to the stage.

Runs when a pipeline is built; the operations that it returns run in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fpipe.errors import InputError
from fpipe.record.captured import Function, Operation, Tensors, Value
from fpipe.record.model.snapshot import ContainerState, restore_attributes, restore_containers
from fpipe.record.trace.branching import attach
from fpipe.record.trace.frames import Attribute, Frame, pick, require_constants, tensors_at
from fpipe.tensors.placed import Placed, local_part
from fpipe.tensors.torch_private import is_dtensor

Seat: TypeAlias = tuple[dict[str, Any], str]
"""A place where a module keeps a tensor: one of its tables, and the name there."""
Seats: TypeAlias = Mapping[Value, Sequence[Seat]]


class Seating:
    """A context in which tensors are in their seats; on exit, the previous contents are restored.

    Each of `seats` is a table, a name, and the position in `tensors` of the tensor that belongs there.
    """

    def __init__(self, seats: Sequence[tuple[dict[str, Any], str, int]], tensors: Sequence[Tensor]) -> None:
        self.seats, self.tensors = seats, tensors

    def __enter__(self) -> None:
        seats, tensors = self.seats, self.tensors
        self.before = [table[name] for table, name, _ in seats]
        for table, name, k in seats:
            table[name] = tensors[k]

    def __exit__(self, *error: object) -> None:
        for (table, name, _), old in zip(self.seats, self.before, strict=True):
            table[name] = old


def seat_inputs(
    run: Callable[..., Tensors],
    seats: Sequence[tuple[dict[str, Any], str, int]],
    written: Sequence[ContainerState],
) -> Function:
    """Return `run(key, *inputs)` as a function that puts its inputs in their seats first.

    `seats` are as in `Seating`. `written` are the containers that a run changes; they are restored after it. A
    backward runs with the inputs in their seats, too: hooks and custom functions look weights up, checkpoints rerun.
    """

    def seat(tensors: Tensors) -> AbstractContextManager[None]:
        seating = Seating(seats, tensors)
        return restore_containers(written, tensors, seating) if written else seating

    def run_seated(key: int, *tensors: Tensor) -> Tensors:
        with seat(tensors):
            return run(key, *tensors)

    return Function(run_seated, seat)


class InnerOutput(NamedTuple):
    """A tensor that a module returns: the module, its call number inside the outer call, from 0, and the leaf."""

    path: str
    module: nn.Module
    call: int
    leaf: int


class InnerOutputs:
    """A context that records the results of the modules that return the `wanted` outputs."""

    def __init__(self, wanted: Sequence[InnerOutput]) -> None:
        self.wanted = wanted
        self.returned: dict[tuple[nn.Module, int], Any] = {}
        self.count: Counter[nn.Module] = Counter()

    def __enter__(self) -> InnerOutputs:
        modules = dict.fromkeys(one.module for one in self.wanted)
        self.handles = [module.register_forward_hook(self._note) for module in modules]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _note(self, module: nn.Module, args: object, out: Any) -> None:
        self.returned[module, self.count[module]] = out
        self.count[module] += 1

    @property
    def tensors(self) -> Tensors:
        """The wanted tensors."""
        return tuple([self._tensor(one) for one in self.wanted])

    def _tensor(self, one: InnerOutput) -> Tensor:
        leaves = tensors_at(self.returned.get((one.module, one.call)))
        if one.leaf not in leaves:
            raise InputError(
                f"module {one.path}: got no tensor at leaf {one.leaf} of the result of its call {one.call}, expected "
                "one as at capture, because code outside the module uses it. Call the module every time, and return "
                "the same structure."
            )
        return leaves[one.leaf]


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
    return Placed.of(fake).place(zeros) if is_dtensor(fake) else zeros


def attach_outputs(frame: Frame, operation: Operation, parameters: Sequence[Seat]) -> Operation:
    """Return the operation of a call that branches on data, its outputs attached to all that they may depend on.

    It raises `InputError` in a step whose branch assigns a buffer that the branch at capture did not, or makes a tensor
    of another shape: what follows was recorded for that of the capture.
    """
    module, where = frame.invocation.function, f"module {frame.path or '(root)'}"  # a module, or the loss
    shapes = [frame.shapes[value] for value in operation.makes]
    expected = {(id(one.module._buffers), one.name) for one in frame.assigned}

    def run(key: int, *tensors: Tensor) -> Tensors:
        before = [*_buffers(module)]
        made = operation.call(key, *tensors)
        for table, name, tensor in before:
            if table.get(name) is not tensor and (id(table), name) not in expected:
                raise InputError(
                    f"{where}: got an assignment to the buffer {name!r}, expected none, "
                    "because the branch taken at capture assigned none. The new value would be lost. Write copy_() "
                    "instead."
                )
        for one, shape in zip(made, shapes, strict=True):
            if one.shape != shape:
                raise InputError(
                    f"{where}: got a tensor of shape {[*one.shape]}, expected {[*shape]} as at capture: what follows "
                    "was recorded for that. Keep all that works with a shape that depends on data in the same module."
                )
        return attach(made, (*tensors, *[table[name] for table, name in parameters]))

    return operation._replace(call=run)


def _buffers(module: object) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the buffers of a module and its submodules: the table, the name, and the tensor."""
    for one in module.modules() if isinstance(module, nn.Module) else ():
        yield from [(one._buffers, name, tensor) for name, tensor in one._buffers.items()]
