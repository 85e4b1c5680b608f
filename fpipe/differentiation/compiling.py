# SPDX-License-Identifier: Apache-2.0
"""From a phase of a stage to a function, through a compiler: a backend of `torch.compile`.

A compiler fuses operators, and so adds in another order: what comes out is close, and not the same bits. It knows
nothing of seeds, so a phase that draws random numbers is not given to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from fpipe import random
from fpipe.differentiation.code import Run, function
from fpipe.differentiation.joint import CONSTANT
from fpipe.differentiation.phases import Phase

Compiler: TypeAlias = Callable[[GraphModule, list[Any]], Callable[..., Sequence[Any]]]
"""`compiler(module, examples)` returns a function like the module; as backends of `torch.compile` do."""


def compiled(phase: Phase, compiler: Compiler) -> Run:
    """The phase as a function that `compiler` makes; operator by operator if it has nothing for it."""
    if not phase.nodes or any(node.target is random.reseed for node in phase.nodes):
        return function(phase)
    takes = [node for node in phase.takes if "val" in node.meta]  # not the key
    wanted = {k for k, node in enumerate(phase.takes) if node in set(takes)}
    run, plain = compiler(_module(phase, takes), [node.meta["val"] for node in takes]), function(phase)
    groups: list[tuple[Any, int]] = [(type(group), len(group)) for group in phase.gives]

    def call(box: list[Any]) -> tuple[Any, ...]:
        if any(isinstance(value, FakeTensor) for value in box):  # kernels would read memory that is not there
            return plain(box)
        given = [value for k, value in enumerate(box) if k in wanted]
        box.clear()
        with torch.no_grad():
            found = iter(run(*given))
        return tuple([kind(islice(found, count)) for kind, count in groups])

    return call


def added(run: Run, count: int) -> Run:
    """What `run` computes, added to as many sums as its last group has tensors; they are taken behind all else."""

    def call(box: list[Any]) -> tuple[Any, ...]:
        sums = box[len(box) - count :]
        del box[len(box) - count :]
        *others, grads = run(box)
        if sums:
            torch._foreach_add_(sums, grads)
        return (*others, tuple(sums))

    return call


def _module(phase: Phase, takes: Sequence[Node]) -> GraphModule:
    graph, to = Graph(), dict[Node, Node]()
    holder = torch.nn.Module()
    for k, node in enumerate(takes):
        to[node] = graph.placeholder(f"taken_{k}")
        to[node].meta = node.meta

    def placed(node: Node) -> Node:
        """A node's place; a constant has none before it is used."""
        if node not in to:
            holder.register_buffer(str(node.target), node.meta[CONSTANT])
            to[node] = graph.get_attr(str(node.target))
        return to[node]

    for node in phase.nodes:
        to[node] = graph.node_copy(node, placed)
    graph.output(tuple(map(placed, _flat(phase))))
    return GraphModule(holder, graph)


def _flat(phase: Phase) -> Iterator[Node]:
    return (node for group in phase.gives for node in group)
