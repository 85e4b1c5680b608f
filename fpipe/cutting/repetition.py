# SPDX-License-Identifier: Apache-2.0
"""Choose the values that a stage computes from its part of the batch instead of receiving them.

Problem. A decoder makes a causal mask and rotary tables once, and every layer reads them. Cut into stages, it would
send them along with every hidden state, and keep them once per microbatch in flight.

Idea. A stage that needs such a value runs the units again that it was computed from: it *repeats* them. That keeps
every bit, as long as these units are pure (`fpipe.cutting.purity`). Invariant ones are run once in a step, the others
once for each microbatch. The stage where the value is made does not run invariant units for each microbatch, either.

The rule. A value is repeated, rather than sent, if

- its units read and write at most `RATIO` times its bytes, plus `ALLOWANCE`,
- the leaves of the batch and the buffers that they read have at most its bytes, plus `ALLOWANCE`, and
- if nothing is differentiated, it has at least `LAUNCH` bytes for each of these units.

Memory is about `RATIO` times as fast as a link between ranks. `ALLOWANCE` is what memory delivers in the time that any
message takes. `LAUNCH` is what a link delivers in the time that it takes to launch an operation: when one token is
decoded at a time, stages do little else, and what crosses is small. The rule sees shapes and dtypes only, so all ranks
decide alike.

Buffers that are read where units are repeated live there, too. All plans of a pipeline must agree on that, so the first
one decides for the others.

Units whose values other stages make themselves may not be needed any more where they belong. Invariant values are made
once in a step there, too. Other units are removed only if nothing in their stage reads what they make. A unit stays if
others stay that write the same memory, or that are in the same whole call, and if hooks run in that call.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from fpipe.cutting.calls import outermost
from fpipe.cutting.purity import Purity
from fpipe.cutting.traffic import measure, stored_bytes
from fpipe.record.captured import BatchLeaf, Buffer, Captured, Observed, Unit, Value

RATIO = 32
"""Memory over links: an H100 has 3,350 GB/s of memory, 50 of InfiniBand, and 450 of NVLink."""
ALLOWANCE = 2**20
"""Bytes that memory delivers in the time that any message takes: about 50 microseconds."""
LAUNCH = 2**14
"""Bytes that a link delivers in the time that it takes to launch an operation: 5 microseconds at 3 GB/s."""

ExtraBuffers: TypeAlias = tuple[frozenset[str], ...]
"""The names of the buffers that each stage holds for the units that it repeats."""


@dataclass(frozen=True)
class Repetition:
    """The units that one stage repeats.

    - `values`: what the stage's function gets from them, besides what it receives, with a fake tensor for each.
    - `once`: the units to run once in a step; `shared`: the values that they make for all microbatches.
    - `each`: the units to run for each microbatch.
    - `absent`: units of the stage that need not run in it (`fpipe.cutting.repetition`).
    - `buffers`: the buffers that all of these units read, or that another plan's do: the stage holds them, too.
    """

    values: Mapping[Value, Tensor] = field(default_factory=dict)
    once: tuple[Unit, ...] = ()
    shared: tuple[Value, ...] = ()
    each: tuple[Unit, ...] = ()
    absent: frozenset[Unit] = frozenset()
    buffers: frozenset[Value] = frozenset()


def choose_repetitions(
    captured: Captured,
    observed: Observed,
    partition: Sequence[int],
    results: tuple[Value, ...],
    extra: ExtraBuffers | None = None,
) -> tuple[Repetition, ...]:
    """Return what each stage repeats, for a model cut at `partition` whose `results` leave from the last stage.

    `extra` are the buffers that each stage may hold for this; `None` to let it hold any.
    """
    if not partition:
        return (Repetition(),)
    return _Choice(captured, observed, partition, results, extra).repetitions()


class _Choice:
    """The choice for one captured model; for `traffic` and `fakes`, see `measure`."""

    def __init__(
        self,
        captured: Captured,
        observed: Observed,
        partition: Sequence[int],
        results: tuple[Value, ...],
        extra: ExtraBuffers | None,
    ) -> None:
        self.captured, self.extra = captured, extra
        self.purity = Purity.of(captured, observed, partition, results)
        self.history, self.stages = self.purity.histories, range(len(partition) + 1)
        self.traffic, self.fakes = measure(captured, sorted({k for units in self.history.values() for k in units}))

    def repetitions(self) -> tuple[Repetition, ...]:
        """Return what each stage repeats; see `choose_repetitions`."""
        worthwhile = [value for value in self.history if self._is_worthwhile(value)]
        wanted = {(s, v) for v in worthwhile for s in self.purity.readers(v) if self._has_buffers(s, v)}
        sent = [v for v in self.history if any((s, v) not in wanted for s in self.purity.readers(v))]
        absent = find_absent(self.purity, {value for _, value in wanted}, sent)
        return tuple(self._repetition(s, {v for t, v in wanted if t == s}, absent) for s in self.stages)

    def _is_worthwhile(self, value: Value) -> bool:
        """Return whether repeating the units that make a value costs less than sending it; see the module's text."""
        history, size = self.history[value], stored_bytes(self.fakes[value])
        if any(self.fakes[made].requires_grad for k in history for made in self.captured.units[k].makes):
            return False
        if not self.captured.backward and size < LAUNCH * len(history):
            return False
        read = {v for k in history for v in self.captured.units[k].reads}
        sources = [v for v in read if isinstance(self.captured.sources.get(v), BatchLeaf | Buffer)]
        held = sum(stored_bytes(self.fakes[v]) for v in sources)
        return sum(self.traffic[k] for k in history) <= RATIO * size + ALLOWANCE and held <= size + ALLOWANCE

    def _has_buffers(self, s: int, value: Value) -> bool:
        """Return whether stage `s` may hold the buffers that are read to make a value."""
        buffers = self._buffers(self.history[value])
        held = self.purity.reads[s]
        return self.extra is None or all(v in held or name in self.extra[s] for v, name in buffers.items())

    def _buffers(self, units: Iterable[int]) -> dict[Value, str]:
        """Return the names of the buffers that units read, by value."""
        reads = dict.fromkeys(v for k in units for v in self.captured.units[k].reads)
        sources = {v: self.captured.sources.get(v) for v in reads}
        return {value: source.name for value, source in sources.items() if isinstance(source, Buffer)}

    def _repetition(self, s: int, wanted: Collection[Value], absent: frozenset[int]) -> Repetition:
        """Return what stage `s` repeats to get the values `wanted`, and those that its `absent` units made."""
        here, makers = frozenset(k for k in absent if self.purity.stage_of(k) == s), self.purity.makers
        values = sorted(v for v in self._reads_without(s, here) if v in wanted or makers.get(v) in here)
        once, shared, each = self._split(values)
        named = frozenset[str]() if self.extra is None else self.extra[s]
        placed = {v for v, one in self.captured.sources.items() if isinstance(one, Buffer) and one.name in named}
        return Repetition(
            {value: self.fakes[value] for value in values},
            self._units(once),
            shared,
            self._units(each),
            frozenset(self._units(here)),
            frozenset({*placed, *self._buffers([*once, *each, *here])}),
        )

    def _reads_without(self, s: int, absent: Collection[int]) -> set[Value]:
        """Return the values that stage `s` reads, except in its `absent` units."""
        if not absent:
            return set(self.purity.reads[s])
        present = [
            unit for k, unit in enumerate(self.captured.units) if self.purity.stage_of(k) == s and k not in absent
        ]
        found = {v for unit in present for v in unit.reads}
        return found.union(self.purity.results) if s == self.stages[-1] else found

    def _units(self, positions: Iterable[int]) -> tuple[Unit, ...]:
        return tuple(self.captured.units[k] for k in sorted(positions))

    def _split(self, values: Sequence[Value]) -> tuple[Collection[int], tuple[Value, ...], Collection[int]]:
        """Return the units to run once in a step, the values that they make for all microbatches, and other units.

        Intermediate values larger than `ALLOWANCE` are not kept for the step, but made each time.
        """
        makers, invariant = self.purity.makers, self.purity.invariant
        each = {k for k in self.purity.history(values) if k not in invariant}
        while True:
            reads = {v for k in each for v in self.captured.units[k].reads}
            shared = [v for v in sorted({*reads, *values}) if makers.get(v) in invariant and makers[v] not in each]
            large = {makers[v] for v in shared if v not in values and stored_bytes(self.fakes[v]) > ALLOWANCE}
            if not large:
                return self.purity.history(shared), tuple(shared), each
            each |= large.union(*(group for group in self.purity.written_groups if not group.isdisjoint(large)))


def find_absent(purity: Purity, repeated: Collection[Value], leaving: Iterable[Value]) -> frozenset[int]:
    """Return the units to remove from their stages, if other stages make the values `repeated` themselves.

    The values `leaving` must still be made.
    """
    captured = purity.captured
    calls = (call for call in captured.calls if call.whole and call.start < call.stop)
    whole = outermost(call for call in calls if purity.stage_of(call.start) == purity.stage_of(call.stop - 1))
    groups = [*purity.written_groups, *({*range(call.start, call.stop)} for call in whole)]
    hooked = {k for call in whole if call.has_hooks for k in range(call.start, call.stop)}
    kept = {*leaving, *purity.results, *captured.reassigned.values()}
    early = {v for v in repeated if purity.makers[v] in purity.invariant and _is_local(purity, v)}
    absent = {k for k in purity.history(repeated) if kept.isdisjoint(captured.units[k].makes)} - hooked
    while True:
        before = len(absent)
        absent -= _makers_of_reads(purity, absent, early)
        for group in groups:
            absent -= group if not group <= absent else set()
        if len(absent) == before:
            return frozenset(absent)


def _makers_of_reads(purity: Purity, absent: Collection[int], early: Collection[Value]) -> set[int]:
    """Return those of the `absent` units that make values which others in the stage read, except the `early` ones."""
    makers, found = purity.makers, set[int]()
    for k, unit in enumerate(purity.captured.units):
        if k not in absent:
            made = [makers[v] for v in unit.reads if v not in early and makers.get(v) in absent]
            found.update(maker for maker in made if purity.stage_of(maker) == purity.stage_of(k))
    return found


def _is_local(purity: Purity, value: Value) -> bool:
    """Return whether everything that a value was computed from is made in the stage that makes it."""
    first, last = purity.history((value,))[0], purity.makers[value]
    return purity.stage_of(first) == purity.stage_of(last)
