# SPDX-License-Identifier: Apache-2.0
"""Find the units that any stage may run again, with the same bits and without side effects.

A unit is *pure* if it follows from the batch, from constants, and from buffers that nobody writes, through other pure
units. It reads no parameter, draws no random numbers, communicates with nobody, and is not in a call that must run as a
whole. It may write in place to memory that pure units made, if all of that happens in one stage and before anything
else reads this memory.

A pure unit is *invariant* if it does not depend on the batch: it does the same for every microbatch of a step.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from fpipe.record.captured import BatchLeaf, Captured, Observed, Parameter, Value


@dataclass(frozen=True)
class Purity:
    """The pure units of a model cut at `partition`, by position; `invariant` are those among them that are invariant.

    `makers` is, by value, the position of the unit that makes it; `results` leave from the last stage.
    """

    captured: Captured
    observed: Observed
    partition: tuple[int, ...]
    results: tuple[Value, ...]
    pure: frozenset[int]
    invariant: frozenset[int]
    makers: dict[Value, int]

    @classmethod
    def of(cls, captured: Captured, observed: Observed, partition: Sequence[int], results: tuple[Value, ...]) -> Purity:
        """Return the pure units of a model that is cut at `partition`.

        Units that make `results` or views of them are not invariant: each microbatch has its own results.
        """
        makers = {value: k for k, unit in enumerate(captured.units) for value in unit.makes}
        pure = _Search(captured, observed, partition).pure()
        invariant = _invariant(captured, observed, pure, results)
        return cls(captured, observed, tuple(partition), results, pure, invariant, makers)

    def stage_of(self, k: int) -> int:
        """Return the stage of unit `k`."""
        return bisect_right(self.partition, k)

    @cached_property
    def reads(self) -> tuple[frozenset[Value], ...]:
        """The values that each stage reads, results included."""
        ends = pairwise([0, *self.partition, len(self.captured.units)])
        found = [{v for unit in self.captured.units[start:stop] for v in unit.reads} for start, stop in ends]
        found[-1].update(self.results)
        return tuple(map(frozenset, found))

    def readers(self, value: Value) -> list[int]:
        """Return the stages that read a value after the one that makes it."""
        return [s for s in range(self.stage_of(self.makers[value]) + 1, len(self.reads)) if value in self.reads[s]]

    @cached_property
    def histories(self) -> dict[Value, tuple[int, ...]]:
        """The values that pure units make for later stages, with the units that they were computed from."""
        pure = [v for v, k in self.makers.items() if k in self.pure and v != self.captured.loss]
        return {value: self.history((value,)) for value in pure if self.readers(value)}

    @cached_property
    def written_groups(self) -> list[set[int]]:
        """For all memory that is written in place, the units that make or write it, up to the last that writes."""
        units, storage, written = self.captured.units, self.observed.storage, self.observed.written
        last = {memory: k for k, unit in enumerate(units) for memory in written[unit]}
        found = defaultdict[int, set[int]](set)
        for k, unit in enumerate(units):
            for memory in {*written[unit], *(storage[value] for value in unit.makes)} & last.keys():
                found[memory].update({k} if k <= last[memory] else ())
        return [*found.values()]

    @cached_property
    def _backwards(self) -> list[int]:
        return sorted(self.pure, reverse=True)

    def history(self, values: Iterable[Value]) -> tuple[int, ...]:
        """Return the pure units that `values` were computed from, in order, including those that wrote in place."""
        units, storage, written = self.captured.units, self.observed.storage, self.observed.written
        needed = set(values)
        memories = {storage[value] for value in needed}
        found: list[int] = []
        for k in self._backwards:
            unit = units[k]
            if not needed.isdisjoint(unit.makes) or not memories.isdisjoint(written[unit]):
                found.append(k)
                needed.update(unit.reads)
                memories.update(storage[value] for value in unit.reads)
        return tuple(reversed(found))


class _Search:
    """The search for pure units: all are assumed to be pure, until they touch a value or memory that is not."""

    def __init__(self, captured: Captured, observed: Observed, partition: Sequence[int]) -> None:
        self.captured, self.observed, self.units = captured, observed, captured.units
        sealed = {k for call in captured.calls if call.sealed for k in range(call.start, call.stop)}
        self.allowed = [
            k
            for k, unit in enumerate(self.units)
            if k not in sealed and unit not in observed.random and unit not in observed.collective
        ]
        self.impure = {value for value, one in captured.sources.items() if isinstance(one, Parameter)}
        self.impure |= {*captured.placed, *captured.reassigned}
        storage = observed.storage
        self.memory = {storage[value] for value in (*self.impure, *observed.attached) if value in storage}
        self.writers = defaultdict[int, list[int]](list)
        for k, unit in enumerate(self.units):
            for memory in observed.written[unit]:
                self.writers[memory].append(k)
        self.memory |= self.writers.keys() & {storage[value] for value in captured.sources}
        self.memory |= self._written_in_several_stages(partition)

    def _written_in_several_stages(self, partition: Sequence[int]) -> set[int]:
        """Return the memory that is made in one stage and written in another."""
        stage_of = [bisect_right(partition, k) for k in range(len(self.units))]
        made: dict[int, int] = {}
        for k, unit in enumerate(self.units):
            for value in unit.makes:
                made.setdefault(self.observed.storage[value], stage_of[k])
        return {memory for memory, writers in self.writers.items() if made.get(memory) != stage_of[writers[-1]]}

    def pure(self) -> frozenset[int]:
        """Return the positions of the pure units."""
        while True:
            before = len(self.memory), len(self.impure)
            pure = self._spread()
            self._require_finished(pure)
            if before == (len(self.memory), len(self.impure)):
                return pure

    def _spread(self) -> frozenset[int]:
        """Return the units that touch nothing impure, in order; what others make and write is impure."""
        storage, pure = self.observed.storage, set(self.allowed)
        for k, unit in enumerate(self.units):
            written = self.observed.written[unit]
            if k in pure and self._touches_only_pure(unit.reads) and self.memory.isdisjoint(written):
                pure -= {k} if any(storage[value] in self.memory for value in unit.makes) else set()
            else:
                pure.discard(k)
            if k not in pure:
                self.impure.update(unit.makes)
                self.memory |= written
        return frozenset(pure)

    def _touches_only_pure(self, reads: Iterable[Value]) -> bool:
        storage = self.observed.storage
        return all(value not in self.impure and storage[value] not in self.memory for value in reads)

    def _require_finished(self, pure: frozenset[int]) -> None:
        """Make memory impure if a unit that is not pure reads it before it is written for the last time."""
        for k, unit in enumerate(self.units):
            for value in unit.reads if k not in pure else ():
                memory = self.observed.storage[value]
                if memory in self.writers and k < self.writers[memory][-1]:
                    self.memory.add(memory)


def _invariant(
    captured: Captured, observed: Observed, pure: frozenset[int], results: Iterable[Value]
) -> frozenset[int]:
    """Return the pure units that touch no memory which depends on the batch, or which is that of `results`."""
    storage = observed.storage
    leaves = [value for value, source in captured.sources.items() if isinstance(source, BatchLeaf)]
    varying = {storage[value] for value in (*leaves, *results)}
    while True:
        before, found = len(varying), set(pure)
        for k in sorted(pure):
            unit = captured.units[k]
            touched = {storage[value] for value in (*unit.reads, *unit.makes)} | observed.written[unit]
            if not varying.isdisjoint(touched):
                found.discard(k)
                varying |= {storage[value] for value in unit.makes} | observed.written[unit]
        if before == len(varying):
            return frozenset(found)
