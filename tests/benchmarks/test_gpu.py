# SPDX-License-Identifier: Apache-2.0
"""The first hour on a GPU runs on a CPU, too, and shows what it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu
from tests.common.sizes import by_night


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    for name, value in {"DEVICE": torch.device("cpu"), "DRY": True, "WIDTH": 16, "FOLDER": tmp_path}.items():
        monkeypatch.setattr(gpu, name, value)
    return tmp_path


def test_pure_stages_draw_by_the_seed(on_cpu):
    assert [one.found for one in gpu.pure()] == ["yes", "yes"]


def test_parts_that_have_run_are_shown_and_not_run_again(on_cpu, monkeypatch, capsys):
    ran = []

    def measure(name):
        ran.append(name)
        return [gpu.Finding("a thing", f"was {name}")]

    monkeypatch.setattr(gpu, "measure", measure)
    (on_cpu / "bits.json").write_text(json.dumps([["all leaves", "equal"]]))
    gpu.main([])
    assert ran == [name for name in gpu.PARTS if name != "bits"]
    assert "| all leaves | equal |" in capsys.readouterr().out
    gpu.main(["bits"])
    assert ran[-1] == "bits"
    assert "| a thing | was bits |" in (on_cpu / "page.md").read_text()
    with pytest.raises(SystemExit, match=r"got \['speed'\], expected some of \['bits'"):
        gpu.main(["speed"])


def test_without_a_device_it_says_so(on_cpu, monkeypatch):
    monkeypatch.setattr(gpu, "DRY", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="got no CUDA device, expected one"):
        gpu.main([])


@by_night
def test_all_parts_run_on_a_cpu():
    environment = {**os.environ, "DRY": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", *gpu.PARTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "**" not in done.stdout, done.stdout
    assert all(f"## {name}" in done.stdout for name in gpu.PARTS)
