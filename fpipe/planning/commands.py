# SPDX-License-Identifier: Apache-2.0
"""Make a plan from a shell.

The subject is a function that returns the arguments of `fpipe.plan` as a dict: `train.py:task`, which is run. Or it is
the file of a profile, for which nothing is run: `profile.json`.

Runs on request.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path
from textwrap import fill
from time import monotonic
from typing import Any

from fpipe.errors import InputError
from fpipe.planning.candidates import PlanProblem, ScheduleFactory, list_factories
from fpipe.planning.choosing import choose, say_progress
from fpipe.planning.make import parse_bytes, parse_caps, plan
from fpipe.planning.plan import Plan
from fpipe.planning.profile import Profile
from fpipe.tensors.arguments import require_integer
from schedules import drawing
from schedules.commands.subjects import find_factory, run_file
from schedules.commands.terminal import terminal_width
from schedules.errors import quote
from schedules.status import showing


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan`."""
    parser.add_argument(
        "subject", help="file.py:function, which returns the arguments of fpipe.plan, or a profile.json"
    )
    parser.add_argument("--ranks", type=int, help="the number of ranks", metavar="P")
    parser.add_argument("--microbatches", type=_read_numbers, help="the numbers to try", metavar="M,M,...")
    parser.add_argument("--slices", type=_read_numbers, help="the numbers of slices to try", metavar="N,N,...")
    parser.add_argument("--memory", help="the memory limit of a rank, such as 80GB", metavar="BYTES")
    parser.add_argument("--host", help="how fast activations move to the host, such as 25GB", metavar="BYTES/S")
    parser.add_argument("--schedules", type=_read_names, help="the schedules to try", metavar="NAME,NAME,...")
    parser.add_argument("--cuts", type=_read_names, help="modules at which a stage must begin", metavar="NAME,NAME,...")
    parser.add_argument("--seconds", type=float, default=60.0, help="the most time to search", metavar="S")
    parser.add_argument("--save", type=Path, help="write the plan to a file", metavar="FILE")
    parser.add_argument("--page", type=Path, help="write the predicted step as an interactive page", metavar="FILE")
    parser.set_defaults(run=print_plan)


def _read_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(one) for one in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {quote(text)}, expected numbers, as in 8,16. Correct them.") from None


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def print_plan(options: argparse.Namespace) -> int:
    """Choose cuts, schedule, recomputation and number of microbatches, and print the plan with its picture.

    Interrupt the search to have the best plan found so far.
    """
    start = monotonic()
    found = _make_plan(options)
    width = terminal_width(sys.maxsize)
    for line in str(found).split("\n"):
        print(fill(line, max(width, 40), subsequent_indent=" " * 14))
    print(f"  planned     in {monotonic() - start:.1f} s")
    print()
    print(drawing.text(found.schedule))
    if options.save is not None:
        found.save(options.save)
    if options.page is not None:
        found.page(options.page)
    return 0


def _make_plan(options: argparse.Namespace) -> Plan:
    given: dict[str, Any] = {
        "ranks": options.ranks,
        "microbatches": options.microbatches,
        "slices": options.slices,
        "memory": options.memory,
        "host": options.host,
        "schedules": options.schedules and [find_factory(name) for name in options.schedules],
        "cuts": options.cuts,
    }
    given = {name: value for name, value in given.items() if value is not None}
    file, colon, function = options.subject.rpartition(":")
    if not colon:
        return _plan_profile(Path(options.subject), given, options.seconds)
    arguments = {**call_task(Path(file), function), **given}
    if "ranks" not in arguments:
        raise InputError("ranks: got none, expected their number. Pass, for example, --ranks 4.")
    return plan(**{"seconds": options.seconds, **arguments})


def call_task(path: Path, function: str) -> Mapping[str, Any]:
    """Return what the user's function returns: arguments by name."""
    make = getattr(run_file(path), function, None)
    found = make() if callable(make) else None
    if not isinstance(found, Mapping):
        raise InputError(
            f"{path}:{function}: got {type(found).__name__}, expected a function that returns the arguments of "
            "fpipe.plan as a dict: model, example, targets, loss. Write one."
        )
    missing = [name for name in ("model", "example") if name not in found]
    if missing or not all(isinstance(name, str) for name in found):
        raise InputError(
            f"{path}:{function}: got {quote(sorted(map(str, found)))}, expected a dict of the arguments of fpipe.plan "
            f"by name{f', {missing} among them' if missing else ''}. Return them all."
        )
    return found


def _plan_profile(path: Path, given: Mapping[str, Any], seconds: float) -> Plan:
    """Return the plan for a model that was measured before."""
    profile, ranks, numbers = Profile.read(path), given.get("ranks"), given.get("microbatches", ())
    if ranks is None or len(numbers) != 1:
        raise InputError(
            f"{path}: got ranks={ranks} and microbatches={list(numbers)}, expected one number of each: a profile is "
            "for microbatches of one size. Pass, for example, --ranks 4 --microbatches 8."
        )
    require_integer("ranks", ranks, least=1)
    require_integer("microbatches", numbers[0], least=1)
    if not 0 < seconds < inf:
        raise InputError(f"seconds: got {seconds}, expected a number above 0. Correct it.")
    host = parse_bytes("host", given["host"]) if "host" in given else 0.0
    problem = PlanProblem.of(profile, numbers[0], parse_caps(given.get("memory"), ranks), host=host)
    problem = problem.pin(given.get("cuts", ()))
    if given.get("slices", (problem.slices,)) != (problem.slices,):
        raise InputError(
            f"{path}: got slices={[*given['slices']]}, expected {problem.slices}, for which the profile is. Leave out "
            "--slices."
        )
    factories: tuple[ScheduleFactory, ...] = tuple(given.get("schedules", list_factories([problem.slices])))
    with showing("plan"):
        return choose([problem], factories, seconds=seconds, report=say_progress, ordered="schedules" not in given)
