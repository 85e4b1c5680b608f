# SPDX-License-Identifier: Apache-2.0
"""Files of weights, checkpoints, profiles and plans: whatever is in them, the answer is a value or a named error."""

import ast
import json
import os
import struct
import tempfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import fpipe
from fpipe.checkpoints.manifest import sign
from schedules import gpipe
from tests.common.hostile import JSON, PLANTS, answer, changed, damaged, within

HOME = Path(__file__).parents[3]
X = torch.ones(2, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def pipe():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return fpipe.pipeline(model, example=(X,), loss=torch.mean, schedule=gpipe(ranks=2, microbatches=2))


@pytest.fixture(scope="module")
def documents(folder):
    """A profile and a plan, as JSON values."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    profile = fpipe.profile(model, (X,), loss=torch.mean, microbatches=2, seconds=0)
    plan = fpipe.plan(model, (X,), loss=torch.mean, ranks=2, microbatches=2, profile=profile, seconds=1)
    profile.save(folder / "profile.json")
    plan.save(folder / "plan.json")
    return {
        fpipe.Profile.read: json.loads((folder / "profile.json").read_text()),
        fpipe.Plan.read: json.loads((folder / "plan.json").read_text()),
    }


@given(st.data())
def test_profiles_and_plans_are_read_or_refused(documents, folder, data):
    read = data.draw(st.sampled_from(list(documents)))
    file = folder / "changed.json"
    file.write_text(json.dumps(data.draw(changed(documents[read], JSON | st.just("\x1b[2J")))))
    assert "\x1b" not in str(answer(read, file))


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_files_of_anything_are_refused(folder, data):
    for name, read in (
        ("any.json", fpipe.Profile.read),
        ("any.json", fpipe.Plan.read),
        ("any.json", fpipe.safetensors),
        ("any.safetensors", fpipe.safetensors),
    ):
        (folder / name).write_bytes(data)
        answer(read, folder / name)


HEADERS = st.dictionaries(
    st.text(max_size=5) | st.just("__metadata__"),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "I64", "BOOL", "X", 3]),
            "shape": st.lists(st.sampled_from([0, 1, 4, -1, 2**40, 2**63, "x"]), max_size=3),
            "data_offsets": st.lists(st.sampled_from([0, 4, 16, -1, 2**63]), max_size=3),
        }
    )
    | JSON,
    max_size=3,
)


@given(HEADERS, st.sampled_from([None, 0, 1, 2**20, 2**63]), st.binary(max_size=16))
def test_headers_of_safetensors_are_read_or_refused(folder, header, length, rest):
    text = json.dumps(header).encode()
    file = folder / "header.safetensors"
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + rest)
    found = answer(fpipe.safetensors, file)
    for name in found or ():
        answer(found.__getitem__, name)


NAMES = st.sampled_from(["a.safetensors", "../secret.bin", "/etc/passwd", "..", ".", "", "a/../../b", "\0", "pipe", 3])


@given(st.dictionaries(st.sampled_from("xyz"), NAMES, max_size=3) | JSON)
def test_an_index_names_files_of_its_directory_only(folder, weights):
    home = folder / "model"
    if not home.exists():
        home.mkdir()
        save_file({"x": torch.ones(1)}, home / "a.safetensors")
        save_file({"x": torch.zeros(1)}, folder / "secret.bin")
        os.mkfifo(home / "pipe")
    index = home / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    found = answer(fpipe.safetensors, index)
    for name in found or ():
        assert all(file.resolve().is_relative_to(home.resolve()) for file in found.files[name])
        value = answer(found.__getitem__, name)
        assert value is None or value == 1


def test_links_in_the_directory_are_followed(folder):
    """As in the cache of Hugging Face, where names are links to files elsewhere."""
    elsewhere, home = folder / "blobs", folder / "snapshot"
    elsewhere.mkdir()
    home.mkdir()
    save_file({"x": torch.ones(1)}, elsewhere / "blob")
    (home / "a.safetensors").symlink_to(elsewhere / "blob")
    (home / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert fpipe.safetensors(home)["x"] == 1


@given(st.data())
def test_manifests_of_checkpoints_are_read_or_refused(pipe, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("checkpoint")
    params, _ = pipe.init({"0.weight": torch.ones(4, 4), "0.bias": X[0], "1.weight": X[:1], "1.bias": X[0, :1]})
    fpipe.save(pipe, path, params=params, state={"0.bias": {"step": 1, "sum": X[0]}}, data={"a": (1, X), "b": [2.0]})
    shard = path / "save-1" / "model-00001-of-00001.safetensors"
    file = data.draw(st.sampled_from([path / "checkpoint.json", shard.with_suffix(".json")]))
    fields = json.loads(file.read_text())
    del fields["crc32"]
    others = JSON | st.sampled_from([{"$tensor": "data.0"}, {"$tuple": [1]}])
    new = data.draw(changed(fields, others))
    file.write_text(sign(new) if isinstance(new, dict) else json.dumps(new))
    answer(fpipe.load, pipe, path)


def bits(value):
    """A value with its tensors as bits, to compare."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), list(value.shape), value.detach().contiguous().view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {name: bits(one) for name, one in value.items()}
    return [type(value), *map(bits, value)] if isinstance(value, list | tuple) else value


@pytest.fixture(scope="module")
def undamaged(pipe, documents, tmp_path_factory):
    """The bytes of each file of a checkpoint, a profile and a plan, and how each of the three is read."""
    home = tmp_path_factory.mktemp("undamaged")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    params, _ = pipe.init(model)
    state = {"0.bias": {"step": 2**70, "sum": X[0]}, "1.weight": {"rate": 0.1, "on": True}}
    fpipe.save(pipe, home / "run", params=params, state=state, step=7, data={"a": (1, X), "b": [2.5, None, "text"]})
    for read, document in documents.items():
        (home / f"{read.__self__.__name__}.json").write_text(json.dumps(document))
    reads = {
        "run": lambda path: fpipe.load(pipe, path),
        "Profile.json": fpipe.Profile.read,
        "Plan.json": fpipe.Plan.read,
    }
    files = {str(file.relative_to(home)): file.read_bytes() for file in home.rglob("*") if file.is_file()}
    return files, {name: (read, bits(read(home / name))) for name, read in reads.items()}


@given(st.data())
def test_damaged_files_are_refused_or_read_with_the_same_values(undamaged, data):
    files, reads = undamaged
    name = data.draw(st.sampled_from(sorted(files)))
    kind = data.draw(st.sampled_from(["damaged", "damaged", "another", *PLANTS]))
    read, want = reads[name.split("/")[0]]
    with tempfile.TemporaryDirectory() as folder, within(20):
        for other, content in files.items():
            Path(folder, other).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, other).write_bytes(content)
        file = Path(folder, name)
        if kind in PLANTS:
            file.unlink()
            PLANTS[kind](file)
        else:
            file.write_bytes(
                files[data.draw(st.sampled_from(sorted(files)))]
                if kind == "another"
                else data.draw(damaged(files[name]))
            )
        found = answer(read, Path(folder, name.split("/")[0]))
    assert found is None or bits(found) == want


@given(st.data())
def test_headers_of_a_checkpoint_are_read_or_refused(pipe, undamaged, data):
    """By someone who knows of the checksum: other names, dtypes, shapes, places and metadata."""
    files, _ = undamaged
    shard = "run/save-1/model-00001-of-00001.safetensors"
    (length,) = struct.unpack("<Q", files[shard][:8])
    header = json.loads(files[shard][8 : 8 + length])
    others = JSON | st.sampled_from(
        [[0, 2**62], [2**62], [0, 2**63 - 1, 2**63 - 1], [0, 0], "F64", "F4", {"saved_offsets": [2]}]
    )
    text = json.dumps(data.draw(changed(header, others))).encode()
    made = struct.pack("<Q", len(text)) + text + files[shard][8 + length :]
    with tempfile.TemporaryDirectory() as folder, within(20):
        for other, content in files.items():
            Path(folder, other).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, other).write_bytes(content)
        Path(folder, shard).write_bytes(made)
        sidecar = Path(folder, shard).with_suffix(".json")
        fields = json.loads(sidecar.read_text()) | {"size": len(made), "checksum": zlib.crc32(made)}
        del fields["crc32"]
        sidecar.write_text(sign(fields))
        answer(fpipe.load, pipe, Path(folder, "run"))


FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "cloudpickle", "dill"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__", "all_gather_object", "broadcast_object_list", "gather_object"}
FORBIDDEN_CALLS |= {"scatter_object_list", "send_object_list", "recv_object_list", "unpickle", "load_state_dict_file"}
ALLOWED = {
    ("fpipe/stages/graph/codegen.py", "exec"),  # of lines that name values by position
    ("schedules/arrays/codes.py", "marshal"),  # which packs integers, and loads nothing
    ("schedules/testing/suite.py", "eval"),  # of a repr, in users' own tests
    ("schedules/testing/suite.py", "pickle"),
}


def uses(file):
    """What a module imports and calls by these names."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr != "eval":
            yield node.func.attr
            if node.func.attr == "load" and isinstance(node.func.value, ast.Name):
                yield f"{node.func.value.id}.load"


def test_nothing_is_unpickled_or_evaluated():
    files = [*(HOME / "fpipe").rglob("*.py"), *(HOME / "schedules").rglob("*.py")]
    forbidden = FORBIDDEN_MODULES | FORBIDDEN_CALLS | {"torch.load", "pickle.load"}
    found = {(str(file.relative_to(HOME)), name) for file in files for name in uses(file) if name in forbidden}
    assert found == ALLOWED
