# SPDX-License-Identifier: Apache-2.0
"""Decoders of transformers in slices, through their cache: the reference's bits."""

import copy
from itertools import product

import pytest
import torch
from torch.nn.functional import cross_entropy

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import seq_1f1b
from tests.common.sizes import sampled

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 16, "hidden_size": 16, "num_attention_heads": 2}


def llama(**options):
    sizes = {**SIZES, "intermediate_size": 16, "num_hidden_layers": 2, "num_key_value_heads": 1, **options}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), "model.layers.1"


def gpt2():
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    config = transformers.GPT2Config(vocab_size=16, n_embd=16, n_layer=2, n_head=2, n_positions=32, **off, **ends)
    return transformers.GPT2LMHeadModel(config), "transformer.h.1"


def mistral():
    sizes = {**SIZES, "intermediate_size": 16, "num_hidden_layers": 2, "num_key_value_heads": 1, "sliding_window": 4}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes)), "model.layers.1"


def bert():
    sizes = {**SIZES, "intermediate_size": 16, "num_hidden_layers": 2}
    return transformers.BertModel(transformers.BertConfig(**sizes)), "encoder.layer.1"


def loss(outputs, words):
    return cross_entropy(outputs.logits.flatten(0, 1), words.flatten())


def batch():
    torch.manual_seed(0)
    words = torch.randint(16, (4, 13))
    return words[:, :-1], words[:, 1:].clone()


def pad(ids):
    """A mask of padding on the left, of other lengths in each row."""
    return (torch.arange(ids.shape[1]) >= torch.arange(len(ids))[:, None]).long()


@sampled(2)
@pytest.mark.parametrize(("make", "slices", "masked"), [*product([llama, gpt2], [2, 3], [True, False])])
def test_decoders_train_slice_by_slice(make, slices, masked):
    torch.manual_seed(0)
    (model, cut), (ids, words) = make(), batch()
    inputs = {"input_ids": ids} | ({"attention_mask": pad(ids)} if masked else {})
    how = seq_1f1b(2, 2, slices=slices)
    pipe = fpipe.pipeline(model, example=inputs, targets=words, loss=loss, schedule=how, cuts=[cut])
    state = pipe.init(model)
    out, grads = fpipe.value_and_grad(pipe)(*state, inputs, words)
    reference, wanted = fpipe.reference(pipe)(*state, inputs, words)
    assert same_bits(out.loss, reference.loss)
    assert all(same_bits(grads[name], wanted[name]) for name in wanted)
    one, total = copy.deepcopy(model), 0
    for k in range(2):
        value = loss(one(**{name: leaf.chunk(2)[k] for name, leaf in inputs.items()}), words.chunk(2)[k]) / 2
        value.backward()
        total += value.detach()
    torch.testing.assert_close(out.loss, total, rtol=1e-6, atol=1e-6)
    for name, p in one.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-6)


REFUSALS = {
    "labels": (llama, lambda ids: {"labels": ids}, lambda outputs: outputs.loss, "'labels'.: got labels for 2 slices"),
    "windows": (mistral, lambda ids: {}, loss, "MistralForCausalLM with .*, expected full attention in every layer"),
    "bidirectional": (bert, lambda ids: {}, loss, "BertModel for 2 slices, expected a causal language model"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_a_cache_cannot_carry_is_refused(what):
    make, more, value, message = REFUSALS[what]
    (model, cut), (ids, words) = make(), batch()
    with pytest.raises(fpipe.InputError, match=message):
        fpipe.pipeline(
            model,
            example={"input_ids": ids, **more(ids)},
            targets=None if what == "labels" else words,
            loss=value,
            schedule=seq_1f1b(2, 2, slices=2),
            cuts=[cut],
        )
