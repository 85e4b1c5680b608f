# SPDX-License-Identifier: Apache-2.0
"""The names of schedules on a command line.

    one_f_one_b                              a built-in schedule
    interleaved_1f1b chunks=3                with a parameter
    one_f_one_b split_backward               with a transform; transforms take parameters too
    mine.py:zigzag depth=2                   a factory in your own file, which is run
    table.csv                                a table of a schedule or a program
    v_half costs=F=5,I=9,W=3,comm=0.5        costs to follow; F=1/1/2 for one number per stage
    gpipe connect graph=0-2,1-2              a stage graph, as for --graph
    one_f_one_b recompute stages=0,2         a tuple
    interleaved_1f1b chunks=1..3             one schedule for each value; chunks=1,2,4 likewise

A word with `=` belongs to the name before it; a transform applies to the schedules before it.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import product
from math import isfinite, prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import schedules as package
from schedules import families
from schedules.commands.process import USERS_MODULE
from schedules.errors import UsageError, printable, quote
from schedules.files.csv import Listing, read_csv
from schedules.language.actions import KINDS
from schedules.language.graph import chain
from schedules.language.schedule import Factory, Schedule
from schedules.playing.costs import Costs
from schedules.transforms.connect import connect, parse_graph

MOST_VALUES: Final = 1000
"""More schedules than one table shows."""
MOST_PASSES: Final = 2**24
"""More forwards than anyone waits for."""
Argument: TypeAlias = int | float | str | bool | Costs | tuple[Any, ...] | None


class Subject(NamedTuple):
    """A schedule given on the command line: its title, how to make it, and the program it was read with, if any.

    A transform of a program's schedule has no program, because the transfers would no longer match.
    """

    title: str
    make: Callable[[], Schedule]
    program: Listing | None = None


class Phrase(NamedTuple):
    """A name, and the text for each of its parameters."""

    name: str
    pairs: dict[str, str]


def subjects(words: Sequence[str], sizes: Mapping[str, int], graph: str | None = None) -> list[Subject]:
    """Return all schedules that `words` name, with the given sizes unless `words` override them.

    `graph` lists the edges that connect the stages, as in `schedules.transforms.connect`. Raise `UsageError` for names
    and parameters that do not exist.

    >>> [one.title for one in subjects(["gpipe", "one_f_one_b", "split_backward"], {"ranks": 2, "microbatches": 3})]
    ['gpipe', 'split_backward(one_f_one_b)']
    """
    found: list[list[Subject]] = []
    for phrase in phrases(words):
        if phrase.name.endswith(".csv"):
            found.append([_read_table(phrase, graph)])
        elif not is_transform(factory := find_factory(phrase.name)):
            found.append(
                [_make_subject(factory, phrase.name, given, sizes, graph) for given in _combine(factory, phrase, sizes)]
            )
        elif found:
            found[-1] = [
                _transform_subject(factory, phrase.name, given, one)
                for one in found[-1]
                for given in _combine(factory, phrase, {})
            ]
        else:
            raise UsageError(f"got {phrase.name}, expected a schedule before it. Name the schedule to transform.")
    return [one for group in found for one in group]


def phrases(words: Sequence[str]) -> Iterator[Phrase]:
    """Yield the names, each with the pairs that follow it.

    >>> list(phrases(["kfkb", "k=1..3", "gpipe"]))
    [Phrase(name='kfkb', pairs={'k': '1..3'}), Phrase(name='gpipe', pairs={})]
    """
    phrase: Phrase | None = None
    for word in words:
        pair = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word)
        if pair and phrase is None:
            raise UsageError(f"got {word}, expected a schedule's name before it. Put it after the name.")
        if pair and phrase:
            phrase.pairs[pair[1]] = pair[2]
            continue
        if phrase:
            yield phrase
        phrase = Phrase(word, {})
    if phrase:
        yield phrase


def _split_values(text: str) -> list[str]:
    if bounds := re.fullmatch(r"(-?\d{1,9})\.\.(-?\d{1,9})", text):
        first, last = int(bounds[1]), int(bounds[2])
        if last - first >= MOST_VALUES:
            raise UsageError(f"got {text}, expected a range of at most {MOST_VALUES} values. Name fewer.")
        values = [str(value) for value in range(first, last + 1)]
    else:
        values = text.split(",")
    if not all(values) or not values:
        raise UsageError(f"got {quote(text)}, expected a value, as in 2, several, as in 1,2,4, or a range, as in 1..4.")
    return values


def find_factory(name: str) -> Factory[...]:
    """Return the factory of that name: a built-in schedule or transform, or `file.py:function`."""
    file, colon, function = name.rpartition(":")
    found = getattr(run_file(Path(file)), function, None) if colon else (built_in() | transforms()).get(name)
    if not isinstance(found, Factory):
        raise UsageError(
            f"got {name!r}, expected one of {', '.join((*families.__all__, *transforms()))}, a function with @schedule "
            "as in file.py:function, or a table in a .csv file."
        )
    return found


def built_in() -> dict[str, Factory[...]]:
    """Return the built-in schedules by name."""
    return {name: one for name in families.__all__ if isinstance(one := getattr(families, name), Factory)}


def transforms() -> dict[str, Factory[...]]:
    """Return the built-in transforms by name."""
    public = {name: getattr(package, name) for name in package.__all__}
    return {name: one for name, one in public.items() if isinstance(one, Factory) and is_transform(one)}


def is_transform(factory: Factory[...]) -> bool:
    """Return whether a factory makes schedules from schedules."""
    return "schedule" in factory.signature.parameters


def parameters(factory: Factory[...]) -> dict[str, inspect.Parameter]:
    """Return a factory's parameters by name, except the schedule that a transform takes."""
    return {name: one for name, one in factory.signature.parameters.items() if name != "schedule"}


def run_file(path: Path) -> object:
    """Run a user's file and return its module."""
    spec = importlib.util.spec_from_file_location(USERS_MODULE, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"got {str(path)!r}, expected a Python file. Name it as in file.py:function.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[USERS_MODULE] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        if error.filename is None:  # of a text that has no lines, such as one with null characters
            error.filename, error.lineno = str(path), 1
        raise
    return module


def _combine(factory: Factory[...], phrase: Phrase, sizes: Mapping[str, int]) -> Iterator[dict[str, Argument]]:
    """Yield every combination of the values of the phrase's parameters, which may omit those in `sizes`."""
    known = parameters(factory)
    for name in phrase.pairs:
        if name not in known:
            takes = ", ".join(known) or "no parameters"
            raise UsageError(f"got {name}=, but {phrase.name} takes {takes}. Drop it.")
    for name, parameter in known.items():
        if name not in {*phrase.pairs, *sizes} and parameter.default is parameter.empty:
            raise UsageError(f"{phrase.name} needs {name}. Add it, as in {phrase.name} {name}=2.")
    values = [list(_read_values(known[name], text)) for name, text in phrase.pairs.items()]
    count = prod(map(len, values))
    if count > MOST_VALUES:
        raise UsageError(f"got {count} schedules of {phrase.name}, expected at most {MOST_VALUES}. Name fewer values.")
    for chosen in product(*values):
        yield dict(zip(phrase.pairs, chosen, strict=True))


def _read_values(parameter: inspect.Parameter, text: str) -> Iterator[Argument]:
    """Yield the values that a parameter is given, by its annotation: several numbers are several values."""
    annotation = str(parameter.annotation)
    if "Graph" in annotation:
        yield GraphText(text)
    elif "Costs" in annotation:
        yield _parse_costs(text)
    elif "tuple" in annotation and text not in _WORDS:
        yield tuple(_parse_value(parameter, one) for one in _split_values(text))
    else:
        yield from (_parse_value(parameter, one) for one in _split_values(text))


class GraphText(str):
    """The edges of a graph, whose number of stages is that of the schedule before it."""


def _parse_costs(text: str) -> Costs:
    """Return the costs that a text names: `F=1,B=2/2/3,comm=0.5`."""
    found = dict[str, Any]()
    for name, equals, value in (one.partition("=") for one in text.split(",")):
        if not equals or name not in COST_NAMES:
            names = ", ".join(COST_NAMES)
            raise UsageError(
                f"got costs={printable(text[:40])}, expected times of {names}. Write costs=F=1,B=2,comm=0.5."
            )
        try:
            numbers = tuple(map(float, value.split("/")))
        except ValueError:
            raise UsageError(
                f"got {name}={printable(value[:40])}, expected a number. Write {name}=2, or 2/1 by stage."
            ) from None
        found[name] = numbers if len(numbers) > 1 else numbers[0]
    return Costs(**found)


COST_NAMES: Final = tuple(field.name for field in fields(Costs) if field.name in KINDS or field.name == "comm")


def _parse_value(parameter: inspect.Parameter, text: str) -> Argument:
    """Return a number, true, false or none; or the text itself if the default is text."""
    if isinstance(parameter.default, str):
        return text
    if text in _WORDS:
        return _WORDS[text]
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError, OverflowError):
        if isfinite(value := float(text)):
            return value
    raise UsageError(
        f"got {parameter.name}={printable(text[:40])}, expected a number. Write it as in {parameter.name}=2."
    )


_WORDS: Mapping[str, Argument] = MappingProxyType({"true": True, "false": False, "none": None})


def _read_table(phrase: Phrase, graph: str | None) -> Subject:
    if phrase.pairs:
        raise UsageError(f"got {next(iter(phrase.pairs))}=, but {phrase.name} has its own sizes. Drop it.")
    read = read_csv(phrase.name)
    schedule, program = (read.schedule, read) if isinstance(read, Listing) else (read, None)
    if program and graph is not None:
        program = replace(program, graph=parse_graph(graph, schedule.stages))
    if program and program.graph != chain(schedule.stages):
        schedule = connect(schedule, program.graph)
    elif graph is not None:
        schedule = connect(schedule, parse_graph(graph, schedule.stages))
    return Subject(printable(phrase.name), lambda: schedule, program)


def _make_subject(
    factory: Factory[...], name: str, given: dict[str, Argument], sizes: Mapping[str, int], graph: str | None
) -> Subject:
    def make() -> Schedule:
        schedule = _require_playable(factory(**{**sizes, **given}))
        return schedule if graph is None else connect(schedule, parse_graph(graph, schedule.stages))

    return Subject(_make_title(name, given), make)


def _transform_subject(factory: Factory[...], name: str, given: dict[str, Argument], one: Subject) -> Subject:
    def make() -> Schedule:
        schedule = one.make()
        graphs = {key: parse_graph(text, schedule.stages) for key, text in given.items() if isinstance(text, GraphText)}
        return _require_playable(factory(schedule, **{**given, **graphs}))

    return Subject(_make_title(name, given, one.title), make)


def _require_playable(schedule: Schedule) -> Schedule:
    """Return the schedule; raise `UsageError` if it takes too long to play."""
    passes = schedule.stages * schedule.microbatches * schedule.slices
    if passes > MOST_PASSES:
        raise UsageError(
            f"got {passes} forwards in {quote(schedule)}, expected at most {MOST_PASSES}. Choose fewer microbatches."
        )
    return schedule


def _spell(value: Argument) -> str:
    """Return a value as its title shows it: of costs, those that differ from the usual ones."""
    if not isinstance(value, Costs):
        return f"{value}"
    usual = {field.name: field.default for field in fields(Costs)}
    return f"Costs({', '.join(f'{key}={one}' for key, one in vars(value).items() if one != usual[key])})"


def _make_title(name: str, given: Mapping[str, Argument], *first: str) -> str:
    name = printable(name)
    inside = [*first, *(f"{parameter}={_spell(value)}" for parameter, value in given.items())]
    return f"{name}({', '.join(inside)})" if inside else name
