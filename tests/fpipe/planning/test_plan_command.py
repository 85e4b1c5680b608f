# SPDX-License-Identifier: Apache-2.0
"""`python -m fpipe plan`, `doctor` and `prove`, as a user types them."""

from dataclasses import replace

import pytest

from fpipe import Plan
from fpipe.__main__ import main
from tests.common.chain_profiles import chain_profile
from tests.common.sizes import sampled

TASK = """
import torch

def task():
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
    return {"model": model, "example": (torch.ones(8, 8),), "loss": torch.mean}

def half():
    return {"model": torch.nn.Linear(8, 8)}

def nothing():
    return 3
"""


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    chain_profile([3, 1, 4, 1, 5, 9, 2, 6]).save(path)
    return path


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TASK)
    return path


def test_a_profile_is_planned_drawn_and_saved(profile, tmp_path, capsys):
    saved = tmp_path / "plan.json"
    words = ["plan", str(profile), "--ranks", "2", "--microbatches", "4", "--schedules", "zb_v,one_f_one_b"]
    assert (
        main([*words, "--memory", "1kB", "--cuts", "4", "--save", str(saved), "--page", str(tmp_path / "p.html")]) == 0
    )
    assert (tmp_path / "p.html").read_text().startswith("<!DOCTYPE html>")
    out = capsys.readouterr().out
    plan = Plan.read(saved)
    assert str(plan) in out
    assert str(plan.schedule) in out
    assert "4" in plan.cuts


def test_a_profile_of_slices_is_planned_for_them(tmp_path, capsys):
    path = tmp_path / "profile.json"
    replace(chain_profile([3, 1, 4, 1]), slices=(1.0, 2.0)).save(path)
    assert main(["plan", str(path), "--ranks", "2", "--microbatches", "2", "--slices", "2"]) == 0
    assert "seq_1f1b(ranks=2, microbatches=2, slices=2)" in capsys.readouterr().out


def test_a_task_is_measured_and_planned(script, capsys):
    assert main(["plan", f"{script}:task", "--ranks", "2", "--microbatches", "4", "--seconds", "5"]) == 0
    assert "Plan for Sequential on 2 ranks" in capsys.readouterr().out


@sampled(2)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{profile}"], "expected one number of each"),
        (
            ["{profile}", "--ranks", "2", "--microbatches", "4", "--memory", "3 B"],
            "memory: got 3.0 B, expected at least",
        ),
        (["{profile}", "--ranks", "2", "--microbatches", "4", "--schedules", "zigzag"], "got 'zigzag'"),
        (["{profile}", "--ranks", "2", "--microbatches", "4", "--cuts", "99"], "got '99'"),
        (["{profile}", "--ranks", "2", "--microbatches", "4", "--slices", "1,2"], "got slices=[1, 2], expected 1"),
        (["{script}:task"], "ranks: got none"),
        (["{script}:nothing", "--ranks", "2"], "got int, expected a function that returns the arguments"),
        (["{script}:other", "--ranks", "2"], "got NoneType"),
        (["{script}:half", "--ranks", "2"], "['example'] among them"),
        (["{script}", "--ranks", "2"], "expected a profile that fpipe saved"),
        (["missing.json", "--ranks", "2"], "missing.json: "),
    ],
)
def test_what_makes_no_sense_is_said(profile, script, capsys, words, said):
    filled = [word.format(profile=profile, script=script) for word in words]
    assert main(["plan", *filled]) == 2
    assert said in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- doctor

PATIENT = """
import torch
from torch import nn

class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x)
        return self.b(h) if h.sum() > 0 else h

def healthy():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
        return {"model": model, "example": (torch.ones(8, 8),), "loss": torch.mean, "microbatches": 4, "ranks": 2}

def ill():
    return {"model": Deciding(), "example": (torch.ones(8, 8),), "loss": torch.mean, "ranks": 2}

def loose():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    return {"model": model, "example": (torch.ones(8, 8),), "loss": torch.mean, "weights": "many"}
"""


@pytest.fixture
def patient(tmp_path):
    path = tmp_path / "patient.py"
    path.write_text(PATIENT)
    return path


def test_a_model_without_values_is_diagnosed(patient, capsys):
    assert main(["doctor", f"{patient}:healthy", "--memory", "1MB", "--seconds", "1"]) == 0
    out = capsys.readouterr().out
    for words in ("healthy can be a pipeline.", "Plan for Sequential on 2 ranks", "A GPU needs", "stage 1 on rank 1"):
        assert words in out
    assert max(map(len, out.split("\n"))) < 200


def test_a_model_that_is_rejected_is_told_where_and_what_to_do(patient, capsys):
    assert main(["doctor", f"{patient}:ill", "--seconds", "1"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{patient}:ill can't be a pipeline without changes:")
    assert "return self.b(h) if h.sum() > 0 else h" in out
    assert "Take control flow" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["healthy", "--memory", "1B"], "memory: got 1.0 B"),
        (["loose"], "weights"),
        (["absent"], "expected a function that returns"),
    ],
)
def test_a_diagnosis_that_makes_no_sense_is_refused(patient, words, said, capsys):
    assert main(["doctor", f"{patient}:{words[0]}", *words[1:], "--seconds", "1"]) == 2
    assert said in capsys.readouterr().err
    assert main(["doctor", str(patient)]) == 2


# --------------------------------------------------------------------------------------------------------------- prove


def test_a_proof_is_printed(script, capsys):
    assert main(["prove", f"{script}:task", "--ranks", "2", "--microbatches", "4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        f"{script}:task under zb_h1(ranks=2, microbatches=4)\n\n14 results of a step equal those of the captured model "
        "on one device,"
    )
    assert "14 of them also equal those of your module run eagerly" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task", "--schedule", "check"], "--schedule: got 'check', expected a schedule of the gallery"),
        (["task", "--ranks", "0"], "ranks=0"),
        (["nothing"], "expected a function that returns"),
    ],
)
def test_a_proof_that_makes_no_sense_is_refused(script, words, said, capsys):
    assert main(["prove", f"{script}:{words[0]}", *words[1:]]) == 2
    assert said in capsys.readouterr().err
    assert main(["prove", str(script)]) == 2
