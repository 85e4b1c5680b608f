# SPDX-License-Identifier: Apache-2.0
"""Write timelines and schedules to the files that the options name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from schedules import drawing
from schedules.files.csv import write_csv
from schedules.files.whole import open_whole
from schedules.language.graph import Graph
from schedules.language.schedule import Schedule
from schedules.playing.costs import Sizes
from schedules.playing.engine import Span

Timelines: TypeAlias = Mapping[str, Callable[[], Iterable[Span]]]


def write_files(
    options: argparse.Namespace,
    timelines: Timelines,
    graph: Graph | None = None,
    schedule: Schedule | None = None,
    sizes: Sizes | None = None,
    memory: bool = False,
    marked: Mapping[str, Collection[Span]] = MappingProxyType({}),
) -> bool:
    """Write the files that the options name, and print their names. Return whether there were any."""
    files: list[tuple[str, str]] = []
    style = drawing.Style(options.window, options.labels, options.palette)
    if options.svg or options.pdf or options.tikz:
        drawn = drawing.draw(_make_all(timelines), memory, sizes, options.width, marked, style)
        forms = {options.svg: drawn.svg, options.pdf: lambda: drawn.pdf().decode("ascii"), options.tikz: drawn.tikz}
        files += [(name, write()) for name, write in forms.items() if name]
    if options.trace:
        files.append((options.trace, drawing.trace(_make_all(timelines), graph, sizes)))
    for name, content in files:
        with open_whole(name) as file:
            file.write(content)
        print(f"wrote {name}")
    if schedule and options.csv:
        write_csv(schedule, options.csv)
        print(f"wrote {options.csv}")
    return bool(files) or bool(schedule and options.csv)


def _make_all(timelines: Timelines) -> dict[str, Iterable[Span]]:
    return {name: make() for name, make in timelines.items()}
