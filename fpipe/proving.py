# SPDX-License-Identifier: Apache-2.0
"""Prove, from a shell, that a step of a pipeline computes what one device does, for every input.

The subject is a function that returns the arguments of `fpipe.plan` as a dict, as for the command `plan`.

Runs on request.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import schedules
from fpipe.api import pipeline
from fpipe.doctor import BUILDING
from fpipe.errors import InputError
from fpipe.planning.commands import call_task
from fpipe.verification.prove import prove
from schedules import Factory

UNPROVED: Final = 1
"""The exit code for a pipeline of which something could not be proved."""


def add_prove(parser: argparse.ArgumentParser) -> None:
    """Add the options of `prove`."""
    parser.add_argument("subject", help="file.py:function, which returns the arguments of fpipe.plan")
    parser.add_argument("--ranks", type=int, default=4, help="the number of ranks; by default 4", metavar="P")
    parser.add_argument("--microbatches", type=int, default=8, help="their number; by default 8", metavar="M")
    parser.add_argument(
        "--schedule", default="zb_h1", help="a schedule of the gallery; by default zb_h1", metavar="NAME"
    )
    parser.add_argument("--seed", type=int, default=0, help="for models that draw random numbers", metavar="N")
    parser.set_defaults(run=print_proof)


def print_proof(options: argparse.Namespace) -> int:
    """Prove that a step of a pipeline computes what one device does, for every input; print what could not be proved.

    All ranks run in this process, on the CPU.
    """
    file, colon, function = options.subject.rpartition(":")
    if not colon:
        raise InputError(f"{options.subject}: got no function, expected file.py:function. Name the function.")
    task = dict(call_task(Path(file), function))
    made = getattr(schedules, options.schedule, None)
    if not isinstance(made, Factory):
        raise InputError(
            f"--schedule: got {options.schedule!r}, expected a schedule of the gallery. `python -m schedules list` "
            "prints them."
        )
    how = made(ranks=options.ranks, microbatches=options.microbatches)
    pipe = pipeline(schedule=how, **{name: task[name] for name in BUILDING if name in task})
    found = prove(pipe, task["model"], task["example"], task.get("targets"), seed=options.seed)
    print(f"{options.subject} under {how!r}\n\n{found}")
    return 0 if found.is_complete else UNPROVED
