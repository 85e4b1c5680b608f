# SPDX-License-Identifier: Apache-2.0
"""A recorded stage as a list of nodes: arguments, constants, and calls of torch's operators.

Nodes are not changed once they are in a list. A node refers to the nodes that it reads, never to those that read it, so
nodes form no reference cycles, and a dropped graph is freed at once. Who reads a node is computed where it is needed
(`users_of`).

Runs when a plan is made, if stages are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor

from fpipe.tensors import random
from fpipe.tensors.effects import written_arguments
from fpipe.tensors.torch_private import OpOverload

ARGUMENT, CONSTANT = "argument", "constant"
"""The targets of nodes that call nothing."""


class Node:
    """One value of a recording.

    - `target`: what is called, with `args` and `kwargs`, in which nodes stand for their values; or one of the above.
    - `value`: the fake tensor that it was in the recording, if it was one. `held`: a constant's tensor.
    """

    __slots__ = ("_reads", "_writes", "args", "held", "kwargs", "target", "value")

    def __init__(self, target: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        self.target, self.args, self.kwargs = target, tuple(args), kwargs or {}
        self.value: Tensor | None = None
        self.held: Tensor | None = None
        self._reads: tuple[Node, ...] | None = None
        self._writes: tuple[Node, ...] | None = None

    @property
    def is_call(self) -> bool:
        """True if the node calls something."""
        return self.target is not ARGUMENT and self.target is not CONSTANT

    @property
    def is_item(self) -> bool:
        """True if the node selects one of several results."""
        return self.target is getitem

    @property
    def reads(self) -> tuple[Node, ...]:
        """The nodes that this one reads, each once, in order."""
        if self._reads is None:
            found: dict[Node, None] = {}
            _collect(self.args, found)
            _collect([*self.kwargs.values()], found)
            self._reads = tuple(found)
        return self._reads

    @property
    def writes(self) -> tuple[Node, ...]:
        """The nodes whose tensors this one writes in place."""
        if self._writes is None:
            found: dict[Node, None] = {}
            _collect([*written_arguments(self.target, self.args, self.kwargs)], found)
            self._writes = tuple(found)
        return self._writes

    @property
    def has_effects(self) -> bool:
        """True if the node must run though nobody reads its value: it writes, draws or seeds."""
        if not isinstance(self.target, OpOverload):
            return self.target is random.reseed
        if torch.Tag.nondeterministic_seeded in self.target.tags:
            return True
        return self.target._schema.is_mutable or bool(self.writes)

    def on(self, to: Mapping[Node, Node]) -> Node:
        """Return the same call, of what `to` has in place of some nodes; itself if it reads none of these."""
        if all(to.get(one, one) is one for one in self.reads):
            return self
        return self.copy(lambda one: to.get(one, one))

    def copy(self, to: Callable[[Node], Any]) -> Node:
        """Return the same call of other nodes."""
        made = Node(self.target, map_nodes(self.args, to), map_nodes(self.kwargs, to))
        made.value, made.held = self.value, self.held
        return made


def number_in(tensor: Tensor) -> Any:
    """Return the number in a tensor: the target of nodes that are numbers of the batch."""
    return tensor.item()


def constant(tensor: Tensor, value: Tensor | None) -> Node:
    """Return a node for a tensor that depends on no argument; `value` is the fake one."""
    node = Node(CONSTANT)
    node.held, node.value = tensor, value
    return node


def map_nodes(tree: Any, to: Callable[[Node], Any]) -> Any:
    """Return arguments with `to(node)` in place of each node."""
    if isinstance(tree, Node):
        return to(tree)
    if type(tree) in (tuple, list):
        return type(tree)([map_nodes(one, to) for one in tree])
    return {key: map_nodes(one, to) for key, one in tree.items()} if type(tree) is dict else tree


def _collect(tree: Any, found: dict[Node, None]) -> None:
    if isinstance(tree, Node):
        found[tree] = None
    elif type(tree) is tuple or type(tree) is list:
        for one in tree:
            _collect(one, found)


def users_of(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return the nodes that read each of these."""
    users: dict[Node, list[Node]] = {}
    for node in nodes:
        users.setdefault(node, [])
        for one in node.reads:
            users.setdefault(one, []).append(node)
    return users
