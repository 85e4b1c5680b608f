# SPDX-License-Identifier: Apache-2.0
"""The stage graph: which stages feed which.

Stages are numbered in topological order, so an edge `(s, t)` has `s < t` and every graph is acyclic by construction.
Gradients of shared parameters travel after they are complete, and may go either way. A graph knows only that something
crosses an edge, not what.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from schedules.arguments import MOST_STAGES, is_size, require_types
from schedules.errors import GraphError, quote

Edge: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Graph:
    """`stages` stages and three sets of edges `(s, t)`, all but `gradients` with `s < t`.

    - `values`: the forward of `t` uses a value that the forward of `s` makes or passes on.
    - `cotangents`: the backward of `s` uses a cotangent that the backward of `t` makes.
    - `gradients`: `t` shares a parameter with `s`, and needs its gradient from `s` after the last backward of `s`.

    Raise `GraphError` for an edge that does not run from an earlier to a later stage of the graph, or, in `gradients`,
    between two different stages.
    """

    stages: int
    values: frozenset[Edge]
    cotangents: frozenset[Edge]
    gradients: frozenset[Edge] = frozenset()

    def __post_init__(self) -> None:
        if not is_size(self.stages, 0):
            raise GraphError(
                f"Graph: got stages={quote(self.stages)}, expected an integer from 0 to {MOST_STAGES}. Pass the "
                "number of stages."
            )
        for name in ("values", "cotangents", "gradients"):
            edges = getattr(self, name)
            if not isinstance(edges, frozenset) or not all(map(_is_edge, edges)):
                raise GraphError(
                    f"Graph: got {name}={quote(edges)}, expected a frozenset of edges (s, t) between two stages. Write "
                    "frozenset({(0, 1)})."
                )
        for edge in sorted(self.values | self.cotangents):
            if not 0 <= edge[0] < edge[1] < self.stages:
                raise GraphError(
                    f"got edge {edge}, expected (s, t) with 0 <= s < t < {self.stages}. "
                    "Number the stages in topological order."
                )
        for edge in sorted(self.gradients):
            if edge[0] == edge[1] or not 0 <= min(edge) <= max(edge) < self.stages:
                raise GraphError(
                    f"got edge {edge} of gradients, expected two different stages below {self.stages}. "
                    "Name the stages that share a parameter."
                )

    @cached_property
    def feeds(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the later stages that use its values."""
        return _sorted(self.stages, self.values)

    @cached_property
    def fed_by(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the earlier stages whose values it uses."""
        return _sorted(self.stages, {(t, s) for s, t in self.values})

    @cached_property
    def pulls(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the earlier stages that its cotangents go to."""
        return _sorted(self.stages, {(t, s) for s, t in self.cotangents})

    @cached_property
    def pulled_by(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the later stages whose cotangents it uses."""
        return _sorted(self.stages, self.cotangents)

    @cached_property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the other stages that need its gradients of shared parameters."""
        return _sorted(self.stages, self.gradients)

    @cached_property
    def shared_by(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the other stages whose gradients of shared parameters it needs."""
        return _sorted(self.stages, {(t, s) for s, t in self.gradients})


def _is_edge(edge: object) -> bool:
    return isinstance(edge, tuple) and len(edge) == 2 and all(type(end) is int for end in edge)


def _sorted(stages: int, edges: set[Edge] | frozenset[Edge]) -> tuple[tuple[int, ...], ...]:
    ends: list[list[int]] = [[] for _ in range(stages)]
    for start, end in sorted(edges):
        ends[start].append(end)
    return tuple(tuple(row) for row in ends)


def dag(stages: int, edges: frozenset[Edge] | set[Edge]) -> Graph:
    """Return a graph in which values flow along `edges` and cotangents flow back along all of them."""
    require_types(dag, locals())
    return Graph(stages, frozenset(edges), frozenset(edges))


def chain(stages: int) -> Graph:
    """Return the chain: stage `s` feeds stage `s + 1`.

    >>> sorted(chain(3).values)
    [(0, 1), (1, 2)]
    """
    edges = frozenset((s, s + 1) for s in range(stages - 1 if is_size(stages, 0) else 0))  # Graph refuses other sizes
    return Graph(stages, edges, edges)
