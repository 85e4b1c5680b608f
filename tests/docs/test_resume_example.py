# SPDX-License-Identifier: Apache-2.0
"""A run whose ranks are killed ends with the bits of one that nobody disturbed."""

import re

import pytest

import fpipe
from fpipe.tensors.tree import same_bits
from tests.common.examples import FOLDER, load_example
from tests.common.processes import run_under_torchrun
from tests.common.sizes import by_night

KILLED = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import resume

original, calls = resume.make_batch, []

def make_batch(step):
    calls.append(step)
    if len(calls) == 7 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return original(step)

resume.make_batch = make_batch
resume.main({options!r})
"""


@pytest.fixture
def resume():
    with load_example("resume") as module:
        yield module


def saved(path):
    """Every tensor of the last checkpoint by name."""
    (folder,) = max(path.glob("step-*")).glob("save-*")
    return fpipe.safetensors(folder)


def require_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not same_bits(one[name], other[name])] == []


@by_night
def test_torchrun_starts_a_run_again_that_is_killed(resume, tmp_path):
    """Rank 1 is killed in its sixth step, between two saves; then all start again from the fourth.

    By day, `tests/distributed/test_comeback.py` kills more ranks in less time.
    """
    options = ["--path", str(tmp_path / "run"), "--steps", "8", "--every", "4"]
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(folder=str(FOLDER), options=options))
    code, out, err = run_under_torchrun(script, restarts=1)
    assert code == 0, err
    assert "step    8  loss" in out
    assert "exitcode: -9" in err
    resume.main(["--path", str(tmp_path / "whole"), "--steps", "8", "--every", "8"])
    require_same(saved(tmp_path / "run"), saved(tmp_path / "whole"))


def test_a_run_goes_on_from_where_it_stopped(resume, tmp_path, capsys):
    """The first batch that it takes after a restart is the one that follows the checkpoint."""
    options = ["--path", str(tmp_path / "run"), "--every", "2"]
    resume.main([*options, "--steps", "4"])
    made, original = [], resume.make_batch
    resume.make_batch = lambda step: made.append(step) or original(step)
    resume.main([*options, "--steps", "6"])
    assert made == [0, 4, 5], "the example's batch, and those of two steps"
    assert re.findall(r"^step +(\d+)", capsys.readouterr().out, re.MULTILINE) == ["2", "4", "6"]


def test_a_run_goes_on_from_the_checkpoint_before_one_that_was_altered(resume, tmp_path, capsys):
    options = ["--path", str(tmp_path / "run"), "--every", "2"]
    resume.main([*options, "--steps", "4"])
    (shard,) = (tmp_path / "run" / "step-000004").glob("save-*/*.safetensors")
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    resume.main([*options, "--steps", "4"])
    assert re.findall(r"^step +(\d+)", capsys.readouterr().out, re.MULTILINE) == ["2", "4", "4"]
    resume.main(["--path", str(tmp_path / "whole"), "--steps", "4", "--every", "4"])
    require_same(saved(tmp_path / "run"), saved(tmp_path / "whole"))


def test_the_last_three_checkpoints_are_kept(resume, tmp_path):
    resume.main(["--path", str(tmp_path), "--steps", "5", "--every", "1"])
    assert sorted(place.name for place in tmp_path.iterdir()) == ["step-000003", "step-000004", "step-000005"]
