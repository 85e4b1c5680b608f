# SPDX-License-Identifier: Apache-2.0
"""A stage's forward and backward, recorded once as a single graph of torch's operators.

Problem. Autograd builds and walks the same graph for every microbatch of every step.

Idea. The functions of `autograd` are run once on fake tensors, forward and full backward, and every operator is
recorded below autograd. The recording holds autograd's formulas in autograd's order, so replaying it gives the same
bits; whatever modules do to their backward (custom functions, checkpoints, hooks) is recorded as it happened.

Other side effects of Python code are not recorded; the stage always repeats the recording. In the graph, as in the
stage, the generator is seeded before each random operator. Recording uses key 0, and `random.reseed` xors key and
label, so the seed seen while recording is the label.

Runs when a plan is made, if stages are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode

from fpipe.autodiff.accumulation import Gradients
from fpipe.autodiff.autograd import Autograd
from fpipe.autodiff.interface import Wiring
from fpipe.capture.assumed_values import assume_values
from fpipe.errors import CaptureError
from fpipe.ir.captured import Tensors
from fpipe.tensors import random
from fpipe.tensors.effects import is_collective, random_devices
from fpipe.tensors.spec import Spec
from fpipe.torch_private import TENSOR_METHODS, FakeTensor, FakeTensorMode, TorchDispatchMode, no_dispatch

SET_DATA: Any = TENSOR_METHODS["data"].__set__
"""The function that torch calls to assign to a tensor's `.data`."""
CONSTANT = "constant"
"""The key in a node's `meta` under which a constant node stores its tensor."""


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

    - `params`, `buffers`, `inputs`, `key`, `cotangents`: the arguments. They are placeholders; `params` may also have
      views of parameters that are made beforehand. Constants are not arguments; their nodes store them in `meta`.
    - `forward`: the nodes recorded in the forward.
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
        """The nodes that compute something, in order; not constants or arguments."""
        return (node for node in self.graph.nodes if node.op == "call_function" and node not in self.params)

    def transfer(self, graph: Graph, to: Mapping[Node, Node]) -> Joint:
        """Return the same roles for the corresponding nodes of another graph, without `forward` nodes that it lacks."""

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
    """Return the joint graph of a stage, recorded in one forward and backward on fake tensors.

    Raises `CaptureError` for a stage that a graph can't represent.
    """
    if any(tensor.layout is not torch.strided for tensor in eager.constants):
        raise CaptureError("got a sparse constant, which cannot be a fake tensor")
    params, buffers, constants, inputs, cotangents, mode = examples
    stops = _stops(params, buffers, constants, inputs, cotangents)
    reached: dict[str, Any] = {}
    draws = _Draws()

    def joint(*tensors: Tensor) -> tuple[Tensors, Tensors, Gradients, Gradients]:
        params, buffers, constants, inputs, cotangents = (tensors[a:b] for a, b in stops)
        functions = replace(eager, constants=constants)
        with draws, _Assignments(), _cast_once():
            outputs, new, residuals = functions.forward(params, buffers, inputs, 0)
            reached["forward"] = frozenset(draws.graph.nodes)
            outgoing, grads = functions.differentiate(residuals, cotangents)
            assert all(grad is not None for grad in grads), "what autograd has no gradient of has none in a stage"
        reached["counts"] = [len(outputs), len(new), len(outgoing), len(grads)]
        return outputs, new, outgoing, tuple(grads)

    arguments = (*examples.leaves(eager.wiring), *buffers, *constants, *inputs, *cotangents)
    devices = {tensor.device for tensor in arguments} | {torch.device("cpu")}
    with random.preserve_generators(d for d in devices if d.type in ("cpu", "cuda")), mode, assume_values(mode):
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
    """Return the recorded graph with reseeding inserted."""
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
    """Return a tensor that doesn't depend on the arguments; raise `CaptureError` for a fake one, which was computed."""
    if isinstance(tensor, FakeTensor):
        raise CaptureError(
            f"got a {Spec.of(tensor)} that no recorded operator computed, expected operators of torch only. Use "
            "backward='autograd'."
        )
    return tensor


@contextmanager
def _cast_once() -> Iterator[None]:
    """Under autocast, cast a weight once for all of its uses, as without a tracer; tracers disable that."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _Assignments(TorchFunctionMode):
    """A function mode that refuses assignments to `.data`, which replace a tensor's data without an operator."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA:
            raise CaptureError(
                "got an assignment to .data, expected operators of torch only. Use copy_(), or backward='autograd'."
            )
        return func(*args, **(kwargs or {}))


def _stops(*groups: Tensors) -> list[tuple[int, int]]:
    """Return the start and the end of each group in their concatenation."""
    ends = [sum(map(len, groups[: k + 1])) for k in range(len(groups))]
    return list(zip([0, *ends], ends, strict=False))


class _Draw(NamedTuple):
    """A random operator before which the generator was seeded, and the seed."""

    node: Node
    label: int
    device: torch.device


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records the operators before which the generator was freshly seeded.

    Operators on fake tensors draw nothing, so `_fresh_seed` draws in their place.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[_Draw] = []

    @property
    def graph(self) -> Graph:
        """The graph being recorded."""
        proxies: Any = get_proxy_mode()
        graph: Graph = proxies.tracer.graph
        return graph

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_collective(func):
            raise CaptureError("got a collective of torch.distributed, whose handle no graph waits for")
        before = next(iter(reversed(self.graph.nodes)))
        out = func(*args, **kwargs)
        for device in random_devices(func, args, kwargs, out):
            with no_dispatch():
                label = _fresh_seed(device)
            if label is not None:
                self.found.append(_Draw(before.next, label, device))
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
