# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a Hugging Face Llama with LoRA: only its adapters are trained, saved, and held by the optimizer.

    torchrun --standalone --nproc-per-node 2 examples/lora.py    # one process per rank, over Gloo
    python examples/lora.py                                      # both ranks in this process

Both commands print the same losses. At the end, `peft` loads the adapters into a fresh model on one device, which must
have the same loss, to the last digit. The model is small and random, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fpipe
from schedules import one_f_one_b

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
WORDS, LENGTH, ROWS, GROUPS = 64, 16, 8, 4
ADAPTERS = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])


def build_model() -> nn.Module:
    """Return the model that is fine-tuned; the same in every process."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_attention_heads=4, **sizes))


def make_batch(step: int) -> tuple[dict[str, Any], Tensor]:
    """Return inputs and targets: rows that count from numbers that depend only on the step."""
    starts = torch.randint(WORDS, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    ids = (starts + torch.arange(LENGTH)) % WORDS
    return {"input_ids": ids, "use_cache": False}, ids


def loss(outputs: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Return the cross-entropy of each next word."""
    return nn.functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(pipe: fpipe.Pipeline, model: nn.Module, steps: int) -> tuple[dict[str, Tensor], Tensor]:
    """Train the adapters. Return this process's parameters, and the loss of the trained model on a new batch."""
    params, buffers = pipe.init(model)
    init, update = fpipe.optimizer(torch.optim.AdamW, lr=0.02)
    state, step = init(params), fpipe.value_and_grad(pipe)  # no gradients for what is frozen, so no state and no update
    for i in range(steps):
        out, grads = step(params, buffers, *make_batch(i), seed=i)
        params, state = update(grads, state, params)
        if RANK == 0 and i % 10 == 0:
            print(f"step {i:4}  loss {out.loss.item():.6f}", flush=True)
    return params, fpipe.evaluate(pipe)(params, buffers, *make_batch(steps)).loss


def collect_adapters(pipe: fpipe.Pipeline, model: nn.Module, params: dict[str, Tensor]) -> None:
    """Put the trained adapters of all ranks into the model, on every rank: they are small."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(params.get(name, parameter))
            if SIZE > 1:
                dist.broadcast(parameter.data, pipe.owners[name])


def main() -> None:
    """Train, save the adapters, and load them on one device."""
    parser = argparse.ArgumentParser(description="Fine-tune a small Llama with LoRA as a pipeline.")
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    if SIZE > 1:
        dist.init_process_group("gloo")
    how = one_f_one_b(ranks=max(2, SIZE), microbatches=GROUPS)
    model, (inputs, ids) = get_peft_model(build_model(), ADAPTERS), make_batch(0)
    pipe = fpipe.pipeline(model, example=inputs, targets=ids, loss=loss, schedule=how)
    params, final = train(pipe, model, steps)
    collect_adapters(pipe, model, params)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)  # peft's own format
        alone = PeftModel.from_pretrained(build_model(), folder).eval()
        parts = make_batch(steps)[1].chunk(GROUPS)
        expected = sum(loss(alone(input_ids=part, use_cache=False), part) / GROUPS for part in parts)
    assert torch.equal(final, expected), f"got a loss of {final} on all ranks, and {expected} on one device"
    if RANK == 0:
        print(f"final loss {final.item():.6f}, with the saved adapters on one device too")
    if SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
