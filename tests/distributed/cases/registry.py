# SPDX-License-Identifier: Apache-2.0
"""The registry of cases: functions of (rank, size), by name. All ranks of a job run a case at the same time."""

from __future__ import annotations

from collections.abc import Callable

CASES: dict[str, Callable[[int, int], None]] = {}


def case(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Add a function to `CASES` under its own name."""
    CASES[function.__name__] = function
    return function
