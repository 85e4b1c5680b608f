# SPDX-License-Identifier: Apache-2.0
"""Choose contiguous stages of nearly equal size when only some cuts and some stages are allowed.

This is the chain partition problem with forbidden stages. With `n` places it is solved exactly in O(stages n^2) by
dynamic programming. First, minimize the largest stage. Many choices may attain that minimum, for example next to one
huge embedding. So among those that exceed it by no more than a given slack, minimize the number of values that cross
cuts, then the sum of squared sizes.

Forbidden stages are discovered on the way: make a choice; if it is refused, exclude the stages that the `Refusal`
forbids, and choose again. `route` refuses one cut at a time, because of a value that is modified in place. Where that
value is made, modified and used forbids many stages at once: all those that begin in one range of positions and stop in
another.

Runs when a pipeline is built, unless the user names the cuts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fpipe.cutting.routing import ClashError, route
from fpipe.record.captured import Buffer, Captured, Constant, Observed, Parameter, Value
from fpipe.record.validity import observe

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
    forbidden: Iterable[Forbidden] = (),
) -> Positions | Refusal:
    """Choose `stages - 1` of `places`, ascending positions, so that the stages are as even as possible.

    `sizes` are those of the units; `crossing` is, by position, the number of values that cross a cut there. The largest
    stage has at most `slack` times the least size possible. No stage is one of those `forbidden`. If no choice is
    allowed, return the last refusal.

    >>> balance([1, 2, 3, 4, 5], [90, 10, 10, 10, 10, 10], 3, lambda positions: None, [1, 1, 1, 1, 1, 1])
    (1, 3)
    >>> balance([1, 2, 3, 4, 5], [90, 10, 10, 10, 10, 10], 3, lambda positions: None, [1, 1, 1, 2, 1, 1])
    (1, 4)
    >>> balance([1, 2], [0, 90, 10], 2, lambda positions: None, [0, 0, 1], 1.2, [Forbidden(range(1), range(1, 2))])
    (2,)
    """
    edges = [0, *places, len(sizes)]
    sums = list(accumulate(sizes, initial=0))
    start = torch.tensor([sums[edge] for edge in edges], dtype=torch.float64)
    cost = start[None, :] - start[:, None]
    cost[~torch.ones_like(cost, dtype=torch.bool).triu(1)] = torch.inf
    crossed = torch.tensor([crossing[edge] if edge in places else 0 for edge in edges])[:, None]
    last = Refusal("", ())
    for one in forbidden:
        _exclude(cost, edges, one)
    while (chosen := find_even_path(cost, stages, slack, crossed)) is not None:
        positions = tuple(edges[k] for k in chosen)
        refused = refusal(positions)
        if refused is None:
            return positions
        last = refused
        for one in refused.stages:
            _exclude(cost, edges, one)
        taken = pairwise([0, *chosen, len(edges) - 1])
        assert any(cost[a, b] == torch.inf for a, b in taken), "a refusal forbids a stage that was refused"
    return last


def _exclude(cost: Tensor, edges: Sequence[int], forbidden: Forbidden) -> None:
    rows, columns = (slice(bisect_left(edges, one.start), bisect_left(edges, one.stop)) for one in forbidden)
    cost[rows, columns] = torch.inf


def find_even_path(cost: Tensor, stages: int, slack: float, crossed: Tensor | float = 0.0) -> list[int] | None:
    """Return the edges between stages on the most even path from the first edge to the last; `None` if there is none.

    `cost` has that of a stage from edge to edge. The largest stage costs at most `slack` times the least possible. Of
    these paths, return that with the least sum of what is `crossed` where stages begin, then of squared costs.
    """
    least, _ = find_best_path(cost, stages, torch.maximum)
    if least == torch.inf:
        return None
    squares = (cost / max(stages * least, 1e-30)).square()  # they add up to less than one crossing
    _, chosen = find_best_path(torch.where(cost <= slack * least, crossed + squares, torch.inf), stages, torch.add)
    return chosen


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


def refusals(captured: Captured) -> Callable[[Positions], Refusal | None]:
    """Return a function that returns why `route` refuses positions; `None` if it does not."""
    observed = observe(captured)
    results = (*(() if captured.loss is None else (captured.loss,)), *captured.aux, *captured.outputs)

    def refusal(positions: Positions) -> Refusal | None:
        try:
            route(captured, observed, positions, results)
        except ClashError as clash:
            start, stop = list(pairwise([0, *positions, len(captured.units)]))[clash.stage]
            return Refusal(str(clash), tuple(_forbidden_stages(captured, observed, results, clash.value, start, stop)))
        return None

    return refusal


def _forbidden_stages(
    captured: Captured, observed: Observed, results: tuple[Value, ...], value: Value, start: int, stop: int
) -> Iterator[Forbidden]:
    """Yield the stages forbidden because of `value`: the refused one from `start` to `stop`, then all like it."""
    units, source = captured.units, captured.sources.get(value)
    if value in captured.reassigned.values():
        yield from _apart(captured, observed, value, start, stop)
        return
    made = next((k for k, unit in enumerate(units) if value in unit.makes), -1)
    uses = [k for k, unit in enumerate(units) if value in unit.reads or (unit is units[-1] and value in results)]
    modified = [k for k in range(start, stop) if observed.storage[value] in observed.written[units[k]]]
    yield Forbidden(range(start, start + 1), range(stop, stop + 1))
    for k in modified:
        stops = range(k + 1, uses[-1] + 1)
        if start <= made < k:  # a view sent after its memory was modified
            yield Forbidden(range(made + 1), stops)
        elif isinstance(source, Parameter | Constant):
            yield Forbidden(range(k + 1), range(k + 1, len(units) + 1))
        elif made < start:
            yield Forbidden(range(made + 1, k + 1), stops)
        if isinstance(source, Buffer):
            yield Forbidden(range(uses[0] + 1, k + 1), range(k + 1, len(units) + 1))


def _apart(captured: Captured, observed: Observed, new: Value, start: int, stop: int) -> Iterator[Forbidden]:
    """Yield the stages that assign the value `new` to a buffer, but do not contain all uses of that buffer."""
    units, memory = captured.units, observed.storage[new]
    buffers = {buffer for buffer, value in captured.reassigned.items() if value == new}
    at = next(k for k, unit in enumerate(units) if new in unit.makes)
    uses = [k for k, unit in enumerate(units) if not buffers.isdisjoint(unit.reads)]
    uses += [k for k, unit in enumerate(units) if k >= at and memory in observed.written[unit]]
    first, last = min([at, *uses]), max([at, *uses])
    yield Forbidden(range(start, start + 1), range(stop, stop + 1))
    yield Forbidden(range(first + 1, at + 1), range(at + 1, len(units) + 1))
    yield Forbidden(range(at + 1), range(at + 1, last + 1))
