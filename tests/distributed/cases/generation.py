# SPDX-License-Identifier: Apache-2.0
"""Generated tokens, and errors of the choice, on every rank."""

from __future__ import annotations

import torch

import fpipe
from schedules import one_f_one_b
from tests.common.averages import Average, AverageDecoder, generate_from_scratch, texts, word_loss
from tests.distributed.cases.checks import gather, raises
from tests.distributed.cases.registry import case


@case
def tokens_on_every_rank(rank, size):
    """A cache per stage, four groups in turn; every rank gets the tokens of a plain loop, and every error."""
    torch.manual_seed(0)
    model, prompts = Average(), texts(8, 5)
    cuts = {2: ["mix"], 4: ["middle", "mix", "head"]}[size]
    pipe = fpipe.pipeline(
        model,
        example=(prompts,),
        targets=prompts,
        loss=word_loss,
        schedule=one_f_one_b(ranks=size, microbatches=4),
        cuts=cuts,
    )
    state, generate = pipe.init(model), fpipe.generate(pipe, 12, decoder=AverageDecoder)
    want = generate_from_scratch(model, prompts, 7)
    assert torch.equal(generate(*state, prompts, 7), want)
    drawn = fpipe.generate(pipe, 12, decoder=AverageDecoder, choose=fpipe.sample(top=5))(*state, prompts, 6, seed=2)
    assert all(torch.equal(drawn, other) for other in gather(drawn))
    with raises(fpipe.TransportError, "prompts: got", "on rank 0"):
        generate(*state, prompts if rank else prompts.flip(0), 7)
    with raises(fpipe.TransportError, "arguments: got", "count 3"):
        generate(*state, prompts, 7 - 4 * (rank == 0))

    def fail(logits, generator):
        raise ValueError("no choice")

    last = rank == size - 1
    with raises(ValueError, "no choice") if last else raises(fpipe.TransportError, "token 0", f"on rank {size - 1}"):
        fpipe.generate(pipe, 12, decoder=AverageDecoder, choose=fail)(*state, prompts, 7)
    assert torch.equal(generate(*state, prompts, 7), want)
