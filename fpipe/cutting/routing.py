# SPDX-License-Identifier: Apache-2.0
"""Route values between stages: find what each stage reads, makes, receives and sends once the units are cut.

The routes preserve what one device computes:

- A stage reads its part of the batch directly. A buffer lives on the stage that uses it.
- What a stage repeats (`fpipe.cutting.repetition`) enters its function like a leaf of the batch, and is not sent.
- A value is passed from user to user in stage order, but never to a rank that has it: the last stage of the rank that
  made or used it keeps it for the next. So a value crosses to each rank once.
- Its cotangent goes back from user to user, to the stage that made it. Each user adds its own contribution, in the
  order in which one device adds them, whatever ranks the users are on.
- A parameter is owned by its first user. Later users hold copies, so nothing is sent forward; its cotangent goes back
  along the chain of users, like that of a value. If its gradients are summed instead (`fpipe.stages.ties`), each user
  computes its own gradient, as an owner does.

An in-place write must not change what another stage sees; if it would, the cut is refused.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, product

from torch import Tensor

from fpipe.cutting.repetition import Repetition
from fpipe.errors import CutError
from fpipe.record.captured import BatchLeaf, Buffer, Captured, Constant, Observed, Parameter, Unit, Value

Routes = Mapping[int, tuple[Value, ...]]


class ClashError(CutError):
    """Raised if a stage modifies memory in place that other stages use, too. `value` is in it. Other cuts may work."""

    def __init__(self, message: str, stage: int, value: Value) -> None:
        super().__init__(f"stage {stage}: {message}")
        self.stage, self.value = stage, value


@dataclass(frozen=True)
class Section:
    """The units of one stage, and its values. Routes are keyed by the stage at the other end, in stage order.

    - `parameters`, `buffers`, `constants`, `batch`: the sources that it reads; buffers also where it repeats units.
    - `repeats`: the values that it computes before its units run, in place of other stages' units or its own, with a
      fake tensor for each.
    - `gets`, `gives`: the values received from earlier stages and sent to later ones.
    - `results`: the values that leave the pipeline here (the loss, outputs).
    - `earlier`, `later`: the values, then the parameters, whose cotangents it sends to their previous user, the maker
      of a value included, or receives from their next.
    - `shares`: the parameters whose gradient, or part of it, it computes, and which other stages hold, too.
    - `modified`: the inputs that it modifies in place, and must therefore copy first.
    - `reassigned`: the buffers that it reassigns, and their new values.
    """

    units: tuple[Unit, ...]
    parameters: tuple[Value, ...]
    buffers: tuple[Value, ...]
    constants: tuple[Value, ...]
    batch: tuple[Value, ...]
    repeats: Mapping[Value, Tensor]
    gets: Routes
    gives: Routes
    results: tuple[Value, ...]
    earlier: Routes
    later: Routes
    shares: Routes
    modified: frozenset[Value]
    reassigned: Mapping[Value, Value]

    @property
    def inputs(self) -> tuple[Value, ...]:
        """All values that the stage's function takes, in order."""
        received = tuple(value for values in self.gets.values() for value in values)
        return (*self.parameters, *self.buffers, *self.constants, *self.batch, *self.repeats, *received)

    @property
    def leaving(self) -> tuple[Value, ...]:
        """All values that leave the stage in its forward, in order: results, then those sent to each later stage."""
        return (*self.results, *[value for values in self.gives.values() for value in values])

    @property
    def kept(self) -> tuple[int, ...]:
        """The positions in `leaving` of what the rank keeps for a stage that is not the next to use it."""
        given = [(target, value) for target, values in self.gives.items() for value in values]
        places = enumerate(given, len(self.results))
        return tuple(k for k, (target, value) in places if value not in self.later.get(target, ()))

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The values that the stage's function returns, each once: those it makes that leave or become buffers."""
        inputs, needed = self.inputs, dict.fromkeys((*self.leaving, *self.reassigned.values()))
        return tuple(value for value in needed if value not in inputs)


def route(
    captured: Captured,
    observed: Observed,
    partition: Sequence[int],
    results: tuple[Value, ...],
    summed: frozenset[str] = frozenset(),
    repetitions: Sequence[Repetition] = (),
    ranks: Sequence[Hashable] = (),
) -> tuple[Section, ...]:
    """Cut the units at `partition`, and route every value; `results` leave from the last stage.

    `summed` are the parameters whose gradients are summed over stages. `repetitions` are what each stage repeats; by
    default, nothing. Stages are numbered through all slices of the record. `ranks` are equal for stages that are on the
    same rank for every microbatch; by default, each stage is on its own. Raise `ClashError` if an in-place write would
    change what another stage sees.
    """
    bounds = list(pairwise([0, *partition, len(captured.units)]))
    repetitions = repetitions or [Repetition() for _ in bounds]
    stages = [
        tuple(unit for unit in captured.units[start:end] if unit not in repetition.absent)
        for (start, end), repetition in zip(bounds, repetitions, strict=True)
    ]
    homes = {value: s for s, units in enumerate(stages) for unit in units for value in unit.makes}
    users = _users(stages, results, repetitions)
    reassigned = _reassignments(captured, observed, stages, homes, users)
    written = [frozenset().union(*(observed.written[unit] for unit in units)) for units in stages]
    for s, memory in enumerate(written):
        _refuse_shared_writes(s, memory, captured, observed, homes, users)
    gives, later, shares = _routes(captured, homes, users, summed, ranks or range(len(stages)))
    for s, units in enumerate(stages):
        _refuse_stale_views(s, units, observed, frozenset(v for values in later[s].values() for v in values))
    return tuple(
        Section(
            units,
            parameters=_sources_read(captured, users, s, Parameter),
            buffers=_sources_read(captured, users, s, Buffer),
            constants=_sources_read(captured, users, s, Constant),
            batch=_sources_read(captured, users, s, BatchLeaf),
            repeats=repetitions[s].values,
            gets=_reverse(gives, s),
            gives=_freeze(gives[s]),
            results=results if s == len(stages) - 1 else (),
            earlier=_reverse(later, s),
            later=_freeze(later[s]),
            shares=_freeze(shares[s]),
            modified=frozenset(
                v for v in users if s in users[v] and homes.get(v) != s and observed.storage[v] in written[s]
            ),
            reassigned={buffer: new for buffer, new in reassigned.items() if homes[new] == s},
        )
        for s, units in enumerate(stages)
    )


def _users(
    stages: Sequence[Sequence[Unit]], results: tuple[Value, ...], repetitions: Sequence[Repetition]
) -> dict[Value, list[int]]:
    """Return, per value, the stages that need it, ascending, except those that repeat it.

    The last stage needs the results. A stage needs the buffers that it repeats units with.
    """
    users: dict[Value, set[int]] = defaultdict(set)
    for s, (units, repetition) in enumerate(zip(stages, repetitions, strict=True)):
        needed = [*[value for unit in units for value in unit.reads], *(results if s == len(stages) - 1 else ())]
        for value in (*[value for value in needed if value not in repetition.values], *repetition.buffers):
            users[value].add(s)
    return {value: sorted(found) for value, found in users.items()}


def _reassignments(
    captured: Captured,
    observed: Observed,
    stages: Sequence[Sequence[Unit]],
    homes: Mapping[Value, int],
    users: dict[Value, list[int]],
) -> Mapping[Value, Value]:
    """Return the reassigned buffers and their new values; make the stage that reassigns a buffer its only user.

    Raise `ClashError` if another stage uses the buffer, or modifies the new value in place.
    """
    for buffer, new in captured.reassigned.items():
        home, memory = homes[new], observed.storage[new]
        later = [s for s, units in enumerate(stages) if s > home and any(memory in observed.written[u] for u in units)]
        others = [s for s in (*users.get(buffer, ()), *later) if s != home]
        if others:
            raise ClashError(
                f"got the buffer {captured.sources[buffer][0]!r}, which is assigned there and used in stage "
                f"{others[0]} too, expected all uses in one stage. Move the cut.",
                home,
                new,
            )
        users[buffer] = [home]
    return captured.reassigned


_Table = dict[int, dict[int, list[Value]]]


def _routes(
    captured: Captured,
    homes: Mapping[Value, int],
    users: Mapping[Value, list[int]],
    summed: frozenset[str],
    ranks: Sequence[Hashable],
) -> tuple[_Table, _Table, _Table]:
    """Return, by pair of stages, the values sent, the values and parameters whose cotangents come back, and the
    parameters shared.
    """
    gives, later, shares = (defaultdict[int, dict[int, list[Value]]](lambda: defaultdict(list)) for _ in range(3))
    count = len(ranks) // (1 + len(captured.slices))
    for value in sorted(users, key=lambda one: (one in captured.sources, one)):
        source = captured.sources.get(value)
        if source is None:
            for chain in _chains(homes[value], [s for s in users[value] if s > homes[value]], count):
                latest = {ranks[chain[0]]: chain[0]}  # by rank, the last stage so far that has the value
                for a, b in pairwise(chain):
                    later[a][b].append(value)
                    gives[latest.get(ranks[b], a)][b].append(value)
                    latest[ranks[b]] = b
        elif isinstance(source, Parameter) and source.name in captured.trainable:
            for _, own in groupby(users[value], lambda s: s // count):
                readers = [*own]
                for a, b in pairwise(readers) if source.name not in summed else ():
                    later[a][b].append(value)
                for owner, holder in product(readers if source.name in summed else readers[:1], readers):
                    if owner != holder:
                        shares[owner][holder].append(value)
    return gives, later, shares


def _chains(home: int, users: Sequence[int], count: int) -> Iterator[Sequence[int]]:
    """Yield the ways of a value from its maker: along its users in the same slice, and from slice to slice.

    Stages are numbered through all slices, with `count` in each. Raise `CutError` for a user in a later slice that is
    another stage.
    """
    own, carried = [s for s in users if s // count == home // count], [s for s in users if s // count > home // count]
    yield [home, *own]
    for s in carried:
        if s % count != home % count:
            raise CutError(
                f"stage {s % count}: got a value in slice {s // count} that slice {home // count} made in stage "
                f"{home % count}, expected a carry to be made and read by the same stage. Move the cut so that what "
                "hands it on is within one stage, or compute it again in each slice."
            )
    if carried:
        yield range(home, carried[-1] + 1, count)


def _reverse(table: _Table, end: int) -> Routes:
    return {start: tuple(table[start][end]) for start in range(end) if start in table and end in table[start]}


def _freeze(row: Mapping[int, list[Value]]) -> Routes:
    return {end: tuple(row[end]) for end in sorted(row)}


def _sources_read(captured: Captured, users: Mapping[Value, list[int]], stage: int, kind: type) -> tuple[Value, ...]:
    return tuple(v for v, source in captured.sources.items() if isinstance(source, kind) and stage in users.get(v, ()))


def _refuse_shared_writes(
    stage: int,
    memory: frozenset[int],
    captured: Captured,
    observed: Observed,
    homes: Mapping[Value, int],
    users: Mapping[Value, list[int]],
) -> None:
    """Raise `ClashError` if `stage` modifies in place a parameter, a constant, or a value that other stages see."""
    outside = [v for v in users if observed.storage[v] in memory and homes.get(v, -1) < stage]
    for value in outside:
        source = captured.sources.get(value)
        if isinstance(source, Parameter):
            raise ClashError(
                f"got a forward that modifies the parameter {source.name!r} in place, expected parameters to be "
                "read-only. Make it a buffer, or compute a new tensor.",
                stage,
                value,
            )
        if isinstance(source, Constant):
            raise ClashError(
                "got an in-place change of a tensor that is neither a parameter nor a buffer, expected a buffer: the "
                "change would be lost after the step. Use register_buffer.",
                stage,
                value,
            )
        aliases = [v for v in outside if observed.storage[v] == observed.storage[value] and stage in users[v]]
        seen = [s for s in users[value] if s > stage or (s != stage and isinstance(source, Buffer))]
        if seen or len(aliases) > 1:
            what = f"the buffer {source.name!r}" if isinstance(source, Buffer) else "a value from another stage"
            where = f"used in stage {seen[0]} too" if seen else "arrives under two names (one is a view of the other)"
            raise ClashError(
                f"got {what} that is modified in place and {where}, expected in-place changes to stay within one "
                "stage. Move the cut so that all uses are in one stage, or compute a new tensor.",
                stage,
                value,
            )


def _refuse_stale_views(stage: int, units: Sequence[Unit], observed: Observed, leaving: frozenset[Value]) -> None:
    """Raise `ClashError` if a view leaves `stage` after its base was modified in place, and others use the base, too.

    Autograd regenerates such a view's graph at its next use. That would be in another stage, and gradients of the base
    would be summed in another order. Without other uses there is nothing to sum.
    """
    views: set[Value] = set()
    for k, unit in enumerate(units):
        stale = [v for v in views if observed.storage[v] in observed.written[unit] and v not in unit.makes]
        used = {*leaving, *(v for later in units[k + 1 :] for v in later.reads)} if stale else set[Value]()
        stale = [v for v in stale if any(observed.storage[v] == observed.storage[w] for w in used - {v})]
        if stale:
            raise ClashError(
                "got a view for another stage, taken before its memory was modified in place, expected one taken "
                "after the change, because others use the memory, too. Move the cut, or take the view later.",
                stage,
                stale[0],
            )
        views |= {v for v in unit.makes if v in leaving and v in observed.views}
