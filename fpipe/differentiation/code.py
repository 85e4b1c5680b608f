# SPDX-License-Identifier: Apache-2.0
"""From a phase of a stage to a function: a line of Python for each node.

The function takes a list and empties it, and every value is let go of after its last use; so nothing lives longer
than it is needed, whoever calls. Operators are called as directly as Python can: by torch's own bindings where there is
one for exactly this operator (`DIRECT`), else past the dispatcher's Python frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from fpipe.differentiation.joint import CONSTANT
from fpipe.differentiation.phases import Phase
from fpipe.differentiation.simplification import is_item, written_by

Run: TypeAlias = Callable[[list[Any]], tuple[Any, ...]]
"""Takes the values of `Phase.takes`, in a list that it empties; returns the groups of `Phase.gives`."""

aten = torch.ops.aten
DIRECT: Mapping[Any, Any] = MappingProxyType(
    {
        aten.mm.default: torch.mm,
        aten.bmm.default: torch.bmm,
        aten.addmm.default: torch.addmm,
        aten.baddbmm.default: torch.baddbmm,
        aten.t.default: torch.t,
        aten.transpose.int: torch.transpose,
        aten.permute.default: torch.permute,
        aten.view.default: Tensor.view,
        aten.expand.default: Tensor.expand,
        aten.unsqueeze.default: torch.unsqueeze,
        aten.sum.dim_IntList: torch.sum,
        aten.sum.default: torch.sum,
        aten.mean.default: torch.mean,
        aten.pow.Tensor_Scalar: torch.pow,
        aten.add.Tensor: torch.add,
        aten.sub.Tensor: torch.sub,
        aten.mul.Tensor: torch.mul,
        aten.mul.Scalar: torch.mul,
        aten.div.Tensor: torch.div,
        aten.div.Scalar: torch.div,
        aten.relu.default: torch.relu,
        aten.tanh.default: torch.tanh,
        aten.gelu.default: torch._C._nn.gelu,
        aten.native_layer_norm.default: torch.native_layer_norm,
    }
)


def function(phase: Phase) -> Run:
    """The phase as a function."""
    return _compiled(phase, ())


def adding(phase: Phase) -> Run:
    """The phase as a function that takes, behind all else, a sum for each tensor of the last group that it gives.

    It adds each tensor to its sum as soon as it is computed, and gives the sums; at the end, if anything is written in
    place on the way.
    """
    return _compiled(phase, tuple(f"s{k}" for k in range(len(phase.gives[-1]))))


def _compiled(phase: Phase, sums: tuple[str, ...]) -> Run:
    names = {node: f"v{k}" for k, node in enumerate((*phase.takes, *phase.nodes))}
    writer, last = _Writer(names), _last_uses(phase, bool(sums))
    added = _added(phase, sums)
    taken = [*(names[node] for node in phase.takes), *sums]
    lines = ["def run(box):", f"    {_tuple(taken)} = box" if taken else "    pass", "    box.clear()"]
    for node in (None, *phase.nodes):
        lines += [f"    {writer.call(node)}"] if node is not None else []
        lines += [f"    {total}.add_({writer.text(grad)})" for total, grad in added.get(node, ())]
        lines += writer.dropped(last.get(node, []))
    groups = [*map(writer.text, phase.gives[:-1]), _tuple(sums)] if sums else map(writer.text, phase.gives)
    lines.append(f"    return {_tuple(groups)}")
    exec(compile("\n".join(lines), "<stage>", "exec"), writer.namespace)
    made: Run = writer.namespace["run"]
    return made


def _added(phase: Phase, sums: tuple[str, ...]) -> dict[Node | None, list[tuple[str, Node]]]:
    """Behind which node what is added to which sum; `None` stands for the beginning."""
    writes = any(written_by(node) for node in phase.nodes)
    found: dict[Node | None, list[tuple[str, Node]]] = {}
    for total, grad in zip(sums, phase.gives[-1] if sums else (), strict=True):
        behind = phase.nodes[-1] if writes else grad if grad in phase.nodes else None
        found.setdefault(behind, []).append((total, grad))
    return found


def _tuple(entries: Iterable[str]) -> str:
    return f"({''.join(f'{entry}, ' for entry in entries)})"


def _last_uses(phase: Phase, adding: bool) -> dict[Node | None, list[Node]]:
    """After which node each value is used no more, and is not returned; under `None` what is never used.

    What is added to sums is used up to the end, if anything is written in place.
    """
    last: dict[Node, Node | None] = dict.fromkeys(phase.takes, None)
    for node in phase.nodes:
        for used in (node, *(one for one in node.all_input_nodes if one in last)):
            last[used] = node
    if adding and any(written_by(node) for node in phase.nodes):
        last.update({grad: phase.nodes[-1] for grad in phase.gives[-1] if grad in last})
    returned = {node for group in (phase.gives[:-1] if adding else phase.gives) for node in group}
    found: dict[Node | None, list[Node]] = {}
    for value, user in last.items():
        if value not in returned:
            found.setdefault(user, []).append(value)
    return found


class _Writer:
    """Writes calls; `namespace` holds what the text cannot say."""

    def __init__(self, names: Mapping[Node, str]) -> None:
        self.names = names
        self.namespace: dict[str, Any] = {}
        self.known: dict[Any, str] = {}

    def call(self, node: Node) -> str:
        """The line of a node."""
        name = self.names[node]
        if is_item(node):
            return f"{name} = {self.names[node.all_input_nodes[0]]}[{node.args[1]}]"
        arguments = [self.text(one) for one in node.args]
        arguments += [f"{keyword}={self.text(one)}" for keyword, one in node.kwargs.items()]
        return f"{name} = {self._named(_callable(node.target))}({', '.join(arguments)})"

    def dropped(self, nodes: list[Node]) -> list[str]:
        """The line that lets go of these values."""
        return [f"    del {', '.join(self.names[node] for node in nodes)}"] if nodes else []

    def text(self, argument: Any) -> str:
        """An argument of a call, or what is returned."""
        if isinstance(argument, Node):
            return self.names[argument] if argument in self.names else self._named(argument.meta[CONSTANT])
        if isinstance(argument, list):
            return f"[{', '.join(map(self.text, argument))}]"
        if isinstance(argument, tuple):
            return _tuple(map(self.text, argument))
        return repr(argument) if argument is None or isinstance(argument, bool | int) else self._named(argument)

    def _named(self, value: Any) -> str:
        if id(value) not in self.known:
            self.known[id(value)] = name = f"c{len(self.known)}"
            self.namespace[name] = value
        return self.known[id(value)]


def _callable(target: Any) -> Any:
    return DIRECT.get(target) or (target._op if isinstance(target, torch._ops.OpOverload) else target)
