# SPDX-License-Identifier: Apache-2.0
"""Insert copies of gradients that may share memory into a joint graph.

The first gradient of a parameter becomes the sum to which later ones are added in place, so it must not share memory
(see `fpipe.stages.accumulation`). In a graph, a gradient certainly shares none if an operator of the backward
allocated its memory, the gradient fills it exactly, and no other returned tensor uses it.

Runs when a plan is made, if stages are recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import torch

from fpipe.stages.graph.joint import Joint, Node
from fpipe.stages.interface import Wiring
from fpipe.tensors.effects import storage_id
from fpipe.tensors.layouts import aten
from fpipe.tensors.torch_private import OpOverload


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
