# SPDX-License-Identifier: Apache-2.0
"""The layout of a message: a head that identifies it, and its tensors.

Problem. A receiver must check that a message is the expected one before it uses it, and every send costs tens of
microseconds, however small.

Idea. The head begins with the message's identity, its length and a digest of its specs; small tensors follow in the
same buffer. So most messages are one send, even those of many small tensors. Large tensors are sent separately, as they
are.

Invariant: every tensor begins at a multiple of `LINE` bytes, as if freshly allocated: some kernels depend on alignment.

Runs in every step, if ranks are separate processes; the layout of a message is determined at its first use.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from fpipe.errors import TransportError
from fpipe.network.fingerprint import digest
from fpipe.runtime.transport import Payload
from fpipe.tensors.spec import Spec
from schedules import Action
from schedules.language.actions import SENDS, Message, receive_of

Specs: TypeAlias = tuple[Spec, ...]

LINE: Final = 64
SMALL_BYTES: Final = 2**16
CARRIED: Final = tuple(SENDS.values())


class Envelope:
    """The layout of one message between two ranks.

    - `sizes`: the bytes of each tensor; `small`: whether each travels in the head.
    - `header`: the first `LINE` bytes of the head; `values`: the numbers in them.
    """

    def __init__(self, message: Message, specs: Specs, device: torch.device) -> None:
        self.message, self.specs, self.device = message, specs, device
        self.sizes = [spec.buffer().numel() for spec in specs]
        self.small = [size <= SMALL_BYTES for size in self.sizes]
        kind, source, microbatch, target, _ = message
        about = digest(f"{spec} {spec.stride}" for spec in specs)
        values = [CARRIED.index(kind), source, microbatch, target, sum(self.sizes), about, 0, 0]
        self.values = torch.tensor(values)
        self.header = self.values.view(torch.uint8).to(device)

    @cached_property
    def length(self) -> int:
        """The length of the head in bytes."""
        return LINE + sum(_round_up(size) for size, small in zip(self.sizes, self.small, strict=True) if small)

    def pack(self, payload: Payload) -> tuple[Tensor, ...]:
        """Return the buffers to send for these tensors, in order."""
        head, rest = [self.header], list[Tensor]()
        for spec, tensor, size, small in zip(self.specs, payload, self.sizes, self.small, strict=True):
            packed = spec.pack(tensor)
            if not small:
                rest.append(packed)
                continue
            head.append(packed)
            if size % LINE:
                head.append(self.padding[: -size % LINE])
        return (torch.cat(head) if len(head) > 1 else self.header, *rest)

    def buffers(self) -> tuple[Tensor, ...]:
        """Return uninitialized buffers that receive what `pack` returns."""
        large = [spec.buffer() for spec, small in zip(self.specs, self.small, strict=True) if not small]
        return (torch.empty(self.length, dtype=torch.uint8, device=self.device), *large)

    def unpack(self, data: tuple[Tensor, ...]) -> Payload:
        """Return the tensors in these received buffers."""
        head, *rest = data
        found, start, large = list[Any](), LINE, iter(rest)
        for spec, size, small in zip(self.specs, self.sizes, self.small, strict=True):
            found.append(spec.unpack(head[start : start + size] if small else next(large)))
            start += _round_up(size) if small else 0
        return tuple(found)

    @cached_property
    def padding(self) -> Tensor:
        """Zeros that pad small tensors to a multiple of `LINE` bytes."""
        return torch.zeros(LINE, dtype=torch.uint8, device=self.device)

    def require(self, header: Tensor) -> None:
        """Raise `TransportError` unless a received header, which must be on the CPU, is that of this message."""
        got = header.view(torch.int64)
        if torch.equal(got, self.values):
            return
        (what, *_, length, about), (*_, mine, expected) = got.tolist()[:6], self.values.tolist()[:6]
        known = what in range(len(CARRIED))
        said = str(Action(CARRIED[what], *got.tolist()[1:4])) if known else f"unknown bytes {got.tolist()}"
        same = "" if about == expected else ", with tensors of other shapes or dtypes"
        wanted = receive_of(self.message)
        raise TransportError(
            f"a message: got {said} of {length} bytes{same}, expected that of {wanted} of {mine} bytes. "
            "It was not used. The ranks run different programs: end the processes, and build the pipeline from the "
            "same arguments on every rank."
        )


def _round_up(size: int) -> int:
    """Return a size rounded up to whole lines."""
    return -(-size // LINE) * LINE
