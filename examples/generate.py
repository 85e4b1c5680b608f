# SPDX-License-Identifier: Apache-2.0
"""Continue prompts with a Llama whose layers are on several ranks, and compare with the whole model on one.

    torchrun --nproc-per-node 2 examples/generate.py    # one process per rank, over Gloo
    python examples/generate.py                         # both ranks in one process

The model is small and untrained, so its text is meaningless. But both commands print the same tokens, and every rank
checks that they equal those of a plain loop over the whole model with the same cache. Needs no download.
"""

from __future__ import annotations

import argparse
import os
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import fpipe
from schedules import one_f_one_b


def build_model(layers: int, width: int) -> nn.Module:
    """The same model in every process."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **sizes))


def loss(outputs: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Cross-entropy of each next token."""
    return nn.functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def plain_loop(model: nn.Module, ids: Tensor, count: int, length: int) -> Tensor:
    """The likeliest tokens, on one device."""
    cache, found = StaticCache(config=model.config, max_cache_len=length), []
    for _ in range(count):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
        found.append(ids)
    return torch.cat(found, 1)


def main() -> None:
    """Generate twice, greedily and by sampling; check the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 8, "width": 128, "prompts": 8, "groups": 4, "context": 16, "count": 48}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks, rank = int(os.environ.get("WORLD_SIZE", "2")), int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")

    model = build_model(options.layers, options.width)
    prompts = torch.randint(256, (options.prompts, options.context), generator=torch.Generator().manual_seed(1))
    schedule = one_f_one_b(ranks=ranks, microbatches=options.groups)
    example = {"input_ids": prompts, "use_cache": False}
    pipe = fpipe.pipeline(model, example=example, targets=prompts, loss=loss, schedule=schedule)
    params, buffers = pipe.init(model)  # here you would train

    length = options.context + options.count
    generate = fpipe.generate(pipe, length)
    tokens = generate(params, buffers, prompts, options.count)
    start = perf_counter()
    generate(params, buffers, prompts, options.count)  # no capture now
    milliseconds = (perf_counter() - start) / options.count * 1e3
    sample = fpipe.generate(pipe, length, choose=fpipe.sample(0.8, top=50))
    drawn = sample(params, buffers, prompts, options.count, seed=7)

    model.eval()
    groups = [plain_loop(model, part, options.count, length) for part in prompts.chunk(options.groups)]
    assert torch.equal(tokens, torch.cat(groups)), f"rank {rank}: the plain loop has other tokens"
    if rank == 0:
        print(f"likeliest {tokens[0, :12].tolist()}")
        print(f"drawn     {drawn[0, :12].tolist()}")
        print(f"all {tokens.numel()} tokens equal those of the plain loop; {milliseconds:.1f} ms per step")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
