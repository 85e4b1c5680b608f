# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: one mapping, of which nothing is read but what is asked for; and back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fpipe
from fpipe.tensors.tree import same_bits
from fpipe.weights import safetensors as checkpoint
from tests.common.shares import on_meta, ranks_of, union
from tests.common.sizes import sampled
from tests.common.zoo import ZOO

A, B = {"a": torch.arange(3), "b": torch.randn(2, 2)}, {"c": torch.ones(2, dtype=torch.bfloat16)}


@pytest.fixture
def folder(tmp_path):
    save_file(A, tmp_path / "model-1.safetensors")
    save_file(B, tmp_path / "model-2.safetensors")
    return tmp_path


def index(folder):
    files = dict.fromkeys(A, "model-1.safetensors") | dict.fromkeys(B, "model-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder / "model.safetensors.index.json"


def test_a_directory_files_or_an_index_can_be_read(folder):
    files = sorted(folder.glob("*.safetensors"))
    sources = [folder, str(folder), files, [str(file) for file in files], index(folder), folder]
    for found in map(fpipe.safetensors, sources):
        assert set(found) == set(A) | set(B)
        assert len(found) == 3
        assert "a" in found
        assert "d" not in found
        assert all(same_bits(found[name], value) for name, value in {**A, **B}.items())
        with pytest.raises(KeyError):
            found["d"]
    assert set(fpipe.safetensors(files[0])) == set(A)


def test_an_index_says_which_files_count(folder):
    save_file({"old": torch.ones(1)}, folder / "consolidated.safetensors")
    assert "old" in fpipe.safetensors(folder)
    index(folder)
    assert "old" not in fpipe.safetensors(folder)


def test_only_tensors_that_a_rank_holds_are_read(folder, monkeypatch):
    read = []

    def reading(path, name, original=checkpoint._read_tensor):
        read.append((path.name, name))
        return original(path, name)

    monkeypatch.setattr(checkpoint, "_read_tensor", reading)
    model = ZOO["mlp"].make(4)[0]
    for k in (0, 2, 4, 6):
        save_file({f"{k}.{name}": value for name, value in model[k].state_dict().items()}, folder / f"{k}.safetensors")
    source = fpipe.safetensors([folder / f"{k}.safetensors" for k in (0, 2, 4, 6)])
    for k, rank in enumerate(ranks_of(on_meta(ZOO["mlp"], 4))):
        read.clear()
        params, _ = rank.init(source)
        assert sorted(read) == [(f"{2 * k}.safetensors", f"{2 * k}.{name}") for name in ("bias", "weight")]
        assert all(same_bits(params[name], model.state_dict()[name]) for name in params)


def test_a_tensor_outlives_its_file(folder):
    value = fpipe.safetensors(folder)["b"]
    (folder / "model-1.safetensors").unlink()
    assert torch.equal(value, A["b"])


@sampled(1)
@pytest.mark.parametrize("name", ["gpt", "normalised"])
def test_one_rank_loads_what_two_ranks_saved(name, tmp_path):
    """A tied parameter that both hold is in both files; a state dict's names are all there."""
    pair, alone = on_meta(ZOO[name], 2), on_meta(ZOO[name])
    model = ZOO[name].make(4)[0]
    source = {**dict(model.named_buffers()), **model.state_dict()}
    shares = [rank.init(source) for rank in ranks_of(pair)]
    for rank, (params, buffers) in enumerate(shares):
        save_file({**params, **buffers}, tmp_path / f"rank-{rank}.safetensors")
    loaded = union([alone.init(fpipe.safetensors(tmp_path))])
    expected = union(shares)
    assert loaded.keys() == expected.keys()
    assert all(same_bits(loaded[leaf], expected[leaf]) for leaf in expected)
    missing, unexpected = model.load_state_dict(dict(fpipe.safetensors(tmp_path)), strict=False)
    assert set(missing) <= {"head.weight"}
    assert set(unexpected) <= {"3.scale"}


# --------------------------------------------------------------------------------------------------------------- errors


def test_a_name_has_one_value(folder):
    save_file({"a": A["a"]}, folder / "model-3.safetensors")
    assert torch.equal(fpipe.safetensors(folder)["a"], A["a"])
    save_file({"a": A["a"] + 1}, folder / "model-3.safetensors")
    found = fpipe.safetensors(folder)
    assert torch.equal(found["b"], A["b"])
    with pytest.raises(fpipe.InputError, match=r"a: got different values in \[.*model-1.*model-3.*\], expected"):
        found["a"]


@pytest.mark.parametrize("differs", [1, 2, 3])
def test_a_name_in_several_files_has_one_value(tmp_path, differs):
    for k in range(4):
        save_file({"a": A["a"] + (k == differs)}, tmp_path / f"rank-{k}.safetensors")
    with pytest.raises(fpipe.InputError, match=r"a: got different values in \[.*rank-0.*rank-3.*\], expected the same"):
        fpipe.safetensors(tmp_path)["a"]


def test_files_that_cannot_be_read_are_named(folder):
    (folder / "torn.safetensors").write_bytes((folder / "model-1.safetensors").read_bytes()[:-4])
    (folder / "other.json").write_text("{}")
    (folder / "empty").mkdir()
    for name, words in (
        ("missing.safetensors", "got FileNotFoundError"),
        ("torn.safetensors", "got SafetensorError"),
        ("other.json", "got {}, expected an index with a weight_map, a dict from names to files"),
        ("empty", "got no *.safetensors, expected at least one"),
    ):
        with pytest.raises(fpipe.InputError) as caught:
            fpipe.safetensors(folder / name)
        assert str(caught.value).startswith(f"{folder / name}: {words}")


def test_no_file_is_written_that_would_take_too_long_to_read(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MOST_HEADER", 8)
    with pytest.raises(fpipe.InputError, match=r"got a header of .* bytes, expected at most 8, .*Split the file"):
        checkpoint.write_safetensors(tmp_path / "many.safetensors", A)


def test_a_missing_file_is_named(folder):
    found = fpipe.safetensors(index(folder))
    Path(folder / "model-2.safetensors").unlink()
    assert torch.equal(found["a"], A["a"])
    with pytest.raises(fpipe.InputError, match=r"model-2.safetensors: got FileNotFoundError"):
        found["c"]
