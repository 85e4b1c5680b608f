# SPDX-License-Identifier: Apache-2.0
"""How many examples and cases a test runs by day, and how many by night."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def few(examples: int) -> int:
    """How many examples of a slow property by day; by night, as many times more as of all others."""
    return examples * max(1, settings.default.max_examples // 30)


NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"  # also in processes that tests start


def by_day(cases: Iterable[Any], every: int) -> list[Any]:
    """Every so many of the cases by day, and all of them by night."""
    return [*cases] if NIGHTLY else [*cases][::every]


def in_turn(cases: Iterable[Any], ways: Iterable[Any]) -> list[tuple[Any, Any]]:
    """By day each case in one of the ways, which take turns, and by night in all."""
    every = [*ways]
    return [(case, way) for k, case in enumerate(cases) for way in (every if NIGHTLY else [every[k % len(every)]])]


by_night = pytest.mark.skipif(not NIGHTLY, reason="takes long; make nightly runs it")
