# SPDX-License-Identifier: Apache-2.0
"""Weights are exported as others read them: by `from_pretrained`, and by name."""

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import fpipe
from fpipe.checkpoints import export as exporting
from fpipe.tensors.tree import same_bits
from fpipe.weights.safetensors import write_safetensors
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


@pytest.fixture
def norms():
    """A pipeline, and the parameters and buffers of its model."""
    model = Norms()
    pipe = fpipe.pipeline(model, example=(torch.ones(4, 4),), loss=torch.mean, schedule=gpipe(2, 2), cuts=["b"])
    return pipe, *pipe.init(model)


def test_what_cannot_be_exported_is_refused(norms, tmp_path):
    pipe, params, buffers = norms
    with pytest.raises(fpipe.InputError, match=r"buffers: got none, expected \['scale', 'shift'\]"):
        fpipe.export(pipe, tmp_path, params)
    with pytest.raises(fpipe.InputError, match=r"params\['a\.bias'\]: got float64"):
        fpipe.export(pipe, tmp_path, {**params, "a.bias": torch.ones(4).double()}, buffers)
    assert not [*tmp_path.iterdir()]
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(fpipe.InputError, match=rf"got \['{name}'\], .*with no weights.*mixed"):
            fpipe.export(pipe, tmp_path, params, buffers)
        assert [entry.name for entry in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()
    with pytest.raises(fpipe.InputError, match=r"got a file, expected a directory"):
        fpipe.export(pipe, Path(__file__), params, buffers)


def test_an_export_replaces_the_one_before_whole_or_not_at_all(norms, tmp_path, monkeypatch):
    pipe, params, buffers = norms
    replace = exporting._replace

    def export(value):
        fpipe.export(pipe, tmp_path, {name: torch.full_like(p, value) for name, p in params.items()}, buffers)

    def found():
        """The value of all that is exported, and the names of the files."""
        values = fpipe.safetensors(tmp_path)
        (value,) = {one for name in params for one in values[name].flatten().tolist()}
        return value, sorted(entry.name for entry in tmp_path.iterdir())

    export(1.0)
    before = found()
    for failing in ("write_safetensors", "_replace", "write_durably"):
        with monkeypatch.context() as patch:
            patch.setattr(f"fpipe.checkpoints.export.{failing}", lambda path, *_: fill(path))
            with pytest.raises(OSError, match="No space left"):
                export(2.0)
        assert found() == before
    export(2.0)
    value, files = found()
    assert (value, len(files)) == (2.0, 2)
    assert not {*files} & {*before[1]} - {"model.safetensors.index.json"}
    with monkeypatch.context() as patch:
        patch.setattr("fpipe.checkpoints.export._replace", lambda *given: replace(*given) or fill(tmp_path))
        with pytest.raises(OSError, match="No space left"):
            export(3.0)
    assert found()[0] == 3.0, "the index is there already"


def fill(path):
    """Fill the disk with a part of a file."""
    if path.suffix == ".safetensors":
        path.write_bytes(b"the first part")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_weights_that_somebody_puts_there_meanwhile_stay(norms, tmp_path, monkeypatch):
    def write(path, tensors):
        save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
        write_safetensors(path, tensors)

    monkeypatch.setattr("fpipe.checkpoints.export.write_safetensors", write)
    fpipe.export(norms[0], tmp_path, *norms[1:])
    assert (tmp_path / "other.safetensors").exists()


def test_of_two_jobs_that_export_at_once_one_is_told(norms, tmp_path, monkeypatch):
    pipe, params, buffers = norms

    def write_late(path, tensors):
        """While this is written, another job's export begins and ends."""
        monkeypatch.undo()
        write_safetensors(path, tensors)
        fpipe.export(pipe, tmp_path, params, buffers)

    monkeypatch.setattr("fpipe.checkpoints.export.write_safetensors", write_late)
    with pytest.raises(fpipe.InputError, match=r"got no \['model-.*no other job uses"):
        fpipe.export(pipe, tmp_path, {name: p + 1 for name, p in params.items()}, buffers)
    assert all(same_bits(fpipe.safetensors(tmp_path)[name], p.detach()) for name, p in params.items())
