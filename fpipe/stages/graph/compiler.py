# SPDX-License-Identifier: Apache-2.0
"""Compile a phase of a stage to a function, with a backend of `torch.compile`.

A compiler fuses operators and so sums in a different order: the results are close, but not the same bits. It can't
reseed generators, so a phase that draws random numbers is not compiled, nor is one with checks of values.

Runs when a plan is made, if stages are compiled; the compiled functions run in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx import Node as GraphNode

from fpipe.errors import InputError
from fpipe.record.fakes.recurrent import RecurrentBackward, RecurrentForward
from fpipe.stages.accumulation import own_all
from fpipe.stages.graph.codegen import PhaseFunction, generate_function
from fpipe.stages.graph.joint import ACTING, Node, map_nodes, number_in
from fpipe.stages.graph.phases import Phase
from fpipe.tensors import random
from fpipe.tensors.torch_private import FakeTensor, foreach_add_
from schedules.errors import quote

Compiler: TypeAlias = Callable[[GraphModule, list[Any]], Callable[..., Sequence[Any]]]
"""`compiler(module, examples)` returns a function equivalent to the module, as backends of `torch.compile` do."""
CALLS = (RecurrentForward, RecurrentBackward)
UNCOMPILED = ACTING | {random.state_of, number_in}


def compile_phase(phase: Phase, compiler: Compiler) -> PhaseFunction:
    """Return the phase as a function compiled by `compiler`.

    It stays uncompiled if it has no nodes, or seeds a generator, checks values or reads numbers.
    """
    if not phase.nodes or any(node.target in UNCOMPILED or isinstance(node.target, CALLS) for node in phase.nodes):
        return generate_function(phase)
    takes = [node for node in phase.inputs if node.value is not None]
    run, plain = compiler(_module(phase, takes), [node.value for node in takes]), generate_function(phase)

    if not callable(run):
        raise InputError(
            f"backward: got {quote(run)} from the backend {quote(compiler)}, expected a function that computes what "
            "the module does. Return one, such as module.forward."
        )

    def call(*groups: Any) -> Any:
        taken = [value for group in groups if isinstance(group, tuple | list) for value in group]
        given = [value for value in taken if isinstance(value, Tensor)]  # all but the key
        del taken
        if any(isinstance(tensor, FakeTensor) for tensor in given):  # compiled kernels need real memory
            return plain(*groups)
        for group in groups:
            if isinstance(group, list):
                group.clear()
        with torch.no_grad():
            found = _regroup(phase, run(*given))
        return found if len(found) > 1 else found[0]

    return call


def compile_adding(phase: Phase, compiler: Compiler) -> PhaseFunction:
    """Return the phase as a compiled function with an optional last argument: sums, to which it adds the last group.

    Without sums, it copies the last group: a compiler may drop a copy, or return one tensor for two equal results.
    """
    run, count = compile_phase(phase, compiler), len(phase.takes)

    def call(*groups: Any) -> Any:
        found, onto = run(*groups[:count]), groups[count] if groups[count:] else ()
        several = len(phase.gives) > 1
        grads = found[-1] if several else found
        if onto:
            foreach_add_(onto, grads)
        total = onto or (grads and own_all([*grads], fresh=()))
        return (*found[:-1], total) if several else total

    return call


def _regroup(phase: Phase, tensors: Iterable[Any]) -> tuple[Any, ...]:
    """Return a phase's results in groups, the first of them in the phase's layouts."""
    left = iter(tensors)
    kinds: list[Any] = [type(group) for group in phase.gives]
    groups = [
        None if group is None else kind(islice(left, len(group)))
        for kind, group in zip(kinds, phase.gives, strict=True)
    ]
    if phase.layouts:
        groups[0] = tuple([spec.like(tensor) for spec, tensor in zip(phase.layouts, groups[0] or (), strict=True)])
    return tuple(groups)


def _module(phase: Phase, takes: Sequence[Node]) -> GraphModule:
    """Return the phase as a module of `torch.fx`; constants are its buffers."""
    graph, to = Graph(), dict[Node, GraphNode]()
    holder = torch.nn.Module()

    def made(node: Node, one: GraphNode) -> GraphNode:
        if node.value is not None:
            one.meta["val"] = node.value
        to[node] = one
        return one

    def operand(node: Node) -> GraphNode:
        if node not in to:
            name = f"constant_{len(to)}"
            holder.register_buffer(name, node.held)
            made(node, graph.get_attr(name))
        return to[node]

    for k, node in enumerate(takes):
        made(node, graph.placeholder(f"taken_{k}"))
    for node in phase.nodes:
        args, kwargs = map_nodes((node.args, node.kwargs), operand)
        made(node, graph.call_function(node.target, args, kwargs))
    graph.output(tuple(map(operand, phase.outputs)))
    return GraphModule(holder, graph)
