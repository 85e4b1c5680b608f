# SPDX-License-Identifier: Apache-2.0
"""The plain microbatch loop on one device, which a pipeline must equal bit for bit.

The loop runs the captured model uncut. It adds gradients in the order that the schedule states, ascending for most, so
that equality doesn't depend on the order of a sum. If a stage has replicas, each sums the gradients of its
microbatches, and those sums are added in route order. If several stages compute a gradient of the same parameter
(`fpipe.stages.ties`), so does the loop, and it adds these last, in stage order. If the pipeline has copies on a mesh,
each sums the gradients of its microbatches, and these sums are added as the copies reduce them.

Runs in every step of the function that `reference` returns, and when `verify` is called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import TypeAlias

from torch import Tensor

from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.captured import Tensors
from schedules import KINDS

Orders: TypeAlias = Sequence[Sequence[int]]


def run_on_one_device(
    plan: StepPlan,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batch: Mapping[int, Sequence[Tensor]],
    keys: Sequence[int],
    onto: Mapping[str, Tensor] = MappingProxyType({}),
    first: Mapping[str, Tensor] = MappingProxyType({}),
    start: Tensors = (),
) -> tuple[dict[int, Tensors], Tensors, dict[str, Tensor]]:
    """Run all microbatches in sequence; return the results of each, the final buffers, and gradients by name.

    `batch` has the microbatches of each leaf, `onto` the sums of gradients to go on from, `start` the cotangent of the
    loss, if it is not 1. Other sums begin with `first`, which gives them their dtype, where it has something.
    """
    whole = plan.assembly.whole
    leaves, state = whole.leaves(params), tuple(buffers[name] for name in whole.buffers)
    stated = {name: iter(by_stage) for name, by_stage in find_orders(plan).items()}
    alone = plan.copies.count == 1
    earlier = dict(onto) if alone else {}
    sums = [CopySum(plan, next(stated[name]), earlier.pop(name, None), first.get(name)) for name in whole.grads]
    results = {}
    for i, cut in enumerate(plan.assemblies):
        inputs = tuple(batch[leaf][i] for leaf in cut.whole.batch)
        results[i], state, residuals = cut.whole.forward(leaves, state, inputs, keys[i])
        _, grads = cut.whole.backward(residuals, start)
        for terms, grad in zip(sums, grads, strict=True):
            terms.add(i, grad)
    totals = defaultdict[str, list[Tensor]](list)
    for name, terms in zip(whole.grads, sums, strict=True):
        total = terms.total()
        if total is not None:
            totals[name].append(total)
    return results, state, {name: reduce(add, by_stage) for name, by_stage in totals.items()}


class CopySum:
    """A sum over the copies of a pipeline: over the shards of each replica, then over replicas."""

    def __init__(self, plan: StepPlan, orders: Orders, onto: Tensor | None = None, first: Tensor | None = None) -> None:
        self.count, self.shards = plan.microbatches, plan.copies.shards
        self.parts = [ReplicaSum(orders, onto, first) for _ in range(plan.copies.count)]

    def add(self, i: int, term: Tensor | None) -> None:
        """Add the term of microbatch `i` of the whole batch, or `None` for no term."""
        copy, own = divmod(i, self.count)
        self.parts[copy].add(own, term)

    def total(self) -> Tensor | None:
        """Return the sum of all terms, if there are any; dense if there are several copies."""
        totals = [part.total() for part in self.parts]
        if len(totals) > 1:
            totals = [one.to_dense() if one is not None and one.is_sparse else one for one in totals]
        replicas = [totals[k : k + self.shards] for k in range(0, len(totals), self.shards)]
        return reduce(_add, [reduce(_add, shards) for shards in replicas])


class OrderedSum:
    """A sum whose terms are added in a given order, whatever the order in which they arrive.

    >>> terms = OrderedSum([1, 0])
    >>> terms.add(0, "a"); terms.add(1, "b")
    >>> terms.total()
    'ba'
    """

    def __init__(self, order: Sequence[int], onto: Tensor | None = None) -> None:
        self.order, self.next = tuple(order), 0
        self.early: dict[int, Tensor | None] = {}
        self.sum = onto

    def add(self, i: int, term: Tensor | None) -> None:
        """Add term number `i`, or `None` for no term, once all terms before it in the order have been added."""
        self.early[i] = term
        while self.next < len(self.order) and self.order[self.next] in self.early:
            self.sum = _add(self.sum, self.early.pop(self.order[self.next]))
            self.next += 1

    def total(self) -> Tensor | None:
        """Return the sum of all terms."""
        assert not self.early, "every term of the order was added"
        if len(self.order) > 1 or self.sum is None:
            return self.sum
        return self.sum.clone()


def _add(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    return total + term if total is not None and term is not None else term if total is None else total


class ReplicaSum:
    """A sum over replicas, in their order, of sums that each have their own order.

    >>> terms = ReplicaSum([[0, 2], [3, 1]])
    >>> for i, term in enumerate("abcd"):
    ...     terms.add(i, term)
    >>> terms.total()
    'acdb'
    """

    def __init__(self, orders: Orders, onto: Tensor | None = None, first: Tensor | None = None) -> None:
        own, *others = orders
        self.parts = [OrderedSum(own, first if onto is None else onto), *[OrderedSum(one, first) for one in others]]

    def add(self, i: int, term: Tensor | None) -> None:
        """Add term number `i`, or `None` for no term."""
        (part,) = (part for part in self.parts if i in part.order)
        part.add(i, term)

    def total(self) -> Tensor | None:
        """Return the sum of all terms, if there are any."""
        return reduce(_add, [part.total() for part in self.parts])


def find_orders(plan: StepPlan) -> dict[str, list[Orders]]:
    """Return the order in which microbatches are added to each gradient.

    Per parameter, for each stage that computes a gradient of it, and each replica of that stage: the microbatches of a
    copy in order.
    """
    schedule = plan.program.schedule
    rows = [list(schedule.actions(rank)) for rank in range(schedule.ranks)]
    found = defaultdict[str, list[Orders]](list)
    for stage in plan.assembly.stages:
        order = [
            [a.microbatch for a in rows[rank] if a.stage == stage.index and KINDS[a.kind].after == "done"]
            for rank in schedule.placement.replicas(stage.index)
        ]
        for name in stage.grads:
            found[name].append(order)
    return dict(found)
