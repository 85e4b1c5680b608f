# SPDX-License-Identifier: Apache-2.0
"""The form of a joint graph: everything that the functions made of it depend on.

Problem. A model has many blocks of one kind, and so stages that compute the same with other parameters. Each would be
simplified, cut into phases, and compiled separately.

Idea. Number a graph's nodes in their order: two graphs have the same form if the same operators read nodes of the same
numbers, whose tensors have the same metadata and share memory in the same way. Only what is recorded matters, not the
names of classes or modules. Seeds of random numbers are arguments of nodes, and constants are compared by identity:
stages that draw differ, and so do those that hold other constants.

Invariant: functions made of one graph compute, bit for bit, what those made of another of its form do.

Runs when a plan is made, if stages are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import getitem
from typing import Any, TypeAlias

from fpipe.record.trace.frames import COMPARABLE
from fpipe.stages.graph.joint import ACTING, ARGUMENT, CONSTANT, Joint, Node, number_in
from fpipe.tensors import random
from fpipe.tensors.effects import storage_id
from fpipe.tensors.spec import Spec
from fpipe.tensors.torch_private import OpOverload

GraphForm: TypeAlias = tuple[Hashable, ...]
CALLED = ACTING | {getitem, number_in, random.state_of, ARGUMENT, CONSTANT}


def form_of(joint: Joint) -> GraphForm | None:
    """Return the form of a graph; `None` if it calls or is given something that cannot be compared.

    Constants are in it by id: it holds as long as the graph is alive.
    """
    taken = (*joint.params, *joint.buffers, *joint.inputs, joint.key, *joint.cotangents)
    given = dict.fromkeys(taken)
    number = {node: k for k, node in enumerate(dict.fromkeys((*given, *joint.nodes)))}
    memories: dict[int, int] = {}

    def name(node: Node) -> Hashable:
        """Return the number of a node; a constant, which is in no list, gets one when it is first read."""
        if node in number:
            return number[node]
        number[node] = len(number)
        return (number[node], id(node.held), *_metadata(node, memories))

    groups = joint.params, joint.buffers, joint.inputs, joint.cotangents
    returned = joint.outputs, joint.updated, joint.outgoing, joint.grads
    try:
        return (
            tuple(map(len, groups)),
            tuple([_metadata(node, memories) for node in given]),
            tuple([_call(node, name, memories) for node in joint.nodes if node not in given]),
            tuple([node in joint.forward for node in joint.nodes]),
            tuple([tuple(map(name, group)) for group in returned]),
        )
    except TypeError:
        return None


def form_of_block(takes: Sequence[Node], nodes: Sequence[Node], gives: Sequence[Node]) -> GraphForm | None:
    """Return the form of some nodes of a graph, what they take, and what they give."""
    return form_of(Joint((*nodes,), (), (), (*takes,), Node(ARGUMENT), (), frozenset(), (*gives,), (), (), ()))


def code_of(node: Node) -> Hashable:
    """Return what a node calls, whatever it reads; an object that equals nothing else if that cannot be compared."""
    try:
        return _call(node, lambda one: None, {})
    except TypeError:
        return object()


def _call(node: Node, name: Callable[[Node], Hashable], memories: dict[int, int]) -> Hashable:
    """Return what a node calls, and its metadata; raise `TypeError` for what cannot be compared."""
    if not (isinstance(node.target, OpOverload) or node.target in CALLED):
        raise TypeError
    return node.target, _compare(node.args, name), _compare(node.kwargs, name), *_metadata(node, memories)


def _metadata(node: Node, memories: dict[int, int]) -> tuple[Hashable, ...]:
    """Return a tensor's metadata, and the number of its memory in the order in which memories are met."""
    value = node.value
    if value is None:
        return ()
    return Spec.of(value), value.storage_offset(), memories.setdefault(storage_id(value), len(memories))


def _compare(one: Any, name: Callable[[Node], Hashable]) -> Hashable:
    """Return an argument as a value that is equal only for arguments of the same kinds and bits."""
    kind = type(one)
    if kind is Node:
        return kind, name(one)
    if kind in COMPARABLE:
        return kind, one
    if kind is float:
        return kind, one.hex()
    if kind in (list, tuple):
        return kind, tuple([_compare(each, name) for each in one])
    if kind is dict:
        return kind, tuple([(key, _compare(each, name)) for key, each in one.items()])
    raise TypeError
