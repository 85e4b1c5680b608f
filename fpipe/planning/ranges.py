# SPDX-License-Identifier: Apache-2.0
"""Sums over contiguous runs of blocks, for every run at once.

Problem. A search asks for the bytes and seconds of thousands of stages. Seconds add up, but bytes do not: two blocks
that save the same tensor keep it once, and what one block passes to the next crosses a cut only if the cut is there.

Idea. Note for each piece of memory which blocks use it (`Spread`), and for each tensor that passes between blocks from
where to where (`Hop`). Then every run of blocks is a sum over a table, computed once for all runs by cumulative sums.

A table is a matrix: entry `[a, b]` is that of the stage of blocks `a` to `b - 1`, for `0 <= a < b <= blocks`, else 0.

Runs on request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor


class ActionTimes(NamedTuple):
    """Seconds by kind of action: forward, whole backward, its input and weight halves, checkpointed forward."""

    F: float
    B: float
    I: float  # noqa: E741 - the action's name
    W: float
    C: float


TIMED: Final = ActionTimes._fields
"""The kinds of actions that are timed; a recomputation takes as long as a forward."""


def add_times(times: Iterable[ActionTimes]) -> ActionTimes:
    """Return the times of all of these actions in all, by kind."""
    return ActionTimes(*map(sum, zip(*times, strict=True)))


class Spread(NamedTuple):
    """Memory that several blocks use: a stage with any of these blocks holds the bytes once."""

    bytes: int
    blocks: tuple[int, ...]


class Hop(NamedTuple):
    """Tensors that pass from block `source` to block `target`, their next user, in every microbatch.

    They are sent if the two are on different stages: `forward` bytes of values, and `back` bytes of cotangents.
    """

    source: int
    target: int
    forward: int
    back: int


class Arrival(NamedTuple):
    """A value that a stage holds if it begins after block `source` and includes block `target`, the value's next user.

    `saved` is the first block from there on that saves it. If the stage ends before that, the value is not saved, but
    the stage holds it until its backward, which returns its cotangent. Without a cotangent, `saved` is `target`; if no
    block saves it, the number of blocks.
    """

    source: int
    target: int
    bytes: int
    saved: int


def sum_blocks(amounts: Sequence[float]) -> Tensor:
    """Return the table of sums of one amount per block.

    >>> sum_blocks([1, 2, 4])[0, 2], sum_blocks([1, 2, 4])[1, 3]
    (tensor(3., dtype=torch.float64), tensor(6., dtype=torch.float64))
    """
    sums = torch.tensor([0.0, *amounts], dtype=torch.float64).cumsum(0)
    return (sums[None, :] - sums[:, None]).triu(1)


def count_once(spreads: Iterable[Spread], blocks: int) -> Tensor:
    """Return the table of bytes, counting memory that several blocks of a stage use once.

    >>> shared = count_once([Spread(8, (0, 2)), Spread(1, (1,))], 3)
    >>> [shared[a, b].item() for a, b in ((0, 1), (0, 2), (0, 3), (1, 3))]
    [8.0, 9.0, 9.0, 9.0]
    """
    amounts, pairs = [0.0] * blocks, torch.zeros(blocks + 1, blocks + 1, dtype=torch.float64)
    for size, users in spreads:
        for user in users:
            amounts[user] += size
        for first, second in pairwise(users):
            pairs[first, second + 1] += size
    inside = pairs.flip(0).cumsum(0).flip(0).cumsum(1)  # of two neighboring users within the run, one is enough
    return (sum_blocks(amounts) - inside).triu(1)


def sum_entering(arrivals: Iterable[Arrival], blocks: int, unsaved: bool = False) -> Tensor:
    """Return the table of bytes of values that each stage gets from earlier ones.

    With `unsaved`, count those that no block of the stage saves, but which the stage must hold for its backward.

    >>> arrivals = [Arrival(0, 1, 4, 2), Arrival(0, 2, 3, 2)]
    >>> [sum_entering(arrivals, 3)[a, b].item() for a, b in ((0, 3), (1, 2), (1, 3), (2, 3))]
    [0.0, 4.0, 7.0, 3.0]
    >>> [sum_entering(arrivals, 3, unsaved=True)[a, b].item() for a, b in ((0, 3), (1, 2), (1, 3), (2, 3))]
    [0.0, 4.0, 0.0, 0.0]
    """
    change = torch.zeros(blocks + 2, blocks + 2, dtype=torch.float64)
    for source, target, size, saved in arrivals:
        last = saved if unsaved else blocks
        for start, sign in ((source + 1, size), (target + 1, -size)):  # stages that begin in between
            change[start, target + 1] += sign  # and end later
            change[start, last + 1] -= sign
    return change.cumsum(0).cumsum(1)[:-1, :-1]


def sum_crossing(hops: Iterable[Hop], blocks: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of values, and of cotangents, that cross a cut before each block; nothing before the first.

    >>> sum_crossing([Hop(0, 1, 4, 4), Hop(0, 2, 3, 0)], 3)[0].tolist()
    [0.0, 7.0, 3.0, 0.0]
    """
    change = torch.zeros(2, blocks + 2, dtype=torch.float64)
    for source, target, *both in hops:
        amounts = torch.tensor(both, dtype=torch.float64)
        change[:, source + 1] += amounts
        change[:, target + 1] -= amounts
    values, cotangents = change.cumsum(1)[:, :-1]
    return values, cotangents
