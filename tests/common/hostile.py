# SPDX-License-Identifier: Apache-2.0
"""Values that nobody meant to write, for parsers; and what a parser may answer."""

from collections.abc import Callable, Iterator
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
