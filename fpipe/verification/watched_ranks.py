# SPDX-License-Identifier: Apache-2.0
"""Ranks of this process that tell a ledger of expressions whose action computes.

An execution knows its instruction, and a rank runs until it waits: between two waits, what computes is that rank's.

Runs when `prove` is called.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
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

    def follow(
        self, copies: Sequence[Callable[[int, Transport], Execution]]
    ) -> Generator[None, None, list[dict[int, Outcome]]]:
        """Do what `Ranks.follow` does; see there."""
        told = [partial(self._watch, k if len(copies) > 1 else None, one) for k, one in enumerate(copies)]
        self.outcomes = yield from super().follow(told)
        return self.outcomes

    def shared(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the gradients that several processes would return, as each would: the name, and the name with where.

        In this process they are one result, so nobody else looks at each. Those of shards are put together.
        """
        shards, held = self.plan.copies.shards, defaultdict[tuple[str, str], list[Tensor]](list)
        for copy, outcomes in zip(self.plan.parts, self.outcomes, strict=True):
            for rank, outcome in outcomes.items():
                where = f" on rank {rank}" + f" of replica {copy // shards}" * (self.plan.copies.count > 1)
                found = collect_gradients(replace(self.plan.parts[copy], ranks=(rank,)), {rank: outcome})
                for name, grad in found.items():
                    held[name, f"gradient {name}{where}"].append(grad)
        holders = Counter(name for name, _ in held)
        for (name, leaf), pieces in held.items():
            if holders[name] > 1:
                yield name, leaf, pieces[0] if shards == 1 else torch.cat(pieces)

    def _watch(
        self, copy: int | None, start: Callable[[int, Transport], Execution], rank: int, transport: Transport
    ) -> Execution:
        execution = start(rank, transport)
        where = f"copy {copy}, rank {rank}" * (copy is not None) or f"rank {rank}"
        vars(execution)["run"] = partial(self._run, execution.run(), RunningRank(where, execution))
        return execution

    def _run(self, running: Generator[Any, None, Outcome], rank: RunningRank) -> Generator[Any, None, Outcome]:
        """Run an execution, and be the one that computes until its next wait."""
        while True:
            self.ledger.running = rank
            try:
                handle = next(running)
            except StopIteration as stop:
                outcome: Outcome = stop.value
                return outcome
            finally:
                self.ledger.running = None
            yield handle


class RunningRank(NamedTuple):
    """An execution of a program, and its rank; as text, also the action that it is at."""

    rank: str
    execution: Execution

    def __str__(self) -> str:
        at = self.execution.at
        return self.rank if at is None else f"{self.rank}, position {at.position}, {at.action}"
