# SPDX-License-Identifier: Apache-2.0
"""What transformers asks while it runs: whether it is traced, and what is in a batch."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import transformers
from torch import nn
from transformers import masking_utils
from transformers.utils import import_utils

import fpipe
from schedules import one_f_one_b
from tests.common.generators import seeded
from tests.common.running import require_eager
from tests.common.sizes import NIGHTLY, sampled

LENGTH, WORDS, WIDTH, HEADS, GROUPS = 64, 50, 128, 4, 2  # heads of dimension 32
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "use_cache": False,
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=48)),
}
BACKWARDS = [("mistral", "autograd"), ("llama", "graph")]
BACKWARDS += [("llama", "autograd"), ("qwen2", "autograd")] if NIGHTLY else []
ROWS = 4


def padded(rows: slice) -> torch.Tensor:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[rows, :10] = 0
    return mask


def batches() -> dict[str, dict[str, torch.Tensor]]:
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=seeded(1))
    steps = torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous()
    packed = torch.cat([torch.arange(30), torch.arange(34)]).expand(ROWS, LENGTH).contiguous()
    masked = {"input_ids": ids, "labels": ids}
    masks = {"ones": padded(slice(0)), "padded": padded(slice(None)), "half": padded(slice(0, 1))}
    found = {name: masked | {"attention_mask": mask, "position_ids": steps} for name, mask in masks.items()}
    return found | {"packed": masked | {"attention_mask": masks["ones"], "position_ids": packed}}


def plain(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and gradients of a loop that knows nothing of fpipe."""
    model, total = copy.deepcopy(model), torch.zeros(())
    for i in range(2):
        loss = model(**{name: leaf.chunk(2)[i] for name, leaf in batch.items()}).loss / 2
        loss.backward()
        total = loss.detach() if i == 0 else total + loss.detach()
    return total, {name: p.grad for name, p in model.named_parameters()}


def masks_sent(pipe: fpipe.Pipeline) -> int:
    return sum(spec.dtype is torch.bool for stage in pipe.stages for one in stage.gives for spec in one.specs)


@sampled(1)
@pytest.mark.parametrize(("name", "backward"), BACKWARDS)
def test_models_with_grouped_heads_are_exact_for_batches_in_turns(name, backward):
    torch.manual_seed(0)
    model = MODELS[name]()
    how = one_f_one_b(ranks=2, microbatches=2)
    turns = batches()
    pipe = fpipe.pipeline(
        copy.deepcopy(model),
        example=turns["ones"],
        loss=lambda out: out.loss,
        schedule=how,
        gradients=fpipe.Gradients(backward=backward),
    )
    assert name == "mistral" or masks_sent(pipe) == 0
    params, buffers = pipe.init(model)
    step = fpipe.value_and_grad(pipe)
    for which in ("ones", "padded", "packed", "half", "ones"):
        out, grads = step(params, buffers, turns[which])
        loss, expected = plain(model, turns[which])
        assert torch.equal(out.loss, loss), which
        assert grads.keys() == expected.keys()
        assert all(torch.equal(grads[key], expected[key]) for key in grads), which


def test_no_mask_crosses_a_cut_where_there_is_none():
    torch.manual_seed(0)
    model, ids = MODELS["llama"](), torch.randint(0, WORDS, (ROWS, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    pipe = fpipe.pipeline(model, example=batch, loss=lambda out: out.loss, schedule=one_f_one_b(2, 2))
    assert masks_sent(pipe) == 0
    fpipe.verify(pipe, model, batch)


class Curious(nn.Module):
    """Asks `question(hidden)`, and turns its result around if the answer is yes."""

    def __init__(self, question):
        super().__init__()
        self.first, self.second, self.question = nn.Linear(2, 2), nn.Linear(2, 2), question

    def forward(self, x):
        hidden = self.first(x)
        return self.second(-hidden if self.question(hidden) else hidden)


WORDS_OF_TRACING = ("tracing", "compiling", "exporting", "fake", "proxy", "jitting", "capturing")
QUESTIONS = [
    function
    for name, function in inspect.getmembers(import_utils, inspect.isfunction)
    if name.startswith("is_") and any(word in name for word in WORDS_OF_TRACING)
]


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_questions_about_tracing_are_answered_as_in_an_eager_run(backward):
    assert {"is_tracing", "is_torchdynamo_compiling", "is_fake_tensor"} <= {one.__name__ for one in QUESTIONS}
    asked = [(one, bool(inspect.signature(one).parameters)) for one in QUESTIONS]
    model = Curious(lambda hidden: any(one(hidden) if takes else one() for one, takes in asked))
    require_eager(model, (torch.ones(4, 2),), cuts=["second"], backward=backward)


MASKS = sorted(
    name
    for name, function in inspect.getmembers(masking_utils, inspect.isfunction)
    if name.startswith("create_") and {"config", "inputs_embeds"} <= inspect.signature(function).parameters.keys()
)


class Masked(nn.Module):
    """Attends under the mask that one of transformers' functions makes, if it makes one."""

    def __init__(self, create):
        super().__init__()
        self.first, self.second, self.create = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), create
        self.config = transformers.MistralConfig(**SIZES, sliding_window=48, attn_implementation="sdpa")
        self.config.attention_chunk_size = 48

    def forward(self, x, attention_mask, position_ids):
        known = {"past_key_values": None, "attention_mask": attention_mask, "position_ids": position_ids}
        takes = inspect.signature(self.create).parameters
        arguments = {name: value for name, value in known.items() if name in takes}
        mask = self.create(config=self.config, inputs_embeds=x, **arguments)
        hidden = self.first(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        for one in mask.values() if isinstance(mask, dict) else (mask,):
            if one is not None and one.dim() == 4:
                hidden = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=one)
        return self.second(hidden.transpose(1, 2).reshape(x.shape))


@sampled(2)
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_transformers_are_made_as_in_an_eager_run(name):
    assert len(MASKS) > 5
    torch.manual_seed(0)
    model, turns = Masked(getattr(masking_utils, name)), batches()
    x = torch.randn(ROWS, LENGTH, WIDTH)
    examples = {key: (x, one["attention_mask"], one["position_ids"]) for key, one in turns.items()}
    pipe = fpipe.pipeline(model, example=examples["ones"], loss=torch.sum, schedule=one_f_one_b(2, 2), cuts=["second"])
    for which in ("ones", "half", "packed"):
        fpipe.verify(pipe, model, examples[which])
