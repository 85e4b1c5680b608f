# SPDX-License-Identifier: Apache-2.0
"""Strategies for sizes, costs and stage graphs to test schedules with, and for schedules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

from hypothesis import reject
from hypothesis import strategies as st

from schedules.arguments import require_types
from schedules.errors import ArgumentError, SizeError, quote
from schedules.language.graph import Edge, Graph
from schedules.language.schedule import SIZES, Schedule
from schedules.playing.costs import Costs

RANKS, MICROBATCHES, CHUNKS = 8, 12, 4


def sizes() -> st.SearchStrategy[tuple[int, int]]:
    """Return a strategy for 1 to 8 ranks and 1 to 12 microbatches."""
    return st.tuples(st.integers(1, RANKS), st.integers(1, MICROBATCHES))


def costs() -> st.SearchStrategy[Costs]:
    """Return a strategy for costs in quarters, whose sums are exact in floating point."""
    times = st.integers(1, 20).map(lambda quarters: quarters / 4)
    passes, maybe = dict.fromkeys("FBIW", times), ("comm", "UNSHARD", "REDUCE_GRAD", "OFFLOAD", "RELOAD")
    return st.builds(Costs, **passes, **dict.fromkeys(maybe, st.just(0) | times))


@st.composite
def graphs(draw: st.DrawFn, stages: int) -> Graph:
    """Draw a stage graph in which every stage but the first is fed by an earlier one.

    Cotangents flow back along some of the values' edges and perhaps along others; some stages share parameters, whose
    gradients go one way, the other, or both.
    """

    def edges(smallest: int) -> frozenset[Edge]:
        starts = (draw(st.sets(st.integers(0, t - 1), min_size=smallest, max_size=3)) for t in range(1, stages))
        return frozenset((s, t) for t, these in enumerate(starts, 1) for s in these)

    values = edges(1)
    dead = draw(st.sets(st.sampled_from(sorted(values)), max_size=3)) if values else set()
    extra = draw(st.just(frozenset[Edge]()) | st.builds(edges, st.just(0)))
    forth, back = (draw(st.just(frozenset[Edge]()) | st.builds(edges, st.just(0))) for _ in "ab")
    shared = forth | {(t, s) for s, t in back}
    return Graph(stages, values, (values - dead) | extra, shared)


def schedules(factories: Sequence[Callable[..., Schedule]]) -> st.SearchStrategy[Schedule]:
    """Return a strategy for schedules of the factories, with `sizes()`, and 1 to 4 for every other `int` parameter.

    Sizes for which the factory raises `SizeError` are skipped.
    """
    require_types(schedules, locals())
    if not factories or not all(map(callable, factories)):
        raise ArgumentError(
            f"schedules: got factories={quote(factories)}, expected functions. Pass [one_f_one_b], say."
        )
    return _schedules(factories)


@st.composite
def _schedules(draw: st.DrawFn, factories: Sequence[Callable[..., Schedule]]) -> Schedule:
    factory: Callable[..., Schedule] = draw(st.sampled_from(factories))
    ranks, microbatches = draw(sizes())
    others = {name: draw(st.integers(1, CHUNKS)) for name in _int_parameters(factory)}
    try:
        return factory(ranks=ranks, microbatches=microbatches, **others)
    except SizeError:
        reject()


def grid_of(factory: Callable[..., Schedule], given: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the values to try for each size that the factory takes: those `given`, or the ranges of `schedules`.

    Raise `ArgumentError` for sizes of a parameter that it does not have, and for none.
    """
    tried = dict[str, Sequence[int]](ranks=range(1, RANKS + 1), microbatches=range(1, MICROBATCHES + 1))
    tried |= dict.fromkeys(_int_parameters(factory), range(1, CHUNKS + 1))
    known = [*inspect.signature(factory).parameters]
    for name, values in given.items():
        if name not in known or not isinstance(values, Sequence) or not values:
            raise ArgumentError(
                f"conformance: got sizes={{{name!r}: {quote(values)}}}, expected values for parameters of "
                f"{factory!r}: {', '.join(known)}. Correct the name, or list at least one value."
            )
    return tried | dict(given)


def _int_parameters(factory: Callable[..., Schedule]) -> list[str]:
    """Return the factory's parameters, besides ranks and microbatches, that are an `int` or named like a size."""
    others = [p for p in inspect.signature(factory).parameters.values() if p.name not in ("ranks", "microbatches")]
    return [p.name for p in others if p.annotation in (int, "int") or type(p.default) is int or p.name in SIZES]
