# SPDX-License-Identifier: Apache-2.0
"""Choose where to cut: turn the user's arguments into positions in the sequence of units.

A partition is a tuple of ascending positions: stage `s + 1` begins at unit `partition[s]`. The user says where each
stage begins (`Explicit`), or leaves the choice to fpipe (`Evenly`): then the stages' parameter counts are as even as
the allowed places permit. No stage may begin inside a call that is sealed or unsplittable; and none that fpipe chooses
inside one that torch may run as a single operator in evaluation, if there is another choice.

A search over many cuts should not have to ask for each whether it is allowed, which can depend on other cuts: a module
that modifies a tensor in place may have to be in the same stage as another that reads it. So `find_places` finds places
at which a model may be cut in any combination.

Runs when a pipeline is built, or a model profiled; `cut_at_marks` runs when the model is captured for another kind of
microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from fpipe.cutting.balance import Forbidden, Positions, Refusal, balance, refusals
from fpipe.cutting.calls import Calls, Mark, Selector, describe_selector, is_pattern, outermost, selects
from fpipe.cutting.purity import Purity
from fpipe.errors import CutError
from fpipe.record.captured import BatchLeaf, Call, Captured, Parameter
from fpipe.record.model.places import LOSS
from fpipe.record.validity import observe
from fpipe.tensors.arguments import describe_argument
from schedules import Schedule
from schedules.arguments import each

SLACK = 1.1
Item: TypeAlias = str | int
CutsArgument: TypeAlias = Item | type[nn.Module] | Iterable[Item | type[nn.Module]] | None


class Explicit(NamedTuple):
    """Cuts at the beginning of each of `at`: names of modules, or indices of the calls that the model itself makes."""

    at: tuple[Item, ...]


class Evenly(NamedTuple):
    """Cuts as even as possible; if `among` is not empty, only at the beginnings of calls that it selects."""

    stages: int
    among: tuple[Selector, ...]


class Marked(NamedTuple):
    """Cuts at the beginnings and ends of the same calls as in another capture: `marks` has those of each stage."""

    marks: tuple[tuple[Mark, ...], ...]


class Cuts(NamedTuple):
    """The user's choice of cuts, the modules in whose calls no stage may begin, and those that run as Python."""

    where: Explicit | Evenly | Marked
    unsplittable: tuple[Selector, ...] = ()
    whole: tuple[Selector, ...] = ()

    @property
    def stages(self) -> int:
        """The number of stages."""
        where = self.where
        if isinstance(where, Evenly):
            return where.stages
        return len(where.marks if isinstance(where, Marked) else where.at) + 1

    def positions(self, captured: Captured, model: nn.Module) -> Positions:
        """Return the positions at which stages after the first begin; raise `CutError` if none are possible."""
        calls = Calls.of(captured, model)
        if isinstance(self.where, Marked):
            return cut_at_marks(calls, self.where.marks, "captured again")
        barriers = self._barriers(calls)
        if isinstance(self.where, Explicit):
            return cut_explicitly(calls, self.where.at, barriers)
        pure = Purity.of(captured, observe(captured), (), ()).pure
        return cut_evenly(captured, calls, self.where, barriers, refusals, pure)

    def places(self, captured: Captured, model: nn.Module) -> Positions:
        """Return every position at which the user allows a stage after the first to begin, ascending.

        Cuts that are balanced may be at any of them, but not after the end of the model: there is only the loss.
        """
        if not isinstance(self.where, Evenly):
            return self.positions(captured, model)
        calls, end = Calls.of(captured, model), _end_of_model(captured)
        barriers = self._barriers(calls)
        found = [k for k in _places(calls, self.where.among) if k < end]
        allowed = [k for k in found if not any(barrier.holds(k) for barrier in barriers)]
        return tuple(calls.outside_fused(allowed) or allowed)

    def names(self, model: nn.Module, loss: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the modules that may branch on data, and of those that run as Python, the loss included.

        The former include the latter.
        """
        kinds = [*((name, type(module)) for name, module in model.named_modules()), (LOSS, type(loss))]
        opaque, whole = (
            tuple(name for name, kind in kinds if any(selects(s, name, kind) for s in selectors))
            for selectors in ((*self.unsplittable, *self.whole), self.whole)
        )
        return opaque, whole

    def _barriers(self, calls: Calls) -> list[Barrier]:
        sealed = [Barrier(call, call.sealed) for call in calls.sealed]
        for where, selectors in (("unsplittable", self.unsplittable), ("whole", self.whole)):
            named = [call for one in selectors if one != LOSS for call in calls.select(where, one)]
            sealed += [Barrier(call, f"it can't be cut, because of {where}") for call in named]
        return sealed


class Barrier(NamedTuple):
    """A call in which no stage may begin, and why."""

    call: Call
    reason: str

    def __str__(self) -> str:
        return f"{repr(self.call.path) if self.call.path else 'the model'} ({self.call.kind.__name__}): {self.reason}"

    def holds(self, position: int) -> bool:
        """Return whether a position is inside the call."""
        return self.call.start < position < self.call.stop


def parse_cuts(
    cuts: CutsArgument,
    stages: int | None,
    unsplittable: Selector | Iterable[Selector],
    schedule: Schedule,
    whole: Selector | Iterable[Selector] = (),
) -> Cuts:
    """Parse the user's arguments; raise `CutError` if they are invalid or do not match the schedule's stage count."""
    parsed = parse_places(cuts, unsplittable, schedule.stages if stages is None else stages, whole)
    where = parsed.where
    if stages is not None and isinstance(where, Explicit):
        raise CutError("cuts, stages: got both, expected one of them. Drop stages; cuts determine it.")
    count = parsed.stages
    if count != schedule.stages:
        raise CutError(
            f"cuts: got {count} stages, expected {schedule.stages} for {describe_argument(schedule)}. Pass "
            f"{schedule.stages - 1} cuts, or change the schedule's ranks."
        )
    return parsed


def parse_places(
    cuts: CutsArgument,
    unsplittable: Selector | Iterable[Selector],
    stages: int,
    whole: Selector | Iterable[Selector] = (),
) -> Cuts:
    """Parse the arguments that say where stages may begin, for a balanced choice of `stages`; raise `CutError`."""
    items = _items("cuts", cuts)
    kept = _selectors("unsplittable", unsplittable), _selectors("whole", whole)
    if cuts is None or (items and all(map(is_pattern, items))):
        return Cuts(Evenly(stages, items), *kept)
    if any(is_pattern(item) or isinstance(item, bool) or not isinstance(item, str | int) for item in items):
        raise CutError(
            f"cuts: got {list(items)!r}, expected names and indices of modules, or else only classes and patterns. "
            "Write cuts=['blocks.1', 'head'], cuts=Block, or cuts='blocks.*'."
        )
    return Cuts(Explicit(items), *kept)


def _selectors(name: str, argument: Any) -> tuple[Selector, ...]:
    """Return the selectors in an argument; raise `CutError` if there is anything else."""
    found = _items(name, argument)
    if not all(isinstance(item, str | type) for item in found):
        raise CutError(
            f"{name}: got {list(found)!r}, expected names, classes and patterns. Write {name}=['blocks.1', Attention]."
        )
    return found


def _items(name: str, argument: Any) -> tuple[Any, ...]:
    """Return one item, an iterable of items, or `None`, as a tuple of items."""
    if argument is None:
        return ()
    several = isinstance(argument, Iterable) and not isinstance(argument, str | type)
    return tuple(each(name, argument, object, CutError)) if several else (argument,)


def cut_explicitly(calls: Calls, at: Sequence[Item], barriers: Sequence[Barrier]) -> Positions:
    """Return the positions at which these calls, by name or index, begin.

    Raise `CutError` for one that is unknown, repeated, out of order, or at which no stage can begin.
    """
    positions = [(calls.call(item) if isinstance(item, str) else calls.at(item)).start for item in at]
    for (a, start), (b, end) in pairwise([("the model's first operation", 0), *zip(at, positions, strict=True)]):
        if a == b:
            raise CutError(f"cuts: got {b!r} twice, expected each name once. Drop one.")
        if end < start:
            raise CutError(f"cuts: got {b!r} after {a!r}, expected the order of execution. Put {b!r} first.")
        if end == start:
            raise CutError(
                f"cuts: got {a!r} and {b!r} with no operation between them, expected at least one. Drop one of the "
                "two, or cut later."
            )
        for barrier in barriers:
            if barrier.holds(end):
                raise CutError(
                    f"cuts: got {b!r}, inside {barrier}; expected a module outside it. Cut at its beginning, or "
                    "after it."
                )
    return tuple(positions)


def cut_evenly(
    captured: Captured,
    calls: Calls,
    where: Evenly,
    barriers: Sequence[Barrier],
    refusing: Callable[[Captured], Callable[[Positions], Refusal | None]],
    pure: Collection[int] = (),
) -> Positions:
    """Return cuts for which the largest stage has as few parameters as possible.

    Cut where calls of modules begin or end, or only where the calls that `where` selects begin; never inside
    `barriers`, nor where `refusing` refuses. If nothing is selected, let the largest stage be up to a tenth larger, and
    among these choices minimize the number of values that cross cuts, except those of `pure` units, which stages make
    themselves; then the sum of squared sizes. The loss has a stage to itself only if there is no other choice: without
    it, that stage would have nothing to compute; and a stage without parameters is chosen only if there is no other.
    What scales the loss is no stage. Raise `CutError` if there are too few places.
    """
    if where.stages == 1:
        return ()
    end, last = _end_of_model(captured), _end_of_loss(captured)
    found = [k for k in _places(calls, where.among) if k < last]
    places = [k for k in found if not any(barrier.holds(k) for barrier in barriers)]
    hit = [barrier for barrier in barriers if any(barrier.holds(k) for k in found)]
    if len(places) < where.stages - 1:
        raise CutError(_too_few(where, len(places), hit))
    sizes = [size + 1 for size in _parameters(captured)]
    crossing, slack = (_crossing(captured, pure), SLACK) if not where.among else ([0] * len(sizes), 1.0)
    refusal, reason = refusing(captured), ""
    inside = [k for k in places if k < end]
    bare = [*_without_parameters(captured)]
    for allowed, forbidden in product((calls.outside_fused(inside), inside, places), (bare, ())):
        chosen = balance(allowed, sizes, where.stages, refusal, crossing, slack, forbidden)
        if not isinstance(chosen, Refusal):
            return chosen
        reason = chosen.reason
    raise CutError(_too_few(where, len(places), hit, reason))


def _end_of_model(captured: Captured) -> int:
    """Return the position after the last unit that makes an output of the model; what follows is the loss."""
    ends = [k for k, unit in enumerate(captured.units, 1) if not {*unit.makes}.isdisjoint(captured.outputs)]
    return max(ends, default=len(captured.units))


def _end_of_loss(captured: Captured) -> int:
    """Return the position after the last unit of the loss function; what follows scales what it returns."""
    ends = [k for k, unit in enumerate(captured.units, 1) if unit.path.partition(".")[0] == LOSS]
    return max([_end_of_model(captured), *ends])


def cut_at_marks(calls: Calls, stages: Sequence[Sequence[Mark]], what: str) -> Positions:
    """Return the positions of the marks at which stages after the first begin in another capture of the same model.

    Raise `CutError`, naming this capture `what`, if a stage has no operations here, or its beginning is not found.
    """
    found: list[int] = []
    for stage, marks in enumerate(stages, 1):
        place = calls.position_of(marks)
        if place is None or place <= (found or [0])[-1] or place >= len(calls.units):
            raise CutError(
                f"stage {stage}, {what}: got no operations, or no beginning at {' or '.join(map(str, marks))}, "
                "where it begins in the example; expected the same modules to run. Cut between modules that run in "
                f"training and in evaluation, for every batch.{calls.advise_on_fused(marks)}"
            )
        found.append(place)
    return tuple(found)


def find_slices(captured: Captured, count: int) -> tuple[int, ...]:
    """Return the positions of the units at which slices after the first begin, in the record of all of them."""
    outer = outermost(call for call in captured.calls if not call.path)
    if len(outer) != count:
        raise CutError(
            f"(root): got {len(outer)} calls of the model in the record, expected {count}, one for each slice. Record "
            'it with the front end "trace".'
        )
    found = []
    for call in outer[1:]:
        start = call.start
        while captured.units[start - 1].does.startswith("narrow") and all(
            isinstance(captured.sources.get(value), BatchLeaf) for value in captured.units[start - 1].reads
        ):
            start -= 1
        found.append(start)
    return tuple(found)


def cut_slices(captured: Captured, model: nn.Module, marks: Sequence[Sequence[Mark]], first: Positions) -> Positions:
    """Return the positions at which all stages of all slices begin but the very first; `first` are those of slice 0.

    Stages begin at the same calls in each slice. Raise `CutError` if one of them does not take place.
    """
    found = [*first]
    for k, start in enumerate(captured.slices, 1):
        calls = Calls.of(captured.slice(k), model)
        found += [start, *(start + position for position in cut_at_marks(calls, marks, f"slice {k}"))]
    return tuple(found)


def _places(calls: Calls, among: Sequence[Selector]) -> list[int]:
    """Return the positions at which stages after the first may begin, ascending."""
    starts = {call.start for selector in among for call in calls.select("cuts", selector)}
    edges = starts if among else {edge for call in calls.listed for edge in (call.start, call.stop)}
    return sorted(edge for edge in edges if 0 < edge < len(calls.units))


def _too_few(where: Evenly, count: int, barriers: Sequence[Barrier], refused: str = "") -> str:
    shown = [*map(str, barriers[:3]), *["..."] * (len(barriers) > 3)]
    why = f" No stage may begin inside {'; '.join(shown)}." if barriers else ""
    why += f" The last choice was rejected. {refused}" if refused else ""
    if where.among:
        names = " and ".join(map(describe_selector, where.among))
        return (
            f"cuts: got {count} calls of {names} at which a stage can begin, expected at least {where.stages - 1} for "
            f"{where.stages} stages (the first begins at the model's first operation).{why} Select more modules, or "
            "use fewer stages."
        )
    return (
        f"stages: got {where.stages}, expected at most {count + 1}, the number of modules that run one after the "
        f"other, the loss among them.{why} Use fewer stages, or split a module."
    )


def _crossing(captured: Captured, pure: Collection[int]) -> list[int]:
    """Return, by position, how many values made before it are read at or after it, but not those of `pure` units."""
    change = [0] * (len(captured.units) + 2)
    last = {value: k for k, unit in enumerate(captured.units) for value in unit.reads}
    for made, unit in enumerate(captured.units):
        for value in unit.makes if made not in pure else ():
            change[made + 1] += 1
            change[max(last.get(value, made), made) + 1] -= 1
    return list(accumulate(change))


def _parameters(captured: Captured) -> list[int]:
    """Return, by unit, the number of parameter elements that it is the first to read."""
    seen: set[int] = set()
    sizes = []
    for unit in captured.units:
        new = [v for v in unit.reads if isinstance(captured.sources.get(v), Parameter) and v not in seen]
        seen.update(new)
        sizes.append(sum(captured.fakes[value].numel() for value in new))
    return sizes


def _without_parameters(captured: Captured) -> Iterator[Forbidden]:
    """Yield the stages in which no unit reads a parameter: those within each run of such units."""
    own = [any(isinstance(captured.sources.get(v), Parameter) for v in unit.reads) for unit in captured.units]
    begin = 0
    for stop in [*(k for k, reads in enumerate(own) if reads), len(own)]:
        if begin < stop:
            yield Forbidden(range(begin, stop), range(begin + 1, stop + 1))
        begin = stop + 1


def find_places(captured: Captured, model: nn.Module, cuts: Cuts, most: int) -> Positions:
    """Return positions at which stages after the first may begin, ascending, such that any choice of them is allowed.

    They are among those that the user's `cuts` allow. If these leave the choice to fpipe, and there are more than
    `most`, leave out those within the innermost modules, then those within the modules around them, and so on. Raise
    `CutError` if the model can't be run at all.
    """
    places, refusal, end = [*cuts.places(captured, model)], refusals(captured), len(captured.units)
    if isinstance(cuts.where, Evenly) and not cuts.where.among:
        places = _outermost(places, Calls.of(captured, model), most)
    while (refused := refusal(tuple(places))) is not None:
        largest = sorted(refused.stages, key=lambda one: -len(one.begins) * len(one.stops))
        before = len(places)
        for forbidden in largest:
            places = _without(places, forbidden, end)
        if len(places) == before:
            raise CutError(refused.reason)
    return tuple(places)


def _outermost(places: Sequence[int], calls: Calls, most: int) -> list[int]:
    """Return at most so many places: those at the edges of the outermost calls."""
    depth: dict[int, int] = {}
    running: list[Call] = []
    for call in calls.listed:
        while running and running[-1].stop <= call.start:
            running.pop()
        for edge in (call.start, call.stop):
            depth[edge] = min(len(running), depth.get(edge, len(running)))
        running.append(call)
    deepest = max(depth.values(), default=0)
    for limit in range(deepest, 0, -1):
        found = [place for place in places if depth.get(place, 0) <= limit]
        if len(found) <= most:
            return found
    return [place for place in places if depth.get(place, 0) == 0]


def _without(places: Sequence[int], forbidden: Forbidden, end: int) -> list[int]:
    """Return the places without those in one of the two ranges, so that no stage is forbidden; all if none is.

    The model's beginning and its end are places that can't be dropped.
    """
    begins = [place for place in (0, *places) if place in forbidden.begins]
    stops = [place for place in (*places, end) if place in forbidden.stops]
    if not any(begin < stop for begin in begins for stop in stops):
        return [*places]
    droppable = [some for some, fixed in ((begins, 0), (stops, end)) if fixed not in some]
    dropped = min(droppable, key=len, default=[])
    return [place for place in places if place not in dropped]
