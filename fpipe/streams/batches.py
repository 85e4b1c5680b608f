# SPDX-License-Identifier: Apache-2.0
"""The batches of a stream: taken from the caller when they are needed, and kept as long as a rank here needs them.

The caller's code runs in `fetch` only, outside of everything that a run changes in torch. What a batch becomes, pieces
for each stage, is made when the first rank begins it.

Runs in every window of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fpipe.errors import InputError
from fpipe.stages.prologue import Feed


class BegunBatch(NamedTuple):
    """A batch that has begun, of a copy of the pipeline: what enters each stage, and the random key, by microbatch."""

    rows: Sequence[Mapping[int, Feed]]
    keys: Sequence[int]


User = tuple[int, int]
"""A copy of the pipeline, and a rank."""


class BatchQueue:
    """The batches that have come and are still needed.

    - `source`: the rest of them; `split(number, batch)` returns a `BegunBatch` for each copy of the pipeline here.
    - `users`: the ranks of each copy.
    - `count`: how many have come; `total`: how many there are, once that is known.
    - `raw`, `begun`: batches that no rank, or some rank, has begun, by number; `left`: the users that still need each.
    """

    def __init__(self, source: Iterator[Any], split: Callable[[int, Any], Mapping[int, BegunBatch]]) -> None:
        self.source, self.split = source, split
        self.users = frozenset[User]()
        self.count = 0
        self.total: int | None = None
        self.limit: int | None = None
        self.raw: dict[int, Any] = {}
        self.begun: dict[int, Mapping[int, BegunBatch]] = {}
        self.left: dict[int, set[User]] = {}

    def fetch(self, number: int) -> None:
        """Take batches from the caller, up to this number, or until there are no more."""
        while self.count <= number and self.total is None:
            if self.limit is not None and self.count >= self.limit:
                self.total = self.count
                return
            try:
                batch = next(self.source)
            except StopIteration:
                self.total = self.count
                return
            if not (isinstance(batch, tuple) and len(batch) == 2):
                raise InputError(
                    f"batches[{self.count}]: got {type(batch).__name__}, expected a pair of inputs and targets, as a "
                    "step takes them. Yield ((x,), y), or ((x,), None) if there are no targets."
                )
            self.raw[self.count] = batch
            self.count += 1

    def enter(self, number: int, copy: int) -> BegunBatch:
        """Return a batch of a copy, which some rank of it begins or goes on with."""
        if number not in self.begun:
            self.begun[number] = self.split(number, self.raw.pop(number))
            self.left[number] = {*self.users}
        return self.begun[number][copy]

    def release(self, user: User, number: int) -> None:
        """Declare that a rank of a copy is done with a batch; drop it after the last one."""
        self.left[number].discard(user)
        if not self.left[number]:
            del self.left[number], self.begun[number]
