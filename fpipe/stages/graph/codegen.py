# SPDX-License-Identifier: Apache-2.0
"""Generate a function from a phase of a stage: a line of Python for each node.

The function empties the lists of tensors that were kept for it, and deletes every value after its last use, so nothing
lives longer than needed. Operators are called as directly as Python allows: by torch's own binding if one maps to
exactly this operator (`DIRECT`), else bypassing the dispatcher's Python frame.

Outputs are copied if their layout is not the inferred one, since fake tensors can be wrong about it.

Runs when a plan is made, if stages are recorded; the functions that it generates run in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fpipe.stages.graph.joint import Node
from fpipe.stages.graph.phases import Phase
from fpipe.tensors.layouts import aten
from fpipe.tensors.spec import Spec
from fpipe.tensors.torch_private import OpOverload, gelu

PhaseFunction: TypeAlias = Callable[..., Any]
"""Takes the groups of `Phase.takes` and returns those of `Phase.gives`; a single group is returned by itself."""

DIRECT: Mapping[Any, Any] = MappingProxyType(
    {
        aten.mm.default: Tensor.mm,
        aten.bmm.default: Tensor.bmm,
        aten.addmm.default: Tensor.addmm,
        aten.baddbmm.default: Tensor.baddbmm,
        aten.t.default: Tensor.t,
        aten.transpose.int: Tensor.transpose,
        aten.permute.default: Tensor.permute,
        aten.view.default: Tensor.view,
        aten.expand.default: Tensor.expand,
        aten.unsqueeze.default: Tensor.unsqueeze,
        aten.sum.dim_IntList: Tensor.sum,
        aten.sum.default: Tensor.sum,
        aten.mean.default: Tensor.mean,
        aten.pow.Tensor_Scalar: Tensor.pow,
        aten.add.Tensor: Tensor.add,
        aten.sub.Tensor: Tensor.sub,
        aten.mul.Tensor: Tensor.mul,
        aten.mul.Scalar: Tensor.mul,
        aten.div.Tensor: Tensor.div,
        aten.div.Scalar: Tensor.div,
        aten.relu.default: Tensor.relu,
        aten.tanh.default: Tensor.tanh,
        aten.gelu.default: gelu,
        aten.native_layer_norm.default: torch.native_layer_norm,
    }
)
NUMBERED = frozenset(
    {
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.div.Scalar,
    }
)
"""Operators of two tensors that, given a number, convert it to a tensor in every call."""


def generate_function(phase: Phase) -> PhaseFunction:
    """Return the phase as a function."""
    return _compile(phase, None)


def generate_adding(phase: Phase) -> PhaseFunction:
    """Return the phase as a function with an optional last argument: a sum for each tensor of its last result group.

    It adds each tensor to its sum as soon as it is computed (at the end, if the phase writes anything in place), and
    returns the sums. Without sums it returns the tensors themselves.
    """
    return _compile(phase, generate_function(phase))


def _compile(phase: Phase, alone: PhaseFunction | None) -> PhaseFunction:
    """Return the phase as a function. If it can take sums, `alone` is the function to call without them."""
    adding = alone is not None
    sums = tuple(f"s{k}" for k in range(len(phase.gives[-1] or ()))) if adding else ()
    writer, last = _Writer(phase), _last_uses(phase, adding)
    added = _additions(phase, sums)
    lines = writer.beginning(sums, alone)
    for node in (None, *phase.nodes):
        lines += [writer.call(node)] if node is not None else []
        lines += [f"{total}.add_({writer.text(grad)})" for total, grad in added.get(node, ())]
        lines += writer.deletion(last.get(node, []))
    lines.append(writer.end(adding))
    return writer.function(lines)


def _additions(phase: Phase, sums: tuple[str, ...]) -> dict[Node | None, list[tuple[str, Node]]]:
    """Return the additions after each node, as pairs of sum and gradient; those under `None` come first."""
    writes = any(node.writes for node in phase.nodes)
    found: dict[Node | None, list[tuple[str, Node]]] = {}
    for total, grad in zip(sums, phase.gives[-1] or (), strict=False):
        maker = phase.nodes[-1] if writes else grad if grad in phase.nodes else None
        found.setdefault(maker, []).append((total, grad))
    return found


def _tuple(entries: Iterable[str]) -> str:
    return f"({''.join(f'{entry}, ' for entry in entries)})"


def _last_uses(phase: Phase, adding: bool) -> dict[Node | None, list[Node]]:
    """Return the values to delete after each node: last used there, and not returned. Under `None`: those never used.

    If anything is written in place, gradients that are added to sums are used until the end.
    """
    last: dict[Node, Node | None] = dict.fromkeys(phase.inputs, None)
    for node in phase.nodes:
        for used in (node, *(one for one in node.reads if one in last)):
            last[used] = node
    if adding and any(node.writes for node in phase.nodes):
        last.update({grad: phase.nodes[-1] for grad in phase.gives[-1] or () if grad in last})
    returned = {node for group in (phase.gives[:-1] if adding else phase.gives) for node in group or ()}
    found: dict[Node | None, list[Node]] = {}
    for value, user in last.items():
        if value not in returned:
            found.setdefault(user, []).append(value)
    return found


class _Writer:
    """The writer of a phase's lines; `namespace` has the objects that they refer to."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.names = {node: f"v{k}" for k, node in enumerate((*phase.inputs, *phase.nodes))}
        self.namespace: dict[str, Any] = {}
        self.known: dict[Any, str] = {}

    def function(self, lines: Iterable[str]) -> PhaseFunction:
        """Return the function compiled from these lines, of which the first is its signature."""
        exec(compile("\n    ".join(lines), "<stage>", "exec"), self.namespace)
        made: PhaseFunction = self.namespace.pop("run")  # its globals, which would make a reference cycle
        return made

    def beginning(self, sums: Sequence[str], alone: PhaseFunction | None) -> list[str]:
        """Return the signature, and the lines that unpack the groups and the sums; without sums they call `alone`."""
        takes = self.phase.takes
        groups = [self.names[group] if isinstance(group, Node) else f"g{k}" for k, group in enumerate(takes)]
        lines = [f"def run({', '.join(groups)}{', onto=()' if alone else ''}):"]
        if alone is not None:
            lines += ["if not onto:", f"    return {self._bind(alone)}({', '.join(groups)})", f"{_tuple(sums)} = onto"]
        for name, group in zip(groups, takes, strict=True):
            if group and not isinstance(group, Node):
                lines.append(f"{self.text(tuple(group))} = {name}")
                lines += [f"{name}.clear()"] * isinstance(group, list)
        return lines

    def end(self, adding: bool) -> str:
        """Return the line that returns the groups."""
        first, *rest = [self.text(group) for group in self.phase.gives]
        if self.phase.layouts:
            first = _tuple(map(self._with_layout, self.phase.gives[0] or (), self.phase.layouts))
        groups = [first, *rest]
        if adding:
            groups[-1] = "onto"
        return f"return {_tuple(groups) if rest else groups[0]}"

    def _with_layout(self, node: Node, spec: Spec) -> str:
        name = self.text(node)
        return f"{name} if {name}.stride() == {self._bind(spec.stride)} else {self._bind(spec.like)}({name})"

    def call(self, node: Node) -> str:
        """Return the line that runs a node."""
        name = self.names[node]
        if node.is_item:
            return f"{name} = {self.names[node.reads[0]]}[{node.args[1]}]"
        arguments = [self.text(one) for one in _arguments(node)]
        arguments += [f"{keyword}={self.text(one)}" for keyword, one in node.kwargs.items()]
        return f"{name} = {self._bind(_target(node))}({', '.join(arguments)})"

    def deletion(self, nodes: list[Node]) -> list[str]:
        """Return the line that deletes these values."""
        return [f"del {', '.join(self.names[node] for node in nodes)}"] if nodes else []

    def text(self, argument: Any) -> str:
        """Return the source of an argument or a returned value."""
        if isinstance(argument, Node):
            return self.names[argument] if argument in self.names else self._bind(argument.held)
        if isinstance(argument, list):
            return f"[{', '.join(map(self.text, argument))}]"
        if isinstance(argument, tuple):
            return _tuple(map(self.text, argument))
        plain = argument is None or type(argument) in (bool, int)  # a subclass could spell itself as any code
        return repr(argument) if plain else self._bind(argument)

    def _bind(self, value: Any) -> str:
        if id(value) not in self.known:
            self.known[id(value)] = name = f"c{len(self.known)}"
            self.namespace[name] = value
        return self.known[id(value)]


def _target(node: Node) -> Any:
    """Return the callable for a node that has the least overhead."""
    target: Any = node.target
    if target in DIRECT and isinstance(node.args[0], Node):
        return DIRECT[target]
    return target._op if isinstance(target, OpOverload) else target


def _arguments(node: Node) -> tuple[Any, ...]:
    """Return the arguments in the form that torch handles fastest: an int for a list of one, a tensor for a number."""
    if node.target is aten.sum.dim_IntList and isinstance(node.args[1], list) and len(node.args[1]) == 1:
        return (node.args[0], *node.args[1], *node.args[2:])
    if node.target in NUMBERED and (number := _as_tensor(node)) is not None:
        return (node.args[0], number, *node.args[2:])
    return node.args


def _as_tensor(node: Node) -> Tensor | None:
    """Return the second argument, if it is a number, as the tensor to which the kernel would convert it.

    Return `None` for reduced-precision floats and on accelerators, where kernels use the number unrounded.
    """
    number, made, taken = node.args[1], node.value, node.args[0]
    value = taken.value if isinstance(taken, Node) else None
    if type(number) not in (int, float) or made is None or value is None or value.dtype != made.dtype:
        return None
    if made.device.type != "cpu" or made.dtype not in (torch.float32, torch.float64):
        return None
    dtype = torch.float64 if isinstance(number, float) else None
    return torch.tensor(number, dtype=dtype).to(made.dtype)
