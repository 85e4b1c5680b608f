# SPDX-License-Identifier: Apache-2.0
"""Fold a flat graph back into the modules that it came from.

Problem. torch.fx and torch.export make one flat graph of a whole model. But users cut at the names of modules, and the
recorder records calls of modules.

Idea. Each node says in the calls of which modules it was made (`nn_module_stack`). So every run of nodes that were made
in one call becomes the forward of that module again: a function of the values that the nodes read, which returns those
that others use. A region under `no_grad` or autocast, which torch.export keeps as a graph in the graph, becomes nodes
in a `with` block again.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby, takewhile
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx, nn

from fpipe.errors import CaptureError
from fpipe.record.captured import Operation, Value, compose
from fpipe.tensors.torch_private import FUNCTORCH, FakeTensor, OpOverload

REGIONS: Final[Mapping[str, tuple[int, Callable[..., AbstractContextManager[Any]]]]] = MappingProxyType(
    {
        "wrap_with_set_grad_enabled": (1, torch.set_grad_enabled),
        "wrap_with_autocast": (4, torch.autocast),
    }
)
"""The operators that run a graph in a context, by name: the number of the context's arguments, and the context."""
HOOK_TABLES: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def fold_module(graph: fx.GraphModule, model: nn.Module) -> nn.Module:
    """Return `model` with the forwards that a graph module, made from it, describes."""
    signature, code = inspect.signature(graph.forward), graph.graph

    def enter(args: Any, kwargs: Any) -> Sequence[Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        found: Sequence[Any] = code.process_inputs(*bound.arguments.values())
        return found

    return fold(code, graph, model, enter, code.process_outputs)


def fold(
    graph: fx.Graph,
    owner: nn.Module,
    model: nn.Module,
    enter: Callable[[Any, Any], Sequence[Any]],
    leave: Callable[[Any], Any],
) -> nn.Module:
    """Return `model` with the forwards that a graph describes.

    - `owner`: has the constants and the graphs that nodes refer to.
    - `enter(args, kwargs)`: returns the values of the placeholders. `leave(out)`: returns what the model returns.
    """
    folding = _Folding(graph, model)
    run, output = folding.fold(graph, owner, 0)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return leave(output(run(0, *enter(args, kwargs))))

    for module, calls in folding.calls.items():
        _set_forward(module, lambda k, *values, calls=calls: calls[k](0, *values))
    _set_forward(model, forward)
    return model


class _Folding:
    """The modules of a model whose forwards become parts of a graph; its nodes are values, numbered as they come."""

    def __init__(self, graph: fx.Graph, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.state = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.state |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.leaves = {str(node.target) for node in graph.nodes if node.op == "call_module"}
        self.calls: dict[nn.Module, list[Callable[..., Any]]] = {}
        self.numbers: dict[fx.Node, Value] = {}

    def fold(
        self, graph: fx.Graph, owner: nn.Module, depth: int
    ) -> tuple[Callable[..., Any], Callable[[Sequence[Any]], Any]]:
        """Return the nodes of a graph as a function of its placeholders, and one that makes its output of the results.

        `depth`: how many calls of modules it runs in.
        """
        nodes = list(graph.nodes)
        places = [node for node in nodes if node.op == "placeholder"]
        held = [node for node in nodes if node.op == "get_attr" and not _is_graph(node, owner)]
        # What the model holds is read once, before anything runs: where it is used, it is an argument.
        operations = [Operation((), (self._value(node),), self._reader(node, owner)) for node in held]
        work = [node for node in nodes if node.op not in ("placeholder", "get_attr", "output")]
        results = nodes[-1].all_input_nodes
        run = self._compose(operations, work, owner, depth, places, results)
        place = {node: k for k, node in enumerate(results)}
        return run, lambda values: fx.map_arg(nodes[-1].args[0], lambda node: values[place[node]])

    def _compose(
        self,
        operations: list[Operation],
        nodes: Sequence[fx.Node],
        owner: nn.Module,
        depth: int,
        reads: Iterable[fx.Node],
        makes: Iterable[fx.Node],
    ) -> Callable[..., Any]:
        """Return a function of values: some operations, then nodes; those in deeper calls become calls of modules."""
        for call, group in groupby(nodes, lambda node: next(iter(self._stack(node, owner)[depth:]), None)):
            if call is None:
                operations += [self._operation(node, owner, depth) for node in group]
            else:
                operations.append(self._call(call[1], list(group), owner, depth + 1))
        return compose(operations, tuple(map(self._value, reads)), tuple(map(self._value, makes)))

    def _call(self, path: str, nodes: Sequence[fx.Node], owner: nn.Module, depth: int) -> Operation:
        """Return nodes as a call of the module at `path`."""
        inside = set(nodes)
        read = dict.fromkeys(arg for node in nodes for arg in _inputs(node, owner) if arg not in inside)
        made = [node for node in nodes if not inside.issuperset(node.users)]
        module = self.modules[path]
        calls = self.calls.setdefault(module, [])
        calls.append(self._compose([], nodes, owner, depth, read, made))
        k = len(calls) - 1
        values = tuple(map(self._value, read)), tuple(map(self._value, made))
        return Operation(*values, lambda key, *given: module(k, *given))

    def _operation(self, node: fx.Node, owner: nn.Module, depth: int) -> Operation:
        """Return a node as an operation."""
        where = self._place(node, owner)
        _require_plain(node, where)
        reads = _inputs(node, owner)
        args, kwargs, function = node.args, node.kwargs, self._function(node, owner, depth)
        if isinstance(function, OpOverload):  # steps repeat calls faster whose arguments nobody can change
            args = tuple([tuple(one) if isinstance(one, list) and not _holds_nodes(one) else one for one in args])
        place, seen = {one: k for k, one in enumerate(reads)}, _spec(node.meta.get("val"))

        used = bool(node.users)

        def call(key: int, *values: Any) -> tuple[Any, ...]:
            given = fx.map_arg((args, kwargs), lambda one: values[place[one]] if one in place else None)
            made = function(*given[0], **given[1])
            if used and any(made is one for one in values):
                # A value after an in-place change is another one than before, for the stages that read it.
                made = torch.ops.aten.alias.default(made)  # with its strides, which view_as may change
            _require_as_traced(seen, made, where, node.name)
            return (made,)

        return Operation(tuple(map(self._value, reads)), (self._value(node),), call)

    def _function(self, node: fx.Node, owner: nn.Module, depth: int) -> Callable[..., Any]:
        """Return the function that a node calls."""
        if node.op == "call_module":
            return owner.get_submodule(str(node.target))
        if node.op == "call_method":
            name = str(node.target)
            return lambda one, *args, **kwargs: getattr(one, name)(*args, **kwargs)
        if (name := _name(node)) not in REGIONS:
            function: Callable[..., Any] = node.target  # type: ignore[assignment]
            return function
        count, context = REGIONS[name]
        inner = _graph_of(node.args[count], owner)
        run, output = self.fold(inner.graph, inner, depth)

        def run_region(*args: Any) -> Any:
            with context(*args[:count]):
                return output(run(0, *args[count + 1 :]))

        return run_region

    def _reader(self, node: fx.Node, owner: nn.Module) -> Callable[..., Any]:
        get = operator.attrgetter(str(node.target))
        if node.target in self.state:
            return lambda key: (get(self.model),)
        constant = get(owner)
        if isinstance(constant, FakeTensor):
            raise CaptureError(
                f"the graph: got a tensor {node.target!r} that was made during capture and kept (by a cache, say), "
                "expected one with values. Call the model once before building the pipeline, or make it in __init__."
            )
        return lambda key: (constant,)

    def _stack(self, node: fx.Node, owner: nn.Module) -> list[tuple[str, str]]:
        """Return the calls of modules around a node, outermost first, without that of the model: a key, and the path.

        What picks a result of a region belongs to the region. Dynamo notes no calls around a region: it gets the calls
        around all of its nodes.
        """
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and _name(node.args[0]) in REGIONS:
            return self._stack(node.args[0], owner)
        calls = list((node.meta.get("nn_module_stack") or {}).items())
        found = [(str(key), path) for key, (path, _) in calls if path and path not in self.leaves]
        if found or _name(node) not in REGIONS:
            return found
        inner = _graph_of(node.args[REGIONS[_name(node)][0]], owner)
        stacks = [
            self._stack(one, inner) for one in inner.graph.nodes if one.op not in ("placeholder", "get_attr", "output")
        ]
        return [level[0] for level in takewhile(lambda level: len(set(level)) == 1, zip(*stacks, strict=False))]

    def _place(self, node: fx.Node, owner: nn.Module) -> str:
        *_, path = "(root)", *[path for _, path in self._stack(node, owner)]
        return f"module {path}"

    def _value(self, node: fx.Node) -> Value:
        return self.numbers.setdefault(node, Value(len(self.numbers)))


def _set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    vars(module)["forward"] = forward  # past __setattr__, which would take it for a change of the model's
    for table in HOOK_TABLES:  # what they did is in the graph
        getattr(module, table).clear()


def _require_plain(node: fx.Node, where: str) -> None:
    """Raise `CaptureError` for a node that means nothing outside of its tracer."""
    if getattr(node.target, "__module__", "").startswith(FUNCTORCH):
        raise CaptureError(
            f"{where}: got a torch.func transform such as vmap, expected plain operators: it cannot be read back from "
            'the graph. Choose front_end="trace", where modules run as they are.'
        )
    if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
        raise CaptureError(
            f"{where}: got a size or a number ({node.name}) that depends on the values of its input, expected shapes "
            "and control flow that do not. Rewrite that part."
        )


def _spec(made: object) -> tuple[torch.dtype, list[int]] | None:
    """Return dtype and shape of a fake tensor; `None` for anything else."""
    return (made.dtype, list(made.shape)) if isinstance(made, FakeTensor) else None


def _require_as_traced(seen: object, made: object, where: str, name: str) -> None:
    """Raise `CaptureError`, at capture, if a node makes another kind of tensor than its tracer saw."""
    if seen is not None and isinstance(made, FakeTensor) and _spec(made) != seen:
        raise CaptureError(
            f"{where}: got {_spec(made)} from {name}, expected {seen}, as in the front end: it traced something other "
            'than what the model does (for example, it ignored autocast). Choose front_end="trace", which runs the '
            "model."
        )


def _holds_nodes(argument: list[Any]) -> bool:
    return any(isinstance(one, fx.Node) for one in argument)


def _name(node: fx.Node) -> str:
    """Return the name of a higher-order operator; any text for other nodes."""
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def _inputs(node: fx.Node, owner: nn.Module) -> list[fx.Node]:
    """Return the nodes whose values a node reads."""
    return [one for one in node.all_input_nodes if not _is_graph(one, owner)]


def _is_graph(node: fx.Node, owner: nn.Module) -> bool:
    """Return whether a node stands for a graph that a region runs."""
    return node.op == "get_attr" and isinstance(operator.attrgetter(str(node.target))(owner), fx.GraphModule)


def _graph_of(node: Any, owner: nn.Module) -> fx.GraphModule:
    found: fx.GraphModule = operator.attrgetter(str(node.target))(owner)
    return found
