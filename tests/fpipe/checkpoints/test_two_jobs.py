# SPDX-License-Identifier: Apache-2.0
"""Two jobs that save to one path, and Ctrl-C: the checkpoint is always whole, and who lost is told."""

import errno
import gc
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fpipe
from schedules import gpipe
from tests.common.sizes import by_day

X = torch.ones(2, 4)


@pytest.fixture(scope="module")
def pipe():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return fpipe.pipeline(model, example=(X,), loss=torch.mean, schedule=gpipe(ranks=2, microbatches=2))


def begin(pipe, path, job, value):
    """Begin a save of parameters of one value, as a process that is called `job`; return the call that ends it."""
    shapes = {"0.weight": (4, 4), "0.bias": (4,), "1.weight": (1, 4), "1.bias": (1,)}
    params = {name: torch.full(shape, float(value), requires_grad=True) for name, shape in shapes.items()}

    def as_job(call):
        with patch("fpipe.checkpoints.claim.JOB", job):
            return call()

    finish = as_job(lambda: fpipe.begin_save(pipe, path, params=params, step=value))
    return lambda: as_job(finish)


def found(pipe, path):
    """The step of the checkpoint, of which all values are."""
    saved = fpipe.load(pipe, path)
    assert {value for p in saved.params.values() for value in p.detach().flatten().tolist()} == {saved.step}
    return saved.step


def test_the_first_to_finish_is_the_checkpoint_and_the_other_is_told(pipe, tmp_path):
    first, second = begin(pipe, tmp_path, "a", 1), begin(pipe, tmp_path, "b", 2)
    assert {"save-1", "save-2"} <= {*os.listdir(tmp_path)}
    second()
    with pytest.raises(
        fpipe.InputError,
        match=r"got save 2 of step 2, which another job finished after this one had begun save 1, expected one job at",
    ):
        first()
    with pytest.raises(fpipe.InputError, match="got a save that has failed"):
        first()
    assert found(pipe, tmp_path) == 2
    assert {*os.listdir(tmp_path)} == {"checkpoint.json", "save-2"}
    begin(pipe, tmp_path, "a", 3)()  # who saves alone again may
    assert found(pipe, tmp_path) == 3


def test_a_save_that_is_finished_leaves_what_another_job_writes(pipe, tmp_path):
    begin(pipe, tmp_path, "a", 1)()
    slow, quick = begin(pipe, tmp_path, "a", 2), begin(pipe, tmp_path, "b", 3)
    quick()
    assert {*os.listdir(tmp_path)} == {"checkpoint.json", "save-2", "save-3"}
    with pytest.raises(fpipe.InputError, match="another job"):
        slow()
    assert {*os.listdir(tmp_path)} == {"checkpoint.json", "save-3"}


def test_saves_of_one_job_are_finished_in_order(pipe, tmp_path):
    first, second = begin(pipe, tmp_path, "a", 1), begin(pipe, tmp_path, "a", 2)
    second()
    with pytest.raises(fpipe.InputError, match=r"got save 2, which began after save 1 but finished first.*order"):
        first()
    first, second = begin(pipe, tmp_path, "a", 3), begin(pipe, tmp_path, "a", 4)
    first()
    second()
    second()  # is done
    assert found(pipe, tmp_path) == 4


def test_what_a_killed_job_has_left_is_removed_before_anything_is_written(pipe, tmp_path):
    begin(pipe, tmp_path, "a", 1)()
    left = begin(pipe, tmp_path, "a", 2)
    while not (tmp_path / "save-2" / "model-00001-of-00001.json").exists():
        time.sleep(0.001)  # its thread, which a killed process has no more
    del left
    gc.collect()  # the lock ends with the process, or with who could finish it
    shutil.copytree(tmp_path / "save-2", tmp_path / "save-7")  # as of a version without locks
    finish = begin(pipe, tmp_path, "b", 3)
    assert {str(file.relative_to(tmp_path)) for file in tmp_path.glob("save-[27]/*")} == set()
    finish()
    assert {*os.listdir(tmp_path)} == {"checkpoint.json", "save-8"}
    assert found(pipe, tmp_path) == 3


def test_files_of_two_saves_are_refused(pipe, tmp_path):
    """Their checksums are all right."""
    for name, value in (("a", 1), ("b", 2)):
        begin(pipe, tmp_path / name, name, value)()
    shutil.rmtree(tmp_path / "a" / "save-1")
    shutil.copytree(tmp_path / "b" / "save-1", tmp_path / "a" / "save-1")
    with pytest.raises(fpipe.InputError, match=r"got a file of save 'b-.*, expected one of save 'a-.*two saves"):
        fpipe.load(pipe, tmp_path / "a")


def test_without_locks_nothing_is_removed_but_what_was_replaced(pipe, tmp_path):
    with patch("fcntl.flock", side_effect=OSError(errno.ENOSYS, "no locks")):
        slow = begin(pipe, tmp_path, "a", 1)
        for value in (2, 3):
            begin(pipe, tmp_path, "b", value)()
        assert {*os.listdir(tmp_path)} == {"checkpoint.json", "save-1", "save-3"}
        with pytest.raises(fpipe.InputError, match="another job"):
            slow()
    assert found(pipe, tmp_path) == 3


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["begin", "finish", "die"])), max_size=12))
def test_whatever_two_jobs_do_the_checkpoint_is_the_last_that_was_finished(pipe, does):
    pending, want = {"a": None, "b": None}, None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run")
        for value, (job, what) in enumerate(does, 1):
            if what == "begin":
                pending[job] = None
                pending[job] = value, begin(pipe, path, job, value)
            elif what == "die":
                pending[job] = None
            elif pending[job] is not None:
                (begun, finish), pending[job] = pending[job], None
                told = None
                try:
                    finish()
                except fpipe.InputError as error:
                    told = str(error)
                assert told is None or "another job" in told
                want = begun if told is None else want
            assert not fpipe.is_checkpoint(path) if want is None else found(pipe, path) == want
        finish = None
        pending.clear()
        gc.collect()
        begin(pipe, path, "c", 99)()
        assert found(pipe, path) == 99
        assert len([*path.glob("save-*")]) == 1


# ------------------------------------------------------------------------------------------------------------- Ctrl-C


def interrupt_at(place, call):
    """Call it, with Ctrl-C before a line of Python in the rooms of files runs first; return the lines that ran."""
    ran = {}

    def trace(frame, event, _):
        code = frame.f_code
        if "/fpipe/checkpoints/" not in code.co_filename and "/fpipe/weights/" not in code.co_filename:
            return None
        here = code.co_filename, frame.f_lineno
        if event == "line" and here not in ran:
            ran[here] = None
            if here == place:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return list(ran)


def save_and_load(pipe, path, value):
    begin(pipe, path, "a", value)()
    assert found(pipe, path) == value


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that was just opened
def test_ctrl_c_at_any_line_leaves_a_whole_checkpoint(pipe, tmp_path):
    """The one of before, or the new one; and the next save works."""
    save_and_load(pipe, tmp_path, 1)
    lines, step = interrupt_at(None, lambda: save_and_load(pipe, tmp_path, 2)), 2
    assert len(lines) > 200
    for place in by_day(lines, 8):
        with suppress(KeyboardInterrupt):
            interrupt_at(place, lambda step=step: save_and_load(pipe, tmp_path, step + 1))
        assert found(pipe, tmp_path) in (step, step + 1), place
        step = found(pipe, tmp_path)
    save_and_load(pipe, tmp_path, step + 1)
    gc.collect()
    assert len([*tmp_path.glob("save-*/*.safetensors")]) == 1


def test_ctrl_c_right_after_the_commit_keeps_the_files(pipe, tmp_path):
    """What was renamed into place names them."""
    save_and_load(pipe, tmp_path, 1)
    replace = Path.replace

    def interrupted(*paths):
        replace(*paths)
        if paths[1].name == "checkpoint.json":
            raise KeyboardInterrupt

    finish = begin(pipe, tmp_path, "a", 2)
    with patch.object(Path, "replace", interrupted), pytest.raises(KeyboardInterrupt):
        finish()
    assert found(pipe, tmp_path) == 2
    finish()


def test_ctrl_c_while_a_file_is_read_is_not_taken_for_a_damaged_one(pipe, tmp_path):
    """Torch drops what a signal's handler raises while it asks a mapped file for its first byte."""
    save_and_load(pipe, tmp_path, 1)
    get = torch.UntypedStorage.__getitem__

    def interrupted(storage, key):
        if key == 0:
            raise KeyboardInterrupt
        return get(storage, key)

    with patch.object(torch.UntypedStorage, "__getitem__", interrupted), pytest.raises(KeyboardInterrupt):
        fpipe.load(pipe, tmp_path)
    assert found(pipe, tmp_path) == 1
