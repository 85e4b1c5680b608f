# SPDX-License-Identifier: Apache-2.0
"""A stage's forward and backward, recorded as a single graph of torch's operators.

Problem. Autograd builds and walks the same graph for every microbatch of every step.

Idea. When a plan is made, forward and backward of a stage run once on fake tensors anyway (`fpipe.stages.metadata`). A
`Tape` notes every operator that they call below autograd, as a list of nodes. The recording holds autograd's formulas
in autograd's order, so replaying it gives the same bits; whatever modules do to their backward (custom functions,
checkpoints, hooks) is recorded as it happened. Torch's own checks of values are recorded, too.

Other side effects of Python code are not recorded; the stage always repeats the recording. In the graph, as in the
stage, the generator is seeded before each random operator. Recording uses key 0, and `random.reseed` xors key and
label, so the seed seen while recording is the label. Where a checkpoint goes back to a state that the generator had
before an earlier draw, so does the graph.

Nodes are not changed once they are in a list. A node refers to the nodes that it reads, never to those that read it, so
nodes form no reference cycles, and a dropped graph is freed at once.

Runs when a plan is made, if stages are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpipe.errors import CaptureError
from fpipe.record.fakes.assumed_values import check_all
from fpipe.record.fakes.recurrent import RecurrentBackward, RecurrentCall, RecurrentForward
from fpipe.tensors import random
from fpipe.tensors.effects import is_collective, is_random, random_devices, written_arguments
from fpipe.tensors.fake import DEVICE
from fpipe.tensors.layouts import aten
from fpipe.tensors.spec import Spec
from fpipe.tensors.torch_private import (
    TENSOR_METHODS,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    Uncompiled,
    no_dispatch,
)

PLAIN_KINDS = frozenset({Tensor, nn.Parameter, FakeTensor})
"""The classes of tensors whose operators are recorded."""
SAME = frozenset({aten.detach.default, aten.alias.default})
"""Operators that return their argument."""
SET_DATA: Any = TENSOR_METHODS["data"].__set__
"""The function that torch calls to assign to a tensor's `.data`."""

FIRST_INTEGER, FIRST_FLOAT = 1_357_024_681, 0.7390851332151607
"""The first names of numbers of the batch, which stand for them while operators are recorded."""
ARGUMENT, CONSTANT = "argument", "constant"
"""The targets of nodes that call nothing."""
ACTING = frozenset({random.reseed, random.restore, check_all})
"""Python functions that are called for their effects; their results are not used."""


class Node:
    """One value of a recording.

    - `target`: what is called, with `args` and `kwargs`, in which nodes stand for their values; or one of the above.
    - `value`: the fake tensor that it was in the recording, if it was one. `held`: a constant's tensor.
    """

    __slots__ = ("_reads", "_writes", "args", "held", "kwargs", "target", "value")

    def __init__(self, target: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        self.target, self.args, self.kwargs = target, tuple(args), kwargs or {}
        self.value: Tensor | None = None
        self.held: Tensor | None = None
        self._reads: tuple[Node, ...] | None = None
        self._writes: tuple[Node, ...] | None = None

    @property
    def is_call(self) -> bool:
        """True if the node calls something."""
        return self.target is not ARGUMENT and self.target is not CONSTANT

    @property
    def is_item(self) -> bool:
        """True if the node selects one of several results."""
        return self.target is getitem

    @property
    def reads(self) -> tuple[Node, ...]:
        """The nodes that this one reads, each once, in order."""
        if self._reads is None:
            found: dict[Node, None] = {}
            _collect(self.args, found)
            _collect([*self.kwargs.values()], found)
            self._reads = tuple(found)
        return self._reads

    @property
    def writes(self) -> tuple[Node, ...]:
        """The nodes whose tensors this one writes in place."""
        if self._writes is None:
            found: dict[Node, None] = {}
            _collect([*written_arguments(self.target, self.args, self.kwargs)], found)
            self._writes = tuple(found)
        return self._writes

    @property
    def has_effects(self) -> bool:
        """True if the node must run even if its value is not used: it writes, draws, seeds or checks."""
        if not isinstance(self.target, OpOverload):
            return self.target in ACTING or (isinstance(self.target, RecurrentForward) and bool(self.target.draws))
        if is_random(self.target) or not self.target._schema.returns:
            return True
        return self.target._schema.is_mutable or bool(self.writes)

    def on(self, to: Mapping[Node, Node]) -> Node:
        """Return the same call, of what `to` has in place of some nodes; itself if it reads none of these."""
        if all(to.get(one, one) is one for one in self.reads):
            return self
        return self.copy(lambda one: to.get(one, one))

    def copy(self, to: Callable[[Node], Any]) -> Node:
        """Return the same call of other nodes."""
        made = Node(self.target, map_nodes(self.args, to), map_nodes(self.kwargs, to))
        made.value, made.held = self.value, self.held
        return made


def number_in(tensor: Tensor) -> Any:
    """Return the number in a tensor: the target of nodes that are numbers of the batch."""
    return tensor.item()


def constant(tensor: Tensor, value: Tensor | None) -> Node:
    """Return a node for a tensor that depends on no argument; `value` is the fake one."""
    node = Node(CONSTANT)
    node.held, node.value = tensor, value
    return node


def map_nodes(tree: Any, to: Callable[[Node], Any]) -> Any:
    """Return arguments with `to(node)` in place of each node."""
    if isinstance(tree, Node):
        return to(tree)
    if type(tree) in (tuple, list):
        return type(tree)([map_nodes(one, to) for one in tree])
    return {key: map_nodes(one, to) for key, one in tree.items()} if type(tree) is dict else tree


def _collect(tree: Any, found: dict[Node, None]) -> None:
    if isinstance(tree, Node):
        found[tree] = None
    elif type(tree) is tuple or type(tree) is list:
        for one in tree:
            _collect(one, found)


def users_of(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return the nodes that read each of these."""
    users: dict[Node, list[Node]] = {}
    for node in nodes:
        users.setdefault(node, [])
        for one in node.reads:
            users.setdefault(one, []).append(node)
    return users


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


def _require_real(tensor: Any) -> Tensor:
    """Return a tensor that doesn't depend on the arguments; raise `CaptureError` for a fake one, which was computed."""
    if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor):
        raise CaptureError(
            f"got {Spec.of(tensor) if isinstance(tensor, Tensor) else tensor} that no recorded operator computed, "
            "expected operators of torch only. Use fpipe.Gradients(backward='autograd')."
        )
    return tensor


class Tape(Uncompiled, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that notes operators, each as a node that reads the nodes of its arguments.

    It only looks on: what it cannot note, it reports in `failure`, and the run goes on without it. The generator is
    seeded again before the operators before which it was freshly seeded. Operators on fake tensors draw nothing, so
    `_note_draw` draws in their place. Operators get each number of the batch as a name: a number that occurs nowhere
    else (`name_number`).

    - `nodes`: what was noted so far. `failure`: why there is no graph; empty if there is one.
    - `known`: the node of each tensor, by the tensor's id. Nodes hold their tensors, and `aliases` has the detached
      ones, so that no id comes twice.
    - `states`: by device and state of its generator, the node that reads that state before a draw; `drawn`: by device,
      the state after the last draw.
    - `numbers`: the node of the tensor that holds each number of the batch, by the number's name.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key = Node(ARGUMENT)
        self.nodes: list[Node] = [self.key]
        self.failure = ""
        self.known: dict[int, Node] = {}
        self.aliases: list[Tensor] = []
        self.states: dict[tuple[torch.device, bytes], Node] = {}
        self.drawn: dict[torch.device, bytes] = {}
        self.numbers: dict[int | float, Node] = {}

    def take(self, tensors: Iterable[Tensor]) -> tuple[Node, ...]:
        """Return a new node for each of these arguments."""
        return tuple([self._add(Node(ARGUMENT), tensor) for tensor in tensors])

    def hold(self, fake: Tensor, tensor: Tensor) -> None:
        """Note that a fake tensor stands for this constant."""
        if tensor.layout is not torch.strided:
            self.fail(CaptureError("got a sparse constant, which cannot be a fake tensor"))
        self.known[id(fake)] = constant(tensor, fake)

    def node_of(self, tensor: Any) -> Node:
        """Return the node of a tensor; one that was not computed here is a constant. Raise `CaptureError` if none."""
        if id(tensor) not in self.known:
            self.known[id(tensor)] = constant(_require_real(tensor), tensor)
        return self.known[id(tensor)]

    def name_number(self, tensor: Tensor) -> int | float:
        """Return the name of the number in a tensor, by which operators get it while they are recorded."""
        integral, count = not tensor.is_floating_point(), len(self.numbers)
        name = FIRST_INTEGER + count if integral else FIRST_FLOAT * (1 + count * 2**-20)
        self._try(lambda: self.numbers.update({name: self.node_of(tensor)}))
        return name

    def fail(self, error: Exception) -> None:
        """Stop, with this reason."""
        self.failure = self.failure or f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        """Note a call of a function that is no operator, and returns nothing."""
        self._try(lambda: self.nodes.append(Node(function, [self._argument(one) for one in args])))

    def note_recurrent(self, call: RecurrentCall, outputs: Sequence[Tensor]) -> None:
        """Note a recurrent call, as a single node; its last item is what its backward takes."""
        self._try(lambda: self._note_recurrent(call, outputs))

    def _note_recurrent(self, call: RecurrentCall, outputs: Sequence[Tensor]) -> None:
        node = Node(RecurrentForward(call), [self.node_of(one) for one in call.tensors])
        for device in call.draws:
            with no_dispatch():
                self._note_draw(device)
        self._add_items(node, outputs)
        if any(call.needs):
            call.kept = self._add(Node(getitem, (node, len(outputs))), None)

    def note_recurrent_backward(
        self, call: RecurrentCall, cotangents: Sequence[Tensor | None], grads: Sequence[Tensor | None]
    ) -> None:
        """Note the backward of a recurrent call."""
        self._try(lambda: self._note_recurrent_backward(call, cotangents, grads))

    def _note_recurrent_backward(
        self, call: RecurrentCall, cotangents: Sequence[Tensor | None], grads: Sequence[Tensor | None]
    ) -> None:
        wanted = [k for k, grad in enumerate(grads) if grad is not None]
        given = tuple([None if one is None else self.node_of(one) for one in cotangents])
        node = Node(RecurrentBackward(call.function, tuple(wanted)), (call.kept, given, (None,) * len(wanted)))
        self._add_items(node, [grads[k] for k in wanted])

    def _add_items(self, node: Node, made: Sequence[Any]) -> None:
        """Append a node that returns several results, and those of them that are tensors."""
        self._add(node, None)
        for k, one in enumerate(made):
            if isinstance(one, Tensor):
                self._add(Node(getitem, (node, k)), one)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:  # the most frequent call; nothing depends on it
            return args[0].device
        if any(kind not in PLAIN_KINDS for kind in types):
            return NotImplemented  # such as a DTensor, which calls operators of its local tensor
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in SAME and not self.failure:  # autograd detaches whatever it saves: half of all calls
            self._try(lambda: self._add_alias(args[0], out))
        elif getattr(func, "namespace", None) != "profiler":  # times calls; nothing depends on it
            self._try(lambda: self._note(func, args, kwargs, out))
        return out

    def _try(self, note: Callable[[], None]) -> None:
        """Call `note` unless the tape has failed; whatever it rejects, autograd can run."""
        if self.failure:
            return
        try:
            note()
        except Exception as error:
            self.fail(error)

    def _add(self, node: Node, made: Any) -> Node:
        """Append a node whose value is `made`, if that is a tensor."""
        self.nodes.append(node)
        if isinstance(made, Tensor):
            self.known[id(made)], node.value = node, made
        return node

    def _add_alias(self, tensor: Tensor, alias: Tensor) -> None:
        self.known[id(alias)] = self.node_of(tensor)
        self.aliases.append(alias)

    def _argument(self, one: Any) -> Any:
        """Return an argument of an operator with nodes in place of tensors."""
        if isinstance(one, Tensor):
            return self.node_of(one)
        if type(one) in (int, float) and one in self.numbers:
            return self._add(Node(number_in, (self.numbers[one],)), None)
        return type(one)([self._argument(each) for each in one]) if type(one) in (tuple, list) else one

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if is_collective(func):
            raise CaptureError("got a collective of torch.distributed, whose handle no graph waits for")
        if not isinstance(func, OpOverload):
            raise CaptureError(f"got {func}, expected operators of torch only")
        given = {name: self._argument(one) for name, one in kwargs.items()}
        # A constant is copied: what is made of it may be written in place.
        target = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func
        node = Node(target, [self._argument(one) for one in args], given)
        for device in random_devices(func, args, kwargs, out):
            with no_dispatch():
                self._note_draw(device)
        if isinstance(out, tuple | list):
            self._add_items(node, out)
        else:
            self._add(node, out)

    def _note_draw(self, device: torch.device) -> None:
        """Record what sets the generator's state before a draw, and draw."""
        generator = random.generator(device)
        state = _bytes(generator)
        if random.is_fresh(device):
            self.nodes.append(Node(random.reseed, (self.key, generator.initial_seed(), device)))
        else:
            if state != self.drawn.get(device):
                if (device, state) not in self.states:
                    raise CaptureError("got a draw from a generator in a state that no seed and no earlier draw left")
                self.nodes.append(Node(random.restore, (self.states[device, state], device)))
            self.states[device, state] = node = Node(random.state_of, (device,))
            self.nodes.append(node)
        torch.rand(1, device=device, generator=generator)
        self.drawn[device] = _bytes(generator)


def _bytes(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


@contextmanager
def note_on(tape: Tape | None) -> Iterator[None]:
    """Note on a tape, if there is one, what runs inside this context."""
    if tape is None:
        yield
        return
    with tape, _Functions(tape):
        yield


class _Functions(TorchFunctionMode):
    """A function mode that notes what is not an operator: checks of values, and `.data = `."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is check_all:
            self.tape.call(check_all, args)
        elif func == SET_DATA:
            self.tape.fail(CaptureError("got an assignment to .data, expected operators of torch only. Use copy_()."))
        return func(*args, **(kwargs or {}))
