# SPDX-License-Identifier: Apache-2.0
"""What is not a checkpoint of this model, or can't become one, is refused by name, and nothing is overwritten."""

import errno
import json
import os
import re
import shutil
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.checkpoints.manifest import sign, sum_file
from fpipe.tensors.tree import same_bits
from schedules import gpipe

X = torch.ones(4, 4)


def pipeline_of(model, example=X):
    return fpipe.pipeline(model, example=(example,), loss=torch.mean, schedule=gpipe(ranks=2, microbatches=2))


def model_of(width=8, dtype=torch.float32, bias=True, between=None):
    between = nn.BatchNorm1d(width, dtype=dtype) if between is None else between
    return nn.Sequential(nn.Linear(4, width, dtype=dtype), between, nn.Linear(width, 1, bias=bias, dtype=dtype))


@pytest.fixture(scope="module")
def pipe():
    return pipeline_of(model_of())


@pytest.fixture(scope="module")
def run(pipe):
    """Parameters, buffers and an optimizer's state."""
    params, buffers = pipe.init(model_of())
    state = {name: {"step": 2, "exp_avg": torch.randn_like(p)} for name, p in params.items()}
    return {"params": params, "buffers": buffers, "state": state}


@pytest.fixture(scope="module")
def original(pipe, run, tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / "run"
    fpipe.save(pipe, path, **run, step=7)
    return path


@pytest.fixture
def saved(original, tmp_path):
    """A copy of the checkpoint, to damage."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def contents(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


SHARD = "save-1/model-00001-of-00001.safetensors"
SIDECAR = "save-1/model-00001-of-00001.json"


def cut(file):
    file.write_bytes(file.read_bytes()[:-7])


def rename_leaf(path):
    """Another header of the same size: a leaf has another name. The checksum is right."""
    data = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(data.replace(b"params.0.bias", b"params.0.bits"))
    resign(path / SIDECAR, checksum=sum_file(path / SHARD))


def resign(file, **changes):
    """Change fields, as someone would who knows of the checksum."""
    fields = json.loads(file.read_text())
    del fields["crc32"]
    file.write_text(sign({**fields, **changes}))


def resign_without(file, name):
    """Drop a field."""
    fields = json.loads(file.read_text())
    del fields["crc32"], fields[name]
    file.write_text(sign(fields))


DAMAGES = {
    "no marker": (
        lambda path: (path / "checkpoint.json").unlink(),
        r"got no checkpoint\.json.*interrupted leaves none",
    ),
    "no JSON": (lambda path: cut(path / "checkpoint.json"), r"checkpoint\.json: got JSONDecodeError.*Copy the checkp"),
    "another JSON": (
        lambda path: (path / "checkpoint.json").write_text("[1]"),
        r"got \[1\], expected the fields of a checkpoint",
    ),
    "another format": (
        lambda path: (path / "checkpoint.json").write_text(json.dumps({"version": 9})),
        r"got \{'version': 9\}, expected a checkpoint of version 3.*the version of fpipe that saved it",
    ),
    "a field less": (lambda path: resign_without(path / "checkpoint.json", "data"), r"got no data, expected any value"),
    "another fields": (
        lambda path: resign(path / "checkpoint.json", no=2),
        r"got the fields \['no'\], expected none of these",
    ),
    "cut shard": (lambda path: cut(path / SHARD), r"00001\.safetensors: got \d+ bytes, expected \d+ bytes\. Copy the"),
    "no shard": (lambda path: (path / SHARD).unlink(), r"00001\.safetensors: got no file, expected \d+ bytes"),
    "no sidecar": (lambda path: (path / SIDECAR).unlink(), r"00001\.json: got FileNotFoundError"),
    "cut sidecar": (lambda path: cut(path / SIDECAR), r"00001\.json: got JSONDecodeError"),
    "no folder": (lambda path: shutil.rmtree(path / "save-1"), r"00001\.json: got FileNotFoundError"),
    "damaged header": (
        lambda path: (path / SHARD).write_bytes(b"\xff" * (path / SHARD).stat().st_size),
        r"00001\.safetensors: got the checksum \w+, expected \w+: the file was altered",
    ),
    "another name": (rename_leaf, r"got 6 params.*missing \['0\.bias'\], unexpected \['0\.bits'\]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(pipe, saved, damage):
    harm, words = DAMAGES[damage]
    harm(saved)
    with pytest.raises(fpipe.InputError, match=words):
        fpipe.load(pipe, saved)


@given(st.data())
def test_a_flipped_bit_anywhere_is_noticed(pipe, original, tmp_path_factory, data):
    path = Path(shutil.copytree(original, tmp_path_factory.mktemp("flipped") / "run"))
    file = path / data.draw(st.sampled_from(["checkpoint.json", SIDECAR, SHARD]))
    found = bytearray(file.read_bytes())
    found[data.draw(st.integers(0, len(found) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(found)
    with pytest.raises(fpipe.InputError, match="expected"):
        fpipe.load(pipe, path)


def test_of_several_paths_the_newest_whole_checkpoint_is_loaded(pipe, run, tmp_path):
    paths = [tmp_path / name for name in ("first", "second", "third", "nothing")]
    for step, path in enumerate(paths[:3], 1):
        fpipe.save(pipe, path, **run, step=step)
    assert fpipe.load(pipe, paths).step == 3
    flip(paths[2] / SHARD)
    assert fpipe.load(pipe, paths).step == 2
    cut(paths[1] / "checkpoint.json")
    assert fpipe.load(pipe, paths).step == 1
    (paths[0] / SIDECAR).unlink()
    with pytest.raises(fpipe.InputError, match=r"got 4 paths, expected at least one .*JSONDecode.*checksum.*No such"):
        fpipe.load(pipe, paths)


def flip(file):
    """Flip one bit of the last tensor."""
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def replace_by_pipe(file):
    file.unlink()
    os.mkfifo(file)


def nest(file, levels):
    """Data that holds a list that holds a list."""
    fields = json.loads(file.read_text())
    del fields["crc32"]
    text = json.dumps({**fields, "data": None}).replace('"data": null', f'"data": {"[" * levels}{"]" * levels}')
    file.write_text(f'{{"crc32": {zlib.crc32(text.encode())}, {text[1:]}')


def write_long_header(path):
    """One name, and blanks."""
    size = 2**25 + 8
    (path / SHARD).write_bytes(size.to_bytes(8, "little") + b"{}" + b" " * (size - 2))
    resign(path / SIDECAR, checksum=sum_file(path / SHARD), size=(path / SHARD).stat().st_size)


def write_header(path, length, shape=(2**40,), end=2**42):
    """A file of tensors whose header lies; its checksum and size are right."""
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}
    header = json.dumps({"data.0": entry}).encode()
    (path / SHARD).write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header)
    resign(path / SIDECAR, checksum=sum_file(path / SHARD), size=(path / SHARD).stat().st_size)


HOSTILE = {
    "a pipe among its files": (lambda path: os.mkfifo(path / "save-1/extra.safetensors"), "expected only what fpipe"),
    "a pipe for a shard": (lambda path: replace_by_pipe(path / SHARD), "no regular file"),
    "a pipe for a sidecar": (lambda path: replace_by_pipe(path / SIDECAR), "no regular file"),
    "a folder elsewhere": (
        lambda path: resign(path / "checkpoint.json", save="1/../../elsewhere"),
        "got save='1/../../elsewhere', expected int",
    ),
    "a billion processes": (lambda path: resign(path / "checkpoint.json", shards=10**9), "at most 65536 processes"),
    "a step before the first": (lambda path: resign(path / "checkpoint.json", step=-5), "at step -5, expected"),
    "a step of any length": (lambda path: resign(path / "checkpoint.json", step=10**4000), "expected a save and proc"),
    "data of any depth": (lambda path: nest(path / "checkpoint.json", 600), "expected"),
    "data deeper than a save's": (lambda path: nest(path / "checkpoint.json", 110), "more than 100 levels"),
    "a number in place of a tensor": (
        lambda path: resign(path / SIDECAR, numbers={"params.0.bias": 1}),
        "got ['params.0.bias', 'params.0.bias'], expected tensors that",
    ),
    "sizes of which torch makes no tensor": (
        lambda path: write_header(path, None, [0, 2**63 - 1, 2**63 - 1], 0),
        "Stride calculation overflowed, expected a complete safetensors file",
    ),
    "a header that takes long to read": (
        write_long_header,
        "got a header of 33554440 bytes, expected at most",
    ),
    "a tensor of another kind": (
        lambda path: resign(path / "checkpoint.json", data={"$tensor": "params.0.bias"}),
        "expected a tensor of the checkpoint",
    ),
    "a tuple of nothing": (lambda path: resign(path / "checkpoint.json", data={"$tuple": 3}), "expected the items"),
    "numbers that are none": (lambda path: resign(path / SIDECAR, numbers={"state.0.bias.step": "x"}), "expected num"),
    "names that are none": (lambda path: resign(path / SIDECAR, on_device=[3]), "expected names"),
    "a header of any length": (lambda path: write_header(path, 2**62), "expected a complete safetensors file"),
    "a tensor larger than the file": (lambda path: write_header(path, None), "expected a complete safetensors file"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_checkpoint_is_refused_at_once(pipe, saved, what):
    harm, words = HOSTILE[what]
    harm(saved)
    with pytest.raises(fpipe.InputError, match=re.escape(words)):
        fpipe.load(pipe, saved)


OTHERS = {
    "a wider layer": (model_of(width=6), r"params\['0\.weight'\]: got .*\[8, 4\].*, expected .*\[6, 4\].*never cast"),
    "another dtype": (
        model_of(dtype=torch.float64),
        r"params\['0\.weight'\]: got float32.*, expected float64.*never cast",
    ),
    "no bias": (
        model_of(bias=False),
        r"got 6 params, expected the model's 5 \(missing \[\], unexpected \['2\.bias'\]\)",
    ),
    "no norm": (model_of(between=nn.Tanh()), r"expected the model's 4 .*unexpected \['1\.bias', '1\.weight'\]"),
    "another norm": (
        model_of(between=nn.BatchNorm1d(8, track_running_stats=False)),
        r"got 3 buffers, expected the model's 0 .*unexpected \['1\.num_batches_tracked'",
    ),
    "one more layer": (nn.Sequential(*model_of(), nn.Linear(1, 1)), r"missing \['3\.weight', '3\.bias'\]"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_checkpoint_of_another_model_is_refused(original, kind):
    model, words = OTHERS[kind]
    with pytest.raises(fpipe.InputError, match=words):
        fpipe.load(pipeline_of(model, X.to(next(model.parameters()).dtype)), original)


def test_scalars_of_the_state_are_read_where_they_were(pipe, run, tmp_path, monkeypatch):
    state = {name: {"step": torch.tensor(2.0)} for name in run["params"]}
    fpipe.save(pipe, tmp_path, params=run["params"], buffers=run["buffers"], state=state, step=7)
    resign(tmp_path / SIDECAR, on_device=["state.0.bias.step"])

    def elsewhere(specs, placed):
        return {name: replace(spec, device=torch.device("meta")) for name, spec in specs.items()}

    monkeypatch.setattr("fpipe.checkpoints.load.whole_specs", elsewhere)
    read = fpipe.load(pipe, tmp_path).state
    assert (read["0.bias"]["step"].device.type, read["0.weight"]["step"].device.type) == ("meta", "cpu")


def test_no_checkpoint_is_refused(pipe, tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        assert not fpipe.is_checkpoint(path)
        with pytest.raises(fpipe.InputError, match=r"got no checkpoint\.json, expected a checkpoint\. Check the path"):
            fpipe.load(pipe, path)


def change(run, kind, name, value):
    return {**run, kind: {**run[kind], name: value}}


def without(run, kind, name):
    return {**run, kind: {other: value for other, value in run[kind].items() if other != name}}


ONE = torch.ones(8)
ARGUMENTS = {
    "another shape": (lambda run: change(run, "params", "0.bias", torch.ones(3)), r"params\['0\.bias'\]: got .*\[3\]"),
    "another dtype": (lambda run: change(run, "params", "0.bias", ONE.double()), r"params\['0\.bias'\]: got float64"),
    "on meta": (lambda run: change(run, "params", "0.bias", ONE.to("meta")), r"params\['0\.bias'\].*meta device"),
    "a parameter less": (lambda run: without(run, "params", "0.bias"), r"params: got 5 leaves.*missing \['0\.bias'\]"),
    "a parameter more": (lambda run: change(run, "params", "new", ONE), r"params: got 7 leaves.*unexpected \['new'\]"),
    "no buffers": (
        lambda run: {**run, "buffers": None},
        r"buffers: got none, expected \['1\.running_mean'.*out\.buffers",
    ),
    "a buffer less": (lambda run: without(run, "buffers", "1.running_var"), r"buffers: got 2 leaves.*running_var"),
    "numbered state": (
        lambda run: {**run, "state": {"state": {0: {}}, "param_groups": []}},
        r"state\['state'\]: got state of a parameter that this process does not hold.*state_dict\(\) numbers them",
    ),
    "a list of states": (lambda run: {**run, "state": [{}]}, r"state: got list, expected a dict \{parameter: \{slot"),
    "no slots": (
        lambda run: change(run, "state", "0.bias", ONE),
        r"state\['0\.bias'\]: got Tensor, expected a dict by s",
    ),
    "an object": (
        lambda run: change(run, "state", "0.bias", {"cache": [1]}),
        r"state\['0\.bias'\]\['cache'\]: got list, expected a tensor or a number.*data=",
    ),
    "a numbered slot": (lambda run: change(run, "state", "0.bias", {0: 1}), r"state\['0\.bias'\]\[0\]: got int"),
    "a dtype without a name": (
        lambda run: change(run, "state", "0.bias", {"z": ONE.to(torch.complex128)}),
        r"state\['0\.bias'\]\['z'\]: got complex128.*, expected a dtype that safetensors files have.*view_as_real",
    ),
    "sparse": (
        lambda run: change(run, "state", "0.bias", {"z": ONE.to_sparse()}),
        r"state\['0\.bias'\]\['z'\]: got a tensor on cpu of layout torch\.sparse_coo.*to_dense",
    ),
    "a set": (
        lambda run: {**run, "data": {"seen": [{1}]}},
        r"data\['seen'\]\[0\]: got set, expected None, a bool.*pickles",
    ),
    "a key": (lambda run: {**run, "data": {"$x": 1}}, r"data: got the key '\$x', expected text.*Rename it"),
    "a number as key": (lambda run: {**run, "data": {"a": {1: 1}}}, r"data\['a'\]: got the key 1, expected text"),
    "half a step": (lambda run: {**run, "step": 1.5}, r"step: got 1\.5, expected an int"),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_what_a_checkpoint_cannot_hold_is_refused_and_nothing_overwritten(pipe, run, saved, kind):
    arguments, words = ARGUMENTS[kind]
    before = contents(saved)
    with pytest.raises(fpipe.InputError, match=words):
        fpipe.save(pipe, saved, **arguments(run))
    assert contents(saved) == before


def test_other_files_are_not_overwritten(pipe, run, tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("mine")
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    for path, words in ((file, "got a file"), (folder, r"got a directory with \['thesis\.tex'\]")):
        with pytest.raises(fpipe.InputError, match=rf"{words}, expected a checkpoint, an empty.*Choose another path"):
            fpipe.save(pipe, path, **run)
    assert contents(tmp_path) == {"file": b"mine", "folder/thesis.tex": b"mine"}


def test_a_folder_that_may_not_be_read_is_refused(pipe, run, saved, monkeypatch):
    """Another path is taken in its place, and nothing is saved into it, or beside it."""

    def refuse(path, *args, **kwargs):
        if Path(path).parts[-2:] in ((saved.name, "checkpoint.json"), (saved.parent.name, saved.name)):
            raise PermissionError(13, "Permission denied", str(path))
        return known(path, *args, **kwargs)

    fpipe.save(pipe, saved.parent / "other", **run, step=3)
    known = os.stat
    monkeypatch.setattr(os, "stat", refuse)
    for call in (fpipe.is_checkpoint, partial(fpipe.load, pipe), lambda path: fpipe.save(pipe, path, **run)):
        with pytest.raises(fpipe.InputError, match=r"PermissionError.*, expected a folder that this process may read"):
            call(saved)
    assert fpipe.load(pipe, [saved, saved.parent / "other"]).step == 3


def test_a_folder_of_the_last_number_is_refused(pipe, run, tmp_path):
    """The save after it could not be loaded."""
    (tmp_path / "save-999999999999999999").mkdir()
    (tmp_path / "save-999999999999999999" / "mine").mkdir()
    with pytest.raises(fpipe.InputError, match=r"got save-9+, after which there is no number, expected folders"):
        fpipe.save(pipe, tmp_path, **run)


PLANTED = {
    "a link": lambda path: path.symlink_to(path.parents[1] / "victim"),
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_stands_where_a_save_might_write_is_not_followed(pipe, run, saved, tmp_path, what):
    """Under the names that other versions use, and the next that this one uses."""
    (tmp_path / "victim").write_text("mine")
    for name in ("checkpoint.json.new", "save-2"):
        PLANTED[what](saved / name)
    fpipe.save(pipe, saved, **run, step=9)
    assert fpipe.load(pipe, saved).step == 9
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize("path", ["s3://bucket/run", "gs://bucket/run", Path("memory://run")])
def test_an_address_is_no_folder(pipe, run, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: fpipe.save(pipe, path, **run),
        lambda: fpipe.load(pipe, path),
        lambda: fpipe.safetensors(path),
    ):
        with pytest.raises(fpipe.InputError, match="which is an address, expected the path of a file on this machine"):
            call()
    assert not os.listdir(tmp_path)


def test_files_beside_a_checkpoint_are_left_alone(pipe, run, saved):
    (saved / "log.txt").write_text("mine")
    (saved / "save-best").mkdir()
    fpipe.save(pipe, saved, **run)
    assert {entry.name for entry in saved.iterdir()} == {"checkpoint.json", "save-2", "log.txt", "save-best"}


def test_a_save_that_fails_anywhere_leaves_the_checkpoint_before_it(pipe, run, saved, monkeypatch):
    """Fail at every point in turn at which a file is made durable or renamed, until a save succeeds."""
    newer = {**run, "params": {name: (p.detach() + 1).requires_grad_() for name, p in run["params"].items()}}
    originals = {(os, "fsync"): os.fsync, (Path, "replace"): Path.replace}
    for failures in range(20):
        left = iter(range(failures))

        def fail(original, left=left):
            def call(*given):
                if next(left, None) is None:
                    raise OSError("disk full")
                return original(*given)

            return call

        with monkeypatch.context() as patch:
            for (owner, name), function in originals.items():
                patch.setattr(owner, name, fail(function))
            try:
                fpipe.save(pipe, saved, **newer, step=8)
            except OSError:
                done = False
            else:
                done = True
        found = fpipe.load(pipe, saved)
        committed = done or found.step == 8  # only the last of all, once the marker is in place
        want = (newer if committed else run)["params"]
        assert found.step == (8 if committed else 7)
        assert all(same_bits(found.params[name].detach(), want[name].detach()) for name in want)
        if done:
            break
    assert failures == 7, "shard, sidecar, and marker: each is synced, and the last two also renamed in a synced folder"
    names = {str(file) for file in contents(saved)}
    assert all(name == "checkpoint.json" or re.match(r"save-\d+/", name) for name in names)
    assert len({name.split("/")[0] for name in names}) == 2, "the folders of failed saves are gone"


def test_a_save_to_a_full_disk_says_so_and_leaves_nothing(pipe, run, saved, monkeypatch):
    """Else no later save ever finds room."""
    before = contents(saved)

    def run_out(path, written):
        path.write_bytes(b"the first part")
        raise OSError(errno.ENOSPC, "No space left on device")

    for writer in ("save.write_safetensors", "claim.write_new"):
        with monkeypatch.context() as patch:
            patch.setattr(f"fpipe.checkpoints.{writer}", run_out)
            with pytest.raises(
                OSError, match=r"/run/.* No space left .*, with \d+ bytes free, expected to write \d+ b"
            ) as told:
                fpipe.save(pipe, saved, **run)
        assert told.value.errno == errno.ENOSPC
        assert contents(saved) == before
    fpipe.save(pipe, saved, **run)
    assert {entry.name for entry in saved.iterdir()} == {"checkpoint.json", "save-4"}


def test_files_that_are_not_there_are_not_committed(pipe, run, saved, monkeypatch):
    """As on a file system that the ranks do not share."""
    before = contents(saved)
    monkeypatch.setattr("fpipe.checkpoints.save.write_sidecar", lambda *given: None)
    with pytest.raises(
        fpipe.InputError, match=r"save-2: got no \['model-00001.*'\], expected the files of all 1 .*share"
    ):
        fpipe.save(pipe, saved, **run)
    monkeypatch.undo()
    assert {name: data for name, data in contents(saved).items() if not name.startswith("save-2")} == before
