# SPDX-License-Identifier: Apache-2.0
"""The command-line options and their meaning."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from math import inf, isfinite
from types import MappingProxyType
from typing import Any, TypeVar

from schedules.commands.subjects import Subject, subjects
from schedules.errors import UsageError
from schedules.language.actions import KINDS
from schedules.language.schedule import Schedule
from schedules.playing.costs import PER_UNIT, Cost, Costs, Link, Sizes

DEFAULTS = {"ranks": 4, "microbatches": 8}
Figures = TypeVar("Figures", Costs, Sizes | None)
LINK = ("latency", "bandwidth", "bytes")


def add_subjects(parser: argparse.ArgumentParser, count: str = "+") -> None:
    """Add the arguments for `subjects_of`: names with their parameters, and the sizes for all of them."""
    parser.add_argument("words", nargs=count, metavar="NAME", help="a schedule, with its parameters and transforms")
    for size, default in DEFAULTS.items():
        parser.add_argument(f"--{size}", type=int, help=f"default {default}", metavar="N")
    parser.add_argument(
        "--graph",
        metavar="EDGES",
        help="stages that do not form a chain, as in 0-2,1-2: a value from the first stage to the second, and a "
        "cotangent back; F0-2 is a value alone, B2-0 a cotangent alone, G0-2 a gradient of what both hold",
    )


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add the options for `costs_of` and `sizes_of`."""
    costs = parser.add_argument_group("times of one microbatch on one stage, or of each stage: 1,1,2")
    for field in fields(Costs):
        if field.name in KINDS:
            default = _FOLLOWS.get(field.name, "that of F") if field.default is None else field.default
            words = f"{KINDS[field.name].meaning}; default {default}"
            costs.add_argument(f"--{field.name}", type=_parse_cost, metavar="TIME", help=words)
    lengths = "relative times of the microbatches: 4,2,1,1"
    costs.add_argument("--lengths", type=_parse_cost, metavar="TIMES", help=lengths)
    links = parser.add_argument_group("transfers between ranks: a time, or latency + bytes / bandwidth")
    for name in ("comm", *LINK):
        links.add_argument(f"--{name}", type=_LINKS.get(name, parse_number), metavar="X")
    noise = parser.add_argument_group("noise")
    noise.add_argument(
        "--jitter", type=_parse_fraction, default=0, metavar="SHARE", help="vary the time of every action by this share"
    )
    noise.add_argument("--seed", type=int, default=0, metavar="N")
    sizes = parser.add_argument_group("memory of one microbatch on one stage (default: count microbatches of a rank)")
    for field in fields(Sizes):
        sizes.add_argument(f"--{field.name}", type=_parse_cost, metavar="SIZE")


def add_files(parser: argparse.ArgumentParser, csv: bool = True) -> None:
    """Add the options for files to write."""
    parser.add_argument("--svg", metavar="FILE", help="write the timeline as a picture")
    parser.add_argument("--pdf", metavar="FILE", help="write that picture for printing")
    parser.add_argument("--tikz", metavar="FILE", help="write it for LaTeX")
    style = parser.add_argument_group("the style of these pictures")
    style.add_argument(
        "--window", type=_parse_window, default=(0.0, inf), metavar="BEGIN,END", help="show only this part of the time"
    )
    style.add_argument("--labels", choices=("full", "microbatch", "none"), default="full")
    style.add_argument("--palette", choices=("color", "gray"), default="color")
    style.add_argument("--width", type=parse_number, metavar="POINTS")
    parser.add_argument("--trace", metavar="FILE", help="write it for ui.perfetto.dev or chrome://tracing")
    if csv:
        parser.add_argument("--csv", metavar="FILE", help="write the actions as a table")


def subjects_of(options: argparse.Namespace) -> list[Subject]:
    """Return the schedules named on the command line."""
    return subjects(options.words, DEFAULTS | _sizes(options), options.graph)


def subject_of(options: argparse.Namespace) -> Subject:
    """Return the one schedule named on the command line. Raise `UsageError` if there are several."""
    found = subjects_of(options)
    if len(found) > 1:
        names = " and ".join(one.title for one in found[:2])
        raise UsageError(f"got {names}, expected one schedule. Use compare for several.")
    if options.words[0].endswith(".csv"):
        for size in _sizes(options):
            raise UsageError(f"got --{size}, expected no sizes: {options.words[0]} has its own. Remove it.")
    return found[0]


def _sizes(options: argparse.Namespace) -> dict[str, int]:
    return {size: value for size in DEFAULTS if (value := getattr(options, size)) is not None}


def costs_of(options: argparse.Namespace) -> Costs:
    """Return the costs the options give."""
    link = {name: value for name in LINK if (value := getattr(options, name)) is not None}
    if link and options.comm is not None:
        raise UsageError(f"got --comm and --{next(iter(link))}, expected one of them. Drop one.")
    times = {field.name: getattr(options, field.name) for field in fields(Costs) if field.name in KINDS}
    given = {name: time for name, time in times.items() if time is not None}
    lengths = (
        options.lengths if isinstance(options.lengths, tuple) else (options.lengths,) * (options.lengths is not None)
    )
    noise = {"jitter": options.jitter, "seed": options.seed}
    return Costs(**given, **noise, comm=Link(**link) if link else options.comm or 0, microbatches=lengths)


def require_effect(options: argparse.Namespace, schedules: Iterable[Schedule]) -> None:
    """Raise `UsageError` for a time or size that is given and makes no difference to any of the schedules."""
    every = list(schedules)
    used = {(a.kind, a.stage) for one in every for rank in range(one.ranks) for a in one.actions(rank)}
    costs, sizes = costs_of(options), sizes_of(options)
    for name in (*KINDS, *(field.name for field in fields(Sizes) if field.name != "weight")):
        if getattr(options, name, None) is None or not used:
            continue
        if name in KINDS:
            known, other = costs.time, replace(costs, **{name: _change(getattr(costs, name))}).time
        else:
            assert sizes is not None, "a size is given"
            known, other = sizes.growth, replace(sizes, **{name: _change(getattr(sizes, name))}).growth
        if all(known(*action) == other(*action) for action in used):
            names = " or ".join(dict.fromkeys(one.factory.__name__ for one in every))
            raise UsageError(f"got --{name}, expected an option for what {names} runs: it has no effect. Drop it.")


def _change(cost: Cost) -> Any:
    return tuple(2 * one + 1 for one in cost) if isinstance(cost, tuple) else 2 * cost + 1


def sizes_of(options: argparse.Namespace) -> Sizes | None:
    """Return the sizes the options give, or `None` if they give none."""
    given = {field.name: getattr(options, field.name) for field in fields(Sizes)}
    given = {name: size for name, size in given.items() if size is not None}
    return Sizes(**given) if given else None


def fit(costs: Figures, schedule: Schedule) -> Figures:
    """Return `costs`. Raise `UsageError` for a tuple unless it has one number for each stage of `schedule`."""
    given = {field.name: getattr(costs, field.name) for field in fields(costs)} if costs else {}
    if isinstance(link := given.get("comm"), Link):
        given["bytes"] = link.bytes
    for name, value in given.items():
        if name not in PER_UNIT and isinstance(value, tuple) and len(value) != schedule.stages:
            raise UsageError(
                f"got {len(value)} numbers for --{name}, expected {schedule.stages}: one for each stage of "
                f"{schedule.factory.__name__}. Give {schedule.stages} numbers, or one for all stages."
            )
    return costs


def parse_number(text: str) -> float:
    """Return the finite number of at least 0 that an option gives."""
    try:
        found = float(text)
    except ValueError:
        found = -1
    if not isfinite(found) or found < 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of at least 0")
    return found


def _parse_cost(text: str) -> Cost:
    numbers = tuple(map(parse_number, text.split(",")))
    return numbers if len(numbers) > 1 else numbers[0]


def _parse_positive(text: str) -> float:
    if not (found := parse_number(text)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")
    return found


def _parse_window(text: str) -> tuple[float, float]:
    begin, _, end = text.partition(",")
    found = parse_number(begin), parse_number(end) if end else inf
    if found[0] >= found[1]:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a later end, as in 8,24")
    return found


def _parse_fraction(text: str) -> float:
    if (found := parse_number(text)) >= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a share below 1")
    return found


_FOLLOWS: Mapping[str, str] = MappingProxyType({"B": "that of its halves", "I": "half of B", "W": "half of B"})
_LINKS: Mapping[str, Callable[[str], Cost]] = MappingProxyType({"bandwidth": _parse_positive, "bytes": _parse_cost})
