# SPDX-License-Identifier: Apache-2.0
"""Which blocks use which memory, and what passes between them, from the stages of a model cut everywhere.

Problem. Blocks are measured one by one, each as a stage. Stages of several blocks save less than the sum: a tensor that
one block makes and saves, and the next one saves too, is the same memory.

Idea. The tensors that cross between two blocks are known to both. So memory that holds one is recognized on either
side. Values that alias each other count as one piece of memory; so does a cotangent that a block passes on unchanged.

What crosses is read off the stages (`fpipe.stages.assembly`), so whatever they recompute rather than send costs no
bytes here either.

Limits. What a rank keeps for a later stage of its own does not count, unless one of the two saves it. A block that
saves a slice of what another made, or of a cotangent that it gets, keeps only the slice if it is on another stage, but
all of it on the same one. It counts as the slice. Recorded stages (`backward="graph"`) keep less than their blocks in
some places, and more in others: a graph of several blocks is simplified further.

Runs when a model is profiled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from fpipe.pipelines.footprint import (
    FakeArguments,
    Footprint,
    MemoryWatch,
    copy_changed,
    make_arrivals,
    measure_holdings,
)
from fpipe.planning.ranges import Arrival, Hop, Spread
from fpipe.record.captured import Value
from fpipe.record.validity import observe
from fpipe.runtime.contract import StageCrossing
from fpipe.stages.assembly import Assembly
from fpipe.stages.autograd import Autograd
from fpipe.stages.stage import ModelStage


@dataclass
class MemoryPieces:
    """Pieces of memory, and the blocks that hold them; pieces that share a tensor are joined.

    - `parent`: links that lead from a name to the name of its piece. `held`: per block and name, the bytes.
    """

    parent: dict[Hashable, Hashable] = field(default_factory=dict)
    held: dict[tuple[int, Hashable], int] = field(default_factory=dict)

    def find(self, name: Hashable) -> Hashable:
        """Return the name of the piece."""
        while self.parent.get(name, name) != name:
            name = self.parent[name]
        return name

    def add(self, block: int, names: Sequence[Hashable], size: int) -> None:
        """Add memory that a block holds under these names; they are one piece from now on."""
        first, *others = names
        for other in others:
            self.parent[self.find(other)] = self.find(first)
        self.held[block, first] = self.held.get((block, first), 0) + size

    def pieces(self) -> dict[Hashable, dict[int, int]]:
        """Return the bytes of each piece that each block holds."""
        found = defaultdict[Hashable, dict[int, int]](lambda: defaultdict(int))
        for (block, name), size in self.held.items():
            if size:
                found[self.find(name)][block] += size
        return found


@dataclass(frozen=True)
class BlockMemory:
    """The memory of the blocks of a model, for a microbatch.

    - `activation`, `residual`: what is kept after a forward, and after the input half of a backward.
    - `arrivals`: what stages get from earlier ones. `versions`: per block, the bytes of the buffers that it modifies,
      and of what it gets from the slice before.
    """

    activation: tuple[Spread, ...]
    residual: tuple[Spread, ...]
    arrivals: tuple[Arrival, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, assembly: Assembly, holdings: Sequence[Sequence[StageHolding]]) -> BlockMemory:
        """Return the memory of an assembly whose stages are single blocks, given what each of them holds."""
        storage = observe(assembly.captured).storage
        activation, residual, versions = MemoryPieces(), MemoryPieces(), [0] * len(assembly.stages)
        entering = list[tuple[Arrival, Hashable, bool]]()
        count = len(assembly.stages)
        for stage, found in zip(assembly.stages, holdings, strict=True):
            s, names = stage.index, _crossing_names(assembly, stage, storage)
            # Sections are numbered through all slices: a value from this stage is a carry.
            senders = {value: p % count for p, values in assembly.sections[s].earlier.items() for value in values}
            sources = [senders[value] for one in stage.gets for value in one.values]
            for k, (held, crossing, unsaved) in enumerate(found):
                known = [names[what][number] for what, number in crossing] or [("own", s, k)]
                got = [number for what, number in crossing if what == "gets"]
                if s in (sources[number] for number in got):
                    got, unsaved = [], False
                activation.add(s, known, 0 if unsaved else held.activation)
                residual.add(s, known, held.residual)
                versions[s] += 0 if got else held.inputs
                entering += [(Arrival(sources[number], s, held.inputs, s), known[0], unsaved) for number in got[:1]]
        pieces, arrivals = activation.pieces(), list[Arrival]()
        for one, name, unsaved in entering:
            users = [*pieces.get(activation.find(name), ()), count]
            arrivals.append(one._replace(saved=min(s for s in users if s >= one.target)) if unsaved else one)
        spreads = _spread(pieces), _spread(residual.pieces())
        return cls(*spreads, _sum_arrivals(arrivals), tuple(versions))

    @classmethod
    def join(cls, slices: Sequence[BlockMemory]) -> BlockMemory:
        """Return the memory of the blocks for a microbatch, given that for each slice of it."""
        return cls(
            _sum_spreads(spread for one in slices for spread in one.activation),
            _sum_spreads(spread for one in slices for spread in one.residual),
            _sum_arrivals(arrival for one in slices for arrival in one.arrivals),
            tuple(map(sum, zip(*[one.versions for one in slices], strict=True))),
        )


def _spread(pieces: Mapping[Hashable, Mapping[int, int]]) -> tuple[Spread, ...]:
    """Return each piece with its blocks."""
    return _sum_spreads(Spread(max(sizes.values()), tuple(sorted(sizes))) for sizes in pieces.values())


def _sum_spreads(spreads: Iterable[Spread]) -> tuple[Spread, ...]:
    """Return memory in the order of its blocks; that of the same blocks is added up."""
    found = defaultdict[tuple[int, ...], int](int)
    for size, blocks in spreads:
        found[blocks] += size
    return tuple(Spread(size, blocks) for blocks, size in sorted(found.items()))


def _sum_arrivals(arrivals: Iterable[Arrival]) -> tuple[Arrival, ...]:
    """Return arrivals in order; those between the same blocks are added up."""
    found = defaultdict[tuple[int, int, int], int](int)
    for source, target, size, saved in arrivals:
        found[source, target, saved] += size
    return tuple(Arrival(source, target, size, saved) for (source, target, saved), size in sorted(found.items()))


class StageHolding(NamedTuple):
    """A `Holding`, and whether the stage holds it only because it got it: nothing in the stage saves it."""

    held: Footprint
    crossing: tuple[tuple[str, int], ...]
    unsaved: bool


def find_holdings(given: FakeArguments) -> list[StageHolding]:
    """Return the memory of a microbatch on a stage, whose arguments are fake tensors."""
    saved = _find_saved(given)
    given = given._replace(stage=replace(given.stage, keeps=()))  # which follows from a placement, not known here
    return [
        StageHolding(
            *one,
            unsaved=saved is not None
            and one.held.activation > 0
            and any(what == "gets" for what, _ in one.crossing)
            and not any(what == "gets" and k in saved for what, k in one.crossing),
        )
        for one in measure_holdings(*given)
    ]


def _find_saved(given: FakeArguments) -> frozenset[int] | None:
    """Return which of the values that a stage gets something in it saves; `None` if it holds nothing else.

    Autograd holds all those whose cotangents are wanted, because they are leaves of its graph. So give it values that
    are not leaves, and look which of them stay alive.
    """
    stage, params, buffers, feed = given
    functions = stage.functions
    if not isinstance(functions, Autograd):
        return None
    entering = feed(0)
    first = len(params) + len(buffers) + len(functions.constants) + len(entering)
    wanted = {k - first for k in functions.wiring.differentiated}
    inner = replace(functions, wiring=replace(functions.wiring, differentiated=()))
    with MemoryWatch() as made:
        leaves = make_arrivals(stage.gets)
        moved = tuple([one.requires_grad_().clone() if k in wanted else one for k, one in enumerate(leaves)])
        numbers = made.find(moved)
        *_, residuals = inner.forward(params, copy_changed(stage, buffers), (*entering, *moved), 0)
        kept = None if residuals is None else residuals._replace(leaves=(), arguments=())
        del leaves, moved, residuals, _
        alive = made.alive()
        del kept
    return frozenset(k for k, found in enumerate(numbers) if any(number in alive for number in found))


def _crossing_names(
    assembly: Assembly, stage: ModelStage, storage: Mapping[Value, int]
) -> Mapping[str, Sequence[Hashable]]:
    """Return the names of the memory of all tensors that cross to or from a stage.

    A value is named after its memory; a cotangent after its value and the stage that it is sent to.
    """
    section = assembly.sections[stage.index]
    return {
        "gets": [("value", storage[value]) for one in stage.gets for value in one.values],
        "leaves": [("value", storage[value]) for value in section.leaving],
        "pulled_by": [("cotangent", stage.index, value) for one in stage.pulled_by for value in one.values],
        "pulls": [("cotangent", one.target, value) for one in stage.pulls for value in one.values],
    }


def find_hops(assembly: Assembly) -> tuple[Hop, ...]:
    """Return what passes between the stages of an assembly, per microbatch, if each is on a rank of its own."""
    forward, back = (defaultdict[tuple[int, int], int](int) for _ in range(2))
    count = len(assembly.stages)
    sizes = {value: size for stage in assembly.stages for value, size in _sizes(stage.gives)}
    for s, section in enumerate(assembly.sections):
        for t, values in section.later.items():
            forward[s, t % count] += sum(sizes.get(value, 0) for value in values)  # a parameter is not sent
        for one in assembly.stages[s].pulls:
            back[one.target, s] += sum(size for _, size in _sizes([one]))
    for edges in forward, back:
        for s in range(count):
            edges.pop((s, s), None)  # a carry stays on its rank
    return tuple(Hop(*ends, forward[ends], back[ends]) for ends in sorted({*forward, *back}))


def join_hops(slices: Iterable[Sequence[Hop]]) -> tuple[Hop, ...]:
    """Return what passes between stages in one message at most, given that of each slice."""
    found: dict[tuple[int, int], Hop] = {}
    for hop in chain.from_iterable(slices):
        other = found.get(hop[:2], hop)
        found[hop[:2]] = hop._replace(forward=max(hop.forward, other.forward), back=max(hop.back, other.back))
    return tuple(hop for _, hop in sorted(found.items()))


def _sizes(crossings: Iterable[StageCrossing]) -> Iterator[tuple[Value, int]]:
    """Yield each value that crosses, with its bytes."""
    for one in crossings:
        yield from ((value, spec.buffer().numel()) for value, spec in zip(one.values, one.specs, strict=True))


def find_parameters(assembly: Assembly) -> tuple[Spread, ...]:
    """Return the bytes of parameters, with the stages that hold them."""
    specs, users = assembly.parameters, defaultdict[str, list[int]](list)
    for stage in assembly.stages:
        for name in (*stage.parameters, *stage.unused):
            users[name].append(stage.index)
    return _sum_spreads(Spread(specs[name].nbytes, tuple(blocks)) for name, blocks in users.items() if name in specs)
