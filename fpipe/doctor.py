# SPDX-License-Identifier: Apache-2.0
"""Say of a model, from a shell, whether it can be a pipeline, and what that would be like. Nothing is computed.

The subject is a function that returns the arguments of `fpipe.plan` as a dict, as for the command `plan`. Its times are
those of an assumed GPU (`GPU`, `GPU_LINK`), estimated as a roofline; `plan` measures them where it runs.

Runs on request.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from fpipe.api import pipeline
from fpipe.errors import CaptureError, CutError, GraphError, InputError
from fpipe.pipelines.description import format_bytes
from fpipe.pipelines.options import gather_fields
from fpipe.planning.commands import call_task
from fpipe.planning.make import plan
from fpipe.planning.profiler import profile
from fpipe.planning.roofline import Roofline
from schedules.commands.terminal import terminal_width
from schedules.playing.costs import Link
from schedules.status import showing

GPU: Final = Roofline(flops=4e14, bandwidth=3e12, overhead=5e-6)
GPU_LINK: Final = Link(latency=1e-5, bandwidth=5e10)
"""A GPU, and what connects it to others, of about 2024: 400 TFLOP/s, 3 TB/s to its memory, 50 GB/s to other GPUs."""
BUILDING: Final = ("model", "example", "loss", "targets", "microbatching", "recording", "gradients")
"""The arguments that a plan and a pipeline have in common."""
REJECTED: Final = 1
"""The exit code for a model that can't be pipelined as it is."""


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    parser.add_argument("subject", help="file.py:function, which returns the arguments of fpipe.plan")
    parser.add_argument("--ranks", type=int, help="the number of ranks; by default 4", metavar="P")
    parser.add_argument("--memory", help="the memory of a GPU, such as 80GB", metavar="BYTES")
    parser.add_argument("--seconds", type=float, default=10.0, help="the most time to search", metavar="S")
    parser.set_defaults(run=print_diagnosis)


def print_diagnosis(options: argparse.Namespace) -> int:
    """Say whether a model can be a pipeline: if not, what is rejected, where, and the repair.

    If so, print a plan for an assumed GPU: where the model is cut, which schedule, what each rank holds and sends, and
    what of the model runs as Python.
    """
    file, colon, function = options.subject.rpartition(":")
    if not colon:
        raise InputError(f"{options.subject}: got no function, expected file.py:function. Name the function.")
    task = gather_fields(profile, call_task(Path(file), function))
    given = {"ranks": options.ranks or task.get("ranks", 4), "memory": options.memory or task.get("memory")}
    try:
        with showing("doctor"):
            text = diagnose({**task, **given}, options.seconds)
    except (CaptureError, CutError, GraphError) as error:
        print(f"{options.subject} can't be a pipeline without changes:\n")
        print(_fold(f"{type(error).__name__}: {error}"))
        return REJECTED
    print(f"{options.subject} can be a pipeline.\n")
    print(text)
    return 0


def diagnose(task: dict[str, Any], seconds: float) -> str:
    """Return a plan for `GPU`, and the pipeline that it makes, as text; `task` are the arguments of `fpipe.plan`.

    Raise `PipelineError`, as `fpipe.plan` and `fpipe.pipeline` do.
    """
    assumed = {"device": GPU, "link": GPU_LINK, "seconds": seconds}
    found = plan(**{**assumed, **{name: value for name, value in task.items() if value is not None}})
    pipe = pipeline(plan=found, **{name: task[name] for name in BUILDING if name in task})
    most = max(found.predicted.memory)
    need = f"A GPU needs {format_bytes(most)} for this, in addition to what torch and its libraries use."
    return f"{_fold(str(found))}\n\n{need}\n\n{pipe}"


def _fold(text: str) -> str:
    """Return text folded to the width of the terminal."""
    width = max(40, terminal_width(sys.maxsize))
    return "\n".join("\n".join(wrap(line, width, subsequent_indent=" " * 14) or [""]) for line in text.split("\n"))
