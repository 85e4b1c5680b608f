# SPDX-License-Identifier: Apache-2.0
"""Rewrite a joint graph: remove redundant work, compute constants only once, copy gradients that may share memory.

The bits stay the same.

- Double transposes are removed and, if nothing is written in place, powers with exponent 1 (the backward of a square
  has one).
- A sum that keeps its dimension, only for a view to remove it, no longer keeps it.
- Small tensors that depend on no argument are computed once: the one with which a backward begins, for example.
- The backward of a recurrent call gets the sums so far, to which autograd adds the gradients of its steps.
- Unused nodes are removed, unless they write in place, draw random numbers, seed a generator or check values.

The first gradient of a parameter becomes the sum to which later ones are added in place, so it must not share memory
(see `fpipe.stages.accumulation`). In a graph, a gradient certainly shares none if an operator of the backward
allocated its memory, the gradient fills it exactly, and no other returned tensor uses it.

Runs when a plan is made, if stages are recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from fpipe.record.fakes.recurrent import RecurrentBackward
from fpipe.stages.graph.joint import CONSTANT, Joint, Node, constant, map_nodes, users_of
from fpipe.stages.interface import Wiring
from fpipe.tensors.effects import storage_id
from fpipe.tensors.layouts import aten
from fpipe.tensors.torch_private import OpOverload

LIKE = frozenset({aten.ones_like.default, aten.zeros_like.default, aten.full_like.default})
"""Operators that depend only on the shape and dtype of their argument."""
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
    return _feed_sums(_remove_unused(joint.transfer(nodes, to)))


def _feed_sums(joint: Joint) -> Joint:
    """Return the graph in which backwards of recurrent calls add to what a gradient is so far, as autograd does.

    Autograd adds the gradients of the steps one by one, so the order of the sum is another than that of two sums.
    """
    returned = set(joint.returned)
    users, place = users_of(joint.nodes), {node: k for k, node in enumerate(joint.nodes)}
    parts, sums = dict[Node, dict[int, Node]](), dict[Node, Node]()
    for node in joint.nodes:
        if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        before, item = node.args
        if (
            isinstance(before, Node)
            and isinstance(item, Node)
            and item.is_item
            and users[item] == [node]
            and item not in returned
        ):
            call = item.args[0]
            if isinstance(call.target, RecurrentBackward) and place.get(before, -1) < place[call]:
                parts.setdefault(call, {})[item.args[1]] = before
                sums[node] = item
    to, nodes = dict[Node, Node](), list[Node]()
    for node in joint.nodes:
        made = node.on(to)
        if node in parts:
            kept, cotangents, empty = made.args
            found = [parts[node].get(k) for k in range(len(empty))]
            made = Node(node.target, (kept, cotangents, tuple([one and to.get(one, one) for one in found])))
        if node in sums:
            to[node] = to.get(sums[node], sums[node])
            continue
        nodes.append(made)
        to.update({} if made is node else {node: made})
    return joint.transfer(nodes, to) if parts else joint


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
    """Return the graph without calls whose results are not used."""
    wanted, kept = set(joint.returned), list[Node]()
    for node in reversed(joint.nodes):
        if node in wanted or not node.is_call or node.has_effects:
            kept.append(node)
            wanted.update(node.reads)
    return replace(joint, nodes=tuple(reversed(kept)), forward=joint.forward.intersection(kept))


def own_gradients(joint: Joint, wiring: Wiring) -> Joint:
    """Return the graph with a copy in place of each gradient that may share memory, or is laid out in another way.

    Autograd lays the first gradient of a weight out like the weight.
    """
    weights = [joint.params[k] if k < len(joint.params) else None for k in wiring.leaves[len(wiring.cotangents) :]]
    made_by: dict[int, Node] = {}
    for node in joint.nodes:
        if (number := _memory_of(node)) is not None:
            made_by.setdefault(number, node)
    returned = Counter(map(_memory_of, chain(joint.outgoing, joint.grads)))
    grads = [
        grad if _is_fresh(grad, joint, made_by, returned) and not layout else _copy_of(grad, layout)
        for grad, layout in zip(joint.grads, map(_other_layout, joint.grads, weights), strict=True)
    ]
    copies = [one for one, grad in zip(grads, joint.grads, strict=True) if one is not grad]
    return replace(joint, nodes=(*joint.nodes, *copies), grads=tuple(grads))


def _memory_of(node: Node) -> int | None:
    return None if node.value is None else storage_id(node.value)


def _is_fresh(grad: Node, joint: Joint, made_by: Mapping[int, Node], returned: Mapping[int | None, int]) -> bool:
    """Return whether nothing else can refer to a gradient's memory."""
    value, number = grad.value, _memory_of(grad)
    if value is None or number is None or returned[number] > 1:
        return False
    if number not in made_by or made_by[number] in joint.forward:
        return False
    spread = any(size > 1 and not stride for size, stride in zip(value.shape, value.stride(), strict=True))
    fills = value.untyped_storage().nbytes() == value.numel() * value.element_size() and not spread
    return fills and _allocates(made_by[number])


def _allocates(node: Node) -> bool:
    """Return whether a node's results are in new memory, as its schema promises."""
    source = node.reads[0] if node.is_item else node
    target = source.target
    return isinstance(target, OpOverload) and not any(one.alias_info for one in target._schema.returns)


def _other_layout(grad: Node, weight: Node | None) -> Mapping[str, torch.memory_format]:
    """Return the layout of a weight as an argument of `clone`, if the gradient has another; else nothing."""
    mine, wanted = grad.value, None if weight is None else weight.value
    if mine is None or wanted is None or mine.shape != wanted.shape or mine.stride() == wanted.stride():
        return {}
    formats = [torch.contiguous_format, *([torch.channels_last] if wanted.dim() == 4 else [])]
    found = [one for one in formats if wanted.is_contiguous(memory_format=one)]
    return {"memory_format": found[0]} if found and not mine.is_contiguous(memory_format=found[0]) else {}


def _copy_of(grad: Node, layout: Mapping[str, torch.memory_format]) -> Node:
    copy = Node(aten.clone.default, (grad,), layout)
    copy.value = None if grad.value is None else grad.value.clone(**layout)
    return copy
