# SPDX-License-Identifier: Apache-2.0
"""Convert an exported program to units and values: one unit per operator, named after the module that called it.

The graph is the training graph of ATen operators, specialized to the microbatch's shapes and to train or eval mode.
Consecutive units are fused by generating Python code for them.

A value is identified by the index of its node. An operator that returns several tensors and the `getitem` nodes that
pick them form one unit, so that every value is a tensor.

Runs when a pipeline is built, and when a new kind of batch first comes; units and generated code run in every step.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument

from fpipe.capture.group_names import hide_group_names
from fpipe.errors import CaptureError
from fpipe.ir.captured import (
    BatchLeaf,
    Buffer,
    Call,
    Captured,
    Constant,
    Function,
    Labels,
    Parameter,
    Source,
    Tensors,
    Unit,
    Value,
)
from fpipe.tensors import random
from fpipe.tensors.fake import fake
from fpipe.tensors.tree import Structure, first_names
from fpipe.torch_private import FUNCTORCH, FakeTensor, FakeTensorMode


def read_program(
    program: ExportedProgram,
    model: nn.Module,
    leaves: Sequence[int],
    returned: Callable[[Sequence[Any]], tuple[Any, list[Any]]],
    structure: Structure,
    mode: FakeTensorMode,
    device: torch.device,
) -> Captured:
    """Return an exported program as a captured model.

    - `model`: the skeleton, which was the attribute `model` of the exported module.
    - `leaves`: the number of the batch leaf for each tensor input of the program.
    - `returned`: picks, from the nodes that the program returns, that of the loss (`None` if there is no loss) and
      those of the output tensors. `structure`: the tree of the outputs.
    - `device`: where fake tensors go if the model's are on meta.
    """
    graph = _Graph(program, _first_names(model), leaves)
    sources, fakes = graph.sources, {value: graph.nodes[value].meta["val"] for value in graph.sources}
    for source, tensor in _state(model):
        if source not in sources.values():  # unused
            value = Value(len(graph.nodes) + len(sources))
            sources[value], fakes[value] = source, tensor
    made: Any = graph.nodes[-1].args[0]
    loss, outputs = returned(made)
    return Captured(
        units=graph.units(),
        sources=sources,
        loss=None if loss is None else graph.value[loss],
        outputs=tuple(graph.value[node] for node in outputs),
        structure=structure,
        fakes={value: fake(mode, tensor, device) for value, tensor in fakes.items()},
        mode=mode,
        trainable=frozenset(name for name, p in model.named_parameters() if p.requires_grad),
        calls=graph.calls(dict(model.named_modules(remove_duplicate=False))),
        fuse=graph.fuse,
    )


def _state(model: nn.Module) -> list[tuple[Source, Tensor]]:
    parameters: list[tuple[Source, Tensor]] = [(Parameter(name), p) for name, p in model.named_parameters()]
    return [*parameters, *[(Buffer(name), b) for name, b in model.named_buffers()]]


def _first_names(model: nn.Module) -> Mapping[str, Source]:
    """Map each state name in the program to its parameter or buffer, by the first name in the user's model."""
    parameters = {f"model.{name}": Parameter(first) for name, first in first_names(model, "parameters").items()}
    return parameters | {f"model.{name}": Buffer(first) for name, first in first_names(model, "buffers").items()}


class _Graph:
    """The graph of an exported program, its nodes numbered as values."""

    def __init__(self, program: ExportedProgram, state: Mapping[str, Source], leaves: Sequence[int]) -> None:
        self.module = program.graph_module
        self.nodes: list[fx.Node] = list(self.module.graph.nodes)
        self.value: dict[fx.Node, Value] = {node: Value(k) for k, node in enumerate(self.nodes)}
        self.sources: dict[Value, Source] = {}
        self.origin: dict[Unit, fx.Node] = {}
        self._read_sources(program, state, iter(leaves))

    def _read_sources(self, program: ExportedProgram, state: Mapping[str, Source], leaves: Iterator[int]) -> None:
        """Assign a source to each placeholder; placeholders of one tied parameter share a value."""
        known: dict[Source, Value] = {}
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                if not isinstance(spec.arg, TensorArgument):
                    continue  # non-tensors are part of the program
                source: Source = BatchLeaf(next(leaves))
            elif spec.target in state:
                source = state[spec.target]
                self.value[node] = known.setdefault(source, self.value[node])
            else:
                source = Constant(self._constant(program, spec.target))
            self.sources[self.value[node]] = source

    @staticmethod
    def _constant(program: ExportedProgram, target: str | None) -> Tensor:
        tensor = program.constants.get(target or "", program.state_dict.get(target or ""))
        if isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"the graph: got a tensor {target!r} that was made during capture and kept (by a cache, say), expected "
                "one with values. Call the model once before building the pipeline, or make it in __init__."
            )
        if not isinstance(tensor, Tensor):
            raise CaptureError(
                f"the graph: got {target!r} ({type(tensor).__name__}) among its inputs, expected tensors. Pass what it "
                'stands for as an argument of forward, or choose capture="trace".'
            )
        return tensor.detach()

    def units(self) -> tuple[Unit, ...]:
        """Return one unit per operator, in the order of the graph."""
        return tuple(self._unit(node) for node in self.nodes if node.op == "call_function" and not _is_pick(node))

    def _unit(self, node: fx.Node) -> Unit:
        if getattr(node.target, "__module__", "").startswith(FUNCTORCH):
            raise CaptureError(
                f"module {_path(node) or '(root)'}: got a torch.func transform such as vmap, expected plain operators: "
                'it cannot be read back from the graph. Choose capture="trace", where modules run as they are.'
            )
        if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
            raise CaptureError(
                f"module {_path(node) or '(root)'}: got a size or a number ({node.name}) that depends on the values of "
                "its input, expected shapes and control flow that do not. Rewrite that part."
            )
        reads = tuple(dict.fromkeys(self.value[arg] for arg in node.all_input_nodes if arg.op != "get_attr"))
        picks = [user for user in node.users if _is_pick(user)] if _is_tuple(node) else []
        makes = tuple(self.value[pick] for pick in picks) if _is_tuple(node) else (self.value[node],)
        makes = makes if _is_tuple(node) or isinstance(node.meta.get("val"), Tensor) else ()

        def call(*tensors: Tensor) -> Tensors:
            values = dict(zip(reads, tensors, strict=True))
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: self._load(arg, values))
            out = node.target(*args, **kwargs)  # type: ignore[operator]
            return tuple(out[pick.args[1]] for pick in picks) if _is_tuple(node) else (out,) if makes else ()

        unit = Unit(_path(node), reads, makes, call, does=_operator_text(node))
        self.origin[unit] = node
        return unit

    def _load(self, node: fx.Node, values: Mapping[Value, Tensor]) -> Any:
        return operator.attrgetter(str(node.target))(self.module) if node.op == "get_attr" else values[self.value[node]]

    def calls(self, modules: Mapping[str, nn.Module]) -> tuple[Call, ...]:
        """Return the calls of modules: the longest sequences of units whose stacks share a call."""
        found: list[Call] = []
        running: dict[str, int] = {}
        for position, unit in enumerate(self.units()):
            stack = _stack(self.origin[unit])
            running = {path: running[path] for path in stack if path in running}
            for path in stack:
                if path not in running:
                    running[path] = len(found)
                    name = path.split("@")[0]
                    found.append(Call(name, type(modules[name]), position, position))
            for index in running.values():
                found[index] = found[index]._replace(stop=position + 1)
        return tuple(found)

    def fuse(
        self,
        units: Sequence[Unit],
        random_units: Mapping[Unit, Labels],
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
    ) -> Function:
        """Return units, in order, as a function that fx generates; it frees each value after its last use."""
        graph = fx.Graph()
        key = graph.placeholder("key")
        new = {value: graph.placeholder(f"v{value}") for value in inputs}
        for unit in units:
            for device in random_units[unit].devices if unit in random_units else ():
                graph.call_function(random.reseed, (key, random_units[unit].label, device))
            node = self.origin[unit]
            picks = [user for user in node.users if _is_pick(user)] if _is_tuple(node) else []
            for one in (node, *picks):
                copied = graph.node_copy(one, lambda arg: self._copied(graph, arg, new))
                new[self.value[one]] = copied
        graph.output(tuple(new[value] for value in outputs))
        graph.lint()
        return Function(fx.GraphModule(self.module, graph).forward)

    def _copied(self, graph: fx.Graph, node: fx.Node, new: dict[Value, fx.Node]) -> fx.Node:
        return graph.get_attr(str(node.target)) if node.op == "get_attr" else new[self.value[node]]


def _operator_text(node: fx.Node) -> str:
    """Return a node's operator and literal arguments as text."""
    literals = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, bool | int | float | str)]
    return f"{getattr(node.target, '__name__', node.target)}{hide_group_names(node.target, literals)}"


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _is_pick(node: fx.Node) -> bool:
    """Return whether a node picks one of several tensors that an operator returned."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and _is_tuple(node.args[0])


def _stack(node: fx.Node) -> list[str]:
    """Return the paths of the module calls around a node, outermost first; a module's second call ends in `@1`.

    Dynamo records no stack for a higher-order operator; it gets the calls around all nodes of the graphs that it takes.
    """
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    found = [path.removeprefix("model").removeprefix(".") for path in paths if path.startswith("model")]
    stacks = [] if found else [stack for one in _inner_nodes(node) if (stack := _stack(one))]
    levels = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*stacks, strict=False))
    return found or [path for path, *_ in levels]


def _inner_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of the graphs that a node takes as arguments."""
    modules = [
        operator.attrgetter(str(arg.target))(node.graph.owning_module)
        for arg in node.all_input_nodes
        if arg.op == "get_attr"
    ]
    return [one for module in modules if isinstance(module, fx.GraphModule) for one in module.graph.nodes]


def _path(node: fx.Node) -> str:
    return (_stack(node) or [""])[-1]
