# SPDX-License-Identifier: Apache-2.0
"""A trial: one architecture, cut in 2 and in 8, under three kinds of schedule and both backwards, compared bit for bit.

Without dropout, loss, outputs, all gradients and all buffers must equal those of the model's own eager loop and those
of the reference. With dropout, eager draws different numbers, so they are compared with the reference only.
"""

from __future__ import annotations

import copy
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from subject import Subject, UntriedError, loss_of, said, subject

import fpipe
from fpipe.stages.backends import Backward
from schedules import Schedule, interleaved_1f1b, one_f_one_b, v_1f1b

MICROBATCHES, DROPOUT = 2, 0.1
READS = r"module (\S+) \((\w+)\)(?: in .*)?: got (?:a question about values|DataDependent|DynamicOutputShape)"
MODELS = f"transformers{os.sep}"


class Variant(NamedTuple):
    """One way to run an architecture."""

    schedule: Callable[[], Schedule]
    backward: Backward
    dropping: bool = False


SCHEDULES: Mapping[str, Callable[[], Schedule]] = {
    "V, 4 ranks": lambda: v_1f1b(ranks=4, microbatches=MICROBATCHES),
    "1F1B, 2 ranks": lambda: one_f_one_b(ranks=2, microbatches=MICROBATCHES),
    "interleaved, 4 ranks": lambda: interleaved_1f1b(ranks=4, microbatches=MICROBATCHES, chunks=2),
}
BACKWARDS: tuple[Backward, ...] = ("autograd", "graph")
VARIANTS: Mapping[str, Variant] = {
    **{f"{name}, {way}": Variant(schedule, way) for way in BACKWARDS for name, schedule in SCHEDULES.items()},
    "V, 4 ranks, dropout": Variant(SCHEDULES["V, 4 ranks"], "autograd", dropping=True),
}


@dataclass
class Trial:
    """The outcome for one architecture.

    - `commit`: the commit of fpipe; `seconds`: the time taken; `finished`: whether every variant was tried.
    - `attention`: heads, key and value heads, and the size of a head; `tokens`: the length of the text.
    - `untried`: why not even a plain eager step works; empty if it does.
    - `note`: why the loss the model computes from labels was refused, if it was tried without labels instead.
    - `whole`: the classes of modules kept whole because they branch on data.
    - `cuts`: per number of stages, the modules at which stages after the first begin.
    - `results`: per variant, the number of leaves that were compared and equal; or, as text, what went wrong.
    """

    kind: str
    name: str
    commit: str
    parameters: int = 0
    attention: tuple[int | None, ...] = ()
    tokens: int = 0
    batch: tuple[str, ...] = ()
    untried: str = ""
    note: str = ""
    whole: list[str] = field(default_factory=list)
    cuts: dict[str, list[str]] = field(default_factory=dict)
    results: dict[str, int | str] = field(default_factory=dict)
    seconds: float = 0.0
    finished: bool = False

    @property
    def wrong(self) -> dict[str, str]:
        """The failures by variant."""
        return {name: what for name, what in self.results.items() if isinstance(what, str)}

    @property
    def refused(self) -> bool:
        """True if it was refused when the pipeline was built."""
        return any(what.startswith(("CaptureError", "CutError")) for what in self.wrong.values())

    def record(self) -> dict[str, Any]:
        """Return the trial as a JSON object."""
        return asdict(self)


def trials(found: Trial, names: Sequence[str], among: Sequence[str], capture: str) -> Iterator[Trial]:
    """Try an architecture in the variants `among` that have no result yet, and yield the trial after each."""
    began, found.finished = time.monotonic() - found.seconds, False
    for one in _steps(found, names, among, capture):
        one.seconds = round(time.monotonic() - began, 1)
        yield one
    found.finished = True
    yield found


def _steps(found: Trial, names: Sequence[str], among: Sequence[str], capture: str) -> Iterator[Trial]:
    try:
        plain = subject(found.kind, names)
    except UntriedError as error:
        found.untried = str(error)
        return
    found.name, found.parameters = type(plain.model).__name__, plain.parameters
    found.attention, found.tokens = plain.attention, plain.tokens
    plain = plain.without("labels") if found.note else plain
    yield from _plain(plain, among, capture, found)
    if found.refused and "labels" in plain.batch:
        found.note, found.results = next(iter(found.wrong.values())), {}
        yield from _plain(plain.without("labels"), among, capture, found)
    if not found.wrong and any("drop" in name for name in plain.model.config.to_dict()):
        for name in among:
            if VARIANTS[name].dropping and name not in found.results:
                found.results[name] = _dropped(names, VARIANTS[name], capture, found)
                yield found


def _plain(plain: Subject, among: Sequence[str], capture: str, found: Trial) -> Iterator[Trial]:
    """Try each variant without dropout. What a capture refuses, it refuses under every schedule."""
    found.batch = tuple(plain.batch)
    for name in among:
        if not VARIANTS[name].dropping and name not in found.results:
            refusal = next((what for what in found.wrong.values() if what.startswith("CaptureError")), None)
            found.results[name] = refusal or _compared(plain, VARIANTS[name], capture, found)
            yield found


def _compared(plain: Subject, variant: Variant, capture: str, found: Trial) -> int | str:
    """Return the number of equal leaves, or what went wrong; under 1F1B, the same pipeline also runs unpadded."""
    plain = plain._replace(model=copy.deepcopy(plain.model))  # an eager step may leave state behind
    batches = [plain.batch, *([plain.unpadded] if variant.schedule is SCHEDULES["1F1B, 2 ranks"] else [])]
    try:
        pipe = _built(plain, variant, capture, found)
        found.cuts[str(pipe.schedule.stages)] = _begins(pipe)
        equal = [fpipe.verify(pipe, plain.model, batch, seed=0) for batch in batches if batch is not None]
    except Exception as error:
        return f"{said(error)}{_line(error)}"
    return sum(one.reference + one.eager for one in equal)


def _built(plain: Subject, variant: Variant, capture: str, found: Trial) -> fpipe.Pipeline:
    """Return the pipeline, declaring classes of modules that branch on data unsplittable one by one, as users would."""
    schedule = variant.schedule()
    while True:
        kinds = {type(module) for module in plain.model.modules() if type(module).__name__ in found.whole}
        try:
            return fpipe.pipeline(
                plain.model,
                example=plain.batch,
                loss=loss_of,
                schedule=schedule,
                stages=schedule.stages,
                microbatching=fpipe.Microbatching(batch_dims=_dims_of(plain.batch)),
                recording=fpipe.Recording(front_end=capture, unsplittable=list(kinds)),
                gradients=fpipe.Gradients(backward=variant.backward),
            )
        except fpipe.CaptureError as error:
            blamed = re.match(READS, str(error))
            if blamed is None or blamed[1] == "(root)" or blamed[2] in found.whole:
                raise
            found.whole.append(blamed[2])


def _dims_of(batch: dict[str, Any]) -> Any:
    """Return 0 for all leaves; an entry for each, if patches of images are beside one row for each image."""
    sizes = {len(leaf) for leaf in batch.values() if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if len(sizes) <= 1:
        return 0
    return {name: 0 if isinstance(leaf, torch.Tensor) else None for name, leaf in batch.items()}, 0


def _dropped(names: Sequence[str], variant: Variant, capture: str, found: Trial) -> int | str:
    try:
        dropping = subject(found.kind, names, DROPOUT)
    except UntriedError as error:
        return str(error)
    if "labels" not in found.batch:
        dropping = dropping.without("labels")
    return _compared(dropping, variant, capture, found)


def _begins(pipe: fpipe.Pipeline) -> list[str]:
    """Return the modules at which stages after the first begin."""
    cut = pipe.training.assembly
    return [cut.captured.units[position].path or "(root)" for position in cut.partition]


def _line(error: BaseException) -> str:
    """Return the line of the model's code in which an error originated, if it did."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [one for one in traceback.extract_tb(error.__traceback__) if MODELS in one.filename]
    return f" At {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
