# SPDX-License-Identifier: Apache-2.0
"""Plan a pipeline from a shell: `python -m fpipe plan train.py:task --ranks 4 --memory 80GB`.

Exit codes: 0, success; 2, the command made no sense, or a file of yours raised an error, and standard error says why;
130, interrupted.

Runs on request.
"""

from __future__ import annotations

import argparse
import sys
from inspect import getdoc

import fpipe
from fpipe.doctor import add_doctor, print_diagnosis
from fpipe.planning.commands import add_plan, print_plan
from fpipe.proving import add_prove, print_proof
from schedules.commands.process import run_command


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code."""
    return run_command("python -m fpipe", lambda: _run(arguments))


def _run(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        "python -m fpipe",
        usage="python -m fpipe COMMAND ...",
        description=_USE,
        formatter_class=argparse.RawTextHelpFormatter,
        add_help=False,
    )
    parser.add_argument("--help", "-h", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"fpipe {fpipe.__version__}", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", help=argparse.SUPPRESS)
    add_plan(commands.add_parser("plan", description=getdoc(print_plan)))
    add_doctor(commands.add_parser("doctor", description=getdoc(print_diagnosis)))
    add_prove(commands.add_parser("prove", description=getdoc(print_proof)))
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


_USE = """Prepare a pipeline from a shell.

  doctor SUBJECT       check whether the model can be a pipeline: what is rejected, or the cuts and what a GPU needs
  plan SUBJECT         choose cuts, schedule, recomputation and number of microbatches, and print the plan
  prove SUBJECT        prove that a step computes what one device does, for every input

SUBJECT is file.py:function, where your function returns the arguments of fpipe.plan as a dict. The file is run. For
example:

  doctor train.py:task --memory 80GB
  plan train.py:task --ranks 4 --memory 80GB
  prove train.py:task --ranks 4 --schedule zb_h1

Each command has its own help, as in plan --help; --version prints the version."""

if __name__ == "__main__":
    sys.exit(main())
