# SPDX-License-Identifier: Apache-2.0
"""Buffers that a forward reassigns: `self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)`.

Problem. A step puts buffers into their modules and takes them out again, so a tensor assigned there would be lost.

Idea. After the run, compare the tensor in a buffer's place with the buffer. If shape, strides, dtype and device match,
it is the buffer's next value, and the stage that assigns it returns it. If not, it is a rebuilt cache, such as one for
a longer sequence. That is allowed if every run would rebuild the same one: from constants, and from buffers that never
change. Anything else is refused.

Invariant: each assignment is recorded as a unit, which makes an alias of the assigned tensor. So the position of that
unit is where the assignment happened.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import Tensor, nn

from fpipe.errors import CaptureError
from fpipe.record.captured import Buffer, Constant, Parameter, Source, Value
from fpipe.record.trace.frames import outermost_checkpoints
from fpipe.record.trace.record import Provenance, Record, Values
from fpipe.tensors.spec import Spec
from fpipe.tensors.torch_private import DisableTorchFunction

BufferTable = dict[str, Tensor | None]


class Reassigned(NamedTuple):
    """A reassigned buffer.

    - `table`, `name`: its place. `first`: the tensor there before the run. `buffer`: the value of that tensor, if it is
      a buffer of the model.
    - `new`: the value in its place now. `where`: the module that assigned it.
    """

    table: BufferTable
    name: str
    first: Tensor | None
    buffer: Value | None
    new: Value
    where: str


class Reassignments:
    """The buffers that a run reassigns.

    - `values`: the run's tensors. `here`: returns the running module, for errors.
    - `by_place`: the reassigned buffers, by the `id` of their table and the name there. `assigned`: all values that
      were ever assigned.
    """

    def __init__(self, values: Values, here: Callable[[], str]) -> None:
        self.values, self.here = values, here
        self.by_place: dict[tuple[int, str], Reassigned] = {}
        self.assigned: set[Value] = set()

    def assign(self, module: nn.Module, name: str, value: object, call: Callable[..., Any]) -> Any:
        """Record the assignment of `value` to a buffer, and return the tensor to put in its place.

        `call` runs and records a torch call. Raise `CaptureError` if `value` is not a tensor, or requires a gradient.
        """
        table, key = module._buffers, (id(module._buffers), name)
        known = self.by_place.get(key)
        first = table[name] if known is None else known.first
        if value is table[name]:
            return value
        if value is first:  # the original is back
            del self.by_place[key]
            return value
        self._require_plain(name, value)
        new = call(Tensor.detach, (value,), {})
        number, old = self.values.known[id(new)], self.values.known.get(id(first), Value(-1))
        buffer = old if isinstance(self.values.sources.get(old), Buffer) else None
        self.by_place[key] = Reassigned(table, name, first, buffer, number, self.here())
        self.assigned.add(number)
        return new

    def _require_plain(self, name: str, value: object) -> None:
        with DisableTorchFunction():
            is_tensor = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            if isinstance(value, Tensor) and is_tensor and not value.requires_grad:
                return
        got = "a tensor that requires a gradient" if is_tensor else f"a {type(value).__name__}"
        raise CaptureError(
            f"{self.here()}: got an assignment of {got} to the buffer {name!r}, expected a tensor that does not. "
            "Buffers are carried from microbatch to microbatch without a graph. Write "
            f"self.{name} = (...).detach(), or compute it under torch.no_grad()."
        )

    def restore(self) -> None:
        """Put back the tensors that were in these places before the run."""
        for one in self.by_place.values():
            one.table[one.name] = one.first

    @property
    def current_values(self) -> dict[Value, Value]:
        """The value now in the place of each reassigned buffer, by buffer."""
        return {one.buffer: one.new for one in self.by_place.values() if one.buffer is not None}

    @property
    def next_values(self) -> dict[Value, Value]:
        """The next value of each reassigned buffer that is carried from microbatch to microbatch, by buffer."""
        return {one.buffer: one.new for one in self.by_place.values() if one.buffer is not None and self._is_alike(one)}

    @property
    def caches(self) -> list[Reassigned]:
        """The reassigned buffers that are rebuilt rather than carried."""
        return [one for one in self.by_place.values() if one.buffer is None or not self._is_alike(one)]

    def _is_alike(self, one: Reassigned) -> bool:
        new = self.values.tensors[one.new]
        return one.first is not None and _layout(one.first) == _layout(new)

    # ---------------------------------------------------------------------------------------------------------- checks

    def require_carried(self, record: Record) -> None:
        """Raise `CaptureError`, naming the buffer, unless every assigned tensor can be carried or rebuilt."""
        written = record.written
        for one in self.caches:
            self._require_constant(one, written, record.provenance((one.new,)))
        for one in self.by_place.values():
            if one.buffer in self.next_values:
                self._require_apart(one, written)

    def _require_constant(self, one: Reassigned, written: Collection[int], provenance: Provenance) -> None:
        """Raise `CaptureError` for a cache that another run might build differently."""
        changing = {other.buffer for other in self.by_place.values()}

        def is_fixed(value: Value, source: Source) -> bool:
            if isinstance(source, Buffer):
                return value not in changing and self.values.storage[value] not in written
            return isinstance(source, Constant)

        others = [source for value, source in provenance.sources.items() if not is_fixed(value, source)]
        if not others and not provenance.is_random:
            return
        got, expected = _describe(self.values.tensors[one.new]), "None" if one.first is None else _describe(one.first)
        raise CaptureError(
            f"{one.where}: got an assignment of {got} to the buffer {one.name!r}, which is {expected}, expected the "
            "same shape, strides and dtype, or a cache that depends on shapes and constants only. This one depends on "
            f"{_describe_source(others[0]) if others else 'random numbers'}. Register it as {got}, or write "
            f"self.{one.name}.copy_(...)."
        )

    def _require_apart(self, one: Reassigned, written: Collection[int]) -> None:
        """Raise `CaptureError` if the buffer would share memory with a tensor that changes independently."""
        storage, sources, mine = self.values.storage, self.values.sources, {one.buffer, one.new}
        others = {**sources, **{new: sources[buffer] for buffer, new in self.next_values.items()}}
        in_place = one.buffer is not None and storage[one.buffer] in written
        for value, source in others.items():
            if storage[value] != storage[one.new] or value in mine:
                continue
            changes = isinstance(source, Parameter) or (isinstance(source, Buffer) and storage[value] in written)
            if in_place or changes:
                raise CaptureError(
                    f"{one.where}: got an assignment to the buffer {one.name!r} of memory that it would share with "
                    f"{_describe_source(source)}, expected new memory. An in-place change of one would change the "
                    f"other. Write self.{one.name} = (...).clone()."
                )

    def require_not_repeated(self, record: Record) -> None:
        """Raise `CaptureError` if a checkpointed function uses a reassigned buffer: a rerun would see the new value."""
        changing = self.assigned | {one.buffer for one in self.by_place.values()}
        for frame in outermost_checkpoints(record.frames):
            inside = record.units_in(frame)
            used = {value for unit in inside for value in (*unit.reads, *unit.makes)} - {*frame.invocation.reads}
            if changing & used and record.is_rerun(frame):
                names = sorted({one.name for one in self.by_place.values()})
                raise CaptureError(
                    f"module {frame.path or '(root)'}: got a checkpointed function that uses or assigns a buffer that "
                    f"the forward reassigns ({', '.join(names)}), expected none. The backward would rerun the function "
                    "on the new value. Assign the buffer outside the checkpoint, and pass what the function uses of it "
                    "as an argument."
                )


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return a tensor's shape, the strides of its dimensions longer than 1, its dtype and its device."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(tensor.shape), [step for size, step in pairs if size > 1], tensor.dtype, tensor.device


def _describe(tensor: Tensor) -> str:
    spec = Spec.of(tensor)
    return str(spec) if tensor.is_contiguous() else f"{spec} of strides {list(spec.stride)}"


def _describe_source(source: Source) -> str:
    if isinstance(source, Parameter | Buffer):
        return f"the {type(source).__name__.lower()} {source.name!r}"
    return "a constant" if isinstance(source, Constant) else "the batch"
