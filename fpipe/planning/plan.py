# SPDX-License-Identifier: Apache-2.0
"""A plan: where to cut a model, which rank runs what, in which order, what is recomputed; and how good that is.

It says what was predicted, what limits it, how far from the best it is at most, and what was considered besides. A plan
is a frozen value that saves as JSON; `fpipe.pipeline` takes it in place of a schedule and cuts.

Runs on request.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from fpipe.errors import InputError, PipelineError
from fpipe.pipelines.description import describe_channels, format_bytes, name_schedule
from fpipe.planning.documents import Format, Limit
from fpipe.planning.timelines import write_page
from fpipe.tensors.arguments import describe_argument, require_arguments
from fpipe.weights.files import AnyPath
from schedules import Certificate, Costs, Schedule, Sizes, check, drawing, lower, spans
from schedules.errors import printable

PLAN_FORMAT: Final = Format("plan", 1, "Make the plan again.", indent=1)


@dataclass(frozen=True)
class Prediction:
    """The predicted step: its `seconds`, its `bubble`, and the bytes that each rank holds at most."""

    seconds: float
    bubble: float
    memory: tuple[int, ...]


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
    """A way to run a model on several ranks, and its predicted time and memory. Made by `fpipe.plan`.

    - `model`, `microbatch`, `device`: what was measured, and where.
    - `cuts`: the names of the modules at which stages after the first begin; `schedule`: the order, with what it
      recomputes.
    - `predicted`: the seconds of a step, the bubble, and the bytes of each rank.
    - `limits`: what the step's time consists of. `caps`: the bytes of each rank that the plan had to fit into.
    - `costs`, `sizes`: the seconds and bytes of the stages, with which `schedules.simulate` makes the prediction.
    - `bound`: no plan takes fewer seconds; `because`: the argument that proves it.
    - `others`: the best of other schedules. `alone`, `copies`: one device, and data parallelism over as many.
    - `advice`: what to do instead, if a pipeline does not pay off; otherwise empty.
    - `complete`: false if the search was stopped early.
    - `certificate`: what holds of the schedule's program for a chain of these stages, with a bound for this order's
      actions, for `schedules/certificate.py` to check; `None` if it is very long or can't be certified.
    """

    model: str
    microbatch: str
    device: str
    cuts: tuple[str, ...]
    schedule: Schedule
    predicted: Prediction
    limits: str
    caps: tuple[Limit, ...]
    costs: Costs
    sizes: Sizes
    bound: float
    because: str
    others: tuple[RunnerUp, ...]
    alone: RunnerUp
    copies: RunnerUp
    advice: str = ""
    complete: bool = True
    certificate: Certificate | None = None

    @property
    def gap(self) -> float:
        """The time by which the predicted step is above the bound, as a fraction of the bound."""
        return max(0.0, self.predicted.seconds / self.bound - 1) if self.bound else 0.0

    def save(self, path: AnyPath) -> None:
        """Write the plan as JSON, with its certificate."""
        PLAN_FORMAT.save(path, self)

    def page(self, path: AnyPath, beside: Plan | None = None) -> None:
        """Write the predicted step as an interactive page (`schedules.drawing.page`), optionally with that of another
        plan.

        Raise `InputError` for a plan without times, and if the file can't be written.
        """
        require_arguments(Plan.page, locals())
        others = {} if beside is None else {f"beside: {name_schedule(beside.schedule)}": beside._panel()}
        write_page(path, {name_schedule(self.schedule): self._panel(), **others})

    def _panel(self) -> drawing.Panel:
        if not self.predicted.seconds:
            raise InputError(
                "page: got a plan without times, expected one that predicts a step. Profile the model where it can run."
            )
        return drawing.Panel(self.schedule, self.costs, None, self.sizes, self.caps, (), "s", "B")

    def _repr_html_(self) -> str:  # called by notebooks
        timelines = {"predicted": spans(self.schedule, self.costs)} if self.predicted.seconds else {}
        from html import escape  # rarely needed, and slow to import

        return f"<pre>{escape(str(self))}</pre>{drawing.sketch(name_schedule(self.schedule), timelines)}"

    @classmethod
    def read(cls, path: AnyPath) -> Plan:
        """Return the plan in a file that `save` wrote.

        Raise `InputError`, naming the file and the field, for anything else: also for a schedule that `schedules.check`
        refuses, and for a certificate of which a claim does not hold.
        """
        plan: Plan = PLAN_FORMAT.load(path, cls)
        try:
            plan.require_consistent()
        except PipelineError as error:
            raise InputError(f"{path}: {error}") from error
        return plan

    def require_consistent(self) -> None:
        """Raise `PipelineError` for another number of cuts than the schedule needs, and for a wrong schedule."""
        if len(self.cuts) + 1 != self.schedule.stages:
            raise InputError(
                f"cuts: got {len(self.cuts)}, expected {self.schedule.stages - 1} for "
                f"{describe_argument(self.schedule)}. Make the plan again."
            )
        check(self.schedule)

    def __str__(self) -> str:
        return "\n".join(map(printable, _describe(self)))


def require_certified(plan: Plan) -> None:
    """Raise `InputError` if a plan has a certificate, and not one that holds of its own schedule."""
    if plan.certificate is None:
        return
    try:
        known = Certificate.parse(plan.certificate.text, "plan.certificate").programs()
    except PipelineError as error:
        raise InputError(str(error)) from error
    program = lower(plan.schedule)
    for rank, stream in enumerate(program.streams(range(plan.schedule.ranks))):
        if known[rank : rank + 1] != [" ".join(map(str, stream))]:
            raise InputError(
                f"plan.certificate: got another program for rank {rank}, expected that of {plan.schedule!r}. Make the "
                "plan again, or pass one with certificate=None."
            )


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
    require_certified(plan)
    return plan.schedule, plan.cuts


UNTIMED: Final = "  a step      not predicted: the profile has no times, so stages are balanced by their parameters"


def format_seconds(seconds: float) -> str:
    """Return a duration for readers.

    >>> format_seconds(0.01234), format_seconds(12.5), format_seconds(0.00002)
    ('12.3 ms', '12.5 s', '0.02 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _describe_time(plan: Plan) -> list[str]:
    step = format_seconds(plan.predicted.seconds)
    return [
        f"  a step      {step} predicted, bubble {100 * plan.predicted.bubble:.1f} %",
        f"  limited by  {plan.limits}",
        f"  bound       {format_seconds(plan.bound)}, at most {100 * plan.gap:.1f} % below: {plan.because}",
    ]


def _describe_certificate(certificate: Certificate) -> str:
    share = f", at most {100 * certificate.gap:.1f} % above the bound for these actions" if certificate.makespan else ""
    return f"  certified   correct, can't hang, takes {format_seconds(float(certificate.makespan))}{share}"


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
        *[f"  transfers   {one}" for one in (describe_channels(lower(plan.schedule).channels),) if one],
        f"  one device  {plan.alone}",
        f"  copies      {plan.copies}",
        *[f"  next best   {one}" for one in plan.others],
        *([] if plan.certificate is None else [_describe_certificate(plan.certificate)]),
        f"  profile     {plan.microbatch}, {plan.device}",
    ]
    if not plan.complete:
        lines.append("  The search was stopped early; this is the best plan found by then.")
    return [*lines, *([f"  {plan.advice}"] if plan.advice else [])]
