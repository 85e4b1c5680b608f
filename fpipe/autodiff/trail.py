# SPDX-License-Identifier: Apache-2.0
"""The shortest paths through an autograd graph to the nodes that a split backward needs.

A stage makes the same graph for every microbatch, so the paths found in one graph lead to the same nodes in the next.
Following them checks that the graph is the same: the classes of the nodes on the paths, the sequence numbers of the
roots and deferred nodes, counted from the graph's start, and the weights at the ends must match.

Runs when a plan is made and, if the schedule splits backwards, in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NewType, TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fpipe.autodiff.derivatives import AutogradNode, InputIndex
from fpipe.autodiff.interface import WeightIndex

Root: TypeAlias = Tensor | GradientEdge
NodeIndex = NewType("NodeIndex", int)
"""A position among the nodes that a `Trail` reaches."""


class AutogradGraph(NamedTuple):
    """An autograd graph: the nodes from sequence number `start` to those of `roots`."""

    roots: Sequence[Root]
    start: int

    def nodes(self) -> list[AutogradNode]:
        """Return the node of each root; for a leaf, the one that accumulates its gradient."""
        return [r.node if isinstance(r, GradientEdge) else r.grad_fn or get_gradient_edge(r).node for r in self.roots]


class Trail(NamedTuple):
    """The shortest paths from the roots of a graph to the nodes that a split needs, and how to recognize the graph.

    Nodes are numbered as they are reached, the roots first.

    - `hops`: the nodes to continue from, in order, and which of their inputs to follow.
    - `kinds`: the class of every node.
    - `ages`: the sequence number of each root and each deferred node, counted from the graph's start.
    - `weights`: the nodes that accumulate the gradients of weights.
    """

    hops: tuple[tuple[NodeIndex, tuple[InputIndex, ...]], ...]
    kinds: tuple[type[Any], ...]
    ages: tuple[tuple[NodeIndex, int], ...]
    weights: tuple[tuple[NodeIndex, WeightIndex], ...]

    def follow(self, graph: AutogradGraph, weights: Sequence[Tensor]) -> list[AutogradNode] | None:
        """Return the trail's nodes, or `None` if the graph differs from the one that was searched."""
        nodes = graph.nodes()
        try:
            for node, inputs in self.hops:
                after = nodes[node].next_functions
                for k in inputs:
                    nodes.append(after[k][0])
        except (AttributeError, IndexError):
            return None
        if tuple(map(type, nodes)) != self.kinds:
            return None
        for node, age in self.ages:
            if nodes[node]._sequence_nr() - graph.start != age:
                return None
        for node, weight in self.weights:
            if nodes[node].variable is not weights[weight]:
                return None
        return nodes
