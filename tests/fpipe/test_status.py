# SPDX-License-Identifier: Apache-2.0
"""What takes long says how far it is."""

import pytest
import torch
from torch import nn

import fpipe
from fpipe.verification import expressions
from schedules import one_f_one_b
from schedules.status import StatusLine
from tests.common.cases import mse


@pytest.fixture
def said(monkeypatch):
    found = {}
    monkeypatch.setattr(
        StatusLine, "say", lambda line, doing, share=None: found.setdefault(line.call, []).append(doing)
    )
    return found


def test_long_calls_say_what_they_do(said, tmp_path, monkeypatch):
    monkeypatch.setattr(expressions, "TOLD", 20)
    model, x, y = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(4, 4), torch.randn(4, 4)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=one_f_one_b(2, 2), cuts=["2"])
    params, buffers = pipe.init(model)
    fpipe.save(pipe, tmp_path / "checkpoint", params=params, buffers=buffers)
    fpipe.load(pipe, tmp_path / "checkpoint")
    fpipe.prove(pipe, model, (x,), y)
    fpipe.plan(model, (x,), y, ranks=2, loss=mse, microbatches=2, schedules=one_f_one_b, seconds=1)
    assert {"recording the model", "recording 2", "making stage 1 of 2"} <= {*said["pipeline"]}
    assert any(one.startswith("reading ") for one in said["load"])
    assert any("operators, " in one for one in said["prove"])
    assert any("tried, best " in one for one in said["plan"])
    assert said.keys() <= {"pipeline", "load", "prove", "plan", "save"}
