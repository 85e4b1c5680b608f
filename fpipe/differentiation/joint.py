# SPDX-License-Identifier: Apache-2.0
"""A stage's forward and backward, recorded once as a single graph of torch's operators.

Problem. Autograd builds and walks the same graph for every microbatch of every step.

Idea. The functions of `autograd` are run once on fake tensors, forward and full backward, and every operator is
recorded below autograd. So what it would do is written down with its formulas, in its order, and running that again
gives its bits; what modules do to their backward (custom functions, checkpoints, hooks) is in it, as it took place.

What Python does besides is not: a stage does for ever what it did then. Random operators are preceded by their seed,
as in the stage: it is recorded with key 0, and `random.reseed` mixes key and label by exclusive or, so the generator's
seed is the label.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe import random
from fpipe.capture.assumption import assuming
from fpipe.capture.contract import Tensors
from fpipe.capture.observation import drawn, is_collective
from fpipe.differentiation.autograd import Autograd
from fpipe.differentiation.contract import Wiring
from fpipe.differentiation.sums import Gradients
from fpipe.errors import CaptureError
from fpipe.spec import Spec

SET_DATA: Any = vars(torch._C.TensorBase)["data"].__set__
"""What torch calls when a tensor is given other data."""
CONSTANT = "constant"
"""Where the nodes of the graph that stand for a tensor of the model's own have it."""


class Examples(NamedTuple):
    """Fake tensors like those that a stage takes: its arguments by kind, and cotangents; `mode` is theirs."""

    params: Tensors
    buffers: Tensors
    constants: Tensors
    inputs: Tensors
    cotangents: Tensors
    mode: FakeTensorMode

    def leaves(self, wiring: Wiring) -> Tensors:
        """The parameters, those that are trained as leaves."""
        return tuple([nn.Parameter(tensor.detach(), k in wiring.trained) for k, tensor in enumerate(self.params)])


@dataclass(frozen=True)
class Joint:
    """The graph, and which of its nodes are what.

    - `params`, `buffers`, `inputs`, `key`, `cotangents`: what is taken: its placeholders, of which those of the model's
      own tensors have these themselves; and views of parameters, if they are made beforehand.
    - `forward`: the nodes that were recorded in the forward.
    - `outputs`, `updated` (buffers), `outgoing`, `grads`: what the functions of the stage return.
    """

    graph: Graph
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
        """The nodes at which something is done, in order; neither constants nor what is taken are."""
        return (node for node in self.graph.nodes if node.op == "call_function" and node not in self.params)

    def mapped(self, graph: Graph, to: Mapping[Node, Node]) -> Joint:
        """The same in a graph where others stand for its nodes; what is not there is left out."""

        def all_of(nodes: Sequence[Node]) -> tuple[Node, ...]:
            return tuple([to[node] for node in nodes])

        return Joint(
            graph,
            all_of(self.params),
            all_of(self.buffers),
            all_of(self.inputs),
            to[self.key],
            all_of(self.cotangents),
            frozenset(to[node] for node in self.forward if node in to),
            all_of(self.outputs),
            all_of(self.updated),
            all_of(self.outgoing),
            all_of(self.grads),
        )


def record(eager: Autograd, examples: Examples) -> Joint:
    """Run forward and backward once on fake tensors, and write down what is done."""
    if any(tensor.layout is not torch.strided for tensor in eager.constants):
        raise CaptureError("got a sparse constant, which cannot be a fake tensor")
    params, buffers, constants, inputs, cotangents, mode = examples
    stops = _stops(params, buffers, constants, inputs, cotangents)
    reached: dict[str, Any] = {}
    draws = _Draws()

    def joint(*tensors: Tensor) -> tuple[Tensors, Tensors, Gradients, Gradients]:
        params, buffers, constants, inputs, cotangents = (tensors[a:b] for a, b in stops)
        functions = replace(eager, constants=constants)
        with draws, _Assignments(), _casting_once():
            outputs, new, residuals = functions.forward(params, buffers, inputs, 0)
            reached["forward"] = frozenset(draws.graph.nodes)
            outgoing, grads = functions.backward(residuals, cotangents)
            assert all(grad is not None for grad in grads), "what autograd has no gradient of has none in a stage"
        reached["counts"] = [len(outputs), len(new), len(outgoing), len(grads)]
        return outputs, new, outgoing, grads

    arguments = (*examples.leaves(eager.wiring), *buffers, *constants, *inputs, *cotangents)
    devices = {tensor.device for tensor in arguments} | {torch.device("cpu")}
    with random.preserved(d for d in devices if d.type in ("cpu", "cuda")), mode, assuming(mode):
        module = make_fx(joint)(*arguments)
    for node in module.graph.find_nodes(op="get_attr"):
        node.meta[CONSTANT] = _constant(getattr(module, node.target))
    holders = list(module.graph.find_nodes(op="placeholder"))
    groups = [tuple(holders[a:b]) for a, b in stops]
    for node, tensor in zip(groups.pop(2), eager.constants, strict=True):
        node.meta[CONSTANT] = tensor
    return _joint(module.graph, groups, reached["forward"], reached["counts"], draws.found)


def _joint(
    graph: Graph,
    taken: Sequence[tuple[Node, ...]],
    forward: frozenset[Node],
    counts: Sequence[int],
    draws: Sequence[_Draw],
) -> Joint:
    """The recorded graph with the seeds in it."""
    with graph.inserting_before(next(iter(graph.nodes))):
        key = graph.placeholder("key")
    seeds: dict[Node, Node] = {}
    for node, label, device in draws:
        with graph.inserting_before(node):
            seeds[graph.call_function(random.reseed, (key, label, device))] = node
    returned = [node for group in next(iter(reversed(graph.nodes))).args[0] for node in group]
    groups = [tuple(returned[sum(counts[:k]) : sum(counts[: k + 1])]) for k in range(4)]
    params, buffers, inputs, cotangents = taken
    forward |= {seed for seed, node in seeds.items() if node in forward}
    return Joint(graph, params, buffers, inputs, key, cotangents, forward, *groups)


def _constant(tensor: Tensor) -> Tensor:
    """A tensor that is there whatever the arguments are; raises `CaptureError` for one that was computed."""
    if isinstance(tensor, FakeTensor):
        raise CaptureError(
            f"got a {Spec.of(tensor)} that was computed out of sight, expected operators of torch alone. Leave this "
            "model to autograd."
        )
    return tensor


@contextmanager
def _casting_once() -> Iterator[None]:
    """Under autocast a weight is cast once for all its uses, as it is without a tracer; tracers turn that off."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _Assignments(TorchFunctionMode):
    """Raises `CaptureError` where a tensor gets other data without an operator."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA:
            raise CaptureError(
                "got an assignment to .data, expected operators of torch alone. Leave this model to autograd, or write "
                "copy_() instead."
            )
        return func(*args, **(kwargs or {}))


def _stops(*groups: Tensors) -> list[tuple[int, int]]:
    """Where each group begins and ends, one after the other."""
    ends = [sum(map(len, groups[: k + 1])) for k in range(len(groups))]
    return list(zip([0, *ends], ends, strict=False))


class _Draw(NamedTuple):
    """A random operator before which the generator was seeded, and with what."""

    node: Node
    label: int
    device: torch.device


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes at which operators the generator is freshly seeded; each draws, so that afterwards it is not."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[_Draw] = []

    @property
    def graph(self) -> Graph:
        """The graph that is being recorded."""
        proxies: Any = get_proxy_mode()
        graph: Graph = proxies.tracer.graph
        return graph

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_collective(func):
            raise CaptureError("got a collective of torch.distributed, whose handle no graph waits for")
        before = next(iter(reversed(self.graph.nodes)))
        out = func(*args, **kwargs)
        for device in drawn(func, args, kwargs, out):
            with no_dispatch():
                label = _freshly_seeded(device)
            if label is not None:
                self.found.append(_Draw(before.next, label, device))
        return out


def _freshly_seeded(device: torch.device) -> int | None:
    """What the generator was seeded with, if nothing has been drawn from it since; then something is."""
    generator = random.generator(device)
    seed = generator.initial_seed()
    fresh = torch.Generator(device).manual_seed(seed)
    if not torch.equal(generator.get_state(), fresh.get_state()):
        return None
    torch.rand(1, device=device, generator=generator)
    return seed
