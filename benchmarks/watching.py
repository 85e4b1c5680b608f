# SPDX-License-Identifier: Apache-2.0
"""The cost of checking, before every step, that nothing a pipeline assumes has changed since it was built.

    python -m benchmarks.watching

The time of the comparison as a share of the whole step that it is part of, with all ranks in this process and one
thread: CPU time, medians of many interleaved runs. GPTs of several sizes, four Linear(8, 8), and a small Llama with its
configuration; stages differentiated by autograd and as graphs, which compare more and take less time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import fpipe
from benchmarks.common.models import cross_entropy, gpt
from benchmarks.common.rows import most, row
from benchmarks.common.turns import medians
from schedules import one_f_one_b

MICROBATCHES, ROUNDS, SHARE = 8, 20, 0.01
Case = tuple[nn.Module, Any, Any, Any]


def gpts(blocks: int, width: int, length: int) -> Case:
    tokens = torch.randint(0, 256, (MICROBATCHES, length))
    return gpt(blocks, width, width // 32, 256, length), (tokens,), tokens, cross_entropy


def linears() -> Case:
    x = torch.randn(MICROBATCHES, 8)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), (x,), x, nn.functional.mse_loss


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, use_cache=False, **sizes))
    tokens = torch.randint(0, 256, (MICROBATCHES, 64))
    return model, {"input_ids": tokens, "labels": tokens}, None, lambda outputs: outputs.loss


def cases() -> Mapping[str, Case]:
    return {
        "GPT, 8 blocks of width 128": gpts(8, 128, 64),
        "GPT, 8 blocks of width 32": gpts(8, 32, 16),
        "Llama, 4 layers of width 128": llama(),
        "4 Linear(8, 8)": linears(),
    }


def share(case: Case, backward: str) -> tuple[float, float]:
    """Return the seconds of the comparison, and its share of a step."""
    model, inputs, targets, loss = case
    how = one_f_one_b(ranks=2, microbatches=MICROBATCHES)
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=loss, schedule=how, gradients=fpipe.Gradients(backward=backward)
    )
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    compare = pipe.training.watch.require_unchanged
    found = medians({"step": lambda: step(*state, inputs, targets), "compare": compare}, ROUNDS)
    return found["compare"], found["compare"] / found["step"]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, case in cases().items():
        for backward in ("autograd", "graph"):
            seconds, part = share(case, backward)
            what = f"noticing what has changed, share of a step: {name}, {backward}, {1e6 * seconds:.0f} us"
            print(row(what, "share", part, None, most(SHARE)))


if __name__ == "__main__":
    main()
