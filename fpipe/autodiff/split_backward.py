# SPDX-License-Identifier: Apache-2.0
"""A backward in two halves: first what other stages wait for, later the gradients of weights, at no extra cost.

Problem. If autograd is called twice, it keeps all that the forward saved until the second call, and walks most of the
graph twice.

Idea. It is called once, for everything except the gradients of the *deferred* weights, and in addition for the
gradients that enter the nodes that would compute those. Since these nodes aren't asked for the weights' gradients, they
skip them. Their saved tensors are kept, and `formulas` does their work later. So only the inputs of linear layers and
the gradients of their outputs are held between the halves.

A weight is deferred if only one node uses it, and that node has a formula. Views and casts in between don't count;
autograd does them, later. All other weights get their gradients in the first half, which is always correct.

A stage makes the same graph for every microbatch. So it is searched once, and from then on only the shortest paths to
the relevant nodes are followed, which are few. This also verifies that the graph is the same: its number of nodes, the
classes of the nodes on the paths, which of them are relevant, and the weights. If not, it is searched again. It is
always searched if the stage reads the values of tensors, since its graph may depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fpipe.autodiff.accumulation import Gradients, Put
from fpipe.autodiff.formulas import Formula, Kept, Node, Operand, formula_of
from fpipe.torch_private import AccumulateGrad

Root: TypeAlias = Tensor | GradientEdge
Edges: TypeAlias = tuple[GradientEdge, ...]
VIEWS = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Expand", "Alias")
BETWEEN = frozenset(f"{name}Backward0" for name in (*VIEWS, "ToCopy"))
"""The nodes allowed between a weight and its user: each takes one tensor and saves nothing of it."""


class Task(NamedTuple):
    """Gradients that one formula computes for one node.

    - `place`: the node's place; `incoming`: which of the first half's gradients enters it.
    - `operands`: the weights that the node reads.
    """

    place: int
    incoming: int
    formula: Formula
    operands: tuple[Operand, ...]


class Graph(NamedTuple):
    """An autograd graph: the nodes from number `start` up to those of `roots`."""

    roots: Sequence[Root]
    start: int

    def nodes(self) -> list[Node]:
        """Return the nodes of the roots; a leaf's is the one that accumulates its gradient."""
        return [r.node if isinstance(r, GradientEdge) else r.grad_fn or get_gradient_edge(r).node for r in self.roots]


@dataclass(frozen=True)
class Split:
    """The deferred part of a stage's backward, and how to find it.

    - `hops`: from the roots to the nodes that compute deferred gradients, and on to the weights: the place of a node
      reached so far, and the inputs to follow from it. `kinds`: the classes of all reached nodes, by place.
    - `sites`: the places of the nodes that compute deferred gradients; `ends`: those of the weights; `ages`: how many
      nodes were made before each site and each root.
    - `tasks`: what to compute from the nodes' saved tensors; `behind`: for operands computed from a weight, that
      weight, the place and the input.
    - `now`: the weights that are not deferred; `reasons`: why.
    """

    hops: tuple[tuple[int, tuple[int, ...]], ...]
    kinds: tuple[type[Any], ...]
    sites: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]
    ages: tuple[tuple[int, int], ...]
    tasks: tuple[Task, ...]
    behind: tuple[tuple[int, int, int], ...]
    now: tuple[int, ...]
    reasons: Mapping[int, str]

    def follow(self, graph: Graph, weights: Sequence[Tensor]) -> list[Node] | None:
        """Return the nodes by place, or `None` if the graph differs from the one that was searched."""
        if not self.sites:
            return []
        nodes, start = graph.nodes(), graph.start
        try:
            for place, numbers in self.hops:
                after = nodes[place].next_functions
                for number in numbers:
                    nodes.append(after[number][0])
        except (AttributeError, IndexError):
            return None
        if tuple(map(type, nodes)) != self.kinds:
            return None
        for place, age in self.ages:
            if nodes[place]._sequence_nr() - start != age:
                return None
        for place, k in self.ends:
            if nodes[place].variable is not weights[k]:
                return None
        return nodes


class Half(NamedTuple):
    """The state kept for the second half.

    - `tasks`: what to compute, each with what it needs.
    - `behind`: where autograd continues, for weights that operands are computed from.
    """

    split: Split
    tasks: tuple[tuple[Task, Kept], ...]
    behind: Mapping[int, GradientEdge]

    def grads(self, found: Gradients, weights: Sequence[Tensor], totals: list[Tensor | None], put: Put) -> Gradients:
        """Return the gradients of all weights; each is `put` to its total as soon as it is computed.

        `found` are the gradients that the first half asked for. A node that received no gradient produces none.
        """
        onward: list[tuple[int, GradientEdge, Tensor]] = []
        for place, k in enumerate(self.split.now):
            totals[k] = put(totals[k], found[place])
        for (_, place, formula, operands), kept in self.tasks:
            incoming = found[place]
            if incoming is None:
                continue
            for operand, grad in zip(operands, formula.grads(incoming, kept, operands), strict=True):
                k = operand.weight
                if operand.between:
                    onward.append((k, self.behind[k], grad))
                else:
                    totals[k] = put(totals[k], grad)
        if onward:
            numbers, edges, grads = zip(*onward, strict=True)
            ends = [weights[k] for k in numbers]
            for k, grad in zip(numbers, torch.autograd.grad(edges, ends, grads), strict=True):
                totals[k] = put(totals[k], grad)
        return tuple(totals)


class Splitter:
    """Splits the backwards of one stage, whose graphs are alike.

    - `refused`: the weights that are never deferred, each with the reason.
    - `alike`: whether all graphs are the same.
    - `split`: the split of the last graph.
    """

    def __init__(self, refused: Mapping[int, str], alike: bool) -> None:
        self.refused, self.alike = refused, alike
        self.split: Split | None = None

    def half(self, graph: Graph, weights: Sequence[Tensor]) -> tuple[Edges, Half]:
        """Return the edges whose gradients the first half must request besides those of `split.now`, and what to keep.

        Call it while the graph still has what it saved. Don't keep the edges: they keep the whole graph alive, and the
        tensors at its leaves.
        """
        nodes = self.split.follow(graph, weights) if self.split is not None and self.alike else None
        if self.split is None or nodes is None:
            self.split = search(graph, weights, self.refused)
            nodes = self.split.follow(graph, weights)
            assert nodes is not None, "a graph is like itself"
        split = self.split
        tasks = tuple([(task, task.formula.keep(nodes[task.place])) for task in split.tasks])
        behind = {weight: GradientEdge(*nodes[k].next_functions[number]) for weight, k, number in split.behind}
        return tuple([GradientEdge(nodes[place], 0) for place in split.sites]), Half(split, tasks, behind)


def search(graph: Graph, weights: Sequence[Tensor], refused: Mapping[int, str]) -> Split:
    """Return what the backward can defer; the `refused` weights are not deferred, each for the reason given."""
    users = _Search(graph, weights)
    reasons, tasks = dict(refused), dict[tuple[Node, Formula], list[Operand]]()
    for k, weight in enumerate(weights):
        if k not in refused:
            found = users.use(weight, k)
            if isinstance(found, str):
                reasons[k] = found
            else:
                node, formula, operand = found
                tasks.setdefault((node, formula), []).append(operand)
    for (node, formula), operands in list(tasks.items()):
        if formula.together and len(operands) < sum(node.next_functions[k][0] is not None for k in formula.numbers):
            reasons |= {operand.weight: f"{node.name()} computes others too" for operand in operands}
            del tasks[node, formula]
    return users.split(tasks, dict(sorted(reasons.items())))


class _Search:
    """An autograd graph, searched breadth first.

    - `first`: the node and input through which each node was found first.
    - `users`: the nodes and inputs through which each node is reached; a root is also used from outside.
    """

    def __init__(self, graph: Graph, weights: Sequence[Tensor]) -> None:
        self.graph, self.starts = graph, graph.nodes()
        self.first: dict[Node, tuple[Node, int]] = {}
        self.users: dict[Node, list[tuple[Node, int]]] = {node: [] for node in self.starts}
        self.weights: dict[int, Node] = {}
        numbers = {id(weight): k for k, weight in enumerate(weights)}
        queue = list(dict.fromkeys(self.starts))
        for node in queue:
            if isinstance(node, AccumulateGrad) and id(node.variable) in numbers:
                self.weights[numbers[id(node.variable)]] = node
            for number, (after, _) in enumerate(node.next_functions):
                if after is not None:
                    if after not in self.users:
                        self.users[after] = []
                        self.first[after] = node, number
                        queue.append(after)
                    self.users[after].append((node, number))

    def use(self, weight: Tensor, k: int) -> tuple[Node, Formula, Operand] | str:
        """Return the only node that uses a weight, and how; or why there is none."""
        node = self.weights.get(k)
        between: list[str] = []
        while node is not None:
            if node in self.starts:
                return "also used by other stages"
            if len(self.users[node]) > 1:
                return f"used {len(self.users[node])} times"
            ((user, number),) = self.users[node]
            name, formula = user.name(), formula_of(user.name(), number)
            if formula is not None:
                transposed = formula.transposes and between == ["TBackward0"]
                shape, rest = tuple(node._input_metadata[0].shape), () if transposed else tuple(between)
                return _refusal(user, formula, weight) or (user, formula, Operand(k, number, shape, transposed, rest))
            if name not in BETWEEN:
                return f"computed by {name}"
            between.append(name)
            node = user
        return "not reached"

    def split(self, tasks: Mapping[tuple[Node, Formula], Sequence[Operand]], reasons: Mapping[int, str]) -> Split:
        """Return the split with these tasks."""
        nodes = list(dict.fromkeys(node for node, _ in tasks))
        ends = {o.weight: self.weights[o.weight] for operands in tasks.values() for o in operands}
        hops, ways = self._ways([*nodes, *ends.values()])
        places = {node: k for k, node in enumerate(ways)}
        aged = [n for n in dict.fromkeys((*self.starts, *nodes)) if not isinstance(n, AccumulateGrad)]
        sites = {node: len(reasons) + k for k, node in enumerate(nodes)}
        found = tuple(Task(places[n], sites[n], formula, tuple(using)) for (n, formula), using in tasks.items())
        return Split(
            tuple((place, tuple(numbers)) for place, numbers in hops.items()),
            tuple(map(type, ways)),
            tuple(places[node] for node in nodes),
            tuple((places[node], weight) for weight, node in ends.items()),
            tuple((places[node], node._sequence_nr() - self.graph.start) for node in aged),
            found,
            tuple((o.weight, task.place, o.number) for task in found for o in task.operands if o.between),
            tuple(reasons),
            reasons,
        )

    def _ways(self, targets: Sequence[Node]) -> tuple[dict[int, list[int]], list[Node]]:
        """Return the shortest paths from the roots to the targets: the hops in order, and the nodes by place."""
        needed = set[Node]()
        for node in targets:
            while node in self.first and node not in needed:
                needed.add(node)
                node, _ = self.first[node]
        nodes, hops = [*self.starts], dict[int, list[int]]()
        places = {node: k for k, node in enumerate(nodes)}
        for node, (before, number) in self.first.items():
            if node in needed:
                hops.setdefault(places[before], []).append(number)
                places[node] = len(nodes)
                nodes.append(node)
        return hops, nodes


def _refusal(node: Node, formula: Formula, weight: Tensor) -> str:
    """Return why the gradient that this node computes can't be deferred; empty if it can."""
    if weight.is_complex():
        return "complex"
    if any(getattr(node, name).unpack_hook is not None for name in dir(node) if name.startswith("_raw_saved_")):
        return "checkpointed"
    return "" if formula.fits(node) else f"computed by {node.name()} with factors or as a sparse tensor"
