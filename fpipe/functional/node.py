# SPDX-License-Identifier: Apache-2.0
"""A pure stage in the form that the executor runs; see `fpipe.runtime.contract`.

A node selects from its stage's output what each reader reads. It adds the cotangents that come back, those of later
readers first, as autograd does on one device, and the gradients of all microbatches. An edge carries one payload: the
trees that are read along it. They are passed whole, so they may be anything; if their shapes are known (`layouts`), the
tensors in them are passed, which is what travels between processes. Each slice of a microbatch has nodes of its own;
a carry is an edge from a stage to itself, and never travels.

Invariant: a node keeps nothing; what a forward leaves for its backward is in the residuals.

Runs in every step of `execute`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.functional.derived import TreeShape
from fpipe.functional.graph import READ_CARRY, WHOLE_INPUTS, Stages
from fpipe.functional.stage import add_trees
from fpipe.runtime.contract import StageCrossing
from fpipe.runtime.transport import Handle, Payload
from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import NAMESPACE
from schedules.language.actions import Action
from schedules.language.graph import Edge

Layouts: TypeAlias = Mapping[Edge, TreeShape]


class NodeState(NamedTuple):
    """The state that a node keeps of a forward.

    - `residuals`: the stage's own. `numbered`: its output, with the number of each leaf in its place.
    - `origins`: per input, the stage that it came from, or the carry; `None` for the batch.
    - `loss`: what the last stage returned, or the first of a pair; `None` for other stages.
    """

    residuals: Any
    numbered: Any
    origins: tuple[int | None, ...]
    loss: Any = None


class StageNode:
    """Stage number `index` of connected stages.

    - `layouts`: per edge, the shape of what it carries; an edge without one carries whole trees.
    - `part`, `slices`: which slice of a microbatch it is for, and how many there are.
    """

    shares: tuple[StageCrossing, ...] = ()
    shared_by: tuple[StageCrossing, ...] = ()
    totals: tuple[Any, ...] = (None,)

    def __init__(self, stages: Stages, index: int, layouts: Layouts, part: int = 0, slices: int = 1) -> None:
        self.stage, self.name, self.index, self.layouts = stages.stages[index], stages.names[index], index, layouts
        self.reads, self.is_last = stages.reads[index], index == len(stages) - 1
        self.result, carry = stages.carried[index]
        sources = sorted({read.source for read in self.reads if isinstance(read.source, int)})
        targets = [t for t, reads in enumerate(stages.reads) if any(read.source == index for read in reads)]
        self.sources = [index] * (carry is not None and part > 0) + sources
        self.targets = targets + [index] * (carry is not None and part < slices - 1)
        self.read_by = {t: [read for read in stages.reads[t] if read.source == index] for t in targets}
        self.read_by |= {} if carry is None else {index: [carry]}
        self.results = (None,) if self.is_last else ()
        self.gets = tuple([self._crossing(s, index, "values") for s in self.sources])
        self.gives = tuple([self._crossing(index, t, "values") for t in self.targets])
        self.pulls = tuple([self._crossing(index, s, "cotangents") for s in self.sources])
        self.pulled_by = tuple([self._crossing(t, index, "cotangents") for t in self.targets])

    def _crossing(self, source: int, target: int, what: str) -> StageCrossing:
        layout = self.layouts.get((min(source, target), max(source, target)))
        specs: tuple[Any, ...] = (None,)
        if layout is not None:
            specs = layout.specs if what == "values" else _differentiable(layout.specs)
        return StageCrossing(source, target, tuple([f"{what} {k}" for k in range(len(specs))]), specs)

    def forward(self, params: Any, buffers: Any, inputs: Payload, key: int) -> tuple[Payload, Any, NodeState]:
        """Run the stage; return its result, if it is the last, and what each edge carries."""
        given, origins = self._gather(inputs)
        outputs, new, residuals = self.stage.forward(params, buffers, given, key)
        numbers = iter(range(optree.tree_structure(outputs, none_is_leaf=True, namespace=NAMESPACE).num_leaves))
        numbered = optree.tree_map(lambda _: next(numbers), outputs, none_is_leaf=True, namespace=NAMESPACE)
        return (
            self._give(outputs),
            new,
            NodeState(residuals, numbered, origins, loss_of(self.result.select(outputs)) if self.is_last else None),
        )

    def evaluate(self, params: Any, buffers: Any, inputs: Payload, key: int) -> tuple[Payload, Any]:
        """Return the same without residuals."""
        outputs, new, _ = self.stage.forward(params, buffers, self._gather(inputs)[0], key)
        return self._give(outputs), new

    def _gather(self, inputs: Payload) -> tuple[tuple[Any, ...], tuple[int | None, ...]]:
        """Return the inputs of the stage, in the order of its reads, and their origins."""
        (batch, *arrived), found, origins = inputs, list[Any](), list[int | None]()
        trees = {s: iter(tree) for s, tree in zip(self.sources, self._unpack(self.gets, arrived), strict=True)}
        for read in self.reads:
            source = self.index if read == READ_CARRY else read.source
            if isinstance(source, int):
                found.append(next(trees[source]) if source in trees else None)
                origins.append(source)
            else:
                tree = read.select(batch[source])
                several = tree if isinstance(tree, tuple) and read == WHOLE_INPUTS else [tree]
                found += several
                origins += [None] * len(several)
        return tuple(found), tuple(origins)

    def _give(self, outputs: Any) -> Payload:
        carried: list[Any] = [self.result.select(outputs)] if self.is_last else []
        for t in self.targets:
            trees = tuple([read.select(outputs) for read in self.read_by[t]])
            carried += self._pack((self.index, t), trees)
        return tuple(carried)

    def _pack(self, edge: Edge, trees: tuple[Any, ...]) -> Payload:
        """Return what an edge carries for the trees that are read along it."""
        layout = self.layouts.get(edge)
        if layout is None:
            return (trees,)
        tensors, shape = TreeShape.of(trees)
        if shape.structure != layout.structure:
            raise InputError(
                f"stage {self.name!r}: got an output of the structure {shape.structure}, expected {layout.structure}, "
                "as on the example. Return the same structure for every microbatch."
            )
        return tuple([self._conform(spec, one) for spec, one in zip(layout.specs, tensors, strict=True)])

    def _conform(self, spec: Spec, tensor: Tensor) -> Tensor:
        """Return what crosses in the layout in which it is sent."""
        if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
            raise InputError(
                f"stage {self.name!r}: got an output {Spec.of(tensor)}, expected {spec}, as on fake tensors: ranks "
                "agree on shapes before they send. Return shapes that depend only on those of the inputs."
            )
        return spec.like(tensor.detach())

    def _unpack(self, crossings: Sequence[StageCrossing], arrived: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the trees that arrived along each edge."""
        rest, found = list(arrived), list[tuple[Any, ...]]()
        for crossing in crossings:
            mine, rest = rest[: len(crossing.specs)], rest[len(crossing.specs) :]
            layout = self.layouts.get((crossing.source, crossing.target))
            found.append(mine[0] if layout is None else layout.fill(mine))
        return found

    # ---------------------------------------------------------------------------------------------------- the backward

    def backward(self, kept: NodeState, cotangents: Payload, onto: Any) -> tuple[Payload, Any]:
        """Run the backward; return what each edge carries back, and the sum of gradients."""
        entering = self._enter(kept, cotangents)
        if self.stage.backward is None:
            outgoing, deferred = self._run_half(kept, entering)
            return outgoing, self.backward_weight(deferred, onto)
        found, grads = self.stage.backward(kept.residuals, entering)
        return self._leave(kept, found), (add_trees(*onto, grads),)

    def backward_input(self, kept: NodeState, cotangents: Payload) -> tuple[Payload, Any]:
        """Run the input half; of a stage without halves, run the whole, and keep its gradients for the weight half."""
        entering = self._enter(kept, cotangents)
        if self.stage.backward_input is None and self.stage.backward is not None:
            found, grads = self.stage.backward(kept.residuals, entering)
            return self._leave(kept, found), (grads,)
        return self._run_half(kept, entering)

    def _run_half(self, kept: NodeState, entering: Any) -> tuple[Payload, Any]:
        assert self.stage.backward_input is not None, "the stage is differentiable"
        found, deferred = self.stage.backward_input(kept.residuals, entering)
        return self._leave(kept, found), deferred

    def backward_weight(self, deferred: Any, onto: Any) -> Any:
        """Run the weight half; return the sum of gradients."""
        grads = deferred[0] if self.stage.backward_weight is None else self.stage.backward_weight(deferred)
        return (add_trees(*onto, grads),)

    def _enter(self, kept: NodeState, cotangents: Payload) -> Any:
        """Return the cotangent of the whole output: the sum of what came from all readers, later ones first."""
        sums = dict[int, Any]()
        rest = list(cotangents)
        if self.is_last:
            start = rest.pop(0)
            self._require_loss(kept.loss)
            sums[0] = torch.full_like(kept.loss, start) if isinstance(kept.loss, Tensor) else start
        carried = [rest.pop(0) if c.specs == (None,) else [rest.pop(0) for _ in c.specs] for c in self.pulled_by]
        for t, given in reversed([*zip(self.targets, carried, strict=True)]):
            for read, tree in zip(self.read_by[t], self._read_back((self.index, t), given), strict=True):
                numbers = _leaves(read.select(kept.numbered))
                for number, one in zip(numbers, _leaves(tree), strict=True):
                    if one is not None:
                        sums[number] = sums[number] + one if number in sums else one
        return optree.tree_map(sums.get, kept.numbered, none_is_leaf=True, namespace=NAMESPACE)

    def _require_loss(self, loss: Any) -> None:
        if isinstance(loss, Tensor) and (loss.dim() or not loss.is_floating_point()):
            raise InputError(
                f"stage {self.name!r}, the last: got {Spec.of(loss)}, expected a floating-point scalar: the loss of a "
                "microbatch, or a pair of it and aux. Reduce it, for example by .mean()."
            )

    def _read_back(self, edge: Edge, given: Any) -> tuple[Any, ...]:
        layout = self.layouts.get(edge)
        if layout is None:
            return tuple(given)
        values = iter(given)
        tensors = [next(values) if spec.dtype.is_floating_point else None for spec in layout.specs]
        found: tuple[Any, ...] = layout.fill(tensors, others=False)
        return found

    def _leave(self, kept: NodeState, found: Any) -> Payload:
        """Return what each edge carries back, given the cotangents of the stage's inputs."""
        if not isinstance(found, tuple) or len(found) != len(kept.origins):
            got = f"{len(found)} of them" if isinstance(found, tuple) else type(found).__name__
            raise InputError(
                f"stage {self.name!r}, its backward: got {got} as the cotangents of its {len(kept.origins)} inputs, "
                "expected a tuple with one for each. Return None for an input without a cotangent."
            )
        pairs, carried = [*zip(kept.origins, found, strict=True)], list[Any]()
        for s in self.sources:
            trees = tuple([tree for origin, tree in pairs if origin == s])
            layout = self.layouts.get((s, self.index))
            carried += (trees,) if layout is None else _dense(layout, trees)
        return tuple(carried)

    def offload(self, kept: NodeState) -> NodeState:
        """Raise `AssertionError`: execute refuses schedules that move memory."""
        raise AssertionError("execute moves no memory")

    def reload(self, action: Action, kept: NodeState) -> Handle:
        """Raise `AssertionError`: execute refuses schedules that move memory."""
        raise AssertionError("execute moves no memory")

    def zero_cotangents(self) -> Payload:
        """Raise `AssertionError`: every microbatch counts here."""
        raise AssertionError("execute gives no microbatch a weight")

    def add(self, first: Any, second: Any) -> Any:
        """Return the sum of the gradients of the stage's two replicas."""
        return (add_trees(*first, *second),)

    def complete(self, total: Any) -> Any:
        """Return the gradients; they are complete."""
        return total

    def gradients_for(self, peer: int, total: Any) -> Payload:
        """Return the gradients, for the stage's other replica."""
        gradients: Payload = total
        return gradients


def loss_of(outputs: Any) -> Any:
    """Return the loss that the last stage returned, alone or as the first of a pair."""
    return outputs[0] if isinstance(outputs, tuple) and outputs else outputs


def _leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)


def _differentiable(specs: Sequence[Spec]) -> tuple[Spec, ...]:
    return tuple([spec for spec in specs if spec.dtype.is_floating_point])


def _dense(layout: TreeShape, trees: tuple[Any, ...]) -> list[Tensor]:
    """Return the cotangents of the floating-point tensors on an edge, zeros where there is none."""
    pairs = zip(layout.leaves, _leaves(trees), strict=True)
    wanted = [(spec, one) for spec, one in pairs if isinstance(spec, Spec) and spec.dtype.is_floating_point]
    return [spec.allocate().zero_() if one is None else spec.like(one) for spec, one in wanted]
