# SPDX-License-Identifier: Apache-2.0
"""A running generation: the caches of every group of sequences, and the choice of tokens that all ranks see.

Invariants. A cache is a buffer of the decoder, and each group has its own: the executor passes the buffers of a
microbatch on from one token to the next, never to another microbatch. Only the rank of the last stage chooses. If
choosing fails there, the other ranks learn it in place of the tokens, so nobody waits.

Runs in every token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import InputError, TransportError
from fpipe.inference.decoders import PREFIX
from fpipe.inference.sampling import Choose
from fpipe.network.ranks import Ranks
from fpipe.pipelines.batch import SplitBatch
from fpipe.pipelines.fields import CommonArguments
from fpipe.pipelines.handshake import agree_on_plan
from fpipe.pipelines.inputs import State, feed, make_keys
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import merge_results
from fpipe.pipelines.step import run_plan
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.variant import Variant
from fpipe.runtime.executor import Inputs, Outcome
from fpipe.tensors import random
from fpipe.tensors.spec import Spec


class Session:
    """The state of one generation on this process.

    - `pipe`: the pipeline of the decoder; `variant`: how it runs.
    - `held`: this process's parameters and the model's buffers, by the decoder's names.
    - `caches`: by group, the decoder's own buffers.
    - `leaves`: by plan, per microbatch and stage, the parameters in the form that the stage takes.
    """

    def __init__(self, pipe: Pipeline, variant: Variant, held: State, seed: int | None) -> None:
        self.pipe, self.variant, self.held, self.seed = pipe, variant, held, seed
        self.caches: list[State] = []
        self.leaves: dict[StepPlan, Sequence[Mapping[int, Any]]] = {}

    def plan(self, inputs: tuple[Tensor, ...]) -> tuple[StepPlan, SplitBatch]:
        """Return the plan for these inputs, cached for each kind of them, and the inputs split into groups."""
        batch = self.pipe.batch(self.variant, inputs, None, self.pipe.ranks.exchange_text)
        plan = agree_on_plan(self.pipe, self.variant, batch.signature, CommonArguments(self.seed))
        self.pipe.memo.use((self.variant, batch.signature))
        return plan, batch

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[StepPlan, Tensor | None]:
        """Run the decoder; return its plan, and on the rank of the last stage the logits of all sequences."""
        plan, batch = self.plan(inputs)
        outcomes = run_plan(self.pipe, plan, self._inputs(plan, batch))
        self._keep(plan, outcomes)
        results = {i: values for outcome in outcomes.values() for i, values in outcome.results.items()}
        return plan, merge_results(plan, results)[1] if results else None

    def _inputs(self, plan: StepPlan, batch: SplitBatch) -> Inputs:
        leaves, here = batch.take(), plan.local_stages
        if not self.caches:
            self.caches = [_make_caches(plan) for _ in plan.assemblies]
        if plan not in self.leaves:
            plan.watch.require_unchanged()
            self.leaves[plan] = self._leaves(plan)
        held = [{**self.held, **cache} for cache in self.caches]
        feeds = [
            {s.index: feed(cut.stages[s.index], leaves, known) for s in here}
            for cut, known in zip(plan.assemblies, held, strict=True)
        ]
        return Inputs(
            params=self.leaves[plan],
            buffers=[self._buffers(plan, cache) for cache in self.caches],
            batch=lambda s, i: feeds[i][s](i),
            keys=make_keys(plan, self.seed),
        )

    def _leaves(self, plan: StepPlan) -> Sequence[Mapping[int, Any]]:
        local = [stage.index for stage in plan.local_stages]
        by_cut = {cut: {s: cut.stages[s].leaves(self.held) for s in local} for cut in plan.cuts}
        return [by_cut[cut] for cut in plan.assemblies]

    def _buffers(self, plan: StepPlan, cache: State) -> Mapping[int, Any]:
        found = {**self.held, **cache}
        return {stage.index: tuple([found[name] for name in stage.buffers]) for stage in plan.local_stages}

    def _keep(self, plan: StepPlan, outcomes: Mapping[int, Outcome]) -> None:
        """Keep the caches that the groups leave, for their next tokens."""
        for outcome in outcomes.values():
            for cache, by_stage in zip(self.caches, outcome.buffers, strict=True):
                for s, values in by_stage.items():
                    names = plan.assembly.stages[s].buffers
                    cache.update({n: v for n, v in zip(names, values, strict=True) if not n.startswith(PREFIX)})


def _make_caches(plan: StepPlan) -> State:
    """Return empty caches for one group: those of this process's layers."""
    own = {name: spec for name, spec in plan.buffers.items() if not name.startswith(PREFIX)}
    return {name: torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device) for name, spec in own.items()}


@dataclass(frozen=True)
class Choice:
    """The choice of tokens: `choose` them, until each sequence has its token `end`, with draws seeded by `seed`."""

    choose: Choose
    end: int | None
    seed: int | None

    def agree_on_tokens(self, ranks: Ranks, source: int, logits: Tensor | None, like: Tensor, number: int) -> Tensor:
        """Return token `number` of every sequence, on every rank, as rank `source` chooses from its logits.

        `like` has the shape of the tokens. Raise what `choose` raises, and `TransportError` on the other ranks.
        """
        error, packed = None, None
        if logits is not None:
            try:
                packed = torch.cat([self._choose(logits, like, number), like.new_zeros(1)])
            except Exception as failure:
                error, packed = failure, torch.cat([torch.zeros_like(like), like.new_ones(1)])
        spec = Spec((len(like) + 1,), (1,), torch.int64, like.device)
        packed = ranks.broadcast(packed, spec, source)
        ranks.conclude()
        if error is not None:
            raise error
        if packed[-1]:
            raise TransportError(
                f"token {number}: got an error from choose on rank {source}, expected tokens. Its error says what to "
                "repair."
            )
        return packed[:-1]

    def _choose(self, logits: Tensor, like: Tensor, number: int) -> Tensor:
        generator = torch.Generator(logits.device).manual_seed(random.key(self.seed or 0, number))
        tokens = self.choose(logits, generator)
        if not isinstance(tokens, Tensor) or tokens.shape != like.shape or tokens.dtype != torch.int64:
            got = Spec.of(tokens) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise InputError(
                f"token {number}: got {got} from choose, expected {Spec.of(like)}: a token for every sequence. Return "
                "what logits.argmax(-1) or torch.multinomial(...).squeeze(-1) returns."
            )
        return tokens

    def end_sequences(self, tokens: Tensor, before: Tensor | None) -> Tensor:
        """Return the tokens, with `end` for every sequence that had ended `before`."""
        if self.end is None or before is None:
            return tokens
        return tokens.masked_fill(before == self.end, self.end)

    def is_over(self, tokens: Tensor) -> bool:
        """Return whether every sequence has ended."""
        return self.end is not None and bool((tokens == self.end).all())
