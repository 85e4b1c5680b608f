# SPDX-License-Identifier: Apache-2.0
"""GPT-2, T5, ViT and decoders of transformers, tiny and random, and a UNet: bit for bit what one device computes.

Models as their authors wrote them, which compute their own loss: tied heads, encoders and decoders, skips over several
stages. Between stages of decoders, only hidden states cross. All other architectures of transformers are tried by
`benchmarks/architectures`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import fpipe
from schedules import interleaved_1f1b, one_f_one_b, v_1f1b
from tests.common.cases import Case, mse
from tests.common.comparison import Result, assert_same
from tests.common.loops import loop
from tests.common.running import build, run, run_reference
from tests.common.sizes import NIGHTLY, by_day, by_night, sampled

ROWS, LENGTH, WORDS, WIDTH = 4, 6, 31, 16


def gpt2(dropout: float = 0.0) -> nn.Module:
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = hf.GPT2Config(
        n_layer=4,
        n_embd=WIDTH,
        n_head=2,
        vocab_size=WORDS,
        n_positions=8,
        use_cache=False,
        decoder_start_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
        **drops,
    )
    return hf.GPT2LMHeadModel(config)


def t5(dropout: float = 0.0) -> nn.Module:
    config = hf.T5Config(
        num_layers=2,
        d_model=WIDTH,
        d_kv=8,
        d_ff=24,
        num_heads=2,
        vocab_size=WORDS,
        dropout_rate=dropout,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def vit(dropout: float = 0.0) -> nn.Module:
    config = hf.ViTConfig(
        num_hidden_layers=4, hidden_size=WIDTH, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_labels=5, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def padded(rows: int = ROWS) -> torch.Tensor:
    """An attention mask: rows are shorter and shorter."""
    return (torch.arange(LENGTH) < LENGTH - torch.arange(rows)[:, None]).long()


def ids(rows: int = ROWS) -> torch.Tensor:
    return torch.randint(3, WORDS, (rows, LENGTH))


def text(rows: int) -> tuple[Any, None]:
    words = ids()
    return {"input_ids": words, "attention_mask": padded(), "labels": words}, None


def translation(rows: int) -> tuple[Any, None]:
    return {"input_ids": ids(), "attention_mask": padded(), "labels": ids()}, None


def images(rows: int) -> tuple[Any, None]:
    return {"pixel_values": torch.randn(rows, 3, 8, 8), "labels": torch.randint(5, (rows,))}, None


def own(outputs: Any) -> torch.Tensor:
    """The loss that the model computed."""
    return outputs.loss


class Level(nn.Sequential):
    """Two convolutions, each with batch normalisation."""

    def __init__(self, inner: int, outer: int) -> None:
        halves = [(inner, outer), (outer, outer)]
        layers = [[nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.SiLU(inplace=True)] for a, b in halves]
        super().__init__(*layers[0], *layers[1])


class UNet(nn.Module):
    """Three levels down and up; every skip goes over stages that do not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Level(3, 4), Level(4, 8), Level(8, 8)])
        self.deepest = Level(8, 8)
        self.up = nn.ModuleList([Level(16, 8), Level(16, 4), Level(8, 4)])
        self.last = nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.deepest(x)
        for level in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = level(torch.cat([x, skips.pop()], 1))
        return self.last(x)


def pictures(rows: int) -> tuple[Any, torch.Tensor]:
    return (torch.randn(rows, 3, 16, 16),), torch.randn(rows, 3, 16, 16)


T5_CUTS = ("encoder.block.1", "decoder.block.0", "decoder.block.1")
CASES = {
    "gpt2": Case(gpt2, text, own, ("transformer.h.1", "transformer.h.2", "transformer.ln_f")),
    "t5": Case(t5, translation, own, T5_CUTS),
    "vit": Case(vit, images, own, ("vit.layers.1.layernorm_after", "vit.layers.2", "vit.layernorm")),
    "unet": Case(UNet, pictures, mse, ("down.2", "deepest", "up.1")),
}
SCHEDULES = {
    "1f1b, 2": lambda: one_f_one_b(ranks=2, microbatches=2),
    "1f1b, 4": lambda: one_f_one_b(ranks=4, microbatches=4),
    "interleaved, 4": lambda: interleaved_1f1b(ranks=2, microbatches=4, chunks=2),
    "v, 4": lambda: v_1f1b(ranks=2, microbatches=2),
}


def flat(result: Result) -> Result:
    """With a plain dict where a model returns one of its own."""
    return result._replace(outputs=dict(result.outputs)) if isinstance(result.outputs, dict) else result


@sampled(1)
@pytest.mark.parametrize(("name", "kind"), by_day(product(CASES, SCHEDULES), 5))
def test_transformers_equal_the_plain_loop_and_the_reference(name, kind):
    case, how = CASES[name], SCHEDULES[kind]()
    built = _, model, inputs, targets = build(case, how, ROWS, capture="trace")
    got = flat(run(*built))
    assert got.grads.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert_same(got, flat(run_reference(*built)))
    assert_same(got, loop(model, case.loss, inputs, targets, how.microbatches))


@sampled(2)
@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=by_night), pytest.param("vit", marks=by_night)])
def test_dropout_depends_neither_on_the_cuts_nor_on_the_schedule(name):
    make, case = {"gpt2": gpt2, "t5": t5, "vit": vit}[name], CASES[name]
    dropping = Case(lambda: make(0.2), case.batch, case.loss, case.cuts, random=True)
    results = []
    for kind in ("1f1b, 2", "v, 4"):
        built = build(dropping, SCHEDULES[kind](), ROWS, capture="trace")
        results.append(flat(run(*built, seed=3)))
        assert_same(results[-1], flat(run_reference(*built, seed=3)))
    assert_same(*results)
    assert not torch.equal(run(*built, seed=4).loss, results[-1].loss)


COMMON: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 4, "use_cache": False}
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
BY_DAY = [("llama", True), ("llama", False), ("gemma2", True), ("gpt2", True)]


def build_decoder(name: str, masked: bool) -> tuple[fpipe.Pipeline, Any, dict[str, torch.Tensor]]:
    """A decoder in three stages, cut at its layers, and a batch, padded if it is masked."""
    make, layers = DECODERS[name]
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(make())
    words = ids(5)
    batch = {"input_ids": words, "labels": words, **({"attention_mask": padded(5)} if masked else {})}
    pipe = fpipe.pipeline(
        model,
        example=batch,
        loss=lambda out: out.loss,
        schedule=one_f_one_b(ranks=3, microbatches=2),
        cuts=[f"{layers}.1", f"{layers}.3"],
    )
    return pipe, model, batch


@sampled(1)
@pytest.mark.parametrize(("name", "masked"), product(DECODERS, [True, False]) if NIGHTLY else BY_DAY)
def test_only_the_hidden_state_crosses(name: str, masked: bool) -> None:
    pipe, model, batch = build_decoder(name, masked)
    crossing = [[str(spec) for one in stage.gives for spec in one.specs] for stage in pipe.stages]
    hidden = [f"float32[{3}, {LENGTH}, {WIDTH}]"]
    assert crossing == [hidden, hidden, []]
    assert fpipe.verify(pipe, model, batch).eager


@by_night
def test_a_bias_that_is_learned_crosses() -> None:
    """Position biases of T5 follow from a parameter; its masks do not."""
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": WIDTH, "num_layers": 3, "num_heads": 2, "dropout_rate": 0.0}
    torch.manual_seed(0)
    model = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=WORDS, **sizes, use_cache=False))
    words = ids()
    batch = {"input_ids": words, "decoder_input_ids": words, "labels": words, "attention_mask": padded()}
    how = one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(model, example=batch, loss=lambda out: out.loss, schedule=how, cuts=["encoder.block.1"])
    crossing = [str(spec) for one in pipe.stages[0].gives for spec in one.specs]
    assert crossing == [f"float32[1, 2, {LENGTH}, {LENGTH}]", f"float32[2, {LENGTH}, {WIDTH}]"]
    assert fpipe.verify(pipe, model, batch).eager
