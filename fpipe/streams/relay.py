# SPDX-License-Identifier: Apache-2.0
"""Send the loss of every batch of a stream from the rank that computes it to all others, which get it much later.

Problem. Ranks of a stream are at different batches at the same time. A broadcast that the sender waited for would keep
it from going on; and a rank whose batches end before those of others would leave them waiting for messages.

Idea. The sender posts and goes on, and waits for what it posted some batches ago, when the others have long taken it.
With each loss travels how many batches the sender has, which the others compare with their own.

Runs in every window of a stream, if ranks are separate processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.network.ranks import Ranks
from fpipe.tensors.spec import Spec

COUNT_BYTES = torch.iinfo(torch.int64).bits // 8


class LossRelay:
    """The losses of one stream.

    - `home`: the rank that computes them; `spec`: what one is like. `depth`: how many batches it is ahead at most.
    - `posted`: functions that wait for what was sent last.
    """

    def __init__(self, ranks: Ranks, spec: Spec, home: int, depth: int) -> None:
        self.ranks, self.spec, self.home, self.depth = ranks, spec, home, depth
        size = spec.buffer().numel()
        self.packed = Spec((size + COUNT_BYTES,), (1,), torch.uint8, spec.device)
        self.posted = deque[Callable[[], Tensor]]()

    def send(self, loss: Tensor, count: int, total: int | None) -> None:
        """Send a loss; this rank has had `count` batches, of `total` if it knows."""
        number = torch.tensor([-count if total is None else total], device=self.spec.device)
        data = torch.cat([self.spec.pack(loss).flatten(), number.view(torch.uint8)])
        self.posted.append(self.ranks.post_broadcast(data, self.packed, self.home))
        while len(self.posted) > self.depth:
            self.posted.popleft()()

    def receive(self, count: int, total: int | None) -> Tensor:
        """Return the next loss. On a CPU, raise `InputError` if there are other batches there than here."""
        data = self.ranks.post_broadcast(None, self.packed, self.home)()
        if data.device.type == "cpu":  # elsewhere the host would wait for the device
            found = int(data[-COUNT_BYTES:].clone().view(torch.int64))
            theirs, other = (-found, None) if found < 0 else (found, found)
            if theirs > (total or theirs) or count > (other or count):
                raise InputError(
                    f"batches: got {count if total is None else total} on this rank, and "
                    f"{theirs}{' or more' if other is None else ''} on rank {self.home}, expected as many on every "
                    "rank. Pass the same number of batches everywhere."
                )
        return self.spec.unpack(data[:-COUNT_BYTES].clone())

    def finish(self) -> None:
        """Wait until all ranks have what was sent."""
        while self.posted:
            self.posted.popleft()()
