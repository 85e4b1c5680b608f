# SPDX-License-Identifier: Apache-2.0
"""Move what a forward keeps off the device, and back before its backward.

Problem. A tensor that is kept may be a view, and a backward may depend on its strides. Two of them may share memory.

Idea. Memory is moved, not tensors: each storage once, as bytes. A moved tensor is described by its place in its
storage, and made again in memory with the same bytes. On an accelerator the bytes go to pinned memory of the host,
on a stream for each direction; on a CPU, to other memory.

What is not the microbatch's stays: parameters, buffers, constants and the batch. So does what autograd keeps, which is
in its graph. While a dispatch mode tracks tensors, as in a proof, nothing moves, since it could not track the copies.

Invariant: what comes back has the bytes, the sizes and the strides of what went.

Runs in every step of a schedule with `OFFLOAD`. The accelerator's part has not been run on one yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.runtime.transport import Payload
from fpipe.tensors.torch_private import count_dispatch_modes
from schedules.language.actions import Action


class StoredBytes:
    """The bytes of one storage, elsewhere; `done` is the event at whose end they are there."""

    def __init__(self, held: Tensor, device: torch.device, done: Any) -> None:
        self.held, self.device, self.done = held, device, done


class MovedTensor(NamedTuple):
    """A tensor that was moved: its bytes, and its place in them."""

    stored: StoredBytes
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def make(self, memory: Tensor) -> Tensor:
        """Return the tensor, in memory with the same bytes."""
        made = torch.empty(0, dtype=self.dtype, device=memory.device)
        return made.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


class Restoration:
    """The move of what a forward kept, back to the device: a handle, like that of a collective."""

    end, is_done = "GROUP", True  # a host waits for nothing: the device waits, when it is taken

    def __init__(self, message: Action, residuals: Any, coming: dict[StoredBytes, tuple[Tensor, Any]]) -> None:
        self.message, self.residuals, self.coming = message, residuals, coming

    def take(self) -> Payload:
        """Return what the forward kept, to be used on the device's current stream."""
        for memory, done in self.coming.values():
            if done is not None:
                torch.cuda.current_stream(memory.device).wait_event(done)
        for k, one in enumerate(self.residuals if self.coming else ()):
            if isinstance(one, MovedTensor):
                self.residuals[k] = one.make(self.coming[one.stored][0])
        return (self.residuals,)


class Mover:
    """Moves the tensors at these positions of what a stage keeps, a list; `streams` are those of a device, per way."""

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = positions
        self.streams: dict[tuple[torch.device, str], Any] = {}

    def move_out(self, residuals: Any) -> Any:
        """Return what a forward kept, moved off the device."""
        if residuals is None or count_dispatch_modes():
            return residuals
        stored: dict[int, StoredBytes] = {}
        for k in self.positions:
            one = residuals[k]
            if type(one) is not Tensor or one.layout is not torch.strided or one.is_conj() or one.is_neg():
                continue
            storage = one.untyped_storage()
            if storage._cdata not in stored:
                stored[storage._cdata] = self._store(torch.empty(0, dtype=torch.uint8, device=one.device).set_(storage))
            place = stored[storage._cdata]
            residuals[k] = MovedTensor(place, one.dtype, one.size(), one.stride(), int(one.storage_offset()))
        return residuals

    def move_back(self, action: Action, residuals: Any) -> Restoration:
        """Post the move back; return its handle."""
        moved = residuals if isinstance(residuals, list) else ()
        places = dict.fromkeys(one.stored for one in moved if isinstance(one, MovedTensor))
        return Restoration(action, residuals, {place: self._load(place) for place in places})

    def _store(self, memory: Tensor) -> StoredBytes:
        if memory.device.type != "cuda":
            return StoredBytes(memory.clone(), memory.device, None)
        stream = self._stream(memory.device, "out")
        stream.wait_stream(torch.cuda.current_stream(memory.device))  # the forward has to be over
        with torch.cuda.stream(stream):
            held = torch.empty(memory.numel(), dtype=torch.uint8, pin_memory=True)
            held.copy_(memory, non_blocking=True)
        memory.record_stream(stream)  # or the memory could be reused before it is copied
        return StoredBytes(held, memory.device, stream.record_event())

    def _load(self, place: StoredBytes) -> tuple[Tensor, Any]:
        memory = torch.empty(place.held.numel(), dtype=torch.uint8, device=place.device)
        if place.done is None:
            return memory.copy_(place.held), None
        stream = self._stream(place.device, "back")
        stream.wait_stream(torch.cuda.current_stream(place.device))  # the memory may have just been freed there
        stream.wait_event(place.done)
        with torch.cuda.stream(stream):
            memory.copy_(place.held, non_blocking=True)
        memory.record_stream(stream)
        return memory, stream.record_event()

    def _stream(self, device: torch.device, way: str) -> Any:
        if (device, way) not in self.streams:
            self.streams[device, way] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self.streams[device, way]
