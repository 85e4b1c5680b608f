# SPDX-License-Identifier: Apache-2.0
"""Find stages that are forbidden because one modifies in place what another uses.

`route` refuses such cuts one at a time. But the reason is where a value is made, modified and used, which forbids many
stages at once: all those that begin in one range of positions and stop in another.

Runs when a pipeline is built, unless the user names the cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from fpipe.cutting.balance import Forbidden, Positions, Refusal
from fpipe.cutting.routing import ClashError, route
from fpipe.record.captured import Buffer, Captured, Constant, Observed, Parameter, Value
from fpipe.record.observation import observe


def refusals(captured: Captured) -> Callable[[Positions], Refusal | None]:
    """Return a function that returns why `route` refuses positions; `None` if it does not."""
    observed = observe(captured)
    results = (*(() if captured.loss is None else (captured.loss,)), *captured.outputs)

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
