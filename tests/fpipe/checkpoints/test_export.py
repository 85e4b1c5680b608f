# SPDX-License-Identifier: Apache-2.0
"""Weights are exported as others read them: by `from_pretrained`, and by name."""

import json

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import dualpipe, gpipe, one_f_one_b


def test_a_hugging_face_model_reads_what_was_exported(tmp_path):
    config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    ids = torch.arange(8).reshape(2, 4)
    pipe = fpipe.pipeline(
        model,
        example={"input_ids": ids, "labels": ids, "use_cache": False},
        loss=lambda outputs: outputs.loss,
        schedule=one_f_one_b(ranks=2, microbatches=2),
    )
    params, buffers = pipe.init(model)
    params = {name: p.detach() + 1 for name, p in params.items()}
    fpipe.export(pipe, tmp_path, params, buffers)
    config.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(same_bits(p.detach(), params[name]) for name, p in again.named_parameters())
    assert again.lm_head.weight is again.transformer.wte.weight
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in params.values())
    assert set(index["weight_map"]) == set(dict(model.named_parameters()))


class Norms(nn.Module):
    """Two buffers of which state dicts have one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x):
        return self.b(self.a(x) * self.scale + self.shift)


@pytest.mark.parametrize("how", [gpipe(2, 2), dualpipe(2, 4)])
def test_what_is_exported_is_the_state_dict(how, tmp_path):
    model, x = Norms(), torch.ones(8, 4)
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=how, cuts=["b"])
    fpipe.export(pipe, tmp_path / "new" / "model", *pipe.init(model))
    found = fpipe.safetensors(tmp_path / "new" / "model")
    assert found.keys() == model.state_dict().keys()
    assert all(same_bits(found[name], value) for name, value in model.state_dict().items())
    assert fpipe.safetensors((tmp_path / "new" / "model").glob("*.safetensors")).keys() == found.keys()


def test_what_cannot_be_exported_is_refused(tmp_path):
    model, x = Norms(), torch.ones(4, 4)
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=gpipe(2, 2), cuts=["b"])
    params, buffers = pipe.init(model)
    with pytest.raises(fpipe.InputError, match=r"buffers: got none, expected \['scale', 'shift'\]"):
        fpipe.export(pipe, tmp_path, params)
    with pytest.raises(fpipe.InputError, match=r"params\['a\.bias'\]: got float64"):
        fpipe.export(pipe, tmp_path, {**params, "a.bias": torch.ones(4).double()}, buffers)
    assert not [*tmp_path.iterdir()]
    fpipe.export(pipe, tmp_path, params, buffers)
    with pytest.raises(fpipe.InputError, match=r"got \['model-00001-of-00001\.safetensors', .*without weights.*mix"):
        fpipe.export(pipe, tmp_path, params, buffers)
