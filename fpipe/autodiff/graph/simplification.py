# SPDX-License-Identifier: Apache-2.0
"""Remove redundant work from a joint graph, and compute constants only once. The bits stay the same.

- Detached copies and double transposes are removed and, if nothing is written in place, powers with exponent 1 (the
  backward of a square has one).
- A sum that keeps its dimension, only for a view to remove it, no longer keeps it.
- Small tensors that depend on no argument are computed once: the one with which a backward begins, for example.
- Unused nodes are removed, unless they write in place, draw random numbers or seed a generator.

Runs when a plan is made, if stages are recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fpipe.autodiff.graph.joint_graph import CONSTANT, Joint
from fpipe.autodiff.graph.operators import LIKE, SAME
from fpipe.tensors import random
from fpipe.tensors.effects import memory, written_arguments
from fpipe.tensors.layouts import aten
from fpipe.torch_private import OpOverload

LARGEST_CONSTANT = 4096
"""The largest number of elements of a tensor that is computed once."""


def simplify(joint: Joint) -> Joint:
    """Return an equivalent joint graph with less work to do."""
    graph, to = Graph(), dict[Node, Node]()
    writes = any(written_nodes(node) for node in joint.calls)
    for node in joint.graph.nodes:
        if node.op != "output":
            same = _shortcut(node, to) or (None if writes else _power_of_one(node, to))
            to[node] = same or _shrink_sum(node, to, graph) or graph.node_copy(node, to.__getitem__)
    return _remove_unused(_fold_constants(joint.transfer(graph, to)))


def _shortcut(node: Node, to: Mapping[Node, Node]) -> Node | None:
    """Return the new node whose result is the same as this node's, if any."""
    if node.target in SAME:
        return to[node.all_input_nodes[0]]
    if node.target is aten.t.default and (turned := to[node.all_input_nodes[0]]).target is aten.t.default:
        return turned.all_input_nodes[0]
    return None


def _power_of_one(node: Node, to: Mapping[Node, Node]) -> Node | None:
    """Return the base, if this node is a power with exponent 1 and has the same dtype and layout as its base."""
    if node.target is not aten.pow.Tensor_Scalar or node.args[1] != 1:
        return None
    base, made = to[node.all_input_nodes[0]], value_of(node)
    value = value_of(base)
    same = made is not None and value is not None and (made.dtype, made.stride()) == (value.dtype, value.stride())
    return base if same else None


def _shrink_sum(node: Node, to: Mapping[Node, Node], graph: Graph) -> Node | None:
    """Return a sum without the dimension of size 1 that this node removes from it, if the node is such a view."""
    if node.target is not aten.view.default:
        return None
    whole = to[node.all_input_nodes[0]]
    if whole.target is not aten.sum.dim_IntList or whole.args[1:] != ([0], True) or len(shape_of(whole)) != 2:
        return None
    if shape_of(node) != shape_of(whole)[1:]:
        return None
    made = graph.call_function(whole.target, (whole.args[0], [0]), whole.kwargs)
    made.meta = node.meta
    return made


def shape_of(node: Node) -> tuple[int, ...]:
    """Return the shape of a node's result, `()` if it is not a tensor."""
    value = value_of(node)
    return () if value is None else tuple(value.shape)


def value_of(node: Node) -> Tensor | None:
    """Return the fake tensor that a node had in the recording, if any."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def written_nodes(node: Node) -> list[Node]:
    """Return the nodes whose tensors a node writes in place."""
    found: list[Node] = []
    for argument in written_arguments(node.target, node.args, node.kwargs):
        map_arg(argument, found.append)
    return found


def is_item(node: Node) -> bool:
    """Return whether a node selects one of several results."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _fold_constants(joint: Joint) -> Joint:
    """Turn small tensors that depend on no argument into constants, unless they are returned or written in place."""
    returned = [*joint.outputs, *joint.updated, *joint.outgoing, *joint.grads]
    changed = [one for node in joint.calls for one in written_nodes(node)]
    kept = {memory(value) for node in (*returned, *changed) for value in [value_of(node)] if value is not None}
    for node in list(joint.calls):
        if _is_constant(node, kept):
            node.meta[CONSTANT] = _compute(node)
            node.op, node.target, node.args, node.kwargs = "get_attr", node.name, (), {}
    return joint


def _is_constant(node: Node, kept: Collection[int]) -> bool:
    value = value_of(node)
    if (
        value is None
        or value.numel() > LARGEST_CONSTANT
        or memory(value) in kept
        or is_item(node)
        or node.op != "call_function"
    ):
        return False
    if _has_effects(node) or not isinstance(node.target, OpOverload):
        return False
    known = all(one.op == "get_attr" for one in node.all_input_nodes)
    return node.target in LIKE or (known and bool(node.all_input_nodes))


def _compute(node: Node) -> Tensor:
    target: Any = node.target
    value = value_of(node)
    assert value is not None, "it is a tensor"
    if target in LIKE:
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        made: Tensor = target(like, *node.args[1:], **node.kwargs)
        return made
    args, kwargs = map_arg((node.args, node.kwargs), lambda used: used.meta[CONSTANT])
    made = target(*args, **kwargs)
    return made


def _remove_unused(joint: Joint) -> Joint:
    returned = {*joint.outputs, *joint.updated, *joint.outgoing, *joint.grads}
    for node in reversed(list(joint.calls)):
        if not node.users and node not in returned and not _has_effects(node):
            joint.graph.erase_node(node)
    return joint


def _has_effects(node: Node) -> bool:
    """Return whether a node has side effects."""
    if isinstance(node.target, OpOverload):
        return node.is_impure() or bool(written_nodes(node))
    return node.target is random.reseed
