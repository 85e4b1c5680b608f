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
it has, and for those in question their classes, which ones they are, and the weights. If not, it is searched again; and
it is always searched if the stage reads the values of tensors, which may decide what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fpipe.differentiation.formulas import Formula, Kept, Node, Operand, formula_of

Root: TypeAlias = Tensor | GradientEdge
AccumulateGrad: Any = vars(torch._C._functions)["AccumulateGrad"]

made_so_far: Callable[[], int] = vars(torch.autograd)["_get_sequence_nr"]
"""How many nodes autograd has made in this thread."""

VIEWS = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Expand", "Alias")
BETWEEN = frozenset(f"{name}Backward0" for name in (*VIEWS, "ToCopy"))
"""The nodes that may stand between a weight and its user: of one tensor each, of which they save nothing."""


class Task(NamedTuple):
    """Gradients that one formula computes for one node: which of the nodes it is, and what it reads."""

    node: int
    formula: Formula
    operands: tuple[Operand, ...]


class Graph(NamedTuple):
    """What autograd has recorded: from node number `start` on, up to those of `roots`."""

    roots: Sequence[Root]
    start: int

    def nodes(self) -> list[Node]:
        """Those of the roots; a leaf's is the one where its gradient is accumulated."""
        return [r.node if isinstance(r, GradientEdge) else r.grad_fn or get_gradient_edge(r).node for r in self.roots]

    def length(self, nodes: Sequence[Node]) -> int:
        """How many nodes were made up to the youngest of these."""
        return max([n._sequence_nr() for n in nodes if type(n) is not AccumulateGrad], default=self.start) - self.start


@dataclass(frozen=True)
class Split:
    """What is deferred in the backward of a stage, and how to find it.

    - `hops`: from the roots to the nodes that compute deferred gradients, and on to the weights: from which place among
      those followed so far, through which input.
    - `sites`: where these nodes are then, and how many nodes are made before each.
    - `length`: how many nodes are made up to the youngest root.
    - `kinds`: the classes of these nodes and of those between them and the weights; `ends`: the weights. Each by place.
    - `tasks`: what is to be done with what the nodes saved; `behind`: for their operands that are made of a weight, in
      order, the site and the input.
    - `reasons`: for every weight that is not deferred, why.
    """

    hops: tuple[tuple[int, int], ...]
    sites: tuple[tuple[int, int], ...]
    length: int
    kinds: tuple[tuple[int, type[Any]], ...]
    ends: tuple[tuple[int, int], ...]
    tasks: tuple[Task, ...]
    behind: tuple[tuple[int, int], ...]
    reasons: Mapping[int, str]

    def follow(self, graph: Graph, weights: Sequence[Tensor]) -> list[Node] | None:
        """The nodes at the sites, if the graph is like the one that was searched."""
        if not self.sites:
            return []
        nodes = graph.nodes()
        if graph.length(nodes) != self.length:
            return None
        try:
            for place, number in self.hops:
                nodes.append(nodes[place].next_functions[number][0])
        except (AttributeError, IndexError):
            return None
        for place, kind in self.kinds:
            if type(nodes[place]) is not kind:
                return None
        for place, age in self.sites:
            if nodes[place]._sequence_nr() - graph.start != age:
                return None
        for place, k in self.ends:
            if type(nodes[place]) is not AccumulateGrad or nodes[place].variable is not weights[k]:
                return None
        return [nodes[place] for place, _ in self.sites]


class Half(NamedTuple):
    """What a first half has to ask for, and what it keeps.

    - `now`: the weights whose gradients it asks for; `edges`: where it asks for the gradient that comes in.
    - `kept`: what the tasks need; `behind`: where autograd goes on, for the operands that are made of a weight.
    """

    split: Split
    now: tuple[int, ...]
    edges: tuple[GradientEdge, ...]
    kept: tuple[Kept, ...]
    behind: tuple[GradientEdge, ...]

    def grads(self, incoming: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """The deferred gradients, each with its weight, as they are computed.

        They are made of the gradients that came in at `edges`; where none came in, there is none.
        """
        onto: list[tuple[GradientEdge, int, Tensor]] = []
        onward = iter(self.behind)
        for (node, formula, operands), kept in zip(self.split.tasks, self.kept, strict=True):
            gradient = incoming[node]
            grads = [None] * len(operands) if gradient is None else formula.grads(gradient, kept, operands)
            for operand, grad in zip(operands, grads, strict=True):
                edge = next(onward) if operand.between else None
                if grad is not None and edge is None:
                    yield operand.weight, grad
                elif grad is not None and edge is not None:
                    onto.append((edge, operand.weight, grad))
        if onto:
            yield from _carried(onto, weights)


def _carried(
    onto: Sequence[tuple[GradientEdge, int, Tensor]], weights: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """The gradients of weights, given those of what was made of them."""
    edges, numbers, grads = zip(*onto, strict=True)
    found = torch.autograd.grad(edges, [weights[k] for k in numbers], grads)
    return zip(numbers, found, strict=True)


class Splitter:
    """Splits the backwards of one stage, which are alike.

    - `refused`: the weights that are never deferred, each with the reason.
    - `alike`: whether all graphs are the same.
    - `split`: that of the last graph.
    """

    def __init__(self, refused: Mapping[int, str], alike: bool) -> None:
        self.refused, self.alike = refused, alike
        self.split: Split | None = None

    def half(self, graph: Graph, weights: Sequence[Tensor]) -> Half:
        """The first half of the backward, while the graph has all that it saved."""
        nodes = self.split.follow(graph, weights) if self.split is not None and self.alike else None
        if self.split is None or nodes is None:
            self.split = search(graph, weights, self.refused)
            nodes = self.split.follow(graph, weights)
            assert nodes is not None, "a graph is like itself"
        return _half(self.split, nodes)


def _half(split: Split, nodes: Sequence[Node]) -> Half:
    return Half(
        split,
        tuple(split.reasons),
        tuple([GradientEdge(node, 0) for node in nodes]),
        tuple([task.formula.keep(nodes[task.node]) for task in split.tasks]),
        tuple([GradientEdge(*nodes[k].next_functions[number]) for k, number in split.behind]),
    )


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
        hops, places = self._ways([*nodes, *ends.values()])
        between = [node for end in ends.values() for node in self._between(end, nodes)]
        found = tuple(Task(nodes.index(node), formula, tuple(using)) for (node, formula), using in tasks.items())
        return Split(
            hops,
            tuple((places[node], node._sequence_nr() - self.graph.start) for node in nodes),
            self.graph.length(self.starts),
            tuple((places[node], type(node)) for node in (*nodes, *between)),
            tuple((places[node], weight) for weight, node in ends.items()),
            found,
            tuple((task.node, operand.number) for task in found for operand in task.operands if operand.between),
            reasons,
        )

    def _between(self, end: Node, nodes: Collection[Node]) -> Iterator[Node]:
        """The nodes between a weight's own and the one of `nodes` that uses it."""
        while (end := self.first[end][0]) not in nodes:
            yield end

    def _ways(self, targets: Sequence[Node]) -> tuple[tuple[tuple[int, int], ...], dict[Node, int]]:
        """The shortest ways from the roots to nodes: the hops in order, and where each node is then."""
        needed = set[Node]()
        for node in targets:
            while node in self.first and node not in needed:
                needed.add(node)
                node, _ = self.first[node]
        places = {node: k for k, node in reversed(list(enumerate(self.starts)))}
        hops: list[tuple[int, int]] = []
        for node, (before, number) in self.first.items():
            if node in needed:
                places[node] = len(self.starts) + len(hops)
                hops.append((places[before], number))
        return tuple(hops), places


def _refusal(node: Node, formula: Formula, weight: Tensor) -> str:
    """Why the gradient that this node computes cannot be deferred; empty if it can."""
    if weight.is_complex():
        return "complex"
    if any(getattr(node, name).unpack_hook is not None for name in dir(node) if name.startswith("_raw_saved_")):
        return "checkpointed"
    return "" if formula.fits(node) else f"computed by {node.name()} with factors or as a sparse tensor"
