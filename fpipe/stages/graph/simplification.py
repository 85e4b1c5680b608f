# SPDX-License-Identifier: Apache-2.0
"""Remove redundant work from a joint graph, and compute constants only once. The bits stay the same.

- Double transposes are removed and, if nothing is written in place, powers with exponent 1 (the backward of a square
  has one).
- A sum that keeps its dimension, only for a view to remove it, no longer keeps it.
- Small tensors that depend on no argument are computed once: the one with which a backward begins, for example.
- Unused nodes are removed, unless they write in place, draw random numbers or seed a generator.

Runs when a plan is made, if stages are recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fpipe.stages.graph.joint import CONSTANT, Joint, Node, constant, map_nodes
from fpipe.stages.graph.operators import LIKE
from fpipe.tensors.effects import storage_id
from fpipe.tensors.layouts import aten
from fpipe.tensors.torch_private import OpOverload

LARGEST_CONSTANT = 4096
"""The largest number of elements of a tensor that is computed once."""


def simplify(joint: Joint) -> Joint:
    """Return an equivalent joint graph with less work to do."""
    writers = [node for node in joint.calls if node.writes]
    changed = [one for node in writers for one in node.writes]
    kept = {storage_id(one.value) for one in (*joint.returned, *changed) if one.value is not None}
    to, nodes = dict[Node, Node](), list[Node]()
    for node in joint.nodes:
        same = _double_transpose(node, to) or (None if writers else _power_of_one(node, to))
        if same is None:
            made = _shrink_sum(node, to) or node.on(to)
            same = constant(_compute(made), made.value) if _is_constant(made, kept) else made
            nodes += [same] if same is made else []
        if same is not node:
            to[node] = same
    return _remove_unused(joint.transfer(nodes, to))


def _double_transpose(node: Node, to: Mapping[Node, Node]) -> Node | None:
    """Return the node that this one transposes back, if any."""
    if node.target is not aten.t.default:
        return None
    before: Node = to.get(node.args[0], node.args[0])
    turned: Node | None = before.args[0] if before.target is aten.t.default else None
    return turned


def _power_of_one(node: Node, to: Mapping[Node, Node]) -> Node | None:
    """Return the base, if this node is a power with exponent 1 and has the same dtype and layout as its base."""
    if node.target is not aten.pow.Tensor_Scalar or node.args[1] != 1:
        return None
    base: Node = to.get(node.args[0], node.args[0])
    made, value = node.value, base.value
    same = made is not None and value is not None and (made.dtype, made.stride()) == (value.dtype, value.stride())
    return base if same else None


def _shrink_sum(node: Node, to: Mapping[Node, Node]) -> Node | None:
    """Return a sum without the dimension of size 1 that this node removes from it, if the node is such a view."""
    if node.target is not aten.view.default:
        return None
    whole: Node = to.get(node.args[0], node.args[0])
    if whole.target is not aten.sum.dim_IntList or whole.args[1:] != ([0], True) or len(shape_of(whole)) != 2:
        return None
    if shape_of(node) != shape_of(whole)[1:]:
        return None
    made = Node(whole.target, (whole.args[0], [0]), whole.kwargs)
    made.value = node.value
    return made


def shape_of(node: Node) -> tuple[int, ...]:
    """Return the shape of a node's result, `()` if it is not a tensor."""
    return () if node.value is None else tuple(node.value.shape)


def _is_constant(node: Node, kept: Collection[int]) -> bool:
    """Return whether a node's tensor is small, depends on no argument, and is neither returned nor written in place."""
    known = node.target in LIKE or (bool(node.reads) and all(one.target is CONSTANT for one in node.reads))
    if not known or not isinstance(node.target, OpOverload) or node.value is None or node.has_effects:
        return False
    return node.value.numel() <= LARGEST_CONSTANT and storage_id(node.value) not in kept


def _compute(node: Node) -> Tensor:
    value, target = node.value, node.target
    assert value is not None, "it is a tensor"
    if target in LIKE:
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        made: Tensor = target(like, *node.args[1:], **node.kwargs)
        return made
    args, kwargs = map_nodes((node.args, node.kwargs), lambda used: used.held)
    made = target(*args, **kwargs)
    return made


def _remove_unused(joint: Joint) -> Joint:
    """Return the graph without calls whose results nobody reads."""
    wanted, kept = set(joint.returned), list[Node]()
    for node in reversed(joint.nodes):
        if node in wanted or not node.is_call or node.has_effects:
            kept.append(node)
            wanted.update(node.reads)
    return replace(joint, nodes=tuple(reversed(kept)), forward=joint.forward.intersection(kept))
