# SPDX-License-Identifier: Apache-2.0
"""A backward in two halves: first what other stages wait for, later the gradients of weights, at no extra cost.

Problem. If autograd is called twice, it keeps all that the forward saved until the second call, and walks most of the
graph twice.

Idea. Call it once: for everything except the gradients of the *deferred* weights, and for the gradients that enter the
nodes that would compute those. These nodes skip the weights' gradients, since they are not requested. The tensors that
the nodes saved are kept, and `derivatives` does their work later. So only the inputs of linear layers and the gradients
of their outputs are held between the halves.

A weight is deferred if only one node uses it, and `derivatives` supports that node. Views and casts in between are
allowed; autograd differentiates them in the second half. All other weights get their gradients in the first half, which
is always correct.

A stage makes the same graph for every microbatch, so it is searched once, and from then on a `Trail` is followed. A
graph that doesn't match is searched again. If the stage reads the values of tensors, its graph may depend on them, so
every graph is searched.

Runs when a plan is made and, if the schedule splits backwards, in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, NewType, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fpipe.autodiff.accumulation import Gradients, add, add_fresh
from fpipe.autodiff.derivatives import AutogradNode, Derivative, InputIndex, Kept, Operand, derivative_of
from fpipe.autodiff.interface import WeightIndex
from fpipe.autodiff.trail import AutogradGraph, NodeIndex, Trail
from fpipe.torch_private import AccumulateGrad

Edges: TypeAlias = tuple[GradientEdge, ...]
RequestIndex = NewType("RequestIndex", int)
"""A position among the gradients that the first half computes for the second."""
VIEW_NODES = (
    *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias"),
    *("Unsqueeze", "Squeeze", "Expand", "Alias"),
)
BETWEEN = frozenset((*(f"{name}Backward0" for name in (*VIEW_NODES, "ToCopy")), "EnterBackward"))
"""The nodes allowed between a weight and its user: each takes one tensor and saves nothing of it."""


class Task(NamedTuple):
    """Gradients that one derivative computes for one node.

    - `node`: the node; `incoming`: the gradient that enters it, which the first half computes.
    - `operands`: the weights that the node reads.
    """

    node: NodeIndex
    incoming: RequestIndex
    derivative: Derivative
    operands: tuple[Operand, ...]


class Split(NamedTuple):
    """A stage's backward in two parts.

    - `trail`: finds the nodes in the next microbatch's graph.
    - `now`: the weights whose gradients the first half computes, its first requests; `reasons`: the reason for each.
    - `sites`: the nodes whose incoming gradients are its other requests.
    - `tasks`: the gradients that the second half computes from these.
    """

    trail: Trail
    now: tuple[WeightIndex, ...]
    reasons: Mapping[WeightIndex, str]
    sites: tuple[NodeIndex, ...]
    tasks: tuple[Task, ...]

    @property
    def fresh(self) -> frozenset[WeightIndex]:
        """The weights whose gradients are fresh (see `accumulation`): a single operation computes each of them."""
        return frozenset(operand.weight for task in self.tasks for operand in task.operands if task.derivative.fresh)

    def nodes(self, graph: AutogradGraph, weights: Sequence[Tensor]) -> list[AutogradNode] | None:
        """Return the trail's nodes, none if there are no tasks, or `None` if the graph is not the one searched."""
        return self.trail.follow(graph, weights) if self.tasks else []


class Half(NamedTuple):
    """The state kept for the second half.

    - `tasks`: the tasks, each with what its node saved.
    - `onward`: the edges from which autograd continues, to weights that are viewed or cast before their use.
    """

    split: Split
    tasks: tuple[tuple[Task, Kept], ...]
    onward: Mapping[WeightIndex, GradientEdge]

    def grads(self, requested: Gradients, weights: Sequence[Tensor], onto: Gradients = ()) -> Gradients:
        """Return the gradients of all weights, each added to its sum in `onto` as soon as it is computed.

        `requested` has the gradients that the first half computed. A node that received no gradient produces none.
        """
        totals: list[Tensor | None] = [*onto] if onto else [None] * len(weights)
        late: list[tuple[WeightIndex, Tensor, bool]] = []
        for k, grad in zip(self.split.now, requested, strict=False):
            totals[k] = add(totals[k], grad)
        for (_, request, derivative, operands), kept in self.tasks:
            incoming = requested[request]
            if incoming is None:
                continue
            for operand, grad in zip(operands, derivative.grads(incoming, kept, operands), strict=True):
                k = operand.weight
                if operand.between:
                    late.append((k, grad, derivative.fresh))
                else:
                    totals[k] = add_fresh(totals[k], grad) if derivative.fresh else add(totals[k], grad)
        if late:
            edges, ends = [self.onward[k] for k, _, _ in late], [weights[k] for k, _, _ in late]
            grads = torch.autograd.grad(edges, ends, [grad for _, grad, _ in late])
            for (k, _, fresh), grad in zip(late, grads, strict=True):
                totals[k] = add_fresh(totals[k], grad) if fresh else add(totals[k], grad)
        return tuple(totals)


class Splitter:
    """The splitter of one stage's backwards, which caches the last split.

    - `refused`: the weights never to defer, each with the reason.
    - `alike`: whether all graphs should be the same, so that the cached split may be reused.
    - `split`: the split of the last graph that was searched.
    """

    def __init__(self, refused: Mapping[WeightIndex, str], alike: bool) -> None:
        self.refused, self.alike = refused, alike
        self.split: Split | None = None

    def half(self, graph: AutogradGraph, weights: Sequence[Tensor]) -> tuple[Edges, Half]:
        """Return the edges whose gradients the first half requests after those of `split.now`, and the state to keep.

        Call it before the graph's saved tensors are freed. Don't keep the edges: they keep the whole graph alive, and
        the tensors at its leaves.
        """
        nodes = self.split.nodes(graph, weights) if self.split is not None and self.alike else None
        if self.split is None or nodes is None:
            self.split = search_graph(graph, weights, self.refused)
            nodes = self.split.nodes(graph, weights)
            assert nodes is not None, "a graph is like itself"
        split = self.split
        tasks = tuple([(task, task.derivative.keep(nodes[task.node])) for task in split.tasks])
        onward = {
            operand.weight: GradientEdge(*nodes[task.node].next_functions[operand.input])
            for task in split.tasks
            for operand in task.operands
            if operand.between
        }
        return tuple([GradientEdge(nodes[site], 0) for site in split.sites]), Half(split, tasks, onward)


class Use(NamedTuple):
    """The only use of a weight: the node, the derivative that covers it, and the weight as the node's operand."""

    node: AutogradNode
    derivative: Derivative
    operand: Operand


def search_graph(graph: AutogradGraph, weights: Sequence[Tensor], refused: Mapping[WeightIndex, str]) -> Split:
    """Return the split that defers as many weights as possible, but none of the `refused`, which maps to reasons."""
    found = _Search(graph, weights)
    reasons, tasks = dict(refused), dict[tuple[AutogradNode, Derivative], list[Operand]]()
    for k, weight in enumerate(weights):
        index = WeightIndex(k)
        if index in refused:
            continue
        use = found.use(weight, index)
        if isinstance(use, str):
            reasons[index] = use
        else:
            tasks.setdefault((use.node, use.derivative), []).append(use.operand)
    for (node, derivative), operands in list(tasks.items()):
        wanted = sum(node.next_functions[k][0] is not None for k in derivative.inputs)
        if derivative.together and len(operands) < wanted:
            reasons |= {operand.weight: f"{node.name()} computes others too" for operand in operands}
            del tasks[node, derivative]
    return found.split(tasks, dict(sorted(reasons.items())))


class _Search:
    """An autograd graph, searched breadth first.

    - `first`: the node and input through which each node was reached first.
    - `users`: the nodes and inputs through which each node is reached; a root is also used from outside.
    - `weights`: the nodes that accumulate the weights' gradients.
    """

    def __init__(self, graph: AutogradGraph, weights: Sequence[Tensor]) -> None:
        self.graph, self.starts = graph, graph.nodes()
        self.first: dict[AutogradNode, tuple[AutogradNode, InputIndex]] = {}
        self.users: dict[AutogradNode, list[tuple[AutogradNode, InputIndex]]] = {node: [] for node in self.starts}
        self.weights: dict[WeightIndex, AutogradNode] = {}
        indices = {id(weight): WeightIndex(k) for k, weight in enumerate(weights)}
        queue = list(dict.fromkeys(self.starts))
        for node in queue:
            if isinstance(node, AccumulateGrad) and id(node.variable) in indices:
                self.weights[indices[id(node.variable)]] = node
            for k, (after, _) in enumerate(node.next_functions):
                if after is None:
                    continue
                if after not in self.users:
                    self.users[after] = []
                    self.first[after] = node, InputIndex(k)
                    queue.append(after)
                self.users[after].append((node, InputIndex(k)))

    def use(self, weight: Tensor, index: WeightIndex) -> Use | str:
        """Return the only use of a weight, or the reason why its gradient can't be deferred."""
        node = self.weights.get(index)
        between: list[str] = []
        while node is not None:
            if node in self.starts:
                return "also used by other stages"
            if len(self.users[node]) > 1:
                return f"used {len(self.users[node])} times"
            ((user, k),) = self.users[node]
            name, derivative = user.name(), derivative_of(user.name(), k)
            if derivative is not None:
                transposed = derivative.transposes and between == ["TBackward0"]
                shape, rest = tuple(node._input_metadata[0].shape), () if transposed else tuple(between)
                operand = Operand(index, k, shape, transposed, rest)
                return _refusal(user, derivative, weight) or Use(user, derivative, operand)
            if name not in BETWEEN:
                return f"computed by {name}"
            between.append(name)
            node = user
        return "not reached"

    def split(
        self, tasks: Mapping[tuple[AutogradNode, Derivative], Sequence[Operand]], reasons: Mapping[WeightIndex, str]
    ) -> Split:
        """Return the split with these tasks; `reasons` says why all other weights are not deferred."""
        sites = list(dict.fromkeys(node for node, _ in tasks))
        weights = [operand.weight for operands in tasks.values() for operand in operands]
        trail, indices = self._trail(sites, weights)
        requests = {node: RequestIndex(len(reasons) + k) for k, node in enumerate(sites)}
        return Split(
            trail,
            now=tuple(reasons),
            reasons=reasons,
            sites=tuple(indices[node] for node in sites),
            tasks=tuple(
                Task(indices[node], requests[node], derivative, tuple(operands))
                for (node, derivative), operands in tasks.items()
            ),
        )

    def _trail(
        self, sites: Sequence[AutogradNode], weights: Sequence[WeightIndex]
    ) -> tuple[Trail, Mapping[AutogradNode, NodeIndex]]:
        """Return the trail to these nodes and weights, and the position of each node on it."""
        nodes, hops = [*self.starts], dict[NodeIndex, list[InputIndex]]()
        indices = {node: NodeIndex(k) for k, node in enumerate(nodes)}
        needed = self._on_the_way([*sites, *[self.weights[k] for k in weights]])
        for node, (before, k) in self.first.items():
            if node in needed:
                hops.setdefault(indices[before], []).append(k)
                indices[node] = NodeIndex(len(nodes))
                nodes.append(node)
        aged = [node for node in dict.fromkeys((*self.starts, *sites)) if not isinstance(node, AccumulateGrad)]
        trail = Trail(
            hops=tuple((node, tuple(inputs)) for node, inputs in hops.items()),
            kinds=tuple(map(type, nodes)),
            ages=tuple((indices[node], node._sequence_nr() - self.graph.start) for node in aged),
            weights=tuple((indices[self.weights[k]], k) for k in weights),
        )
        return trail, indices

    def _on_the_way(self, targets: Sequence[AutogradNode]) -> set[AutogradNode]:
        """Return the nodes on the shortest paths from the roots to the targets, without the roots."""
        needed = set[AutogradNode]()
        for node in targets:
            while node in self.first and node not in needed:
                needed.add(node)
                node, _ = self.first[node]
        return needed


def _refusal(node: AutogradNode, derivative: Derivative, weight: Tensor) -> str:
    """Return the reason why the gradient that this node computes can't be deferred; empty if it can."""
    if weight.is_complex():
        return "complex"
    if any(getattr(node, name).unpack_hook is not None for name in dir(node) if name.startswith("_raw_saved_")):
        return "checkpointed"
    return "" if derivative.fits(node) else f"computed by {node.name()} with factors or as a sparse tensor"
