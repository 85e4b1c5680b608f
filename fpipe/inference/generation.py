# SPDX-License-Identifier: Apache-2.0
"""Generate text with a pipeline: the prompt in one forward, then one token of every sequence at a time.

Problem. Without a cache, every token costs a forward over the whole text so far: a new length, and so a new capture, at
every token, or a forward over padding.

Idea. The pipeline of a decoder (`fpipe.inference.decoders`) keeps keys and values in buffers, so a token is an ordinary
evaluation of a batch of width 1. Two captures serve all tokens: one for the width of the prompt, one for width 1. The
sequences form as many groups as the schedule has microbatches. Each group has a cache of its own, and while one group
is on the last stage, others are on earlier ones.

    rank 0 |F0 F1 F2 F3 .  |F0 F1 F2 F3 .  |         the last rank chooses the tokens of all groups, and sends them
    rank 1 |.  F0 F1 F2 F3 |.  F0 F1 F2 F3 |         to every rank: P - 1 slots are idle per token

Ranks agree once per call. After that they see the same tokens, so they do the same without another word.

Invariants. Nothing of training changes: parameters and buffers are read, caches live in the running call, and chosen
tokens are drawn from a generator of the call. The executor passes the buffers of a microbatch on from one token to the
next, never to another microbatch. In each group, the result is that of the decoder on one device.

Runs when `generate` is called; the function that it returns runs for every batch of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.inference.decoders import PREFIX, MakeDecoder, StaticDecoder, build_decoding
from fpipe.inference.sampling import Choice, Choose, choose_likeliest
from fpipe.network.agreement import Field
from fpipe.network.fingerprint import digest_tensor
from fpipe.pipelines.batch import SplitBatch
from fpipe.pipelines.handshake import CommonArguments, agree_on_arguments, agree_on_plan, call_fields, call_together
from fpipe.pipelines.inputs import State, feed, make_keys
from fpipe.pipelines.modes import suspend_autocast
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import merge_results
from fpipe.pipelines.step import hold_plain, run_plan
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.variant import EVALUATION, Variant
from fpipe.runtime.executor import Inputs, Outcome
from fpipe.tensors.arguments import describe_argument, require_integer, require_seed
from fpipe.tensors.names import accept_trees
from fpipe.tensors.placed import require_plain
from fpipe.tensors.spec import Spec
from schedules import Schedule, forwards
from schedules.errors import quote


def generate(
    pipe: Pipeline,
    length: int,
    *,
    choose: Choose = choose_likeliest,
    decoder: MakeDecoder = StaticDecoder,
    schedule: Schedule | None = None,
) -> Callable[..., Tensor]:
    """Return the function that continues prompts with the model of a pipeline.

    - `length`: the number of tokens that the cache holds for each sequence, including the prompt. Attention reads all
      of them at every token, so make it no longer than necessary.
    - `choose`: chooses each token from the logits: `fpipe.choose_likeliest`, `fpipe.sample(temperature, top)`, or your
      own function, as described in `fpipe.inference.sampling`.
    - `decoder`: adds a cache to the model. The default is for causal language models of Hugging Face's transformers;
      `fpipe.inference.decoders` says how to write another.
    - `schedule`: only its forwards run; it must place stages on ranks as the pipeline's does. Its microbatches are the
      groups that are decoded in turn: at least as many as ranks keep all ranks busy, and 1 takes the fewest steps for
      a single prompt. Defaults to the pipeline's.

    The function takes `(params, buffers, prompts, count, *, mask=None, end=None, seed=None)` and returns the new
    tokens, int64 [sequences, count], on every rank.

    - `params`, `buffers`: as in training. They are not changed.
    - `prompts`: int64 [sequences, T], the same on every rank; the groups must be of the same size.
    - `count`: how many tokens to generate: T + `count` - 1 may be at most `length`, since the last is not read again.
    - `mask`: bool [sequences, T], true for tokens and false for padding, which must be on the left. Prompts of other
      widths are captured again, so pad them to few widths.
    - `end`: a token that ends its sequence; all later ones are `end`, too. Once every sequence has ended, generation
      stops, so there may be fewer than `count` tokens.
    - `seed`: an integer, if `choose` draws tokens; the same seed draws the same tokens on any ranks.

    Every rank must call this, and then the function, with the same arguments; `choose` runs on the last rank only.
    Raise `InputError` or `TransportError` for arguments that don't fit, before anything is sent, and `TransportError`
    on the other ranks if `choose` fails on the last.

    >>> import torch, fpipe
    >>> from torch.nn.functional import cross_entropy
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from schedules import one_f_one_b
    >>> config = LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
    ...                      num_attention_heads=2, num_key_value_heads=1)
    >>> model, words = LlamaForCausalLM(config), torch.randint(16, (4, 8))
    >>> pipe = fpipe.pipeline(model, example={"input_ids": words, "use_cache": False}, targets=words,
    ...                       loss=lambda out, words: cross_entropy(out.logits.flatten(0, 1), words.flatten()),
    ...                       schedule=one_f_one_b(ranks=2, microbatches=2), cuts=["model.layers.1"])
    >>> params, buffers = pipe.init(model)
    >>> generate = fpipe.generate(pipe, length=12)
    >>> generate(params, buffers, words[:, :4], 8).shape
    torch.Size([4, 8])
    """
    with call_together(generate, locals()):
        require_plain("generate", pipe.training.placed, "Call fpipe.predict, which returns outputs.")
        how = forwards(pipe.schedule if schedule is None else schedule)
        _require_single_copy(pipe)
        _require_arguments(pipe, length, how)
        agree_on_arguments(pipe, length=length, schedule=repr(how))
    decodings: dict[tuple[int, bool], Pipeline] = {}

    @accept_trees("params", "buffers")
    def run(
        params: State,
        buffers: State,
        prompts: Tensor,
        count: int,
        *,
        mask: Tensor | None = None,
        end: int | None = None,
        seed: int | None = None,
    ) -> Tensor:
        with suspend_autocast(EVALUATION) as variant, pipe.ranks.enter_call("a generation"), torch.no_grad():
            params, buffers, _ = hold_plain(pipe, params, buffers)
            require_seed(seed)
            if end is not None:
                require_integer("end", end)
            _require_prompts(prompts, count, mask, length, how.microbatches)
            pipe.ranks.agree(
                lambda: [
                    *call_fields(CommonArguments(seed), pipe.device),
                    *_argument_fields(prompts, mask, count, end, length),
                ]
            )
            ids, room = prompts.to(pipe.device), _make_room(mask, length, pipe.device)
            first = ids, torch.tensor(0, device=pipe.device), *room
            key = len(ids), mask is not None
            if key in decodings:
                decodings[key] = decodings.pop(key)  # the most recently used one
            else:
                decodings[key] = build_decoding(pipe, decoder, how, first, length)
                for old in [*decodings][: -pipe.memo.most]:
                    del decodings[old]
            held = {f"{PREFIX}{name}": value for name, value in {**params, **buffers}.items()}
            session = Session(decodings[key], variant, held, seed)
            return _continue(session, Choice(choose, end, seed), first, count)

    return run


def _continue(session: Session, choice: Choice, first: tuple[Tensor, ...], count: int) -> Tensor:
    """Return the tokens that follow the inputs `first`, at most `count` for each sequence."""
    (ids, start, *room), found = first, list[Tensor]()
    for inputs in (first, (ids[:, :1], start, *room))[:count]:
        session.plan(inputs)  # capture, and refuse, before anything is sent
    while True:
        plan, logits = session.forward((ids, start, *room))
        source, like = plan.placement.homes[-1], ids[:, 0]
        tokens = choice.agree_on_tokens(session.pipe.ranks, source, logits, like, len(found))
        found.append(choice.end_sequences(tokens, found[-1] if found else None))
        if len(found) == count or choice.is_over(found[-1]):
            return torch.stack(found, 1)
        ids, start = found[-1][:, None], start + ids.shape[1]


def _make_room(mask: Tensor | None, length: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the mask of all tokens that the cache has room for; nothing without a mask."""
    if mask is None:
        return ()
    later = mask.new_ones(len(mask), length - mask.shape[1])
    return (torch.cat([mask, later], 1).to(device),)


def _argument_fields(prompts: Tensor, mask: Tensor | None, count: int, end: int | None, length: int) -> Iterator[Field]:
    """Yield the fields of a call that must be the same on every rank."""
    yield Field.of("prompts", [f"{Spec.of(prompts)} of values {digest_tensor(prompts)}"])
    yield Field.of("mask", ["none" if mask is None else f"{Spec.of(mask)} of values {digest_tensor(mask)}"])
    yield Field.of("arguments", [f"count {count}", f"end {end}", f"length {length}"])


def _require_single_copy(pipe: Pipeline) -> None:
    """Raise `InputError` for a pipeline of several copies: a generation keeps caches for one."""
    if pipe.copies.count > 1:
        raise InputError(
            f"pipe: got one with {pipe.copies.count} copies on a mesh, expected a single one: prompts are not divided "
            'between copies. Build a pipeline with fpipe.Place(group=mesh["pp"]), and divide the prompts.'
        )


def _require_arguments(pipe: Pipeline, length: int, how: Schedule) -> None:
    require_integer("length", length, least=1)
    if how.slices > 1:
        raise InputError(
            f"schedule: got {describe_argument(how)} of {how.slices} slices, expected whole microbatches: a prompt is "
            "read in one piece. Pass schedule=, such as gpipe with as many ranks and groups of sequences."
        )
    if how.placement.homes != pipe.schedule.placement.homes or how.placement.mirrors:
        raise InputError(
            f"schedule: got {describe_argument(how)}, with stages on ranks {quote(how.placement.homes)}, expected one "
            f"with each stage on one rank, {quote(pipe.schedule.placement.homes)}, as in the pipeline. Pass one with "
            "the pipeline's placement, such as its own schedule with another number of microbatches."
        )


def _require_prompts(prompts: Tensor, count: int, mask: Tensor | None, length: int, groups: int) -> None:
    """Raise `InputError` for prompts that don't fit the cache or the groups, or a mask that doesn't fit the prompts."""
    if not isinstance(prompts, Tensor) or prompts.dtype != torch.int64 or prompts.dim() != 2 or not prompts.numel():
        got = Spec.of(prompts) if isinstance(prompts, Tensor) else type(prompts).__name__
        raise InputError(
            f"prompts: got {got}, expected int64 [sequences, tokens]. Stack them, with padding on the left."
        )
    require_integer("count", count)
    rows, width = prompts.shape
    if rows % groups:
        raise InputError(
            f"prompts: got {rows} sequences, expected a multiple of {groups}, the schedule's microbatches. Repeat "
            "some, or pass a schedule with another number of microbatches to generate."
        )
    if count < 1 or width + count - 1 > length:
        raise InputError(
            f"count: got {count} tokens after a prompt of {width}, expected at least 1 and at most "
            f"{length - width + 1}: the cache holds {length} tokens. Pass a larger length to generate."
        )
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise InputError(f"mask: got {describe_argument(mask)}, expected a tensor. Pass (prompts != padding).")
    if mask.dtype != torch.bool or mask.shape != prompts.shape:
        raise InputError(f"mask: got {Spec.of(mask)}, expected bool {list(prompts.shape)}. Pass (prompts != padding).")
    if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        row = next(k for k, one in enumerate(mask) if not one[-1] or (one[:-1] & ~one[1:]).any())
        raise InputError(
            f"mask, sequence {row}: got padding after a token, expected it on the left only: new tokens follow the "
            'last column. Set padding_side="left" in the tokenizer.'
        )


class Session:
    """The state of one generation on this process.

    - `pipe`: the pipeline of the decoder; `variant`: how it runs.
    - `held`: this process's parameters and the model's buffers, by the decoder's names.
    - `caches`: by group, the decoder's own buffers, and those of the model as its tokens have left them.
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
            buffers=[{s.index: tuple([known[name] for name in s.buffers]) for s in here} for known in held],
            batch=lambda s, i: feeds[i][s](i),
            keys=make_keys(plan, self.seed),
        )

    def _leaves(self, plan: StepPlan) -> Sequence[Mapping[int, Any]]:
        local = [stage.index for stage in plan.local_stages]
        by_cut = {cut: {s: cut.stages[s].leaves(self.held) for s in local} for cut in plan.cuts}
        return [by_cut[cut] for cut in plan.assemblies]

    def _keep(self, plan: StepPlan, outcomes: Mapping[int, Outcome]) -> None:
        """Keep the buffers that the groups leave, for their next tokens."""
        for outcome in outcomes.values():
            for cache, by_stage in zip(self.caches, outcome.buffers, strict=True):
                for s, values in by_stage.items():
                    names = plan.assembly.stages[s].buffers
                    cache.update(zip(names, values, strict=True))


def _make_caches(plan: StepPlan) -> State:
    """Return empty caches for one group: those of this process's layers."""
    own = {name: spec for name, spec in plan.buffers.items() if not name.startswith(PREFIX)}
    return {name: torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device) for name, spec in own.items()}
