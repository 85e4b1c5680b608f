# SPDX-License-Identifier: Apache-2.0
"""Front end: `torch.export`, non-strict. One unit per operator, named by the module that called it.

The graph is the training graph of ATen operators, specialised to the microbatch's shapes and to train or eval mode.
Units are fused by generating Python code for a run of them.

A value is named by the index of its node. An operator that returns several tensors is one unit together with the
`getitem` nodes that pick them, so that every value is a tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from fpipe import random
from fpipe.capture.contract import (
    Batch,
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
from fpipe.capture.fake import fake, fake_mode, skeleton
from fpipe.capture.guards import blame, plain_state, refuse_hooks, require_unchanged, watched
from fpipe.capture.losses import Objective
from fpipe.errors import CaptureError, PipelineError
from fpipe.tree import Structure, flatten, names


def export(model: nn.Module, objective: Objective, leaves: Sequence[Tensor]) -> Captured:
    """Capture `model` and its loss for one microbatch; see `FrontEnd`."""
    refuse_hooks(model)
    device = leaves[0].device if leaves else torch.device("cpu")
    mode = fake_mode()
    trees: list[Structure] = []
    flat = _Flat(skeleton(model, lambda tensor: fake(mode, tensor, device)), objective, trees.append)
    program = _trace(flat, tuple(fake(mode, leaf, device) for leaf in leaves))
    graph = _Graph(program, _first_names(flat.model))
    outputs = graph.outputs()
    fakes = {value: fake(mode, graph.nodes[value].meta["val"], device) for value in graph.sources}
    return Captured(
        units=graph.units(),
        sources=graph.sources,
        loss=None if objective.loss is None else outputs[0],
        outputs=outputs if objective.loss is None else outputs[1:],
        structure=trees[-1],
        fakes=fakes,
        mode=mode,
        trainable=frozenset(name for name, p in model.named_parameters() if p.requires_grad),
        calls=graph.calls(dict(model.named_modules(remove_duplicate=False))),
        fuse=graph.fuse,
    )


class _Flat(nn.Module):
    """A model and its loss as one module of flat tensors; `report` is called with the tree of the outputs."""

    def __init__(self, model: nn.Module, objective: Objective, report: Callable[[Structure], None]) -> None:
        super().__init__()
        self.model, self.objective, self.report = model, objective, report

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """The loss, if there is one, and the tensors of the outputs."""
        with watched(self.model):
            before = plain_state(self.model)
            loss, outputs = self.objective(self.model, leaves)
            require_unchanged(before, plain_state(self.model), "the new value would be lost")
        tensors, structure = flatten(outputs)
        self.report(structure)
        return *(() if loss is None else (loss,)), *tensors


def _trace(flat: _Flat, leaves: Tensors) -> ExportedProgram:
    try:
        return torch.export.export(flat, leaves, strict=False)
    except PipelineError:
        raise
    except Exception as error:
        where = blame(error.__traceback__, flat.model)
        raise CaptureError(
            f"{where}: torch.export could not trace it: {error}. Expected control flow and shapes that do not depend "
            'on data. Rewrite that part, or hand the modules in with capture="modules", where they run as they are.'
        ) from error


def _first_names(model: nn.Module) -> Mapping[str, Source]:
    """What each name of the objective's state is in the user's model: the first name of its tensor."""
    parameters = {f"model.{name}": Parameter(first) for name, first in names(model, "parameters").items()}
    return parameters | {f"model.{name}": Buffer(first) for name, first in names(model, "buffers").items()}


class _Graph:
    """An exported program, read as units and values."""

    def __init__(self, program: ExportedProgram, state: Mapping[str, Source]) -> None:
        self.module = program.graph_module
        self.nodes: list[fx.Node] = list(self.module.graph.nodes)
        self.value: dict[fx.Node, Value] = {node: value for value, node in enumerate(self.nodes)}
        self.sources: dict[Value, Source] = {}
        self.origin: dict[Unit, fx.Node] = {}
        self._read_sources(program, state)

    def _read_sources(self, program: ExportedProgram, state: Mapping[str, Source]) -> None:
        """Placeholders of one tied parameter become one value."""
        known: dict[Source, Value] = {}
        leaf = 0
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                source: Source = Batch(leaf)
                leaf += 1
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
                'stands for as an argument of forward, or hand the modules in with capture="modules".'
            )
        return tensor.detach()

    def units(self) -> tuple[Unit, ...]:
        """One unit per operator, in the order of the graph."""
        return tuple(self._unit(node) for node in self.nodes if node.op == "call_function" and not _picks(node))

    def _unit(self, node: fx.Node) -> Unit:
        if getattr(node.target, "__module__", "").startswith("torch._functorch"):
            raise CaptureError(
                f"module {_path(node) or '(root)'}: got a torch.func transform such as vmap, expected plain operators: "
                "a "
                'graph cannot be cut inside. Use capture="modules", where modules run as they are.'
            )
        reads = tuple(dict.fromkeys(self.value[arg] for arg in node.all_input_nodes if arg.op != "get_attr"))
        picks = [user for user in node.users if _picks(user)] if _is_tuple(node) else []
        makes = tuple(self.value[pick] for pick in picks) if _is_tuple(node) else (self.value[node],)
        makes = makes if _is_tuple(node) or isinstance(node.meta.get("val"), Tensor) else ()

        def call(*tensors: Tensor) -> Tensors:
            values = dict(zip(reads, tensors, strict=True))
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: self._load(arg, values))
            out = node.target(*args, **kwargs)  # type: ignore[operator]
            return tuple(out[pick.args[1]] for pick in picks) if _is_tuple(node) else (out,) if makes else ()

        unit = Unit(_path(node), reads, makes, call, does=_does(node))
        self.origin[unit] = node
        return unit

    def _load(self, node: fx.Node, values: Mapping[Value, Tensor]) -> Any:
        return operator.attrgetter(str(node.target))(self.module) if node.op == "get_attr" else values[self.value[node]]

    def calls(self, modules: Mapping[str, nn.Module]) -> tuple[Call, ...]:
        """The calls of modules, as runs of operators that have a call in common on their stacks."""
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

    def outputs(self) -> tuple[Value, ...]:
        """The values that the graph returns."""
        returned: Any = self.nodes[-1].args[0]
        return tuple(self.value[node] for node in returned)

    def fuse(
        self,
        units: Sequence[Unit],
        random_units: Mapping[Unit, Labels],
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
    ) -> Function:
        """Python code for a run of units, generated by fx; it lets go of every value after its last use."""
        graph = fx.Graph()
        key = graph.placeholder("key")
        new = {value: graph.placeholder(f"v{value}") for value in inputs}
        for unit in units:
            for device in random_units[unit].devices if unit in random_units else ():
                graph.call_function(random.reseed, (key, random_units[unit].label, device))
            node = self.origin[unit]
            picks = [user for user in node.users if _picks(user)] if _is_tuple(node) else []
            for one in (node, *picks):
                copied = graph.node_copy(one, lambda arg: self._copied(graph, arg, new))
                new[self.value[one]] = copied
        graph.output(tuple(new[value] for value in outputs))
        graph.lint()
        return Function(fx.GraphModule(self.module, graph).forward)

    def _copied(self, graph: fx.Graph, node: fx.Node, new: dict[Value, fx.Node]) -> fx.Node:
        return graph.get_attr(str(node.target)) if node.op == "get_attr" else new[self.value[node]]


def _does(node: fx.Node) -> str:
    """The operator and its literal arguments."""
    literals = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, bool | int | float | str)]
    return f"{getattr(node.target, '__name__', node.target)}{literals}"


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _picks(node: fx.Node) -> bool:
    """Whether a node takes one tensor out of the several that an operator returned."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and _is_tuple(node.args[0])


def _stack(node: fx.Node) -> list[str]:
    """The calls of modules, from the outermost, in which a node runs; a second call of a module ends in `@1`."""
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return [path.removeprefix("model").removeprefix(".") for path in paths if path.startswith("model")]


def _path(node: fx.Node) -> str:
    return (_stack(node) or [""])[-1]
