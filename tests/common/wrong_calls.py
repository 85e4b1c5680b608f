# SPDX-License-Identifier: Apache-2.0
"""Wrong calls, generated from the signatures of public functions: each argument in turn, with values of other types."""

import inspect
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import schedules

VALUES = (None, True, "x", 3, 2.5, math.nan, object(), [object()])
"""Values of many types; those that an annotation allows are left out."""


class Known(NamedTuple):
    """A function, arguments that it takes, and further values that it must refuse, by parameter."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    refused: Mapping[str, Iterable[Any]] = types.MappingProxyType({})


def fits(hint: Any, value: object) -> bool:
    """Whether a value is of an annotated type; unknown types take anything."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if hint in (Any, object) or (not isinstance(origin, type) and origin not in (Union, Literal)):
        return True
    if origin in (Union, types.UnionType):
        return any(fits(one, value) for one in inner)
    if origin is Literal:
        return value in inner
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin.__name__ == "Callable" or getattr(origin, "_is_protocol", False):
        return callable(value)
    if isinstance(value, list) and inner and issubclass(origin, Iterable):
        return all(fits(inner[0], one) for one in value) and issubclass(list, origin)
    return isinstance(value, origin)


def parameters(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The annotated parameters of a function, a class or a factory."""
    plain = function.generator if isinstance(function, schedules.Factory) else function
    plain = plain.__init__ if inspect.isclass(plain) else plain
    hints = get_type_hints(inspect.unwrap(plain))
    return ((name, hints[name]) for name in inspect.signature(function).parameters if name in hints)


def wrong_arguments(known: Known) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the arguments of every wrong call, with the name of the wrong one."""
    for name, hint in parameters(known.function):
        values = [value for value in VALUES if not fits(hint, value)]
        for value in (*values, *known.refused.get(name, ())):
            yield name, {**known.arguments, name: value}


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Call it; read what it returns, if that is made as it is read."""
    expected, named = inspect.signature(function).parameters, dict(arguments)
    only = [name for name, one in expected.items() if one.kind is one.POSITIONAL_ONLY]
    positional = [arguments[name] for name in only if name in arguments]
    for name in [name for name, one in expected.items() if one.kind is one.VAR_POSITIONAL]:
        first = [named.pop(one) for one in takewhile(name.__ne__, expected) if one in named]
        positional = [*first, *([named.pop(name)] if name in named else [])]
    found = function(*positional, **named)
    made = found.actions(0) if isinstance(found, schedules.Schedule | schedules.Program) else found
    for _ in made if isinstance(made, Iterator) else ():
        pass


def complain(known: Known) -> list[str]:
    """Return what is wrong with the answers to wrong calls: none is accepted, and every error says what to do."""
    call(known.function, known.arguments)
    where = getattr(known.function, "__qualname__", repr(known.function))
    return [
        f"{where}({name}={schedules.errors.quote(arguments[name])}): {problem}"
        for name, arguments in wrong_arguments(known)
        if (problem := find_problem(known.function, arguments))
    ]


def find_problem(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return what is wrong with the answer to one wrong call; nothing if it says all that it must."""
    try:
        call(function, arguments)
    except schedules.PipelineError as error:
        return find_gaps(str(error))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def find_gaps(message: str) -> str:
    """Return what a message lacks: what it got, what was expected, and the repair, a sentence at its end.

    The error of a schedule names its rule in place of what was expected.
    """
    usual = re.search(r"got .*expected .*\S[.?] \S.*[.?]$", message, re.DOTALL)
    if not usual and not re.search(r"rank \d+, position \d+.*\[rule: \w+\]\. \S.*\.$", message, re.DOTALL):
        return f"lacks what was expected, or the repair: {message}"
    return "" if len(message) < 2000 else f"is {len(message)} characters long"
