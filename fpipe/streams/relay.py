# SPDX-License-Identifier: Apache-2.0
"""Send the loss of every batch of a stream from the rank that computes it to all others, which get it much later.

Problem. Ranks of a stream are at different batches at the same time. In a broadcast, ranks pass on what they get, so
one would wait for another that comes to this batch later. And a rank whose batches end before those of others would
leave them waiting for messages.

Idea. The rank sends the loss to each other one, goes on, and waits for what it sent some batches ago, which all have
long taken. With each loss travels how many batches it has, which the others compare with their own. All of it is on the
CPU, so the host of the rank that computes the loss waits for its device once per batch.

Runs in every window of a stream, if ranks are separate processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.meshes.exchange import CopyLinks
from fpipe.network.ranks import Ranks
from fpipe.tensors.spec import Spec
from schedules import Action

SHARED_LOSS = Action("REDUCE_GRAD", 0, 0)
"""What errors call the exchange of losses between copies."""
COUNT_BYTES = torch.iinfo(torch.int64).bits // 8


class LossRelay:
    """The losses of one stream.

    - `home`: the rank that computes them; `spec`: what one is like. `depth`: how many batches it is ahead at most.
    - `links`: the groups of other copies of the pipeline, if processes play those.
    - `posted`: functions that wait for what was sent last.
    """

    def __init__(self, ranks: Ranks, spec: Spec, home: int, depth: int, links: CopyLinks | None) -> None:
        self.ranks, self.spec, self.home, self.depth = ranks, replace(spec, device=torch.device("cpu")), home, depth
        self.links, self.device = links, spec.device
        self.posted = deque[Callable[[], Tensor]]()

    def send(self, loss: Tensor, count: int, total: int | None) -> Tensor:
        """Send a loss; return the sum of those of all copies.

        This rank has had `count` batches, of `total` if it knows.
        """
        number = torch.tensor([-count if total is None else total])
        data = torch.cat([self.spec.pack(loss.cpu()).flatten(), number.view(torch.uint8)])
        self.posted.append(self.ranks.tell(data, len(data), self.home))
        while len(self.posted) > self.depth:
            self.posted.popleft()()
        return loss if self.links is None else self._add_copies(data, count, total).to(loss.device)

    def receive(self, count: int, total: int | None, device: torch.device) -> Tensor:
        """Return the next loss; raise `InputError` if there are other batches there than here."""
        size = self.spec.buffer().numel()
        data = self.ranks.tell(None, size + COUNT_BYTES, self.home)()
        if self.links is None:
            return self._unpack(data, count, total).to(device)
        return self._add_copies(data, count, total).to(device)

    def compare(self, count: int, total: int | None) -> None:
        """Raise `InputError` if another copy has other batches: the next window would be another one there."""
        if self.links is not None:
            for row in self._share(torch.tensor([-count if total is None else total]).view(torch.uint8)):
                self._require_same(row, count, total)

    def _add_copies(self, data: Tensor, count: int, total: int | None) -> Tensor:
        """Return the sum of the losses of all copies, in their order, given this one's."""
        return reduce(add, [self._unpack(row, count, total) for row in self._share(data)])

    def _share(self, data: Tensor) -> tuple[Tensor, ...]:
        """Return the bytes that each copy passes, in their order."""
        found = data
        for peers in () if self.links is None else self.links:
            posted: Any = peers.share(SHARED_LOSS, found.to(self.device))
            if not posted.is_done:
                self.ranks.wait(posted)
            found = torch.cat(posted.take()).cpu()
        return found.view(-1, len(data)).unbind()

    def _unpack(self, data: Tensor, count: int, total: int | None) -> Tensor:
        """Return a loss; raise `InputError` if its rank has other batches than this one."""
        size = self.spec.buffer().numel()
        self._require_same(data[size:], count, total)
        return self.spec.unpack(data[:size].clone())

    def _require_same(self, data: Tensor, count: int, total: int | None) -> None:
        found = int(data.clone().view(torch.int64))
        theirs, other = (-found, None) if found < 0 else (found, found)
        if theirs > (total or theirs) or count > (other or count):
            raise InputError(
                f"batches: got {count if total is None else total} on this rank, and "
                f"{theirs}{' or more' if other is None else ''} on another one, expected the same number on every "
                "rank. Pass the same number of batches on each."
            )

    def finish(self) -> None:
        """Wait until all ranks have what was sent."""
        while self.posted:
            self.posted.popleft()()
