# SPDX-License-Identifier: Apache-2.0
"""Merge the spans that all ranks recorded into one timeline, and return the costs measured in it.

Problem. Each process has only the spans of its own ranks, timed by its own clock.

Idea. A span is a row of numbers, so rows travel as tensors. Each process converts its times to the first one's clock
(`fpipe.network.measurements`) before it sends them. The result has the form of `schedules.spans`, so it can be
summarized, drawn and simulated in the same way.

Runs when `timeline` or `costs` is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.pipelines.handshake import call_together
from fpipe.pipelines.pipeline import Pipeline
from fpipe.tensors.arguments import require_arguments
from fpipe.weights.files import AnyPath, write_whole
from schedules import KINDS, Action, Costs, Graph, Schedule, Span, drawing, estimate
from schedules.drawing import Panel
from schedules.playing.timelines import read_spans

WORDS: Final = tuple(KINDS)
ABSENT: Final = -1  # the entry for an absent peer or slice


class MeasuredTimeline(tuple[Span, ...]):
    """The spans of a measured step, with the schedule that ran and its stage graph.

    `together` is true if all ranks were in one process. As a value, it is the tuple of its spans.
    """

    schedule: Schedule
    graph: Graph
    together: bool

    @classmethod
    def of(cls, pipe: Pipeline, spans: Iterable[Span]) -> MeasuredTimeline:
        """Return the recording of a step of `pipe`."""
        made = cls(spans)
        made.schedule, made.graph = pipe.schedule, pipe.program.graph
        made.together = len(pipe.ranks.ranks) == pipe.schedule.ranks
        return made

    def page(self, path: AnyPath) -> None:
        """Write the step above its prediction as an interactive page (`schedules.drawing.page`).

        The prediction is the simulation with the costs that were measured, as of `fpipe.costs`. Raise `TimelineError`
        for a stage without a forward or a backward, and for more than one step.
        """
        known = estimate_costs(self.schedule, self.together, [self])
        predicted = Panel(self.schedule, known, self.graph, time="s")
        seen = tuple(span for span in self if not (self.together and span.waits))  # in one process, they wait for turns
        write_page(path, {"measured": replace(predicted, recorded=seen), "predicted": predicted})

    def _repr_html_(self) -> str:  # called by notebooks
        return drawing.sketch(f"{self.schedule!r}, measured in seconds", {"": self})


def write_page(path: AnyPath, panels: Mapping[str, Panel]) -> None:
    """Write a page of timelines; raise `InputError` if there can be none at this path."""
    write_whole(path, drawing.page(panels))


def timeline(pipe: Pipeline, spans: Iterable[Span]) -> MeasuredTimeline:
    """Return the spans of all ranks, in seconds from the start of the first action, rank by rank in order of time.

    `spans` are those that this process recorded, of one step for example (`value_and_grad(pipe, record=spans.append)`).
    Under torch.distributed every rank must call this. A wait that began before the first action begins at 0, so waits
    for the previous step are left out. Clocks of different hosts are aligned to within the shortest round trip of a
    message; processes of one host share a clock.

    Raise `InputError` for spans of ranks that are not in this process.

    >>> import torch, fpipe
    >>> from schedules import drawing, gpipe, spans, summarize
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 4),), loss=torch.mean,
    ...                       schedule=gpipe(ranks=2, microbatches=2), cuts=["1"])
    >>> recorded = []
    >>> step = fpipe.value_and_grad(pipe, record=recorded.append)
    >>> _ = step(*pipe.init(model), (torch.ones(2, 4),))
    >>> measured = fpipe.timeline(pipe, recorded)
    >>> " ".join(str(span.action) for span in measured if span.rank == 0)
    '0F0 0F1 0RECV_B0<1 0B0 0B1'
    >>> simulated = spans(pipe.schedule, fpipe.costs(pipe, measured), pipe.program.graph)
    >>> picture = drawing.svg({"measured": measured, "simulated": simulated})

    `measured.page("step.html")` writes it as an interactive page, above its prediction.
    """
    with call_together(timeline, locals()):
        mine = list(read_spans(spans))
        _require_own(mine, pipe.ranks.ranks)
        pipe.ranks.agree()
        rows = _span_rows(mine, pipe.ranks.measure_clock_offset())
        found = pipe.ranks.gather_rows(rows)
        every = [_span(row) for place in pipe.ranks.places for row in found[place].tolist()]
    begin = min((span.start for span in every if not span.waits), default=0.0)
    moved = (_shift(span, begin) for span in sorted(every, key=lambda span: span.rank))
    return MeasuredTimeline.of(pipe, (span for span in moved if not (span.waits and span.end <= 0)))


def costs(pipe: Pipeline, *timelines: Sequence[Span]) -> Costs:
    """Return the costs measured in timelines of training steps, in seconds, for simulating the pipeline's schedule.

    They are computed by `schedules.estimate`. If all ranks are in this process, transfers cost nothing, because a rank
    that waits only waits for its turn. Raise `TimelineError` for a stage without spans.
    """
    require_arguments(costs, locals())
    return estimate_costs(pipe.schedule, len(pipe.ranks.ranks) == pipe.schedule.ranks, timelines)


def estimate_costs(schedule: Schedule, together: bool, timelines: Iterable[Sequence[Span]]) -> Costs:
    """Return the costs measured in timelines; without waits if all ranks are `together` in one process."""
    each = ([span for span in read_spans(one) if not (together and span.waits)] for one in timelines)
    return estimate(schedule, *each)


def _require_own(spans: Sequence[Span], ranks: tuple[int, ...]) -> None:
    """Raise `InputError` for a span that this process cannot have recorded."""
    for position, span in enumerate(spans):
        if span.rank not in ranks:
            raise InputError(
                f"spans[{position}]: got {span.action} of rank {span.rank}, expected spans of ranks {list(ranks)}, "
                "which this process recorded. On each rank, pass the spans that its own record= was called with."
            )


def _span_rows(spans: Sequence[Span], offset: float) -> Tensor:
    """Return a row of numbers for each span, with times by the first process's clock."""
    rows = [
        (
            rank,
            WORDS.index(kind),
            stage,
            i,
            *(ABSENT if one is None else one for one in more),
            start - offset,
            end - offset,
        )
        for rank, (kind, stage, i, *more), start, end in spans
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(Action._fields) + 3)


def _span(row: Sequence[float]) -> Span:
    """Return the span of a row."""
    *numbers, start, end = row
    rank, word, stage, i, peer, part = map(int, numbers)
    action = Action(WORDS[word], stage, i, None if peer == ABSENT else peer, None if part == ABSENT else part)
    return Span(rank, action, start, end)


def _shift(span: Span, begin: float) -> Span:
    """Return the span with times counted from `begin`; any part before it is cut off."""
    return span._replace(start=max(0.0, span.start - begin), end=span.end - begin)
