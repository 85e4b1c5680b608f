# SPDX-License-Identifier: Apache-2.0
"""Ranks of this process that say, to a ledger of expressions, whose action computes.

An execution knows its instruction; a rank runs until it waits. So whoever runs is noted before, and forgotten after.

Runs when `prove` is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fpipe.network.ranks import Ranks
from fpipe.pipelines.results import collect_gradients
from fpipe.pipelines.step_plan import StepPlan
from fpipe.runtime.executor import Execution, Outcome
from fpipe.runtime.transport import Transport
from fpipe.verification.expressions import Expressions


class WatchedRanks(Ranks):
    """All ranks of a plan in this process, whose actions a ledger learns; `outcomes` are those of the last run."""

    def __init__(self, plan: StepPlan, ledger: Expressions) -> None:
        super().__init__(plan.placement.ranks)
        self.plan, self.ledger = plan, ledger
        self.outcomes: list[dict[int, Outcome]] = []

    def run(self, copies: Sequence[Callable[[int, Transport], Execution]]) -> list[dict[int, Outcome]]:
        """Do what `Ranks.run` does; see there."""
        told = [partial(self._watch, k if len(copies) > 1 else None, one) for k, one in enumerate(copies)]
        self.outcomes = super().run(told)
        return self.outcomes

    def shared(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield the gradients that several ranks would return if they were processes, as each would: its rank and name.

        In one process they are one result, so nobody else looks at each.
        """
        if self.plan.copies.count > 1:
            return
        (outcomes,) = self.outcomes
        found = {r: collect_gradients(replace(self.plan, ranks=(r,)), {r: one}) for r, one in outcomes.items()}
        holders = Counter(name for grads in found.values() for name in grads)
        for rank, grads in found.items():
            yield from ((rank, name, grad) for name, grad in grads.items() if holders[name] > 1)

    def _watch(
        self, copy: int | None, start: Callable[[int, Transport], Execution], rank: int, transport: Transport
    ) -> Execution:
        return WatchedExecution(start(rank, transport), copy, self.ledger)


class WatchedExecution(Execution):
    """An execution that runs in the place of another, with its state, and says when it computes."""

    def __init__(self, other: Execution, copy: int | None, ledger: Expressions) -> None:
        vars(self).update(vars(other))
        self.copy, self.ledger = copy, ledger

    def __str__(self) -> str:
        at = "" if self.at is None else f", position {self.at.position}, {self.at.action}"
        return f"copy {self.copy}, rank {self.rank}{at}" if self.copy is not None else f"rank {self.rank}{at}"

    def run(self) -> Generator[Any, None, Outcome]:
        """Interpret the program, and be the one that computes until the next wait."""
        running = super().run()
        while True:
            self.ledger.running = self
            try:
                handle = next(running)
            except StopIteration as stop:
                outcome: Outcome = stop.value
                return outcome
            finally:
                self.ledger.running = None
            yield handle
