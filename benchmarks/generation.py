# SPDX-License-Identifier: Apache-2.0
"""The time of a token in generation, over a plain loop on one device with the same cache.

    python -m benchmarks.generation          # stages that autograd differentiates, and recorded ones
    python -m benchmarks.generation graph    # recorded ones only

A Llama of 8 layers and width 256, 8 prompts of 32 tokens in 4 groups, a `StaticCache` of 128 positions, the likeliest
tokens. The column `torch` is a plain loop over the same model, cache and groups, which continues one group after the
other.
One process plays both ranks in turn, so its row is the cost of running the stages; on 2 ranks over Gloo the stages run
at the same time. Stages of `backward="autograd"` call the model's modules and functions from Python; those of
`backward="graph"` run recorded operators. The first call makes two captures, one for the width of the prompts and one
for a token; a prompt of a new width costs one more. Medians of calls; what a token costs is the difference between a
long call and a short one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import fpipe
from benchmarks.common import ranks
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import most, row
from schedules import one_f_one_b

LAYERS, WIDTH, PROMPTS, GROUPS, CONTEXT, LENGTH, SHORT, LONG = 8, 256, 8, 4, 32, 128, 8, 28
ROUNDS: Final = rounds(3)
WAYS: Final = ("autograd", "graph")


def build() -> nn.Module:
    """Return the model; the same in every process."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_attention_heads=8, **sizes))
    return model.eval()


def loss(outputs: Any, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def plain(model: nn.Module, prompts: Tensor, count: int) -> Tensor:
    """Return the likeliest tokens, group after group."""
    found = []
    for ids in prompts.chunk(GROUPS):
        cache = StaticCache(config=model.config, max_cache_len=LENGTH)
        group = []
        for _ in range(count):
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            group.append(ids)
        found.append(torch.cat(group, 1))
    return torch.cat(found)


def per_token(call: Callable[[int], object]) -> float:
    """Return the seconds that one more token takes, for all prompts together."""

    def seconds(count: int) -> float:
        start = time.perf_counter()
        call(count)
        return time.perf_counter() - start

    found = [seconds(LONG) - seconds(SHORT) for _ in range(ROUNDS)]
    return statistics.median(found) / (LONG - SHORT)


def measured(backward: str) -> dict[str, float]:
    """Return the seconds of a token, of the first call, and of the first call with prompts of another width."""
    model, prompts = build(), torch.randint(512, (PROMPTS, CONTEXT), generator=torch.Generator().manual_seed(1))
    how = one_f_one_b(ranks=2, microbatches=GROUPS)
    example = {"input_ids": prompts, "use_cache": False}
    pipe = fpipe.pipeline(
        model, example=example, targets=prompts, loss=loss, schedule=how, gradients=fpipe.Gradients(backward=backward)
    )
    params, buffers = pipe.init(model)
    generate = fpipe.generate(pipe, LENGTH)

    def first(width: int) -> float:
        start = time.perf_counter()
        generate(params, buffers, prompts[:, :width], 1)
        return time.perf_counter() - start

    found = {"first": first(CONTEXT), "width": first(CONTEXT // 2)}
    if not torch.equal(tokens := generate(params, buffers, prompts, SHORT), plain(model, prompts, SHORT)):
        raise SystemExit(f"got {tokens.tolist()}, expected the tokens of the plain loop")
    return found | {
        "token": per_token(lambda count: generate(params, buffers, prompts, count)),
        "plain": per_token(lambda count: plain(model, prompts, count)),
    }


def rank() -> None:
    """Measure one rank of two. The plain loop runs on both at once, as two replicas would."""
    dist.init_process_group("gloo")
    ranks.report({f"{way} {name}": found for way in sys.argv[1:] for name, found in measured(way).items()})
    dist.destroy_process_group()


def main() -> None:
    ways = sys.argv[1:] or WAYS
    both = ranks.maxima(ranks.start("benchmarks.generation", 2, *ways))
    what = f"a token for {PROMPTS} prompts in {GROUPS} groups, Llama of {LAYERS} layers"
    for way in ways:
        alone = measured(way)
        one, two = alone["token"] * 1e3, both[f"{way} token"] * 1e3
        print(row(f"{what}, {way} stages, both ranks in one process", "ms", one, alone["plain"] * 1e3))
        goal = most(1, of="ratio") if way == "graph" else None
        print(row(f"{what}, {way} stages, 2 ranks over Gloo", "ms", two, both[f"{way} plain"] * 1e3, goal))
        print(row(f"the first token, captures included, {way} stages, one process", "s", alone["first"], None))
        print(row(f"the first token after a prompt of another width, {way} stages", "s", alone["width"], None))


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank() if ranks.inside() else main()
