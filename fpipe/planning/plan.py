# SPDX-License-Identifier: Apache-2.0
"""A plan: where to cut a model, which rank runs what, in which order, what is recomputed; and how good that is.

It says what was predicted, what limits it, how far from the best it is at most, and what was considered besides. A plan
is a frozen value that saves as JSON; `fpipe.pipeline` takes it in place of a schedule and cuts.

Runs on request.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Final

from fpipe.errors import InputError, PipelineError
from fpipe.pipelines.description import format_bytes
from fpipe.planning.documents import parse_document, read_document, write_document
from fpipe.planning.prediction import Prediction
from fpipe.tensors.arguments import describe_argument
from schedules import Schedule, check
from schedules.errors import printable
from schedules.files.calls import read_call, spell_call

PLAN_KIND: Final = "fpipe plan"
PLAN_EDITION: Final = 1


@dataclass(frozen=True)
class RunnerUp:
    """Another way that was considered: what it is, its seconds, and the most bytes that one of its ranks holds."""

    name: str
    seconds: float
    memory: int
    fits: bool = True

    def __str__(self) -> str:
        note = "" if self.fits else ", which is too much"
        return f"{format_seconds(self.seconds)}, {format_bytes(self.memory)}{note}: {self.name}"


@dataclass(frozen=True)
class Plan:
    """A way to run a model on several ranks, and what to expect of it. Made by `fpipe.plan`.

    - `model`, `microbatch`, `device`: what was measured, and where.
    - `cuts`: the names of the modules at which stages after the first begin; `schedule`: the order, with what it
      recomputes.
    - `predicted`: the seconds of a step, the bubble, and the bytes of each rank.
    - `limits`: what the step's time consists of. `caps`: the bytes of each rank that the plan had to fit into.
    - `bound`: no plan takes fewer seconds; `because`: the argument that proves it.
    - `others`: the best of other schedules. `alone`, `copies`: one device, and data parallelism over as many.
    - `advice`: what to do instead, if a pipeline does not pay; otherwise empty.
    - `complete`: false if the search was stopped early.
    """

    model: str
    microbatch: str
    device: str
    cuts: tuple[str, ...]
    schedule: Schedule
    predicted: Prediction
    limits: str
    caps: tuple[float, ...]
    bound: float
    because: str
    others: tuple[RunnerUp, ...]
    alone: RunnerUp
    copies: RunnerUp
    advice: str = ""
    complete: bool = True

    @property
    def gap(self) -> float:
        """The time by which the predicted step is above the bound, as a fraction of the bound."""
        return max(0.0, self.predicted.seconds / self.bound - 1) if self.bound else 0.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        write_document(path, json.dumps(self._document(), indent=1, allow_nan=False))

    def _document(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in (*TEXTS, "cuts", "bound", "complete")}
        fields |= {"caps": [cap if isfinite(cap) else None for cap in self.caps]}
        fields |= {"schedule": spell_call(self.schedule), "predicted": asdict(self.predicted)}
        fields |= {name: asdict(getattr(self, name)) for name in ("alone", "copies")}
        return {"kind": PLAN_KIND, "version": PLAN_EDITION, **fields, "others": [asdict(one) for one in self.others]}

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """Return the plan in a file that `save` wrote.

        Raise `InputError`, naming the file and the field, for anything else, a schedule that `schedules.check` refuses
        included.
        """
        text = read_document(path)
        try:
            return _parse(parse_document(text))
        except PipelineError as error:
            raise InputError(f"{path}: {error}") from error

    def __str__(self) -> str:
        return "\n".join(map(printable, _describe(self)))


def take_plan(plan: Plan | None, schedule: Schedule | None, cuts: Any, stages: Any) -> tuple[Any, Any]:
    """Return the schedule and the cuts that a pipeline is built with: a plan's, or those that were given instead.

    Raise `InputError` for both.
    """
    if plan is None:
        return schedule, cuts
    if not isinstance(plan, Plan):
        raise InputError(
            f"plan: got {plan!r}, expected a Plan. Pass what fpipe.plan returned, or fpipe.Plan.read(path)."
        )
    for name, given in (("schedule", schedule), ("cuts", cuts), ("stages", stages)):
        if given is not None:
            raise InputError(
                f"{name}: got {given!r} besides a plan, which has its own, expected none. Drop one of them."
            )
    return plan.schedule, plan.cuts


LONGEST: Final = 200
"""Characters of a schedule that are shown."""
UNTIMED: Final = "  a step      not predicted: the profile has no times, so stages are balanced by their parameters"
TEXTS: Final = ("model", "microbatch", "device", "limits", "because", "advice")


def _parse(document: Any) -> Plan:
    """Return the plan that a JSON value describes."""
    if not isinstance(document, dict) or document.get("kind") != PLAN_KIND or document.get("version") != PLAN_EDITION:
        raise InputError(
            f"got {str(document)[:80]}, expected a plan of version {PLAN_EDITION} that fpipe saved. Make the plan "
            "again."
        )
    texts = {name: _take(document, name, str) for name in TEXTS}
    schedule = read_call(document.get("schedule"))
    check(schedule)
    cuts = tuple(_require(f"cuts[{k}]", cut, str) for k, cut in enumerate(_take(document, "cuts", list)))
    if len(cuts) + 1 != schedule.stages:
        raise InputError(
            f"cuts: got {len(cuts)}, expected {schedule.stages - 1} for {describe_argument(schedule)}. Make the plan "
            "again."
        )
    caps = [float("inf") if cap is None else _number("caps", cap) for cap in _take(document, "caps", list)]
    others = [_runner_up(f"others[{k}]", one) for k, one in enumerate(_take(document, "others", list))]
    return Plan(
        **texts,
        cuts=cuts,
        schedule=schedule,
        predicted=_prediction(_take(document, "predicted", dict)),
        caps=tuple(caps),
        bound=_number("bound", document.get("bound")),
        others=tuple(others),
        alone=_runner_up("alone", document.get("alone")),
        copies=_runner_up("copies", document.get("copies")),
        complete=_take(document, "complete", bool),
    )


def _take(document: Mapping[str, Any], name: str, kind: type) -> Any:
    return _require(name, document.get(name), kind)


def _require(where: str, got: Any, kind: type) -> Any:
    if not isinstance(got, kind):
        raise InputError(f"{where}: got {str(got)[:80]!r}, expected {kind.__name__}. Make the plan again.")
    return got


def _number(where: str, got: Any) -> float:
    if isinstance(got, bool) or not isinstance(got, int | float) or not 0 <= got < float("inf"):
        raise InputError(f"{where}: got {str(got)[:80]}, expected a number of at least 0. Make the plan again.")
    return float(got)


def _prediction(found: Mapping[str, Any]) -> Prediction:
    memory = [int(_number("predicted.memory", held)) for held in _take(found, "memory", list)]
    return Prediction(
        _number("predicted.seconds", found.get("seconds")),
        _number("predicted.bubble", found.get("bubble")),
        tuple(memory),
    )


def _runner_up(where: str, found: Any) -> RunnerUp:
    fields = _require(where, found, dict)
    return RunnerUp(
        _take(fields, "name", str),
        _number(f"{where}.seconds", fields.get("seconds")),
        int(_number(f"{where}.memory", fields.get("memory"))),
        _take(fields, "fits", bool),
    )


def format_seconds(seconds: float) -> str:
    """Return a duration for readers.

    >>> format_seconds(0.01234), format_seconds(12.5), format_seconds(0.00002)
    ('12.3 ms', '12.5 s', '0.02 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def name_schedule(schedule: Schedule) -> str:
    """Return the call that makes a schedule, or for an order without a short name, its sizes.

    >>> from schedules import gpipe
    >>> name_schedule(gpipe(2, 4))
    'gpipe(ranks=2, microbatches=4)'
    """
    text = repr(schedule)
    if len(text) <= LONGEST:
        return text
    return f"an order of its own ({schedule.stages} stages, {schedule.microbatches} microbatches)"


def _describe_time(plan: Plan) -> list[str]:
    step = format_seconds(plan.predicted.seconds)
    return [
        f"  a step      {step} predicted, bubble {100 * plan.predicted.bubble:.1f} %",
        f"  limited by  {plan.limits}",
        f"  bound       {format_seconds(plan.bound)}, so at most {100 * plan.gap:.1f} % from the best: {plan.because}",
    ]


def _describe(plan: Plan) -> list[str]:
    held = ", ".join(format_bytes(one) for one in plan.predicted.memory)
    finite = [cap for cap in plan.caps if isfinite(cap)]
    of = f", of {format_bytes(int(min(finite)))}" if finite else ""
    lines = [
        f"Plan for {plan.model} on {plan.schedule.ranks} ranks",
        f"  schedule    {name_schedule(plan.schedule)}",
        f"  cuts        {', '.join(plan.cuts) or 'none'}",
        *(_describe_time(plan) if plan.predicted.seconds else [UNTIMED]),
        f"  memory      {held}{of}",
        f"  one device  {plan.alone}",
        f"  copies      {plan.copies}",
        *[f"  next best   {one}" for one in plan.others],
        f"  profile     {plan.microbatch}, {plan.device}",
    ]
    if not plan.complete:
        lines.append("  The search was stopped early; this is the best plan found by then.")
    return [*lines, *([f"  {plan.advice}"] if plan.advice else [])]
