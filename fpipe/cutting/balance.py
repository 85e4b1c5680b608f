# SPDX-License-Identifier: Apache-2.0
"""Choose contiguous stages of nearly equal size when only some cuts and some stages are allowed.

This is the chain partition problem with forbidden stages. With `n` places it is solved exactly in O(stages n^2) by
dynamic programming. First, minimize the largest stage. Many choices may attain that minimum, for example next to one
huge embedding. So among those that exceed it by no more than a given slack, minimize the number of values that cross
cuts, then the sum of squared sizes.

Forbidden stages are discovered on the way: make a choice; if it is refused, exclude the stages that the `Refusal`
forbids, and choose again.

Runs when a pipeline is built, unless the user names the cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Positions: TypeAlias = tuple[int, ...]


class Forbidden(NamedTuple):
    """Every stage that begins in `begins` and stops in `stops`, both ranges of positions."""

    begins: range
    stops: range


class Refusal(NamedTuple):
    """The reason why positions are refused, and the stages it forbids, including at least one of those refused."""

    reason: str
    stages: tuple[Forbidden, ...]


def balance(
    places: Sequence[int],
    sizes: Sequence[int],
    stages: int,
    refusal: Callable[[Positions], Refusal | None],
    crossing: Sequence[int],
    slack: float = 1.0,
) -> Positions | Refusal:
    """Choose `stages - 1` of `places`, ascending positions, so that the stages are as even as possible.

    `sizes` are those of the units; `crossing` is, by position, the number of values that cross a cut there. The largest
    stage has at most `slack` times the least size possible. If no choice is allowed, return the last refusal.

    >>> balance([1, 2, 3, 4, 5], [90, 10, 10, 10, 10, 10], 3, lambda positions: None, [1, 1, 1, 1, 1, 1])
    (1, 3)
    >>> balance([1, 2, 3, 4, 5], [90, 10, 10, 10, 10, 10], 3, lambda positions: None, [1, 1, 1, 2, 1, 1])
    (1, 4)
    """
    edges = [0, *places, len(sizes)]
    sums = list(accumulate(sizes, initial=0))
    start = torch.tensor([sums[edge] for edge in edges], dtype=torch.float64)
    cost = start[None, :] - start[:, None]
    cost[~torch.ones_like(cost, dtype=torch.bool).triu(1)] = torch.inf
    crossed = torch.tensor([crossing[edge] if edge in places else 0 for edge in edges])[:, None]

    def weights(cost: Tensor) -> Tensor:
        """Return each stage's weight: what crosses its start, plus its squared share; shares add up to below one."""
        least, _ = find_best_path(cost, stages, torch.maximum)
        return torch.where(cost <= slack * least, crossed + (cost / sums[-1]).square(), torch.inf)

    return _search(cost, edges, stages, refusal, weights)


def _search(
    cost: Tensor,
    edges: Sequence[int],
    stages: int,
    refusal: Callable[[Positions], Refusal | None],
    weights: Callable[[Tensor], Tensor],
) -> Positions | Refusal:
    """Return the allowed positions with the least sum of weights; set the `cost` of forbidden stages to infinity."""
    last = Refusal("", ())
    while True:
        total, chosen = find_best_path(weights(cost), stages, torch.add)
        if total == torch.inf:
            return last
        positions = tuple(edges[k] for k in chosen)
        refused = refusal(positions)
        if refused is None:
            return positions
        last = refused
        for forbidden in refused.stages:
            _exclude(cost, edges, forbidden)
        taken = pairwise([0, *chosen, len(edges) - 1])
        assert any(cost[a, b] == torch.inf for a, b in taken), "a refusal forbids a stage that was refused"


def _exclude(cost: Tensor, edges: Sequence[int], forbidden: Forbidden) -> None:
    rows = torch.tensor([edge in forbidden.begins for edge in edges])
    columns = torch.tensor([edge in forbidden.stops for edge in edges])
    cost[rows[:, None] & columns[None, :]] = torch.inf


def find_best_path(cost: Tensor, stages: int, join: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, list[int]]:
    """Return the least joined cost of a path from the first edge to the last in `stages` steps, and the edges on it."""
    total, before = cost[0], []
    for _ in range(stages - 1):
        total, previous = join(total[:, None], cost).min(0)
        before.append(previous)
    chosen = [len(cost) - 1]
    for previous in reversed(before):
        chosen.append(int(previous[chosen[-1]]))
    return float(total[-1]), chosen[:0:-1]
