# SPDX-License-Identifier: Apache-2.0
"""Compile a phase of a stage to a function, with a backend of `torch.compile`.

A compiler fuses operators and so sums in a different order: the results are close, but not the same bits. It can't
reseed generators, so a phase that draws random numbers is not compiled, nor is one with checks of values.

A compiler takes long, and deep models repeat themselves. So it gets the blocks of a phase, each kind of block once.

Runs when a plan is made, if stages are compiled; the compiled functions run in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx import Node as GraphNode

from fpipe.errors import InputError
from fpipe.record.fakes.recurrent import RecurrentBackward, RecurrentForward
from fpipe.stages.accumulation import own_all
from fpipe.stages.graph.blocks import cut_blocks
from fpipe.stages.graph.codegen import PhaseFunction, generate_function
from fpipe.stages.graph.form import GraphForm, form_of_block
from fpipe.stages.graph.joint import ACTING, Node, map_nodes, number_in
from fpipe.stages.graph.phases import Phase
from fpipe.tensors import random
from fpipe.tensors.spec import Spec
from fpipe.tensors.torch_private import FakeTensor, foreach_add_
from schedules.errors import quote

Compiled: TypeAlias = Callable[..., Sequence[Any]]
Compiler: TypeAlias = Callable[[GraphModule, list[Any]], Compiled]
"""`compiler(module, examples)` returns a function equivalent to the module, as backends of `torch.compile` do."""
CALLS = (RecurrentForward, RecurrentBackward)
UNCOMPILED = ACTING | {random.state_of, number_in}


@dataclass(frozen=True, eq=False)
class CompiledBlock:
    """A block, and what a compiler made of it: its form names constants by id, so it is kept, too."""

    block: Phase
    run: Compiled

    def call(self, layouts: Sequence[Spec] | None, *tensors: Tensor) -> Sequence[Any]:
        """Return what the block computes, each tensor in its layout, if there are any."""
        found = self.run(*tensors)
        return found if layouts is None else [spec.like(one) for spec, one in zip(layouts, found, strict=True)]


@dataclass(frozen=True)
class Compilation:
    """The functions that one compiler makes of a model's phases.

    - `made`: what was made of the first block of each form, as long as a phase uses it.
    """

    compiler: Compiler
    made: WeakValueDictionary[GraphForm, CompiledBlock] = field(default_factory=WeakValueDictionary)

    def compile(self, phase: Phase) -> PhaseFunction:
        """Return the phase as a function that calls compiled blocks.

        It stays uncompiled if it has no nodes, or seeds a generator, checks values or reads numbers.
        """
        plain = generate_function(phase)
        if not phase.nodes or any(node.target in UNCOMPILED or isinstance(node.target, CALLS) for node in phase.nodes):
            return plain
        run = generate_function(self._in_blocks(phase))

        def call(*groups: Any) -> Any:
            taken = (value for group in groups if isinstance(group, tuple | list) for value in group)
            if any(isinstance(value, FakeTensor) for value in taken):  # compiled kernels need real memory
                return plain(*groups)
            with torch.no_grad():
                return run(*groups)

        return call

    def compile_adding(self, phase: Phase) -> PhaseFunction:
        """Return the same with an optional last argument: sums, to which it adds the last group.

        Without sums, it copies the last group: a compiler may drop a copy, or return one tensor for two equal results.
        """
        run, count = self.compile(phase), len(phase.takes)

        def call(*groups: Any) -> Any:
            found, onto = run(*groups[:count]), groups[count] if groups[count:] else ()
            several = len(phase.gives) > 1
            grads = found[-1] if several else found
            if onto:
                foreach_add_(onto, grads)
            total = onto or (grads and own_all([*grads], fresh=()))
            return (*found[:-1], total) if several else total

        return call

    def _in_blocks(self, phase: Phase) -> Phase:
        """Return a phase that does the same by a call for each block."""
        blocks, nodes, to = cut_blocks(phase), list[Node](), dict[Node, Node]()
        for block in blocks:
            values = [node.value for node in block.outputs if node.value is not None]
            layouts = [*map(Spec.of, values)] if len(blocks) > 1 else None  # for these the next one is compiled
            run = partial(self._block(block).call, layouts)
            nodes.append(called := Node(run, [to.get(node, node) for node in block.inputs]))
            for k, node in enumerate(block.outputs):
                nodes.append(made := Node(getitem, (called, k)))
                to[node], made.value = made, node.value
        gives = tuple(
            None if group is None else type(group)([to.get(node, node) for node in group])  # type: ignore[call-arg]
            for group in phase.gives
        )
        return phase._replace(nodes=tuple(nodes), gives=gives)

    def _block(self, block: Phase) -> CompiledBlock:
        """Return a block, compiled; the same for all blocks of one form."""
        takes, gives = [*block.inputs], [*block.outputs]
        form = form_of_block(takes, block.nodes, gives)
        if form is not None and (known := self.made.get(form)):
            return known
        run = self.compiler(_module(block), [node.value for node in takes])
        if not callable(run):
            raise InputError(
                f"backward: got {quote(run)} from the backend {quote(self.compiler)}, expected a function that "
                "computes what the module does. Return one, such as module.forward."
            )
        made = CompiledBlock(block, run)
        self.made.update({} if form is None else {form: made})
        return made


def _module(block: Phase) -> GraphModule:
    """Return a block as a module of `torch.fx`; constants are its buffers."""
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

    for k, node in enumerate(block.inputs):
        made(node, graph.placeholder(f"taken_{k}"))
    for node in block.nodes:
        args, kwargs = map_nodes((node.args, node.kwargs), operand)
        made(node, graph.call_function(node.target, args, kwargs))
    graph.output(tuple(map(operand, block.outputs)))
    return GraphModule(holder, graph)
