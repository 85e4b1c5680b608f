# SPDX-License-Identifier: Apache-2.0
"""Attach a stage graph to a schedule.

Problem. Most schedules are written for a chain of stages, and a schedule that is printed, mirrored or overlapped
without a graph is treated as one. For towers that run side by side, that reports violations where there are none.

Idea. `connect` is a transform that keeps the actions and remembers the graph. Anything that takes a schedule without a
graph then uses this one, including other transforms.

As text, a graph is its edges separated by commas: `0-2` for a value from stage 0 to stage 2 whose cotangent comes back,
`F0-2` for the value alone, `B2-0` for the cotangent alone, `G0-2` for the gradient of a parameter that both hold.

Invariant: `parse_graph(format_graph(graph), graph.stages) == graph`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from schedules.errors import GraphError, quote
from schedules.language.actions import Action
from schedules.language.graph import Edge, Graph
from schedules.language.schedule import Factory, Schedule, Shape
from schedules.transforms.transform import KEPT, transform

_EDGE = r"([FBG]?)(0|[1-9][0-9]{0,17})-(0|[1-9][0-9]{0,17})"


def _with_graph(once: Factory[[Schedule, Graph]]) -> Factory[[Schedule, Graph]]:
    """Return the transform whose schedules have the graph they are given."""

    def shape(arguments: dict[str, Any]) -> Shape:
        given, graph = once.shape(arguments), arguments["graph"]
        if not isinstance(graph, Graph) or graph.stages != given.placement.stages:
            got = f"a graph of {graph.stages} stages" if isinstance(graph, Graph) else f"graph={quote(graph)}"
            raise GraphError(
                f"connect: got {got} for {quote(arguments['schedule'])}, expected a Graph of {given.placement.stages}: "
                "one for each stage of the schedule. Change the graph, or the schedule's ranks or chunks."
            )
        return given._replace(graph=graph)

    return Factory(once.generator, once.signature, shape, once.limits)


@_with_graph
@transform(limits=KEPT)
def connect(rank: int, schedule: Schedule, graph: Graph) -> Iterator[Action]:
    """Keep the actions, for stages connected by `graph` instead of in a chain.

    Anything that takes the result without a graph uses this one: printing, `check`, `lower`, `simulate` and transforms.
    Raise `GraphError` for a graph with a different number of stages.

    >>> from schedules import dag, gpipe
    >>> print(connect(gpipe(ranks=3, microbatches=1), dag(3, {(0, 2), (1, 2)})))
    rank 0 |F0 .  .  .  B0    |
    rank 1 |F0 .  .  .  B0    |
    rank 2 |.  F0 B0    .  .  |
    """
    yield from schedule.actions(rank)


def format_graph(graph: Graph) -> str:
    """Return the edges of a graph as text.

    >>> format_graph(Graph(3, frozenset({(0, 1), (0, 2)}), frozenset({(0, 1)}), frozenset({(2, 0)})))
    '0-1,F0-2,G2-0'
    """
    both = graph.values & graph.cotangents
    words = [f"{s}-{t}" for s, t in sorted(both)]
    words += [f"F{s}-{t}" for s, t in sorted(graph.values - both)]
    words += [f"B{t}-{s}" for s, t in sorted(graph.cotangents - both)]
    words += [f"G{s}-{t}" for s, t in sorted(graph.gradients)]
    return ",".join(words)


def parse_graph(text: str, stages: int) -> Graph:
    """Return the graph that `text` spells. Raise `GraphError` for anything but edges between `stages` stages.

    >>> parse_graph("0-1,0-2", stages=3) == Graph(3, frozenset({(0, 1), (0, 2)}), frozenset({(0, 1), (0, 2)}))
    True
    """
    found: dict[str, set[Edge]] = {what: set() for what in "FBG"}
    for word in (word.strip() for word in text.split(",") if word.strip()):
        edge = re.fullmatch(_EDGE, word, re.ASCII)
        if not edge:
            raise GraphError(
                f"got {quote(word)} in the graph {quote(text)}, expected edges such as 0-2, or F0-2, B2-0 or G0-2 for "
                "what crosses one way only, separated by commas. Write each edge as two stages."
            )
        what, start, end = edge[1], int(edge[2]), int(edge[3])
        for one in what or "FB":
            found[one].add((end, start) if what == "B" else (start, end))
    return Graph(stages, *(frozenset(found[what]) for what in "FBG"))
