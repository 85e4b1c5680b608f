# SPDX-License-Identifier: Apache-2.0
"""A backward in two halves: what others wait for, and the gradients of weights, later, at no further cost.

Problem. Asked twice, autograd keeps all that the forward saved until the second time, and walks most of the graph
twice.

Idea. It is asked once, for everything but the gradients of the *deferred* weights, and besides for the gradients that
come in at the nodes that would compute them: these nodes are not asked for those weights then, so they skip them. What
they saved for them is kept, and later `formulas` says what they would have done. So between the halves there are the
inputs of linear layers and the gradients of their outputs, and nothing else.

A weight is deferred if one node alone uses it, and one that has a formula. Views and casts in between are no use, and
are done by autograd, later. All other weights get their gradient in the first half, which is always right.

The same stage makes the same graph for every microbatch. So it is searched once, and afterwards the shortest ways to
the nodes in question are followed, which are few. On the way it is verified that the graph is the same: how many nodes
it has, the classes of those on the ways, which ones are in question, and the weights. If not, it is searched again; and
it is always searched if the stage reads the values of tensors, which may decide what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fpipe.differentiation.formulas import Formula, Kept, Node, Operand, formula_of
from fpipe.differentiation.sums import Gradients, Put

Root: TypeAlias = Tensor | GradientEdge
Edges: TypeAlias = tuple[GradientEdge, ...]
AccumulateGrad: Any = vars(torch._C._functions)["AccumulateGrad"]

made_so_far: Callable[[], int] = vars(torch.autograd)["_get_sequence_nr"]
"""How many nodes autograd has made in this thread."""

VIEWS = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Expand", "Alias")
BETWEEN = frozenset(f"{name}Backward0" for name in (*VIEWS, "ToCopy"))
"""The nodes that may stand between a weight and its user: of one tensor each, of which they save nothing."""


class Task(NamedTuple):
    """Gradients that one formula computes for one node.

    - `place`: the node's; `incoming`: that of the gradient that comes in there, among those of the first half.
    - `operands`: what the node reads.
    """

    place: int
    incoming: int
    formula: Formula
    operands: tuple[Operand, ...]


class Graph(NamedTuple):
    """What autograd has recorded: from node number `start` on, up to those of `roots`."""

    roots: Sequence[Root]
    start: int

    def nodes(self) -> list[Node]:
        """Those of the roots; a leaf's is the one where its gradient is accumulated."""
        return [r.node if isinstance(r, GradientEdge) else r.grad_fn or get_gradient_edge(r).node for r in self.roots]


@dataclass(frozen=True)
class Split:
    """What is deferred in the backward of a stage, and how to find it.

    - `hops`: from the roots to the nodes that compute deferred gradients, and on to the weights: from which place among
      those followed so far, through which inputs; `kinds`: the classes of all of them, by place.
    - `sites`: where the nodes in question are then; `ends`: the weights; `ages`: how many nodes were made before each
      site and before each root.
    - `tasks`: what is to be done with what the nodes saved; `behind`: of operands that are made of a weight, that
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
        """The nodes by place, if the graph is like the one that was searched."""
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
    """What is kept for the second half.

    - `tasks`: what is to be done, each with what it needs.
    - `behind`: where autograd goes on, for weights of which operands are made.
    """

    split: Split
    tasks: tuple[tuple[Task, Kept], ...]
    behind: Mapping[int, GradientEdge]

    def grads(self, found: Gradients, weights: Sequence[Tensor], totals: list[Tensor | None], put: Put) -> Gradients:
        """The gradients of all weights, each put to its total as soon as it is there.

        `found` are the gradients that the first half asked for. Where none came in at a node, it makes none.
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
    """Splits the backwards of one stage, which are alike.

    - `refused`: the weights that are never deferred, each with the reason.
    - `alike`: whether all graphs are the same.
    - `split`: that of the last graph.
    """

    def __init__(self, refused: Mapping[int, str], alike: bool) -> None:
        self.refused, self.alike = refused, alike
        self.split: Split | None = None

    def half(self, graph: Graph, weights: Sequence[Tensor]) -> tuple[Edges, Half]:
        """For the first half of the backward: where to ask for the gradient that comes in, besides for the gradients of
        `split.now`; and what to keep, while the graph has all that it saved.

        The edges are not for keeping: through them the whole graph would stay, and the tensors at its leaves.
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
    """What can be deferred in the backward; not the `refused` weights, each with the reason."""
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

    - `first`: through which node and input each node was found.
    - `users`: the nodes and inputs through which each is reached; a root is used from outside, too.
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
        """The node that alone uses a weight, and how; or why there is none."""
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
        """The split with these tasks."""
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
        """The shortest ways from the roots to nodes: the hops in order, and the nodes by place."""
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
    """Why the gradient that this node computes cannot be deferred; empty if it can."""
    if weight.is_complex():
        return "complex"
    if any(getattr(node, name).unpack_hook is not None for name in dir(node) if name.startswith("_raw_saved_")):
        return "checkpointed"
    return "" if formula.fits(node) else f"computed by {node.name()} with factors or as a sparse tensor"
