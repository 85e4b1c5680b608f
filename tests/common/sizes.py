# SPDX-License-Identifier: Apache-2.0
"""How many examples and cases a test runs by day, and how many by night."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations, product
from typing import Any

import pytest
from hypothesis import settings


def few(examples: int) -> int:
    """How many examples of a slow property: by day a third of these, and by night fifty times as many as said."""
    return examples * settings.default.max_examples // 30 if NIGHTLY else (examples + 2) // 3


NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"  # also in processes that tests start


def by_day(cases: Iterable[Any], every: int) -> list[Any]:
    """Every so many of the cases by day, and all of them by night."""
    return [*cases] if NIGHTLY else [*cases][::every]


def in_turn(cases: Iterable[Any], ways: Iterable[Any]) -> list[tuple[Any, Any]]:
    """By day each case in one of the ways, which take turns, and by night in all."""
    every = [*ways]
    return [(case, way) for k, case in enumerate(cases) for way in (every if NIGHTLY else [every[k % len(every)]])]


def covering_array(*dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """A few combinations of a value from each dimension, which have every value, and many pairs of values.

    They are as many as an additive model of the dimensions has parameters.

    >>> covering_array("abcd", [0, 1], [True, False])
    [('a', 0, True), ('b', 1, False), ('c', 0, False), ('d', 1, True), ('a', 1, False), ('b', 0, True)]
    """
    left = [frozenset(enumerate(row)) for row in product(*[range(len(one)) for one in dimensions])]
    pairs = {row: {*combinations(sorted(row), 2)} for row in left}
    chosen, missing, paired = list[frozenset[tuple[int, int]]](), {*chain(*left)}, set[Any]()
    for _ in range(1 + sum(len(one) - 1 for one in dimensions)):
        best = max(left, key=lambda row: (len(row & missing), len(pairs[row] - paired)))
        left.remove(best)
        chosen.append(best)
        missing -= best
        paired |= pairs[best]
    return [tuple(dimensions[k][place] for k, place in sorted(row)) for row in chosen]


def covering(**dimensions: Iterable[Any]) -> pytest.MarkDecorator:
    """Run a test with a covering array of its arguments by day, and with all their combinations by night.

    A mapping gives its values, under their names.
    """
    named = [_named(one) for one in dimensions.values()]
    rows = [*product(*named)] if NIGHTLY else covering_array(*named)
    cases = [pytest.param(*[value for _, value in row], id="-".join(name for name, _ in row)) for row in rows]
    return pytest.mark.parametrize(", ".join(dimensions), cases)


def _named(values: Iterable[Any]) -> list[tuple[str, Any]]:
    if isinstance(values, Mapping):
        return [*values.items()]
    return [(str(getattr(value, "__name__", value)), value) for value in values]


def sampled(cases: int) -> pytest.MarkDecorator:
    """By day so many of the cases of a test, spread evenly over the list, and by night all."""
    return pytest.mark.sampled(cases)


def drop_by_day(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of `sampled` tests that do not run by day."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items if not NIGHTLY else ():
        if item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped = []
    for some in cases.values():
        mark = some[0].get_closest_marker("sampled")
        assert mark is not None
        kept = {len(some) * k // mark.args[0] for k in range(mark.args[0])}
        dropped += [item for k, item in enumerate(some) if k not in kept]
    return dropped


by_night = pytest.mark.skipif(not NIGHTLY, reason="takes long; make nightly runs it")
