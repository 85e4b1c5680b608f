# SPDX-License-Identifier: Apache-2.0
"""Look at schedules from a shell: `python -m schedules list | show | check | simulate | compare | search | page`.

A schedule is the name of a built-in, `file.py:function` for one of your own (the file is run), or a `.csv` table. Its
parameters and transforms follow, as in `interleaved_1f1b chunks=3 split_backward` (`schedules.commands.subjects`). Exit
codes: 0, success; 1, `check` found a violation; 2, the command made no sense, or a file of yours raised an error, and
standard error says why; 130, interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from inspect import getdoc
from math import inf
from types import MappingProxyType

from schedules import __version__
from schedules.commands.audit import add_audit, report_audit
from schedules.commands.compare import report_comparison
from schedules.commands.options import add_costs, add_files, add_subjects, parse_number
from schedules.commands.pages import add_page, report_page
from schedules.commands.process import run_command
from schedules.commands.reports import draw_timeline, print_names, report_check, report_simulation
from schedules.commands.searching import add_search, report_search
from schedules.commands.terminal import terminal_width, wrap_paragraphs


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code."""
    return run_command("python -m schedules", lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(words: list[str]) -> int:
    parsers = _make_parsers()
    usage = argparse.ArgumentParser(
        "python -m schedules",
        usage="python -m schedules COMMAND ...",
        description=_USE,
        formatter_class=argparse.RawTextHelpFormatter,
        add_help=False,
    )
    usage.add_argument("--help", "-h", action="help", help=argparse.SUPPRESS)
    usage.add_argument("--version", action="version", version=f"schedules {__version__}", help=argparse.SUPPRESS)
    usage.add_argument("command", choices=parsers, help=argparse.SUPPRESS)
    parser = parsers[usage.parse_args(words[:1]).command]
    options = parser.parse_intermixed_args(words[1:])
    code: int = options.run(options)
    return code


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = MappingProxyType(
    {
        "list": print_names,
        "show": draw_timeline,
        "check": report_check,
        "simulate": report_simulation,
        "compare": report_comparison,
        "search": report_search,
        "page": report_page,
        "audit": report_audit,
    }
)
_USE = """Draw, check, simulate and search pipeline schedules.

  list                 the built-in schedules and transforms, with their parameters
  show NAME            draw the timeline
  check NAME           check it, and draw the actions up to a violation
  simulate NAME        time it: what each rank does and holds, and what to shorten first
  compare NAME NAME    compare schedules that do the same work
  page NAME            write an interactive page: zoom, search, why a rank waits, and an editor for the order
  audit NAME           check a schedule of another framework: errors, a certificate, and what would be faster
  search NAME          find a faster order of the same stages in the same memory, and bound the distance to the best

Each command has its own help: show --help. For example:

  show interleaved_1f1b chunks=3 --ranks 4 --microbatches 12
  simulate one_f_one_b split_backward --B 2.1 --svg timeline.svg
  compare gpipe one_f_one_b mine.py:zigzag --memory 4

--version prints the version."""
_NAME = """

NAME is a built-in schedule, file.py:function, or a .csv file. Parameters follow the name, as in chunks=2; then come
transforms with their parameters. Commands that take several schedules also take chunks=1..4 and chunks=1,2."""


def _make_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return a parser for each command; its `run` default is the function that runs it."""
    parsers = dict[str, argparse.ArgumentParser]()
    for name, run in _COMMANDS.items():
        parser = parsers[name] = argparse.ArgumentParser(
            f"python -m schedules {name}",
            description=wrap_paragraphs((getdoc(run) or "") + _NAME, terminal_width(120) - 2),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.set_defaults(run=run)
        if name != "list":
            add_subjects(parser, "*" if name == "audit" else "+")
        if name not in ("list", "check"):
            add_costs(parser)
        if name not in ("list", "check", "audit", "page"):
            add_files(parser, csv=name != "compare")
    device = "also reject a program that may hang on an accelerator"
    parsers["check"].add_argument("--device", action="store_true", help=device)
    brief = "leave out the critical path, which keeps all actions in memory"
    parsers["simulate"].add_argument("--brief", action="store_true", help=brief)
    add_search(parsers["search"])
    add_audit(parsers["audit"])
    add_page(parsers["page"])
    memory = "leave out schedules that hold more than this, in the units of `peak memory`"
    parsers["compare"].add_argument("--memory", type=parse_number, default=inf, help=memory, metavar="X")
    return parsers


if __name__ == "__main__":
    sys.exit(main())
