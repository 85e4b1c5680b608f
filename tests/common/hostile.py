# SPDX-License-Identifier: Apache-2.0
"""Values and files that nobody meant to write, for parsers; and what a parser may answer."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from schedules import PipelineError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**30)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
)


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every place in a JSON value."""
    yield way
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from places(one, (*way, key))


def replaced(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    """The value with another at one place."""
    if not way:
        return new
    copy = value.copy()
    copy[way[0]] = replaced(value[way[0]], way[1:], new)
    return copy


@st.composite
def changed(draw: Any, value: Any, others: st.SearchStrategy[Any] = JSON) -> Any:
    """A JSON value with something else at one of its places."""
    return replaced(value, draw(st.sampled_from(sorted(places(value), key=str))), draw(others))


def answer(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a parser: it returns, or raises a named error of bearable length, for which `None` is returned."""
    problem = None
    try:
        found = function(*arguments)
    except PipelineError as error:
        problem, found = str(error), None
    assert problem is None or ("expected" in problem and len(problem) < 3000), problem
    return found


@st.composite
def damaged(draw: Any, data: bytes) -> bytes:
    """The bytes of a file as a disk, a copy that was cut off, or a careless edit leaves them."""
    start, stop = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
    before, part, after = data[:start], data[start:stop], data[stop:]
    some = st.binary(min_size=1, max_size=9) | st.sampled_from(
        [b"[" * 5000, b'{"a":' * 5000, b"9" * 5000, b"1", b"-", b"0"]
    )
    ways = {
        "cut off": lambda: before,
        "the end of it": lambda: after,
        "dropped": lambda: before + after,
        "zeros": lambda: before + bytes(len(part)) + after,
        "twice": lambda: before + part + part + after,
        "backwards": lambda: after + part + before,
        "something more": lambda: before + draw(some) + part + after,
        "something else": lambda: before + draw(some) + data[min(start + 1, len(data)) :],
        "a bit": lambda: (
            before + bytes([b ^ 1 << draw(st.integers(0, 7)) for b in data[start : start + 1]]) + data[start + 1 :]
        ),
    }
    return ways[draw(st.sampled_from(sorted(ways)))]()


PLANTS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a folder": os.mkdir,
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
}
"""What may stand where a file should be."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in what takes longer; only for the main thread."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"still running after {seconds} seconds")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
