# SPDX-License-Identifier: Apache-2.0
"""Small language models, and the plain loop that generates with them on one device, which uses nothing of fpipe."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, StaticCache

from tests.common.averages import VOCABULARY


def llama(layers: int = 2) -> nn.Module:
    """Grouped-query attention, rotary positions, no tied weights."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))


def gpt2(layers: int = 2) -> nn.Module:
    """Learned positions, dropout in training, and a head tied to the embedding."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": layers, "n_head": 2, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, bos_token_id=0, eos_token_id=0))


def next_word(outputs, targets):
    """The loss of a language model from transformers."""
    return functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def padding(rows: int, width: int) -> Tensor:
    """A mask with no padding in the first row, one column in the second, and so on."""
    return torch.arange(width) >= (torch.arange(rows) % width)[:, None]


def generate_plainly(model, prompts, count, length, groups, mask=None) -> tuple[Tensor, Tensor]:
    """One device: the likeliest tokens [rows, count] and their logits [rows, count, words], group by group."""
    found = [
        _generate_group(model.eval(), part, count, length, None if mask is None else mask.chunk(groups)[g])
        for g, part in enumerate(prompts.chunk(groups))
    ]
    model.train()
    return torch.cat([tokens for tokens, _ in found]), torch.cat([logits for _, logits in found])


@torch.no_grad()
def _generate_group(model, ids, count, length, mask):
    cache, tokens, logits, seen = StaticCache(config=model.config, max_cache_len=length), [], [], 0
    more = {}
    if mask is not None:
        mask = torch.cat([mask, torch.ones(len(mask), length - mask.shape[1], dtype=torch.bool)], 1)
        places = (mask.long().cumsum(-1) - 1).clamp(min=0)
    for _ in range(count):
        if mask is not None:
            more = {"attention_mask": mask, "position_ids": places[:, seen : seen + ids.shape[1]]}
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **more)
        logits.append(out.logits[:, -1])
        tokens.append(logits[-1].argmax(-1))
        seen, ids = seen + ids.shape[1], tokens[-1][:, None]
    return torch.stack(tokens, 1), torch.stack(logits, 1)
