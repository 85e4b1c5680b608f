# SPDX-License-Identifier: Apache-2.0
"""Decoders of transformers: only hidden states cross a cut, and every bit stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

import fpipe
from schedules import one_f_one_b
from tests.common.sizes import NIGHTLY

LENGTH, ROWS, WIDTH, LAYERS = 12, 5, 16, 4
COMMON: dict[str, Any] = {"vocab_size": 32, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "use_cache": False}
GROUPED = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": WIDTH}
WINDOW = {"head_dim": 8, "sliding_window": 4}


def config(kind: Callable[..., Any], **options: Any) -> Any:
    return kind(**COMMON, **options, pad_token_id=0, bos_token_id=1, eos_token_id=2)


DECODERS: dict[str, tuple[Callable[[], Any], str]] = {
    "llama": (lambda: config(hf.LlamaConfig, **GROUPED), "model.layers"),
    "gemma2": (lambda: config(hf.Gemma2Config, **GROUPED, **WINDOW), "model.layers"),
    "gemma3": (lambda: config(hf.Gemma3TextConfig, **GROUPED, **WINDOW), "model.layers"),
    "mistral": (lambda: config(hf.MistralConfig, **GROUPED, sliding_window=4), "model.layers"),
    "gpt_neox": (lambda: config(hf.GPTNeoXConfig, num_attention_heads=2, intermediate_size=WIDTH), "gpt_neox.layers"),
    "falcon": (lambda: config(hf.FalconConfig, num_attention_heads=2, alibi=True), "transformer.h"),
    "bloom": (lambda: config(hf.BloomConfig, n_head=2, hidden_dropout=0.0, attention_dropout=0.0), "transformer.h"),
    "gpt2": (
        lambda: config(hf.GPT2Config, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        "transformer.h",
    ),
}
CASES = [(name, masked) for name in DECODERS for masked in (True, False)]
BY_DAY = [("llama", True), ("llama", False), ("gemma2", True), ("gpt2", True)]


def build(name: str, masked: bool) -> tuple[fpipe.Pipeline, Any, dict[str, torch.Tensor]]:
    """A decoder in three stages, cut at its layers, and a batch, padded if it is masked."""
    make, layers = DECODERS[name]
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(make())
    ids = torch.randint(3, 32, (ROWS, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    if masked:
        batch["attention_mask"] = (torch.arange(LENGTH) < LENGTH - torch.arange(ROWS)[:, None]).long()
    pipe = fpipe.pipeline(
        model,
        example=batch,
        loss=lambda out: out.loss,
        schedule=one_f_one_b(ranks=3, microbatches=2),
        cuts=[f"{layers}.1", f"{layers}.3"],
    )
    return pipe, model, batch


@pytest.mark.parametrize(("name", "masked"), CASES if NIGHTLY else BY_DAY)
def test_only_the_hidden_state_crosses(name: str, masked: bool) -> None:
    pipe, model, batch = build(name, masked)
    crossing = [[str(spec) for one in stage.gives for spec in one.specs] for stage in pipe.stages]
    hidden = [f"float32[{-(-ROWS // 2)}, {LENGTH}, {WIDTH}]"]
    assert crossing == [hidden, hidden, []]
    assert fpipe.verify(pipe, model, batch).eager


def test_a_bias_that_is_learned_crosses() -> None:
    """Position biases of T5 follow from a parameter; its masks do not."""
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": WIDTH, "num_layers": 3, "num_heads": 2, "dropout_rate": 0.0}
    torch.manual_seed(0)
    model = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=32, **sizes, use_cache=False))
    ids = torch.randint(3, 32, (4, LENGTH))
    batch = {"input_ids": ids, "decoder_input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][:, -2:] = 0
    how = one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(model, example=batch, loss=lambda out: out.loss, schedule=how, cuts=["encoder.block.1"])
    crossing = [str(spec) for one in pipe.stages[0].gives for spec in one.specs]
    assert crossing == [f"float32[1, 2, {LENGTH}, {LENGTH}]", f"float32[2, {LENGTH}, {WIDTH}]"]
    assert fpipe.verify(pipe, model, batch).eager
