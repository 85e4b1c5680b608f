# SPDX-License-Identifier: Apache-2.0
"""A trial: one architecture, cut in 2 and in 4, under three kinds of schedule, compared with one device bit for bit.

Without dropout, loss, outputs, all gradients and all buffers must be those of the model's own eager loop and those of
the reference. With dropout, eager draws other numbers, and the reference is what they are compared with.
"""

from __future__ import annotations

import copy
import os
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from subject import Subject, UntriedError, loss_of, said, subject

import fpipe
from schedules import Schedule, interleaved_1f1b, one_f_one_b, v_1f1b

MICROBATCHES, DROPOUT, DROPPING = 2, 0.1, ", dropout"
SCHEDULES: Mapping[str, Callable[[], Schedule]] = {
    "V, 4 stages": lambda: v_1f1b(ranks=2, microbatches=MICROBATCHES),
    f"V, 4 stages{DROPPING}": lambda: v_1f1b(ranks=2, microbatches=MICROBATCHES),
    "1F1B, 2 stages": lambda: one_f_one_b(ranks=2, microbatches=MICROBATCHES),
    "1F1B, 4 stages": lambda: one_f_one_b(ranks=4, microbatches=MICROBATCHES),
    "interleaved, 4 stages": lambda: interleaved_1f1b(ranks=2, microbatches=MICROBATCHES, chunks=2),
}
MODELS = f"transformers{os.sep}"


@dataclass
class Trial:
    """What came out for one architecture.

    - `untried`: why not even a plain eager step works; empty if it does.
    - `note`: why the loss that the model computes from labels could not be captured; then it went without.
    - `whole`: the classes of modules that were kept whole, because they branch on data.
    - `cuts`: per number of stages, the modules at which the second and later begin.
    - `results`: per schedule, how many leaves were compared and found equal; or, as text, what went wrong.
    """

    kind: str
    name: str
    parameters: int = 0
    batch: tuple[str, ...] = ()
    untried: str = ""
    note: str = ""
    whole: list[str] = field(default_factory=list)
    cuts: dict[str, list[str]] = field(default_factory=dict)
    results: dict[str, int | str] = field(default_factory=dict)

    @property
    def wrong(self) -> dict[str, str]:
        """What went wrong, by schedule."""
        return {name: what for name, what in self.results.items() if isinstance(what, str)}

    def record(self) -> dict[str, Any]:
        """The trial as JSON has it."""
        return asdict(self)


def trial(kind: str, names: Sequence[str], among: Sequence[str], capture: str) -> Trial:
    """Try an architecture under the schedules `among`."""
    found = Trial(kind, names[0])
    try:
        plain = subject(kind, names)
    except UntriedError as error:
        found.untried = str(error)
        return found
    found.name, found.parameters = type(plain.model).__name__, plain.parameters
    _try(plain, among, capture, found)
    if found.wrong and "labels" in plain.batch:
        found.note, found.results = next(iter(found.wrong.values())), {}
        _try(plain.without("labels"), among, capture, found)
    if not found.wrong and any("drop" in name for name in plain.model.config.to_dict()):
        for name in among:
            if name.endswith(DROPPING):
                found.results[name] = _dropped(kind, names, SCHEDULES[name](), capture, found)
    return found


def _try(plain: Subject, among: Sequence[str], capture: str, found: Trial) -> None:
    """Without dropout, under each schedule."""
    found.batch = tuple(plain.batch)
    for name in among:
        if not name.endswith(DROPPING):
            found.results[name] = _compared(plain, SCHEDULES[name](), capture, found)


def _compared(plain: Subject, schedule: Schedule, capture: str, found: Trial) -> int | str:
    plain = plain._replace(model=copy.deepcopy(plain.model))  # an eager step may leave something behind
    try:
        pipe = _built(plain, schedule, capture, found)
        found.cuts[str(schedule.stages)] = _begins(pipe)
        equal = fpipe.verify(pipe, plain.model, plain.batch, seed=0)
    except Exception as error:
        return f"{said(error)}{_line(error)}"
    return equal.reference + equal.eager


def _built(plain: Subject, schedule: Schedule, capture: str, found: Trial) -> fpipe.Pipeline:
    """The pipeline; modules that branch on data are named unsplittable, one class after the other, as users would."""
    while True:
        kinds = {type(module) for module in plain.model.modules() if type(module).__name__ in found.whole}
        try:
            return fpipe.pipeline(
                plain.model,
                example=plain.batch,
                loss=loss_of,
                schedule=schedule,
                stages=schedule.stages,
                capture=capture,
                unsplittable=list(kinds),
            )
        except fpipe.CaptureError as error:
            blamed = re.match(r"module (\S+) \((\w+)\): got D(?:ataDependent|ynamicOutputShape)", str(error))
            if blamed is None or blamed[1] == "(root)" or blamed[2] in found.whole:
                raise
            found.whole.append(blamed[2])


def _dropped(kind: str, names: Sequence[str], schedule: Schedule, capture: str, found: Trial) -> int | str:
    try:
        dropping = subject(kind, names, DROPOUT)
    except UntriedError as error:
        return str(error)
    if "labels" not in found.batch:
        dropping = dropping.without("labels")
    return _compared(dropping, schedule, capture, found)


def _begins(pipe: fpipe.Pipeline) -> list[str]:
    """The modules at which stages begin."""
    return [layout.units[0].path or "(root)" for layout in pipe.training.assembly.layouts[1:]]


def _line(error: BaseException) -> str:
    """The line of the model's code that an error began at, if it began in one."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [one for one in traceback.extract_tb(error.__traceback__) if MODELS in one.filename]
    return f" At {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
