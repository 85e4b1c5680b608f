# SPDX-License-Identifier: Apache-2.0
"""Look at schedules from a shell: `python -m schedules list | show NAME | check NAME | simulate NAME`.

NAME is a built-in schedule, `file.py:function` for one of your own (the file is run), or a `.csv` table.
Exit code 0: fine; 1: `check` found a violation; 2: the question made no sense, and standard error says why.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import shutil
import sys
from collections.abc import Callable
from math import isfinite
from pathlib import Path

from schedules import drawing, families
from schedules.authoring import Factory, Schedule
from schedules.costs import Costs
from schedules.errors import PipelineError, ScheduleError, UsageError
from schedules.interchange import read_csv
from schedules.rules import check
from schedules.simulation import simulate

DEFAULTS = {"ranks": 4, "microbatches": 8}


def main(arguments: list[str] | None = None) -> int:
    """Answer one question; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.answer(options)
        return code
    except (PipelineError, OSError) as error:
        print(f"python -m schedules: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m schedules", description="Look at pipeline schedules.")
    questions = parser.add_subparsers(required=True, metavar="list | show | check | simulate")
    questions.add_parser("list", help="names of the built-in schedules").set_defaults(answer=_list)
    for name, answer, what in (
        ("show", _show, "the picture of the timeline"),
        ("check", _check, "whether the schedule is correct"),
        ("simulate", _simulate, "how long it takes and what it holds"),
    ):
        question = questions.add_parser(name, help=what)
        question.set_defaults(answer=answer)
        question.add_argument("name", help="a built-in schedule, file.py:function, or a .csv file")
        for size in ("ranks", "microbatches", "chunks"):
            question.add_argument(f"--{size}", type=int, help=f"default {DEFAULTS.get(size, 'as the schedule says')}")
        if answer is not _check:
            for cost in ("F", "B", "I", "W", "comm"):
                default = getattr(Costs(), cost)
                question.add_argument(f"--{cost}", type=_time, default=default, help=f"its time, by default {default}")
    return parser


def _time(text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = -1
    if not isfinite(time) or time < 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a time of at least 0")
    return time


def _list(options: argparse.Namespace) -> int:
    for name in families.__all__:
        print(f"{name:16} {(inspect.getdoc(getattr(families, name)) or '').splitlines()[0]}")
    return 0


def _show(options: argparse.Namespace) -> int:
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    print(drawing.text(_schedule(options), _costs(options), columns=columns))
    return 0


def _check(options: argparse.Namespace) -> int:
    schedule = _schedule(options)
    try:
        check(schedule)
    except ScheduleError as violation:
        print(violation)
        return 1
    actions = sum(1 for rank in range(schedule.ranks) for _ in schedule.actions(rank))
    print(
        f"ok: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches, {actions} actions"
    )
    return 0


def _simulate(options: argparse.Namespace) -> int:
    timeline = simulate(_schedule(options), _costs(options))
    print(f"makespan     {timeline.makespan:g}")
    print(f"span         {timeline.span:g}")
    print(f"bubble       {timeline.bubble:.4f}")
    print(f"busy         {' '.join(f'{time:g}' for time in timeline.busy)}")
    print(f"peak memory  {' '.join(f'{peak:g}' for peak in timeline.peak_memory)}")
    return 0


def _costs(options: argparse.Namespace) -> Costs:
    return Costs(options.F, options.B, options.I, options.W, options.comm)


def _schedule(options: argparse.Namespace) -> Schedule:
    given = {size: getattr(options, size) for size in ("ranks", "microbatches", "chunks")}
    sizes = {size: value for size, value in given.items() if value is not None}
    if options.name.endswith(".csv"):
        if sizes:
            raise UsageError(f"got --{next(iter(sizes))}, expected no sizes: {options.name} has its own. Drop it.")
        return read_csv(options.name)
    factory = _factory(options.name)
    if "chunks" in sizes and "chunks" not in inspect.signature(factory).parameters:
        raise UsageError(f"got --chunks, but {options.name} does not take them. Drop it.")
    return factory(**{**DEFAULTS, **sizes})


def _factory(name: str) -> Callable[..., Schedule]:
    file, colon, function = name.rpartition(":")
    found = getattr(_run(Path(file)), function, None) if colon else getattr(families, name, None)
    if not isinstance(found, Factory):
        raise UsageError(
            f"got {name!r}, expected one of {', '.join(families.__all__)}, a function with @schedule as in "
            "file.py:function, or a table in a .csv file."
        )
    return found


def _run(path: Path) -> object:
    """The module in a file of the user's."""
    name = "schedules_of_the_user"  # not the file's own, which may be that of a module in use
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"got {str(path)!r}, expected a Python file. Name it as in file.py:function.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
