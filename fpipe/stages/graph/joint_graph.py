# SPDX-License-Identifier: Apache-2.0
"""A stage's forward and backward, recorded once as a single graph of torch's operators.

Problem. Autograd builds and walks the same graph for every microbatch of every step.

Idea. The functions of `autograd` are run once on fake tensors, forward and full backward, and every operator is
recorded below autograd, as a list of nodes. The recording holds autograd's formulas in autograd's order, so replaying
it gives the same bits; whatever modules do to their backward (custom functions, checkpoints, hooks) is recorded as it
happened.

Other side effects of Python code are not recorded; the stage always repeats the recording. In the graph, as in the
stage, the generator is seeded before each random operator. Recording uses key 0, and `random.reseed` xors key and
label, so the seed seen while recording is the label.

Runs when a plan is made, if stages are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpipe.errors import CaptureError
from fpipe.record.captured import Tensors
from fpipe.record.fakes.assumed_values import assume_values
from fpipe.record.numbers import to_python
from fpipe.stages.autograd import Autograd
from fpipe.stages.graph.nodes import ARGUMENT, Node, constant, number_in
from fpipe.stages.graph.operators import SAME
from fpipe.stages.interface import Wiring
from fpipe.tensors import random
from fpipe.tensors.effects import is_collective, random_devices
from fpipe.tensors.layouts import aten
from fpipe.tensors.spec import Spec
from fpipe.tensors.torch_private import (
    TENSOR_METHODS,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    no_dispatch,
)

SET_DATA: Any = TENSOR_METHODS["data"].__set__
"""The function that torch calls to assign to a tensor's `.data`."""
FIRST_INTEGER, FIRST_FLOAT = 1_357_024_681, 0.7390851332151607
"""The first names of numbers of the batch, which stand for them while operators are recorded."""
PLAIN_KINDS = frozenset({Tensor, nn.Parameter, FakeTensor})
"""The classes of tensors whose operators are recorded."""


class Examples(NamedTuple):
    """Fake tensors in place of a stage's arguments, by kind, and of its cotangents; `mode` is their fake mode."""

    params: Tensors
    buffers: Tensors
    constants: Tensors
    inputs: Tensors
    cotangents: Tensors
    mode: FakeTensorMode

    def leaves(self, wiring: Wiring) -> Tensors:
        """Return the parameters as leaves; those that are trained require a gradient."""
        return tuple([nn.Parameter(tensor.detach(), k in wiring.trained) for k, tensor in enumerate(self.params)])


@dataclass(frozen=True)
class Joint:
    """The joint graph of a stage, and the roles of its nodes.

    - `nodes`: all nodes but constants, in order.
    - `params`, `buffers`, `inputs`, `key`, `cotangents`: the arguments; `params` may also have views of parameters that
      are made beforehand.
    - `forward`: the nodes recorded in the forward.
    - `outputs`, `updated` (buffers), `outgoing`, `grads`: what the functions of the stage return.
    """

    nodes: tuple[Node, ...]
    params: tuple[Node, ...]
    buffers: tuple[Node, ...]
    inputs: tuple[Node, ...]
    key: Node
    cotangents: tuple[Node, ...]
    forward: frozenset[Node]
    outputs: tuple[Node, ...]
    updated: tuple[Node, ...]
    outgoing: tuple[Node, ...]
    grads: tuple[Node, ...]

    @property
    def calls(self) -> Iterator[Node]:
        """The nodes that compute something, in order; not arguments."""
        made = set(self.params)
        return (node for node in self.nodes if node.is_call and node not in made)

    @property
    def returned(self) -> tuple[Node, ...]:
        """All nodes that the functions of the stage return."""
        return (*self.outputs, *self.updated, *self.outgoing, *self.grads)

    def transfer(self, nodes: Sequence[Node], to: Mapping[Node, Node]) -> Joint:
        """Return the same roles for the corresponding nodes, `nodes`, of another graph."""

        def all_of(group: Sequence[Node]) -> tuple[Node, ...]:
            return tuple([to.get(node, node) for node in group])

        return Joint(
            tuple(nodes),
            all_of(self.params),
            all_of(self.buffers),
            all_of(self.inputs),
            to.get(self.key, self.key),
            all_of(self.cotangents),
            frozenset(to.get(node, node) for node in self.forward),
            all_of(self.outputs),
            all_of(self.updated),
            all_of(self.outgoing),
            all_of(self.grads),
        )


def record(eager: Autograd, examples: Examples) -> Joint:
    """Return the joint graph of a stage, recorded in one forward and backward on fake tensors.

    Raises `CaptureError` for a stage that a graph can't represent.
    """
    if any(tensor.layout is not torch.strided for tensor in eager.constants):
        raise CaptureError("got a sparse constant, which cannot be a fake tensor")
    leaves, (_, buffers, constants, inputs, cotangents, mode) = examples.leaves(eager.wiring), examples
    recorder = OperatorRecorder()
    params, held, given, arriving = map(recorder.take, (leaves, buffers, inputs, cotangents))
    for fake, tensor in zip(constants, eager.constants, strict=True):
        recorder.known[id(fake)] = constant(tensor, fake)
    devices = {one.device for one in (*leaves, *buffers, *constants, *inputs, *cotangents)} | {torch.device("cpu")}
    with random.preserve_generators(d for d in devices if d.type in ("cpu", "cuda")), mode, assume_values(mode):
        functions = replace(eager, constants=constants)
        with recorder, _Watch(recorder):
            outputs, new, residuals = functions.forward(leaves, buffers, inputs, 0)
            forward = frozenset(recorder.nodes)
            outgoing, grads = functions.differentiate(residuals, cotangents)
        assert all(grad is not None for grad in grads), "what autograd has no gradient of has none in a stage"
        returned = [tuple(map(recorder.node_of, group)) for group in (outputs, new, outgoing, grads)]
        for node in (*recorder.nodes, *recorder.known.values()):
            if node.value is not None and node.value.requires_grad:
                node.value = node.value.detach()  # else it would keep autograd's graph
    return Joint(tuple(recorder.nodes), params, held, given, recorder.key, arriving, forward, *returned)


def _require_real(tensor: Any) -> Tensor:
    """Return a tensor that doesn't depend on the arguments; raise `CaptureError` for a fake one, which was computed."""
    if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor):
        raise CaptureError(
            f"got {Spec.of(tensor) if isinstance(tensor, Tensor) else tensor} that no recorded operator computed, "
            "expected operators of torch only. Use backward='autograd'."
        )
    return tensor


class _Watch(TorchFunctionMode):
    """A function mode that sees what is not an operator.

    It refuses assignments to `.data`, which replace a tensor's data without one, and gives numbers of the batch names.
    """

    def __init__(self, recorder: OperatorRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA:
            raise CaptureError(
                "got an assignment to .data, expected operators of torch only. Use copy_(), or backward='autograd'."
            )
        if func is to_python:
            return self.recorder.name_number(args[0])
        return func(*args, **(kwargs or {}))


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records operators, each as a node that reads the nodes of its arguments.

    The generator is seeded again before the operators before which it was freshly seeded. Operators on fake tensors
    draw nothing, so `_fresh_seed` draws in their place. Operators get each number of the batch as a name: a number that
    occurs nowhere else (`name_number`).

    - `nodes`: what was recorded so far, the arguments first.
    - `known`: the node of each tensor, by the tensor's id. Nodes hold their tensors, and `aliases` has the detached
      ones, so that no id comes twice.
    - `numbers`: the node of the tensor that holds each number of the batch, by the number's name.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key = Node(ARGUMENT)
        self.nodes: list[Node] = [self.key]
        self.known: dict[int, Node] = {}
        self.aliases: list[Tensor] = []
        self.numbers: dict[int | float, Node] = {}

    def take(self, tensors: Tensors) -> tuple[Node, ...]:
        """Return a new node for each of these arguments."""
        return tuple([self._add(Node(ARGUMENT), tensor) for tensor in tensors])

    def name_number(self, tensor: Tensor) -> int | float:
        """Return the name of the number in a tensor, by which operators get it while they are recorded."""
        integral, count = not tensor.is_floating_point(), len(self.numbers)
        name = FIRST_INTEGER + count if integral else FIRST_FLOAT * (1 + count * 2**-20)
        self.numbers[name] = self.node_of(tensor)
        return name

    def node_of(self, tensor: Any) -> Node:
        """Return the node of a tensor; one that was not computed here is a constant."""
        if id(tensor) not in self.known:
            self.known[id(tensor)] = constant(_require_real(tensor), tensor)
        return self.known[id(tensor)]

    def _add(self, node: Node, made: Any) -> Node:
        """Append a node whose value is `made`, if that is a tensor."""
        self.nodes.append(node)
        if isinstance(made, Tensor):
            self.known[id(made)], node.value = node, made
        return node

    def _argument(self, one: Any) -> Any:
        """Return an argument of an operator with nodes in place of tensors."""
        if isinstance(one, Tensor):
            return self.node_of(one)
        if type(one) in (int, float) and one in self.numbers:
            return self._add(Node(number_in, (self.numbers[one],)), None)
        return type(one)([self._argument(each) for each in one]) if type(one) in (tuple, list) else one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN_KINDS for kind in types):
            return NotImplemented  # such as a DTensor, which calls operators of its local tensor
        kwargs = kwargs or {}
        if func in SAME:  # autograd detaches whatever it saves: half of all calls
            out = func(*args, **kwargs)
            self.known[id(out)] = self.node_of(args[0])
            self.aliases.append(out)
            return out
        if is_collective(func):
            raise CaptureError("got a collective of torch.distributed, whose handle no graph waits for")
        if not isinstance(func, OpOverload):
            raise CaptureError(f"got {func}, expected operators of torch only")
        if func.namespace == "profiler":  # times calls; nothing depends on it
            return func(*args, **kwargs)
        given = {name: self._argument(one) for name, one in kwargs.items()}
        # A constant is copied: what is made of it may be written in place.
        target = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func
        node = Node(target, [self._argument(one) for one in args], given)
        out = func(*args, **kwargs)
        for device in random_devices(func, args, kwargs, out):
            with no_dispatch():
                label = _fresh_seed(device)
            if label is not None:
                self.nodes.append(Node(random.reseed, (self.key, label, device)))
        self._add(node, out)
        if isinstance(out, tuple | list):
            for k, one in enumerate(out):
                if isinstance(one, Tensor):
                    self._add(Node(getitem, (node, k)), one)
        return out


def _fresh_seed(device: torch.device) -> int | None:
    """Return the generator's seed if nothing has been drawn since it was set, and draw; else `None`."""
    generator = random.generator(device)
    seed = generator.initial_seed()
    fresh = torch.Generator(device).manual_seed(seed)
    if not torch.equal(generator.get_state(), fresh.get_state()):
        return None
    torch.rand(1, device=device, generator=generator)
    return seed
