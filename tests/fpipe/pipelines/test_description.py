# SPDX-License-Identifier: Apache-2.0
"""What `print(pipe)` shows."""

import pytest
import torch
from torch import nn

import fpipe
from schedules import dualpipe, gpipe, one_f_one_b
from tests.common.cases import WIDTH, mse
from tests.common.running import build
from tests.common.schedules import SCHEDULES
from tests.common.sizes import by_night, sampled
from tests.common.zoo import ZOO


def test_a_pipeline_prints_its_stages():
    case, how = ZOO["gpt"], one_f_one_b(ranks=4, microbatches=2)
    pipe, *_ = build(case, how, 4, capture="trace")
    assert str(pipe).splitlines() == [
        "Pipeline of GPT under one_f_one_b(ranks=4, microbatches=2)",
        "4 stages, 712 parameters (2.8 KiB), all trainable",
        "8 channels between ranks, at most 4 on one rank, each a process group, with NCCL some 360 MiB there",
        "",
        "stage 0 on rank 0",
        "  modules     embed, place, blocks.0, 2 other operations",
        "  parameters  220 (880 B), all trainable",
        "  reads       inputs[0]",
        "  outputs     to stage 1: 96 B per microbatch, 96 B of cotangents back",
        "                float32[2, 3, 4]  from blocks.0",
        "  receives    from stage 3: 176 B of cotangents per microbatch",
        "  keeps       1.1 KiB per microbatch",
        "",
        "stage 1 on rank 1",
        "  modules     blocks.1",
        "  parameters  164 (656 B), all trainable",
        "  outputs     to stage 2: 96 B per microbatch, 96 B of cotangents back",
        "                float32[2, 3, 4]  from blocks.1",
        "  keeps       1.1 KiB per microbatch",
        "",
        "stage 2 on rank 2",
        "  modules     blocks.2-3",
        "  parameters  328 (1.3 KiB), all trainable",
        "  outputs     to stage 3: 96 B per microbatch, 96 B of cotangents back",
        "                float32[2, 3, 4]  from blocks.3",
        "  keeps       2.2 KiB per microbatch",
        "",
        "stage 3 on rank 3",
        "  modules     head, loss, 1 other operation",
        "  parameters  44 (176 B), all trainable",
        "  reads       targets",
        "  keeps       364 B per microbatch",
        "",
        "tied parameters",
        "  embed.weight = head.weight: stages 0, 3, owned by stage 0",
    ]


CHAIN, HALVES = SCHEDULES["one_f_one_b"](4, 2), SCHEDULES["split_backward"](4, 2)


@sampled(2)
@pytest.mark.parametrize(
    ("case", "how", "words"),
    [
        ("frozen_below", CHAIN, "36 trainable|all frozen|(80 B), 16 trainable|32 B per microbatch, no cotangents"),
        ("normalised", CHAIN, "  buffers     3 (40 B)"),
        ("twice", CHAIN, "b, b@1, 1 other operation|shared.bias: stages 0, 3, owned by stage 0"),
        ("later", CHAIN, "int64[2, 3]       from pick"),
        ("one_weight", CHAIN, "0.weight = 2.weight = 4.weight = 6.weight: stages 0, 1, 2, 3, owned by stage 0"),
        (
            "strides",
            CHAIN,
            "stage 3: 192 B per microbatch, 768 B of cotangents back|float32[2, 20, 12]  from the model",
        ),
        ("gpt", HALVES, "undeferred  blocks.2.norm.weight, blocks.2.norm.bias, "),
        ("gpt", HALVES, " computed by native_layer_norm_backward.default"),
        ("gpt", HALVES, "  keeps       2.2 KiB per microbatch, 2.3 KiB for the weight half of its backward"),
        ("mlp", dualpipe(ranks=4, microbatches=2), "stage 1 on ranks 1, 2"),
        ("gpt", gpipe(ranks=1, microbatches=2), "modules     the whole model, loss, 1 other operation"),
        ("gpt", gpipe(ranks=1, microbatches=2), "embed.weight = head.weight: stage 0"),
    ],
)
def test_a_printed_pipeline_shows_what_is_special_about_it(case, how, words):
    text = str(build(ZOO[case], how, 4, capture="trace")[0])
    assert not [one for one in words.split("|") if one not in text], text
    assert ("undeferred" in text) is (how is HALVES)


class Wide(nn.Module):
    """Many modules of different names, whose results all cross the cut, and one weight for all of them."""

    def __init__(self, count):
        super().__init__()
        for k in range(count):
            self.add_module(f"layer_{k:03}", nn.Linear(WIDTH, WIDTH))
            self.get_submodule(f"layer_{k:03}").weight = self.layer_000.weight
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        found = [layer(x) for name, layer in self.named_children() if name != "last"]
        return self.last(sum(found))


@by_night
def test_long_lists_end_in_a_count():
    x = torch.randn(4, WIDTH)
    how = gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(Wide(200), example=(x,), targets=x, loss=mse, schedule=how, cuts=["layer_100"])
    lines = str(pipe).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 40
    text = "\n".join(lines)
    assert "layer_011, ... 88 more" in text
    assert "layer_000.weight = layer_001.weight = layer_002.weight = 197 more names: stages 0, 1," in text
    assert "              ... 88 more" in text


def test_a_long_chain_is_one_entry():
    x = torch.randn(4, WIDTH)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(100)])
    pipe = fpipe.pipeline(model, example=(x,), targets=x, loss=mse, schedule=gpipe(ranks=2, microbatches=2), cuts=[60])
    assert "modules     0-59\n" in str(pipe)
    assert "modules     60-99, loss" in str(pipe)


def test_gradients_that_are_summed_are_printed():
    pipe, *_ = build(ZOO["one_weight"], gpipe(ranks=4, microbatches=2), 4, tied="sum", capture="trace")
    assert "6.weight: stages 0, 1, 2, 3, gradients summed once a step" in str(pipe)


def test_names_of_modules_do_not_control_the_terminal():
    model = nn.Sequential()
    model.add_module("a\x1b[2J", nn.Linear(WIDTH, WIDTH))
    model.add_module("b", nn.Linear(WIDTH, WIDTH))
    x = torch.ones(4, WIDTH)
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=gpipe(ranks=2, microbatches=2))
    assert "a\\x1b[2J" in str(pipe)
    assert "\x1b" not in str(pipe)
