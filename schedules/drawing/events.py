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
from schedules.language.actions import COLLECTIVES
from schedules.language.graph import Graph, chain
from schedules.playing.costs import Sizes
from schedules.playing.engine import Span
from schedules.playing.outputs import Flow, flow_of

Event: TypeAlias = dict[str, Any]


def trace(
    timelines: Mapping[str, Iterable[Span]],
    graph: Graph | None = None,
    sizes: Sizes | None = None,
    microseconds: float = 1000,
) -> str:
    """Return the trace of `timelines`, keyed by name: a process for each, with a thread for each rank, and one for its
    collectives, if it has any.

    Actions are complete events with arguments kind, stage, microbatch and slice; those of category `wait` are transfers
    that a rank waited for. An arrow leads from each action to those on other ranks that use its output, along `graph`,
    by default the chain. A counter per rank shows its memory, by `sizes`, or in units of one rank's activations for one
    microbatch. `microseconds` is the length of one unit of time: a million for times in seconds. Raise `TimelineError`
    for invalid times.

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
            if any(span.action.kind in COLLECTIVES for span in self.drawn.spans[rank]):
                lane = self.drawn.ranks + rank
                yield self._event("M", "thread_name", lane, args={"name": f"rank {rank}, collectives"})
                yield self._event("M", "thread_sort_index", lane, args={"sort_index": rank})

    def complete(self, span: Span) -> Event:
        rank, action, start, end = span
        args = {"kind": look_of(action.kind).name, "stage": action.stage, "microbatch": action.microbatch}
        if action.slice is not None:
            args["slice"] = action.slice
        duration = (end - start) * self.microseconds
        tag = "wait" if span.waits else action.kind
        lane = self.drawn.ranks + rank if action.kind in COLLECTIVES else rank
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
