# SPDX-License-Identifier: Apache-2.0
"""Look at schedules from a shell: `python -m schedules list | show | check | simulate | compare`.

A schedule is the name of a built-in, `file.py:function` for one of your own (the file is run), or a `.csv` table. Its
parameters and transforms follow, as in `interleaved_1f1b chunks=3 split_backward` (`schedules.commands.naming`). Exit
codes: 0, success; 1, `check` found a violation; 2, the command made no sense, and standard error says why.
"""

from __future__ import annotations

import argparse
import os
import sys
from inspect import getdoc
from math import inf

from schedules.commands import options as questions
from schedules.commands.answers import check, list_all, show, simulate
from schedules.commands.compare import compare
from schedules.errors import PipelineError


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    known = _questions()
    asked = argparse.ArgumentParser(
        "python -m schedules", description=_USE, formatter_class=argparse.RawTextHelpFormatter
    )
    asked.add_argument("question", choices=known, metavar=" | ".join(known))
    parser = known[asked.parse_args(given[:1]).question]
    options = parser.parse_intermixed_args(given[1:])
    try:
        code: int = options.answer(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has seen enough, as in `show gpipe | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (PipelineError, OSError) as error:
        print(f"python -m schedules: {error}", file=sys.stderr)
        return 2


_USE = """Look at pipeline schedules.

  list                 the built-in schedules and transforms, with their parameters
  show NAME            the picture of the timeline
  check NAME           whether the schedule is correct; if not, why, and what leads there
  simulate NAME        how long it takes, what each rank does and holds, what to shorten first
  compare NAME NAME    schedules side by side, all doing the same work

Each says more when asked: show --help. For example:

  show interleaved_1f1b chunks=3 --ranks 4 --microbatches 12
  simulate one_f_one_b split_backward --B 2.1 --svg timeline.svg
  compare gpipe one_f_one_b mine.py:zigzag --memory 4"""
_NAME = """

A NAME is a built-in schedule's, file.py:function, or a .csv file. Behind it stand its parameters, as in chunks=2, then
names of transforms, with theirs. Where several schedules may stand, chunks=1..4 and chunks=1,2 are several."""


def _questions() -> dict[str, argparse.ArgumentParser]:
    """Return a parser for each command; its `answer` default is the function that runs it."""
    parsers = dict[str, argparse.ArgumentParser]()
    for answer in (list_all, show, check, simulate, compare):
        name, what = answer.__name__.partition("_")[0], (getdoc(answer) or "") + _NAME
        parser = parsers[name] = argparse.ArgumentParser(
            f"python -m schedules {name}", description=what, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.set_defaults(answer=answer)
        if name != "list":
            questions.add_subjects(parser)
        if name not in ("list", "check"):
            questions.add_costs(parser)
            questions.add_files(parser, csv=name != "compare")
    brief = "leave the critical path out, for which all actions are kept in memory"
    parsers["simulate"].add_argument("--brief", action="store_true", help=brief)
    memory = "leave out what holds more, in the units of `peak memory`"
    parsers["compare"].add_argument("--memory", type=questions.number, default=inf, help=memory, metavar="X")
    return parsers


if __name__ == "__main__":
    sys.exit(main())
