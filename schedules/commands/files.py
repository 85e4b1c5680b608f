# SPDX-License-Identifier: Apache-2.0
"""Timelines and schedules into the files that the options name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from schedules import drawing
from schedules.authoring import Schedule
from schedules.costs import Sizes
from schedules.graph import Graph
from schedules.interchange import write_csv
from schedules.replay import Span

Timelines: TypeAlias = Mapping[str, Callable[[], Iterable[Span]]]


def written(
    options: argparse.Namespace,
    timelines: Timelines,
    graph: Graph | None = None,
    schedule: Schedule | None = None,
    sizes: Sizes | None = None,
    memory: bool = False,
) -> bool:
    """Write what the options ask for, and say so; whether they asked for anything."""
    files = list(_contents(options, timelines, graph, sizes, memory))
    for name, content in files:
        Path(name).write_text(content, encoding="utf-8")
        print(f"wrote {name}")
    if schedule and options.csv:
        write_csv(schedule, options.csv)
        print(f"wrote {options.csv}")
    return bool(files) or bool(schedule and options.csv)


def _contents(
    options: argparse.Namespace, timelines: Timelines, graph: Graph | None, sizes: Sizes | None, memory: bool
) -> Iterator[tuple[str, str]]:
    if options.svg:
        yield options.svg, drawing.svg(_made(timelines), memory=memory, sizes=sizes)
    if options.trace:
        yield options.trace, drawing.trace(_made(timelines), graph, sizes)


def _made(timelines: Timelines) -> dict[str, Iterable[Span]]:
    return {name: make() for name, make in timelines.items()}
