# SPDX-License-Identifier: Apache-2.0
"""Every example but the demo fits on a page, runs in one process, and prints the same on two ranks of torchrun."""

import re
import shlex
import sys

import pytest

from tests.common.examples import FOLDER, load_example
from tests.common.processes import run_under_torchrun
from tests.common.sizes import by_night

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks
TINY = {
    "custom_schedule": "",
    "drop_in": "--steps 3",
    "functional_loop": "--steps 2",
    "generate": "--layers 2 --width 16 --prompts 4 --groups 2 --context 4 --count 4",
    "lora": "--steps 1",
}
SAME = {  # the lines that must be the same on any number of ranks
    "custom_schedule": "42 tensors are those of one device, 42 those of the module",
    "drop_in": "step|.* of the next words",
    "functional_loop": "step",
    "generate": "likeliest|drawn|all 16 tokens are those of the plain loop",
    "lora": "step|final loss .* on one device too",
}
LINES = {"drop_in": 3, "functional_loop": 2, "generate": 3, "lora": 2, "custom_schedule": 1}


def lines_of(name, printed):
    """The lines that say what was computed, without times."""
    found = re.findall(rf"^(?:{SAME[name]}).*$", printed, re.MULTILINE)
    return [re.sub(r"; [0-9.]+ ms.*", "", line) for line in found]


def run_alone(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, *shlex.split(TINY[name])])
    with load_example(name) as example:
        example.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("name", TINY)
def test_an_example_runs_in_one_process(name, monkeypatch, capsys):
    printed = run_alone(name, monkeypatch, capsys)
    assert len(lines_of(name, printed)) == LINES[name], printed


@by_night
@pytest.mark.parametrize("name", [name for name in TINY if name != "custom_schedule"])
def test_two_ranks_print_the_same(name, monkeypatch, capsys):
    code, out, err = run_under_torchrun(FOLDER / f"{name}.py", *shlex.split(TINY[name]))
    assert code == 0, err
    assert lines_of(name, out) == lines_of(name, run_alone(name, monkeypatch, capsys))


@by_night
def test_an_invented_schedule_runs_on_three_ranks():
    code, out, err = run_under_torchrun(FOLDER / "custom_schedule.py", ranks=3)
    assert code == 0, err
    assert re.search(r"^[1-9]\d* tensors are those of one device, [1-9]\d* those of the module", out, re.MULTILINE)


def test_every_example_but_the_demo_fits_on_a_page():
    long = {path.name for path in FOLDER.glob("*.py") if len(path.read_text().splitlines()) >= 100}
    assert long == {"train_gpt.py"}
    assert {path.stem for path in FOLDER.glob("*.py")} == {*TINY, "train_gpt", "resume"}
