# SPDX-License-Identifier: Apache-2.0
"""Write timelines as a trace file for Perfetto (ui.perfetto.dev) and `chrome://tracing`.

The format is Chrome's "Trace Event Format" in JSON: an object with a list of events, times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from schedules.arguments import require_types
from schedules.drawing.palette import look_of
from schedules.drawing.strips import Strip, make_strip
from schedules.errors import TimelineError, VocabularyError, quote
from schedules.language.actions import BESIDE, parse
from schedules.language.graph import Graph, chain
from schedules.playing.costs import Sizes
from schedules.playing.engine import Span
from schedules.playing.outputs import Flow, flow_of
from schedules.playing.timelines import read_spans

Event: TypeAlias = dict[str, Any]


def trace(
    timelines: Mapping[str, Iterable[Span]],
    graph: Graph | None = None,
    sizes: Sizes | None = None,
    microseconds: float = 1000,
) -> str:
    """Return the trace of `timelines`, keyed by name: a process for each, with a thread for each rank, and one for its
    collectives, if it has any.

    Actions are complete events with arguments kind, stage, microbatch, slice and rank; those of category `wait` are
    transfers that a rank waited for. An arrow leads from each action to those on other ranks that use its output, along
    `graph`, by default the chain. A counter per rank shows its memory, by `sizes`, or in units of one rank's
    activations for one microbatch. `microseconds` is the length of one unit of time: a million for times in seconds.
    Raise `TimelineError` for invalid times.

    >>> from schedules import Costs, gpipe, spans
    >>> import json
    >>> events = json.loads(trace({"gpipe": spans(gpipe(ranks=2, microbatches=1), Costs())}))["traceEvents"]
    >>> [event["name"] for event in events if event["ph"] == "X"]
    ['0F0', '0B0', '1F0', '1B0']
    """
    require_types(trace, locals())
    import json  # rarely needed, and slow to import

    events = list[Event]()
    for number, (name, spans) in enumerate(timelines.items()):
        drawn = make_strip(spans)
        process = _Process(number, drawn, microseconds)
        events += process.names(name)
        events += map(process.complete, drawn.all_spans)
        events += process.arrows(graph or chain(1 + max((s for held in drawn.stages for s in held), default=0)))
        events += process.counters(sizes)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, allow_nan=False, separators=(",", ":"))


def read_trace(text: str, microseconds: float = 1000) -> dict[str, tuple[Span, ...]]:
    """Return the timelines in a trace that `trace` wrote with the same `microseconds`, keyed by name.

    Each begins at 0, and comes rank by rank. Raise `TimelineError` for any other text.

    >>> from schedules import Costs, gpipe, spans
    >>> text = trace({"gpipe": spans(gpipe(ranks=2, microbatches=1), Costs())})
    >>> [(str(span.action), span.start, span.end) for span in read_trace(text)["gpipe"] if span.rank == 1]
    [('1F0', 1.0, 2.0), ('1B0', 2.0, 4.0)]
    """
    require_types(read_trace, locals())
    import json  # rarely needed, and slow to import

    try:
        events = json.loads(text)["traceEvents"]
        names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        found: dict[str, list[Span]] = {name: [] for name in names.values()}
        for event in (event for event in events if event["ph"] == "X"):
            start, length = event["ts"] / microseconds, event["dur"] / microseconds
            span = Span(event["args"]["rank"], parse(event["name"]), start, start + length)
            found[names[event["pid"]]].append(span)
    except (ValueError, KeyError, TypeError, VocabularyError) as error:
        raise TimelineError(f"got {quote(text)}, expected a trace of schedules.drawing.trace: {error}.") from error
    return {name: tuple(sorted(read_spans(spans), key=lambda span: span.rank)) for name, spans in found.items()}


class _Process:
    """The events of one timeline."""

    def __init__(self, number: int, drawn: Strip, microseconds: float) -> None:
        self.number, self.drawn, self.microseconds = number, drawn, microseconds

    def _event(self, ph: str, name: str, rank: int, time: float | None = None, **more: object) -> Event:
        event: Event = {"ph": ph, "name": name, "pid": self.number, "tid": rank, **more}
        if time is not None:
            event["ts"] = (time - self.drawn.begin) * self.microseconds
        return event

    def names(self, name: str) -> Iterator[Event]:
        yield self._event("M", "process_name", 0, args={"name": name})
        for rank in range(self.drawn.ranks):
            yield self._event("M", "thread_name", rank, args={"name": f"rank {rank}"})
            yield self._event("M", "thread_sort_index", rank, args={"sort_index": rank})
            if any(span.action.kind in BESIDE for span in self.drawn.spans[rank]):
                lane = self.drawn.ranks + rank
                yield self._event("M", "thread_name", lane, args={"name": f"rank {rank}, beside"})
                yield self._event("M", "thread_sort_index", lane, args={"sort_index": rank})

    def complete(self, span: Span) -> Event:
        rank, action, start, end = span
        args: dict[str, Any] = {
            "kind": look_of(action.kind).name,
            "stage": action.stage,
            "microbatch": action.microbatch,
            "rank": rank,
        }
        if action.slice is not None:
            args["slice"] = action.slice
        duration = (end - start) * self.microseconds
        tag = "wait" if span.waits else action.kind
        lane = self.drawn.ranks + rank if action.kind in BESIDE else rank
        return self._event("X", str(action), lane, start, dur=duration, cat=tag, args=args)

    def arrows(self, graph: Graph) -> Iterator[Event]:
        """Yield arrows from just before the end of each producing action to the start of each that uses its output."""
        users: dict[Flow, Span] = {}
        for span in self.drawn.all_spans:
            users.setdefault(flow_of(span.action), span)
        count = 0
        for span in self.drawn.all_spans:
            what, stage, microbatch, part = flow_of(span.action)
            ways = {"F": graph.feeds, "B": graph.pulls}.get(what)
            for target in ways[stage] if ways and stage < graph.stages else ():
                user = users.get((what, target, microbatch, part))
                if user and user.rank != span.rank:
                    name, tag = {"F": "value", "B": "cotangent"}[what], {"id": f"{self.number}.{count}", "cat": what}
                    yield self._event("s", name, span.rank, span.start + 0.99 * (span.end - span.start), **tag)
                    yield self._event("f", name, user.rank, user.start, bp="e", **tag)
                    count += 1

    def counters(self, sizes: Sizes | None) -> Iterator[Event]:
        for rank in range(self.drawn.ranks):
            for time, level in self.drawn.memory_levels(rank, sizes):
                yield self._event("C", f"memory of rank {rank}", rank, time, args={"held": level})
