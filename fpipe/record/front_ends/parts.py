# SPDX-License-Identifier: Apache-2.0
"""Models made of parts, modules or functions: a sequence, or a graph in which each names its arguments.

A part may return any tree, and take any leaf of the inputs and of other parts' results. So the model is cut where its
author says, not where a tracer happens to see a boundary. Both are ordinary modules. `[a, b, c]` means what
`nn.Sequential(a, b, c)` means: each part is called with what the previous one returned, the first with the inputs, the
loss with what the last returned. A graph calls its parts in the order listed, but each after those whose results it
takes.

With `front_end="modules"` no part is cut inside. Models are recorded as by `fpipe.record.trace.front_end`, with the
parts sealed: whatever tree a part returns is flattened into tensors; non-tensors must be the same for every microbatch.
A tensor that a part returns unchanged stays the same value, so it is sent directly to the stage that uses it next.

Runs when a model is made and whenever it is called: in captures, and in every step if one stage holds all of it.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

import optree
from torch import Tensor, nn

from fpipe.errors import CaptureError, GraphError, InputError
from fpipe.record.captured import Captured
from fpipe.record.objective import Objective
from fpipe.record.trace.front_end import trace_model
from fpipe.tensors.arguments import require_arguments
from fpipe.tensors.tree import NAMESPACE


class FromFunction(nn.Module):
    """A function as a stateless module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def extra_repr(self) -> str:
        """Return the function's name."""
        return getattr(self.function, "__name__", repr(self.function))


def as_part(part: Callable[..., Any]) -> nn.Module:
    """Return a module unchanged; wrap a function in a module."""
    return part if isinstance(part, nn.Module) else FromFunction(part)


class Part:
    """A call of a module or function, written with names in place of values.

    Strings among the arguments, at any depth, name an input of the graph or another part, optionally with an item or
    attribute of it: `"vision"`, `"vision[0]"`, `"vision['features']"`, `"vision.last_hidden_state"`. Anything else is
    passed unchanged.

    >>> import torch
    >>> Part(torch.add, "text", "vision['features']", alpha=2)
    Part(add, 'text', "vision['features']", alpha=2)
    """

    def __init__(self, called: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        if not callable(called):
            raise GraphError(f"a part: got {called!r}, expected a module or a function. Pass one, then its arguments.")
        self.called, self.args, self.kwargs = called, args, kwargs

    def __repr__(self) -> str:
        name = getattr(self.called, "__name__", type(self.called).__name__)
        return f"Part({', '.join([name, *map(repr, self.args), *[f'{k}={v!r}' for k, v in self.kwargs.items()]])})"


class ModuleGraph(nn.Module):
    """A module that calls parts with its own inputs and with each other's results.

    - `parts`: by name, which is also the name of the submodule.
    - `inputs`: the names of the graph's own arguments, in order.
    - `outputs`: what the graph returns: a name, as in `Part`, or any tree of names.

    With `front_end="modules"` no part is ever cut; with the other front ends parts may be cut inside. Raises
    `GraphError` for a name that is unknown, already used, or never used, and for a cycle.

    >>> import torch
    >>> towers = ModuleGraph(
    ...     {
    ...         "text": Part(torch.nn.Linear(3, 4), "tokens"),
    ...         "image": Part(torch.nn.Linear(5, 4), "pixels"),
    ...         "score": Part(lambda a, b: (a * b).sum(-1), "text", "image"),
    ...     },
    ...     inputs=["tokens", "pixels"],
    ...     outputs={"score": "score", "features": "image"},
    ... )
    >>> {name: tuple(tensor.shape) for name, tensor in towers(torch.ones(2, 3), torch.ones(2, 5)).items()}
    {'score': (2,), 'features': (2, 4)}
    """

    def __init__(self, parts: Mapping[str, Part], *, inputs: str | Sequence[str], outputs: Any) -> None:
        super().__init__()
        require_arguments(ModuleGraph.__init__, locals())
        inputs = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        _require_names(parts, inputs)
        known = [*inputs, *parts]
        arguments = {name: _link((part.args, part.kwargs), f"part {name!r}", known) for name, part in parts.items()}
        self.outputs = _link(outputs, "outputs", known)
        reads = {name: dict.fromkeys(one.name for one in _references(tree)) for name, tree in arguments.items()}
        _require_used(known, {name for names in reads.values() for name in names}, self.outputs)
        self.inputs = inputs
        self.arguments = {name: arguments[name] for name in _order(reads)}
        for name in self.arguments:
            self.add_module(name, as_part(parts[name].called))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the parts in order; return the outputs."""
        signature = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in self.inputs])
        values = dict(signature.bind(*args, **kwargs).arguments)
        for name, tree in self.arguments.items():
            positional, named = _resolve(tree, values)
            values[name] = getattr(self, name)(*positional, **named)
        return _resolve(self.outputs, values)

    def extra_repr(self) -> str:
        """Return the wiring, one line per part."""
        lines = [f"{name} = {name}({_arguments_text(*tree)})" for name, tree in self.arguments.items()]
        return "\n".join([*lines, f"return {optree.tree_map(repr, self.outputs, namespace=NAMESPACE)}"])


class _Reference:
    """A parsed reference such as `vision['features'][0]`: a name, and a path of items and attributes from its value."""

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self.way: list[tuple[bool, Any]] = []  # True and an attribute's name, or False and an item's key
        try:
            node = ast.parse(text, mode="eval").body
            while not isinstance(node, ast.Name):
                step, node = _step(node)
                self.way.insert(0, step)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise GraphError(
                f"{where}: got {text!r}, expected a name, optionally followed by [0], ['key'] or .attribute. Pass a "
                "string that is not a name through a function."
            ) from error
        self.name = node.id

    def of(self, values: Mapping[str, Any]) -> Any:
        """Return the value that it refers to, given the `values` by name."""
        value = values[self.name]
        for attribute, key in self.way:
            value = getattr(value, key) if attribute else value[key]
        return value

    def __repr__(self) -> str:
        return self.text


def _step(node: ast.expr) -> tuple[tuple[bool, Any], ast.expr]:
    """Return the last step of a path and the expression before it; raise `ValueError` for anything else."""
    if isinstance(node, ast.Attribute):
        return (True, node.attr), node.value
    if isinstance(node, ast.Subscript):
        return (False, ast.literal_eval(node.slice)), node.value
    raise ValueError(ast.dump(node))


def _link(tree: Any, where: str, known: Sequence[str]) -> Any:
    """Return the tree with its strings parsed as references; raise `GraphError` for an unknown name."""

    def referring(leaf: Any) -> Any:
        if not isinstance(leaf, str):
            return leaf
        reference = _Reference(leaf, where)
        if reference.name not in known:
            close = difflib.get_close_matches(reference.name, known, n=3) or known[:8]
            raise GraphError(
                f"{where}: got {leaf!r}, expected the name of an input or a part. Did you mean one of {list(close)}?"
            )
        return reference

    return optree.tree_map(referring, tree, namespace=NAMESPACE)


def _references(tree: Any) -> Iterator[_Reference]:
    return (leaf for leaf in optree.tree_leaves(tree, namespace=NAMESPACE) if isinstance(leaf, _Reference))


def _resolve(tree: Any, values: Mapping[str, Any]) -> Any:
    """Return the tree with references replaced by their values."""
    return optree.tree_map(
        lambda leaf: leaf.of(values) if isinstance(leaf, _Reference) else leaf, tree, namespace=NAMESPACE
    )


def _arguments_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return ", ".join([*map(repr, args), *[f"{name}={value!r}" for name, value in kwargs.items()]])


def _require_names(parts: Mapping[str, Part], inputs: Sequence[str]) -> None:
    if not parts:
        raise GraphError("parts: got none, expected at least one. Name what the model consists of.")
    for name in [*inputs, *parts]:
        if not isinstance(name, str) or not name.isidentifier():
            raise GraphError(
                f"the name {name!r}: got a name that is not an identifier, expected one such as text_0. Rename it."
            )
        if name in inputs and ([*inputs, *parts].count(name) > 1):
            raise GraphError(f"the name {name!r}: got it twice, expected each once, of inputs and parts. Rename one.")
    for name, part in parts.items():
        if hasattr(nn.Module(), name) or name in ("inputs", "outputs", "arguments"):
            raise GraphError(f"part {name!r}: got a name that modules use themselves, expected another. Rename it.")
        if not isinstance(part, Part):
            raise GraphError(
                f"part {name!r}: got {type(part).__name__}, expected a Part, which says what it is called with. Write "
                f"Part({type(part).__name__}(...), ...)."
            )


def _require_used(known: Sequence[str], read: set[str], outputs: Any) -> None:
    unused = [name for name in known if name not in read | {one.name for one in _references(outputs)}]
    if unused:
        raise GraphError(
            f"parts: got {unused}, which neither a part nor the outputs use, expected every name to be used. Remove "
            "them, or return them."
        )


def _order(reads: Mapping[str, Mapping[str, None]]) -> list[str]:
    """Return the parts as listed, but each after those that it reads; raise `GraphError` for a cycle."""
    order: list[str] = []
    while len(order) < len(reads):
        ready = [name for name in reads if name not in order and not (reads[name].keys() & reads) - {*order}]
        if not ready:
            raise GraphError(
                f"parts: got a cycle, {' -> '.join(_cycle(reads, order))}, expected an order in which each part has "
                "what it reads. Break it, for example by calling a module in two parts."
            )
        order.append(ready[0])
    return order


def _cycle(reads: Mapping[str, Mapping[str, None]], done: Sequence[str]) -> list[str]:
    """Return a cycle among the parts that are not `done`, in the direction of data flow."""
    name = next(name for name in reads if name not in done)
    way = [name]
    while way.count(name) < 2:
        name = next(other for other in reads[name] if other in reads and other not in done)
        way.append(name)
    return way[way.index(name) :][::-1]


class Chain(nn.Module):
    """A sequence of parts as one module: the model that a list of parts represents."""

    def __init__(self, parts: Sequence[Callable[..., Any]] | nn.Sequential) -> None:
        super().__init__()
        # not named_children(), which lists a module that is used twice only once
        named = parts._modules.items() if isinstance(parts, nn.Sequential) else enumerate(parts)
        for name, part in named:
            self.add_module(str(name), as_part(part))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the parts in order, each with what the previous one returned."""
        first, *rest = self._modules.values()
        assert first is not None, "there is a part"
        value = first(*args, **kwargs)
        for part in rest:
            assert part is not None, "parts are modules"
            value = part(value)
        return value


def as_module(model: nn.Module | Sequence[Callable[..., Any]]) -> nn.Module:
    """Return a model as a module: a list of parts becomes a `Chain`, with the names nn.Sequential would give.

    Raise `InputError` for anything else.
    """
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, list | tuple) or not model or not all(callable(part) for part in model):
        raise InputError(
            f"model: got {type(model).__name__}{' without parts' if model in ([], ()) else ''}, expected a module, or "
            "a list of modules and functions. Put a single function into a list."
        )
    return Chain(model)


def modules(model: nn.Module, objective: Objective, leaves: Sequence[Tensor]) -> Captured:
    """Capture a `Chain` or `ModuleGraph` of parts for one microbatch; see `CaptureFunction`."""
    if isinstance(model, nn.Sequential):
        model = Chain(model)
    if not isinstance(model, Chain | ModuleGraph):
        raise CaptureError(
            f"model: got {type(model).__name__}, expected a list of modules or functions, an nn.Sequential, or a "
            'ModuleGraph. Pass the parts as one of these, or use front_end="trace".'
        )
    return trace_model(model, objective, leaves, parts=tuple(model._modules))
