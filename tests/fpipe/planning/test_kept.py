# SPDX-License-Identifier: Apache-2.0
"""Profiles and plans that are kept in a folder are found again for the same model, and for no other."""

import importlib
import logging
import shutil
import sys

import pytest
import torch
from torch import nn

import fpipe
from schedules import Link
from tests.common.cases import mse

X, Y = torch.ones(8, 4), torch.zeros(8, 4)


def layers(kind=nn.Tanh, width=4):
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(width, width), kind())])


def profile(cache, model=None, **options):
    given = {"loss": mse, "microbatches": 2, "seconds": 0, "cache": cache, **options}
    return fpipe.profile(model or layers(), (X,), Y, **given)


def plan(cache, model=None, **options):
    """A plan, and how many candidates were looked at."""
    seen = []
    given = {"ranks": 2, "loss": mse, "microbatches": 2, "seconds": 5, "cache": cache, **options}
    return fpipe.plan(model or layers(), (X,), Y, progress=seen.append, **given), len(seen)


def test_a_profile_is_measured_once(tmp_path):
    first = profile(tmp_path)
    assert profile(tmp_path).times == first.times  # measured times are never equal
    assert profile(None).times != first.times


@pytest.mark.parametrize(
    "change",
    [
        {"model": layers(nn.ReLU)},
        {"microbatches": 4},
        {"seconds": 0.01},
        {"gradients": fpipe.Gradients(backward="autograd")},
        {"link": Link(latency=1.0)},
        {"device": fpipe.Roofline(1e10, 1e10)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_model_or_argument_is_measured(tmp_path, change):
    first = profile(tmp_path)
    assert profile(tmp_path, **change).times != first.times
    assert len([*tmp_path.iterdir()]) == 2


def test_code_that_no_record_shows_counts(tmp_path, monkeypatch):
    """The body of a custom function is a single operation, whatever it does."""
    (tmp_path / "own_layer.py").write_text("SCALE = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("own_layer")
    first = profile(tmp_path / "kept")
    assert profile(tmp_path / "kept").times == first.times
    (tmp_path / "own_layer.py").write_text("SCALE = 2.0\n")
    assert profile(tmp_path / "kept").times != first.times
    del sys.modules["own_layer"]


def test_a_plan_is_searched_once(tmp_path):
    (first, searched), (again, not_searched) = plan(tmp_path), plan(tmp_path)
    assert searched
    assert not not_searched
    assert str(again) == str(first)
    assert again.schedule.actions(0) is not None
    assert plan(tmp_path, memory="1GB")[1]
    assert plan(tmp_path, cuts=["2"])[1]
    assert plan(tmp_path, schedules=[again.schedule])[1] == plan(tmp_path, schedules=[again.schedule])[1]


def test_a_search_that_was_ended_early_leaves_no_plan(tmp_path):
    def interrupt(progress):
        raise KeyboardInterrupt

    given = {"ranks": 2, "loss": mse, "microbatches": 2, "cache": tmp_path}
    assert not fpipe.plan(layers(), (X,), Y, progress=interrupt, **given).complete
    assert not [*tmp_path.glob("plan-*")]


def test_torch_and_machine_count(tmp_path):
    first, threads = profile(tmp_path), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert profile(tmp_path).times != first.times
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"kind": "fpipe KeptPlan"}', b"\xff" * 9])
def test_a_damaged_entry_is_made_again(tmp_path, damage, caplog):
    first, _ = plan(tmp_path)
    (path,) = tmp_path.glob("plan-*")
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING, "fpipe"):
        assert plan(tmp_path)[1]
    assert "It is not used, and made again." in caplog.text
    again, searched = plan(tmp_path)
    assert not searched
    assert again.cuts == first.cuts


def test_an_altered_entry_is_not_used(tmp_path):
    plan(tmp_path)
    (path,) = tmp_path.glob("plan-*")
    path.write_text(path.read_text().replace('"complete": true', '"complete": false'))
    assert plan(tmp_path)[1]


def test_the_entry_of_another_model_is_not_used(tmp_path):
    first = profile(tmp_path)
    (path,) = tmp_path.iterdir()
    other = profile(tmp_path, layers(nn.ReLU))
    (wrong,) = {*tmp_path.iterdir()} - {path}
    shutil.copy(wrong, path)
    found = profile(tmp_path)
    assert found.times not in (first.times, other.times)


def test_a_folder_that_cannot_be_written_loses_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "fpipe"):
        assert profile(tmp_path / "file").blocks
    assert "Nothing was kept." in caplog.text
    with pytest.raises(fpipe.InputError, match="cache: got 3, expected a text or a path or None"):
        profile(3)
