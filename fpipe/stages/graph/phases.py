# SPDX-License-Identifier: Apache-2.0
"""A joint graph cut into phases: the forward, the backward, and the two halves of the backward.

The forward is everything recorded before the backward began. The weight half is found by walking back from the
gradients: a node belongs to it if all users of its result do, and it is a product, a view before one, or a cheap
operator after one (view, cast, sum, scaling). So only operands of products are kept between the halves: for linear
layers, their inputs and the gradients of their outputs. Everything else is computed in the input half.

Invariants. Every phase runs its nodes in the order of the recording. The weight half neither reads nor views memory
that the backward writes in place.

Runs when a plan is made, if stages are recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from fpipe.stages.graph.joint import Joint, Node, number_in, users_of
from fpipe.stages.graph.simplification import own_gradients, simplify
from fpipe.stages.interface import WeightIndex, Wiring
from fpipe.tensors.effects import storage_id
from fpipe.tensors.layouts import aten
from fpipe.tensors.spec import Spec

Nodes: TypeAlias = Sequence[Node]

PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.convolution_backward.default,
        aten.embedding_dense_backward.default,
    }
)
VIEWS = frozenset(
    {
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.select.int,
    }
)
SUMS = frozenset({aten.sum.dim_IntList, aten.sum.default})
SCALED = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default})
LIGHT = VIEWS | SUMS | SCALED | {aten.add.Tensor, aten._to_copy.default, aten.clone.default}
"""Operators that are cheap, compared with products."""


class Phase(NamedTuple):
    """Nodes that run together.

    - `takes`, `gives`: the arguments and results, as groups of nodes. A list is state that one phase keeps for another,
      which empties it; `None` means no state. A single node is an argument by itself.
    - `layouts`: the layouts of the tensors in the first group of results, if they matter.
    """

    nodes: tuple[Node, ...]
    takes: tuple[Nodes | Node | None, ...]
    gives: tuple[Nodes | None, ...]
    layouts: tuple[Spec, ...]

    @property
    def inputs(self) -> Iterator[Node]:
        """All nodes that the phase takes."""
        for group in self.takes:
            yield from (group,) if isinstance(group, Node) else group or ()

    @property
    def outputs(self) -> Iterator[Node]:
        """All nodes that the phase gives."""
        return (node for group in self.gives for node in group or ())


@dataclass(frozen=True)
class Phases:
    """The functions of a stage as phases of a graph.

    - `views` takes parameters; gives them and views of them, once per step. `forward` takes all of these as its
      parameters.
    - `forward` takes parameters, buffers, inputs and the key; gives outputs, buffers, and residuals.
    - `evaluation` takes the same; gives outputs and buffers.
    - `backward` takes residuals and cotangents; gives outgoing cotangents and gradients.
    - `input` takes the same as `backward`; gives outgoing cotangents and what `weight` takes, which gives gradients.
    - `early`: the weights whose gradients `input` computes, each with the reason.
    """

    views: Phase
    forward: Phase
    evaluation: Phase
    backward: Phase
    input: Phase
    weight: Phase
    early: Mapping[WeightIndex, str]


def divide(joint: Joint, wiring: Wiring) -> Phases:
    """Return the phases of a joint graph."""
    views, joint = _split_views(own_gradients(simplify(joint), wiring))
    forward, backward = _cut_before_backward(joint, wiring)
    halves = _split_convolutions(joint)
    first, second = _cut_halves(halves, wiring)
    early = {WeightIndex(k): _describe_maker(node) for k, node in enumerate(halves.grads) if node not in second.nodes}
    evaluation = forward._replace(gives=forward.gives[:2])
    return Phases(views, forward, evaluation, backward, first, second, early)


def _split_views(joint: Joint) -> tuple[Phase, Joint]:
    """Return the phase that makes views of parameters, and the graph that takes them."""
    known = dict.fromkeys(joint.params)
    for node in joint.calls:
        if node.target in VIEWS and known.keys() >= set(node.reads):
            known[node] = None
    views = tuple(node for node in known if node not in joint.params)
    return Phase(views, (joint.params,), (tuple(known),), ()), replace(joint, params=tuple(known))


def _cut_before_backward(joint: Joint, wiring: Wiring) -> tuple[Phase, Phase]:
    """Return the forward and the backward."""
    early = [node for node in joint.calls if node in joint.forward]
    late = [node for node in joint.calls if node not in joint.forward]
    takes = joint.params, joint.buffers, joint.inputs, joint.key
    made = {*early, *joint.params, *joint.buffers, *joint.inputs, joint.key}
    kept = _across(made, late, (*joint.outgoing, *joint.grads)) if wiring.leaves else None
    outputs = tuple(spec for _, spec in wiring.outputs)
    return (
        Phase(tuple(early), takes, (joint.outputs, joint.updated, kept), outputs),
        Phase(tuple(late), (kept, joint.cotangents), (joint.outgoing, joint.grads), wiring.cotangents),
    )


def _across(before: Collection[Node], after: Iterable[Node], returned: Iterable[Node]) -> list[Node]:
    """Return the nodes made before a cut that are used after it or returned, each once."""
    used = [*(operand for node in after for operand in node.reads), *returned]
    return list(dict.fromkeys(node for node in used if node in before))


def _describe_maker(node: Node) -> str:
    """Return a phrase that names the operator that computes a gradient."""
    while node.target in VIEWS or node.target is aten.clone.default or node.is_item:
        node = node.reads[0]
    return f"computed by {getattr(node.target, '__name__', node.target)}"


def _cut_halves(joint: Joint, wiring: Wiring) -> tuple[Phase, Phase]:
    """Return the two halves of the backward."""
    _, backward = _cut_before_backward(joint, wiring)
    deferred = _deferred_nodes(joint, backward)
    first = [node for node in backward.nodes if node not in deferred]
    second = [node for node in backward.nodes if node in deferred]
    rest = _across({*first, *backward.inputs}, second, joint.grads) if wiring.leaves else None
    return (
        Phase(tuple(first), backward.takes, (joint.outgoing, rest), wiring.cotangents),
        Phase(tuple(second), (rest,), (joint.grads,), ()),
    )


def _deferred_nodes(joint: Joint, backward: Phase) -> frozenset[Node]:
    """Return the nodes of the weight half."""
    possible = _deferrable_nodes(joint, backward)
    deferred, users = _nodes_after_products(possible, backward.nodes), users_of(backward.nodes)
    for node in reversed(backward.nodes):  # also views before these nodes, which cost nothing
        free = node.target in VIEWS or node.target is number_in
        if free and node in possible and users[node] and deferred.issuperset(users[node]):
            deferred.add(node)
    return frozenset(deferred)


def _deferrable_nodes(joint: Joint, backward: Phase) -> set[Node]:
    """Return the nodes that may be deferred: products and cheap ones, used only by such nodes or as gradients.

    They read no parameter, so that a shard's whole weight need not be kept or gathered for them.
    """
    needed, memories = set(joint.outgoing), _written_memories(backward.nodes)
    params = set(joint.params)
    found, readers = set[Node](), users_of(backward.nodes)
    for node in reversed(backward.nodes):
        light = node.target in PRODUCTS or node.target in LIGHT or node.is_item or node.target is number_in
        here = light and node not in needed and params.isdisjoint(_read_nodes(node))
        if here and not _touches(node, memories) and found.issuperset(readers[node]):
            found.add(node)
    return found


def _read_nodes(node: Node) -> Sequence[Node]:
    """Return the nodes whose values a node reads; of a convolution's weight, its gradient depends on the shape only."""
    given = node.reads
    return given[:2] if node.target is aten.convolution_backward.default else given


def _nodes_after_products(possible: Collection[Node], nodes: Sequence[Node]) -> set[Node]:
    """Return the possible nodes that are worth deferring.

    These are products, the nodes after them, and sums of their operands, which are kept anyway.
    """
    products = [node for node in possible if node.target in PRODUCTS]
    operands = {_origin(operand) for node in products for operand in node.reads}
    found: set[Node] = set()
    for node in nodes:
        if node in possible:
            follows = not found.isdisjoint(node.reads)
            sums = node.target in SUMS and operands.issuperset(map(_origin, node.reads))
            if node.target in PRODUCTS or follows or sums:
                found.add(node)
    return found


def _origin(node: Node) -> Node:
    """Return the node that this one is a view of."""
    while node.target in VIEWS:
        node = node.reads[0]
    return node


def _written_memories(nodes: Iterable[Node]) -> frozenset[int]:
    """Return the identifiers of the memory that these nodes write in place."""
    values = [argument.value for node in nodes for argument in node.writes]
    return frozenset(storage_id(value) for value in values if value is not None)


def _touches(node: Node, memories: Collection[int]) -> bool:
    """Return whether a node's result or any of its operands is in this memory."""
    values = [one.value for one in (node, *node.reads)] if memories else []
    return any(value is not None and storage_id(value) in memories for value in values)


def _split_convolutions(joint: Joint) -> Joint:
    """Return the graph with each convolution's backward split: the gradient of its input, and those of its weights."""
    nodes, to, pairs = list[Node](), dict[Node, Node](), dict[Node, tuple[Node, Node]]()
    for node in joint.nodes:
        made = node.on(to)
        if node not in joint.forward and _computes_both(node):
            mask: Any = node.args[-1]
            masks = [mask[0], False, False], [False, *mask[1:]]
            first, second = (Node(node.target, (*made.args[:-1], one)) for one in masks)
            pairs[node] = first, second
            nodes += (first, second)
        elif node.is_item and (pair := pairs.get(node.reads[0])):  # of the one that computes this item
            to[node] = made = node.on({node.reads[0]: pair[node.args[1] > 0]})
            nodes.append(made)
        else:
            nodes.append(made)
            to.update({} if made is node else {node: made})
    return joint.transfer(nodes, to) if pairs else joint


def _computes_both(node: Node) -> bool:
    """Return whether a node computes a convolution's gradients of both its input and its weights."""
    mask: Any = node.args[-1] if node.target is aten.convolution_backward.default else (False,)
    return bool(mask[0]) and any(mask[1:])
