# SPDX-License-Identifier: Apache-2.0
"""Ask a function for an answer in bounded time, memory and reading: a value, or a named error."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from schedules import PipelineError
from tests.common.hostile import within

SECONDS: Final = 20
MOST_GROWTH: Final = 2**30 // 1024
"""How much memory may grow in one case, in KiB."""
REFUSED: Final = object()
"""The answer of a function that raised a named error."""
LONGEST: Final = 3000


def ask(function: Callable[..., Any], *arguments: Any, most_read: int | None = None) -> Any:
    """Return the value of a function, or `REFUSED` for a named error, if all bounds are kept.

    - `most_read`: how many bytes it may read from files.

    Raises `AssertionError` for an error that says too little or too much, and whatever else the function raises.
    """
    before, held = count_read(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with within(SECONDS):
        found = call(function, *arguments)
    if isinstance(found, PipelineError):
        text, found = str(found), REFUSED
        assert "expected" in text or "[rule: " in text, f"does not say what was expected: {text}"
        assert len(text) < LONGEST, f"is {len(text)} characters long: {text[:LONGEST]}"
        assert "\x1b" not in text, f"moves the cursor: {text!r}"
    read, grown = count_read() - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held
    assert most_read is None or read <= most_read, f"read {read} bytes, expected at most {most_read}"
    assert grown <= MOST_GROWTH, f"memory has grown by {grown} KiB"
    return found


def call(function: Callable[..., Any], *arguments: Any, expected: type[Exception] = PipelineError) -> Any:
    """Return the value of a function, or the error of an expected type that it raises."""
    try:
        return function(*arguments)
    except expected as error:
        return error


def count_read() -> int:
    """Return how many bytes this process has read, from anywhere."""
    status = Path("/proc/self/io").read_text()
    return int(status.split()[1])
