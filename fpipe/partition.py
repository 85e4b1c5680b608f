# SPDX-License-Identifier: Apache-2.0
"""Where to cut: from module names, or evenly by parameters, to positions in the sequence of units.

A partition is a tuple of ascending positions: stage `s + 1` begins at unit `partition[s]`.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

from fpipe.capture.contract import Captured, Parameter, Unit
from fpipe.errors import CutError


def cut_at(units: Sequence[Unit], cuts: Sequence[str], known: Iterable[str]) -> tuple[int, ...]:
    """The positions at which the modules `cuts` are first called; `known` are the names of the model's modules.

    Raises `CutError` for a name that is unknown, repeated, out of order, or at which no stage can begin.
    """
    known = dict.fromkeys([*known, *[unit.path for unit in units]])
    known.pop("", None)
    positions = [_position(units, name, known) for name in cuts]
    for (a, start), (b, end) in pairwise([("the model's first operation", 0), *zip(cuts, positions, strict=True)]):
        if a == b:
            raise CutError(f"cuts: got {b!r} twice, expected each name once. Drop one.")
        if end < start:
            raise CutError(f"cuts: got {b!r} after {a!r}, expected the order of execution. Put {b!r} first.")
        if end == start:
            raise CutError(
                f"cuts: got {a!r} and {b!r} with no operation between them, expected at least one. Drop one of the "
                "two, or cut later."
            )
    return tuple(positions)


def _position(units: Sequence[Unit], name: str, known: Iterable[str]) -> int:
    if name not in known:
        close = difflib.get_close_matches(str(name), list(known), n=3) or list(known)[:8]
        raise CutError(f"cuts: got {name!r}, expected the name of a module. Did you mean one of {close}?")
    for position, unit in enumerate(units):
        path = unit.path.split("@")[0]
        if path == name or path.startswith(f"{name}."):
            return position
    raise CutError(
        f"cuts: got {name!r}, a module that runs no operation of its own (no_grad and autocast regions are one "
        "operation of the module around them), expected one that does. Name the module that runs next instead."
    )


def even(captured: Captured, stages: int) -> tuple[int, ...]:
    """Cut into `stages` stages so that the largest has as few parameters as possible.

    Cuts are made between modules, and only where no more values cross than needed to have enough places to cut. The
    bottleneck is minimal over these places (the chain partition problem). Raises `CutError` if there are too few.
    """
    if stages == 1:
        return ()
    units = captured.units
    places = [k for k in range(1, len(units)) if units[k].path != units[k - 1].path]
    if len(places) < stages - 1:
        raise CutError(
            f"stages: got {stages}, expected at most {len(places) + 1}, the number of modules that run one after the "
            "other. Use fewer stages, or split a module."
        )
    crossing = _crossing(captured)
    bound = sorted(crossing[k] for k in places)[stages - 2]
    places = [k for k in places if crossing[k] <= bound]
    sizes = [size + 1 for size in _parameters(captured)]
    return _bottleneck(places, sizes, stages)


def _crossing(captured: Captured) -> list[int]:
    """Per position, how many values made before it are read at or after it."""
    count = [0] * (len(captured.units) + 1)
    last = {value: k for k, unit in enumerate(captured.units) for value in unit.reads}
    for made, unit in enumerate(captured.units):
        for value in unit.makes:
            for k in range(made + 1, last.get(value, made) + 1):
                count[k] += 1
    return count


def _parameters(captured: Captured) -> list[int]:
    """Per unit, the number of parameter elements that it is the first to read."""
    seen: set[int] = set()
    sizes = []
    for unit in captured.units:
        new = [v for v in unit.reads if isinstance(captured.sources.get(v), Parameter) and v not in seen]
        seen.update(new)
        sizes.append(sum(captured.fakes[value].numel() for value in new))
    return sizes


def _bottleneck(places: Sequence[int], sizes: Sequence[int], stages: int) -> tuple[int, ...]:
    """The least bound under which a greedy fill needs no more than `stages` stages, by bisection; then fill up."""
    edges = [0, *places, len(sizes)]
    pieces = [sum(sizes[a:b]) for a, b in pairwise(edges)]
    least = bisect_left(range(sum(pieces)), True, lo=max(pieces), key=lambda bound: len(_fill(pieces, bound)) < stages)
    starts = _fill(pieces, least)
    spare = [k for k in range(1, len(pieces)) if k not in starts]
    chosen = sorted([*starts, *spare[: stages - 1 - len(starts)]])
    return tuple(edges[k] for k in chosen)


def _fill(pieces: Sequence[int], bound: int) -> list[int]:
    """Where new stages begin if each takes pieces while their sum stays within `bound`."""
    starts, total = [], 0
    for k, piece in enumerate(pieces):
        if total + piece > bound and k:
            starts.append(k)
            total = 0
        total += piece
    return starts
