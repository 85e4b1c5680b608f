# SPDX-License-Identifier: Apache-2.0
"""A run whose ranks are killed ends with the bits of one that nobody disturbed."""

import json
import random
import re

import pytest

import fpipe
from fpipe.tensors.tree import same_bits
from tests.common.examples import FOLDER, load_example
from tests.common.processes import run_under_torchrun
from tests.common.sizes import by_night

KILLED = """
import os, signal, sys, threading
import torch
sys.path.insert(0, {folder!r})
import fpipe, resume

rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
deaths = {deaths!r}  # of each start: the rank, and the call of make_batch or the second at which it is killed
original, calls = resume.make_batch, []

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def make_batch(step):
    calls.append(step)
    if restarts < len(deaths) and deaths[restarts][:2] == (rank, len(calls)):
        die()
    return original(step)

if restarts < len(deaths) and rank == deaths[restarts][0] and len(deaths[restarts]) == 3:
    threading.Timer(deaths[restarts][2], die).start()
resume.make_batch = make_batch
resume.main({options!r})
"""


@pytest.fixture
def resume():
    with load_example("resume") as module:
        yield module


def saved(path):
    """Every tensor of the last checkpoint by name."""
    markers = {json.loads(file.read_text())["step"]: file for file in path.glob("*/checkpoint.json")}
    (folder,) = markers[max(markers)].parent.glob("save-*")
    return fpipe.safetensors(folder)


def require_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not same_bits(one[name], other[name])] == []


def kill(tmp_path, deaths, ranks, steps, every):
    """Run the example under torchrun with these deaths; return what was saved in the end."""
    options = ["--path", str(tmp_path / "run"), "--steps", str(steps), "--every", str(every)]
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(folder=str(FOLDER), deaths=deaths, options=options))
    code, out, err = run_under_torchrun(script, ranks=ranks, restarts=len(deaths))
    assert code == 0, err
    assert f"step {steps:4}  loss" in out
    return saved(tmp_path / "run"), err


def test_a_run_that_is_killed_ends_as_if_it_had_not_been(resume, tmp_path):
    """Rank 1 is killed in its sixth step, between two saves; then all start again from the fourth."""
    found, err = kill(tmp_path, [(1, 7)], ranks=2, steps=8, every=4)
    assert "exitcode: -9" in err
    resume.main(["--path", str(tmp_path / "whole"), "--steps", "8", "--every", "8"])
    require_same(found, saved(tmp_path / "whole"))


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
    (shard,) = (tmp_path / "run" / "odd").glob("save-*/*.safetensors")
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    resume.main([*options, "--steps", "4"])
    assert re.findall(r"^step +(\d+)", capsys.readouterr().out, re.MULTILINE) == ["2", "4", "4"]
    resume.main(["--path", str(tmp_path / "whole"), "--steps", "4", "--every", "4"])
    require_same(saved(tmp_path / "run"), saved(tmp_path / "whole"))


@by_night
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moments(resume, tmp_path, seed):
    """Three deaths of any ranks at any time: while ranks connect, in a step, in a save."""
    chance = random.Random(seed)
    deaths = [(chance.randrange(4), 0, chance.uniform(1, 15)) for _ in range(3)]
    found, _ = kill(tmp_path, deaths, ranks=4, steps=150, every=1)
    resume.main(["--path", str(tmp_path / "whole"), "--steps", "150", "--every", "150"])
    require_same(found, saved(tmp_path / "whole"))
