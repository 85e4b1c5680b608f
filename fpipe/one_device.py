# SPDX-License-Identifier: Apache-2.0
"""One device: the plain microbatch loop that a pipeline must equal bit for bit.

The loop runs the captured model uncut. It adds gradients in the order that the schedule states, which is ascending for
most, so that equality is a fact about the pipeline and not about the order of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fpipe.capture.contract import Tensors
from fpipe.plan import Plan
from fpipe.stage import Stage
from schedules import Schedule


def one_device(
    plan: Plan,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batch: Sequence[Tensors],
    keys: Sequence[int],
) -> tuple[dict[int, Tensors], Tensors, dict[str, Tensor]]:
    """Run all microbatches one after the other: results of each, the final buffers, and gradients by name."""
    whole = plan.assembly.whole
    leaves, state = whole.leaves(params), tuple(buffers[name] for name in whole.buffers)
    sums = {name: OrderedSum(order) for name, order in _orders(plan).items()}
    results = {}
    for i, inputs in enumerate(batch):
        results[i], state, residuals = whole.forward(leaves, state, inputs, keys[i])
        _, grads = whole.backward(residuals, ())
        for name, grad in zip(whole.grads, grads, strict=True):
            sums[name].add(i, grad)
    return results, state, {name: sums[name].total() for name in whole.grads}


class OrderedSum:
    """A sum whose terms are added in a stated order, whatever the order in which they come.

    >>> terms = OrderedSum([1, 0])
    >>> terms.add(0, "a"); terms.add(1, "b")
    >>> terms.total()
    'ba'
    """

    def __init__(self, order: Sequence[int]) -> None:
        self.order, self.next = tuple(order), 0
        self.early: dict[int, Tensor] = {}
        self.sum: Tensor | None = None

    def add(self, i: int, term: Tensor) -> None:
        """Term number `i`; it waits until those before it in the order are there."""
        self.early[i] = term
        while self.next < len(self.order) and self.order[self.next] in self.early:
            term = self.early.pop(self.order[self.next])
            self.sum = term if self.sum is None else self.sum + term
            self.next += 1

    def total(self) -> Tensor:
        """The sum of all terms."""
        assert self.sum is not None, "there is a term"
        assert not self.early, "every term of the order was added"
        return self.sum if len(self.order) > 1 else self.sum.clone(memory_format=torch.contiguous_format)


def _orders(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Per parameter, the microbatches in the order in which its owner computes gradients."""
    schedule = plan.program.schedule
    return {name: _order(schedule, stage) for stage in plan.assembly.stages for name in stage.grads}


def _order(schedule: Schedule, stage: Stage) -> tuple[int, ...]:
    actions = schedule.actions(schedule.placement.homes[stage.index])
    return tuple(a.microbatch for a in actions if a.stage == stage.index and a.kind in "BW")
