# SPDX-License-Identifier: Apache-2.0
"""The types of arguments, checked where users call.

Problem. Python passes anything. A wrong argument fails deep inside, with an error that names neither it nor the repair,
or it doesn't fail at all.

Idea. The annotations of a public function say what it takes. `require_types` is its first line: it reads them, and
checks each argument by the one row for its type. Containers are checked from outside; what is inside, and ranges of
numbers, are for the function to check.

Invariant: what passes is of its annotated type, and no number is nan.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from schedules.errors import ArgumentError, PipelineError, SizeError, quote

MOST_STAGES: Final = 2**20
"""More stages, or ranks, or slices, than any schedule has; a tuple of so many still fits into memory."""
MOST_MICROBATCHES: Final = 2**40
MOST_ENTRIES: Final = 2**20
"""More entries than any argument has; an iterator that yields more does not end."""

_Element = TypeVar("_Element")
_ABSENT: Final = object()


class ArgumentType(NamedTuple):
    """One type of argument: the words for it, the repair, and a test, if it is another than that of `isinstance`."""

    expected: str
    repair: str
    accepts: Callable[[Any], bool] | None = None


def is_number(value: object) -> bool:
    """Return whether a value is a real number: not nan, and neither a flag nor a text.

    >>> [is_number(one) for one in (2, 0.5, float("inf"), float("nan"), True, "2", 1j)]
    [True, True, True, False, False, False, False]
    """
    if isinstance(value, bool):
        return False
    if not isinstance(value, int | float):
        from numbers import Real  # rarely needed, and slow to import

        if not isinstance(value, Real):
            return False
    return bool(value == value)  # noqa: PLR0124 - false for nan; isnan() fails for large integers


def takes(function: object, count: int) -> bool:
    """Return whether a function can be called with so many arguments; true if it doesn't say.

    >>> [takes(one, 2) for one in (max, lambda x: x, lambda x, *more: x, 3)]
    [True, False, True, False]
    """
    if not callable(function):
        return False
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a built-in one
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def is_size(value: object, least: int = 1, most: int = MOST_STAGES) -> bool:
    """Return whether a value is an integer in this range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_placer(value: object) -> bool:
    """Return whether a value is a function, but not a generator of a rank's actions."""
    return callable(value) and next(iter(inspect.signature(value).parameters), "") != "rank"


def _has_parts(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


TYPES: Final[Mapping[str, ArgumentType]] = types.MappingProxyType(
    {
        "int": ArgumentType("an integer", "Pass an int.", lambda x: isinstance(x, int) and not isinstance(x, bool)),
        "float": ArgumentType("a number", "Pass a number that is not nan.", is_number),
        "bool": ArgumentType("true or false", "Pass True or False."),
        "str": ArgumentType("a text", "Pass a str."),
        "NoneType": ArgumentType("None", "Pass None."),
        "Callable": ArgumentType("a function", "Pass the function itself.", callable),
        "Iterable": ArgumentType(
            "several values", "Pass a list.", lambda x: isinstance(x, Iterable) and not isinstance(x, str)
        ),
        "Sequence": ArgumentType(
            "several values", "Pass a list.", lambda x: isinstance(x, Sequence) and not isinstance(x, str)
        ),
        "dict": ArgumentType("a dict", "Pass a dict.", lambda x: isinstance(x, Mapping)),
        "Mapping": ArgumentType("a dict", "Pass a dict."),
        "TextIO": ArgumentType(
            "an open text file", "Open the file first.", lambda x: hasattr(x, "read") or hasattr(x, "write")
        ),
        "LoweredProgram": ArgumentType("a program", "Pass lower(schedule).", lambda x: hasattr(x, "schedule")),
        "Schedule": ArgumentType("a Schedule", "Call the factory first, as in one_f_one_b(ranks=4, microbatches=8)."),
        "Placer": ArgumentType("a placement", "Write @schedule() with parentheses, or placement=linear.", _is_placer),
    }
)
"""What arguments are, by the name of their type."""


@dataclass(frozen=True, eq=False)
class ArgumentCheck:
    """A function that checks arguments by the `rows` of their types, and raises `error`.

    `show` quotes a value; `begin` is the begin of messages, with the names of function and argument, and the value.
    """

    rows: Mapping[str, ArgumentType]
    error: type[PipelineError]
    show: Callable[[object], str] = quote
    begin: str = "{function}: got {name}={value}"

    def __call__(self, function: Callable[..., Any], given: Mapping[str, object]) -> None:
        """Raise the error unless each argument in `given` has the type that `function` is annotated with."""
        for name, choices in _list_choices(function, self):
            value = given.get(name, _ABSENT)
            if value is not _ABSENT and not any(one.accepts and one.accepts(value) for one in choices):
                called = function.__qualname__.removesuffix(".__init__")
                begin = self.begin.format(function=called, name=name, value=self.show(value))
                expected = " or ".join(dict.fromkeys(one.expected for one in choices))
                raise self.error(f"{begin}, expected {expected}. {choices[0].repair}")


require_types: Final = ArgumentCheck(TYPES, ArgumentError)
"""Checks the arguments of a public function of `schedules`, as its first line: `require_types(simulate, locals())`."""
_Choices: TypeAlias = tuple[tuple[str, tuple[ArgumentType, ...]], ...]


@lru_cache(maxsize=1024)
def _list_choices(function: Any, check: ArgumentCheck) -> _Choices:
    """Return the rows of one of which each annotated parameter must be; none for parameters that take anything."""
    hints, code = get_type_hints(function), inspect.unwrap(function).__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found = ((name, tuple(_choices(hints[name], check.rows))) for name in names if name in hints)
    return tuple((name, choices) for name, choices in found if choices)


def _choices(hint: Any, known: Mapping[str, ArgumentType]) -> list[ArgumentType]:
    """Return the rows of a type; none if it is any."""
    origin = get_origin(hint) or hint
    if origin in (Union, types.UnionType):
        parts = [_choices(one, known) for one in get_args(hint)]
        return [row for part in parts for row in part] if all(parts) else []
    if origin is Literal:
        values = get_args(hint)
        return [ArgumentType(f"one of {list(values)}", f"Pass one of {list(values)}.", lambda x: x in values)]
    if hint is Any or not isinstance(origin, type):
        return []
    taken = next(iter(get_args(hint)), None)
    if origin.__name__ == "Callable" and isinstance(taken, list):
        count = len(taken)
        expected = f"a function of {count} argument{'s' * (count != 1)}"
        return [known["Callable"]._replace(expected=expected, accepts=lambda x: takes(x, count))]
    return [] if origin is object else [_row_of(origin, known)]


def _row_of(kind: type, known: Mapping[str, ArgumentType]) -> ArgumentType:
    """Return the row of a class, complete."""
    if getattr(kind, "_is_protocol", False) and kind.__name__ not in known:
        members = [name for name in vars(kind) if name == "__call__" or not name.startswith("_")]
        own = known["Callable"] if "__call__" in members else known["Schedule"]
        return own._replace(accepts=lambda x: all(hasattr(x, name) for name in members))
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    own = ArgumentType(f"{article} {kind.__name__}", f"Pass {article} {kind.__name__}.")
    row = known.get(kind.__name__, own)
    return row._replace(accepts=row.accepts or (lambda x: isinstance(x, kind)))


def each(
    where: str, values: Iterable[_Element], kind: type[_Element], error: type[PipelineError]
) -> Iterator[_Element]:
    """Yield the values; raise `error` at the first of another type, or if there is no end of them.

    >>> list(each("names", iter("ab"), str, ArgumentError))
    ['a', 'b']
    """
    for k, value in enumerate(islice(values, MOST_ENTRIES + 1)):
        if not isinstance(value, kind) or k == MOST_ENTRIES:
            expected = f"at most {MOST_ENTRIES} values" if k == MOST_ENTRIES else f"each to be of type {kind.__name__}"
            raise error(f"{where}[{k}]: got {quote(value)}, expected {expected}. Correct {where}.")
        yield value


def require_shape(where: str, ranks: int, parts: int, name: str = "chunks") -> None:
    """Raise `SizeError` unless a placement has at least one rank and part of it, and not too many stages."""
    sizes = {"ranks": ranks, name: parts}
    wrong = [what for what, size in sizes.items() if not is_size(size)]
    if wrong or ranks * parts > MOST_STAGES:
        what = (wrong or [name])[0]
        expected = f"an integer of at least 1, with at most {MOST_STAGES} stages in all"
        raise SizeError.of(where, what, sizes[what], expected, f"Choose {what} >= 1.")


def require_size(factory: str, name: str, size: object, least: int = 1) -> None:
    """Raise `SizeError` unless a size of a schedule is in its range."""
    most = MOST_MICROBATCHES if name == "microbatches" else MOST_STAGES
    if not is_size(size, least, most):
        expected = f"an integer of at least {least}" + (
            f", and at most {most}" if isinstance(size, int) and size > most else ""
        )
        raise SizeError.of(factory, name, size, expected, f"Choose {name} >= {least}.")


def without_rank(decorator: str, generator: Callable[..., object], *first: str) -> inspect.Signature:
    """Return the parameters of a factory of schedules: those of `generator` without `rank`.

    Raise `ArgumentError` unless it is a function, and its parameters begin with `rank` and the names in `first`.
    """
    if not callable(generator) or not hasattr(generator, "__name__") or isinstance(generator, type):
        raise ArgumentError(
            f"{decorator}: got {quote(generator)}, expected a generator function (rank, ...). Put @{decorator} above "
            "its def."
        )
    signature = inspect.signature(generator)
    names, expected = list(signature.parameters), ["rank", *first]
    if names[: len(expected)] != expected:
        raise ArgumentError(
            f"{generator.__name__}: got parameters {names}, expected them to begin with {', '.join(expected)}. "
            "Write a generator for one rank that takes these parameters first."
        )
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def bind(name: str, signature: inspect.Signature, /, *args: object, **kwargs: object) -> dict[str, Any]:
    """Return the arguments of a call, with the defaults. Raise `ArgumentError` unless the signature takes them."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        wanted = f"{name}({', '.join(signature.parameters)})"
        raise ArgumentError(f"{name}: got a call with {error}, expected {wanted}. Pass these.") from error
    bound.apply_defaults()
    return bound.arguments


def require_takes(
    factory: str, name: str, rule: Callable[..., object] | None, signature: inspect.Signature, *first: str
) -> None:
    """Raise `ArgumentError` unless a function, if there is one, takes `first`, and by name what the factory takes."""
    try:
        if rule is not None:
            inspect.signature(rule).bind(*first, **dict.fromkeys(signature.parameters))
    except (TypeError, ValueError):  # that of a built-in function may not be known
        raise ArgumentError(
            f"{factory}: got {name}={quote(rule)}, expected a function ({', '.join([*first, *signature.parameters])}). "
            "Write these parameters, or **others for those that it does not use."
        ) from None


def require_hash(factory: str, arguments: Mapping[str, object]) -> None:
    """Raise `ArgumentError` unless all arguments of a factory have a hash."""
    for name, value in arguments.items():
        try:
            hash(value)
        except TypeError:
            raise ArgumentError(
                f"{factory}: got {name}={quote(value)}, expected a value with a hash. Pass a tuple in place of a list."
            ) from None
