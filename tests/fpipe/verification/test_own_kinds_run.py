# SPDX-License-Identifier: Apache-2.0
"""Actions of users' own kinds run by their own handlers, and a step computes what it computes without them."""

import pytest
import torch
from torch import nn

import fpipe
from schedules import OwnKind, one_f_one_b, recompute, split_backward, transform
from tests.common.cases import mse


class Packed:
    def __init__(self, kept):
        self.kept = kept


def pack(run, action, stage, arrived):
    """Put what the forward keeps into a box."""
    unit = run.unit
    if unit in run.residuals:
        run.residuals[unit] = Packed(run.residuals[unit])
    return ()


def unpack(run, action, stage, arrived):
    """Take it out again; a backward could not use the box."""
    unit = run.unit
    if unit in run.residuals:
        run.residuals[unit] = run.residuals[unit].kept
    return ()


PACK = OwnKind("PACK", "put what a forward keeps into a box", "forward", "packed", handler=pack)
UNPACK = OwnKind("UNPACK", "take it out again", "packed", "forward", handler=unpack)


@transform
def packed(rank, schedule):
    for action in schedule.actions(rank):
        kind, s, i, _, _ = action
        if kind in ("B", "I"):
            yield UNPACK(s, i)
        yield action
        if kind in ("F", "R"):
            yield PACK(s, i)


def build(schedule):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    x, y = torch.randn(2, 12, 8)
    return fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=schedule), model, (x,), y


@pytest.mark.parametrize("change", [lambda s: s, recompute, split_backward])
def test_a_step_with_own_kinds_equals_one_device(change):
    pipe, model, inputs, targets = build(packed(change(one_f_one_b(2, 4))))
    fpipe.verify(pipe, model, inputs, targets, seed=3)


def test_a_handler_runs_once_for_each_action():
    ran = []

    def handle(run, action, stage, arrived):
        ran.append((run.rank, str(action)))
        return ()

    note = OwnKind("NOTE", "note it", handler=handle)

    @transform
    def noted(rank, schedule):
        for action in schedule.actions(rank):
            yield action
            if action.kind == "B":
                yield note(*action[1:3])

    pipe, model, inputs, targets = build(noted(one_f_one_b(2, 3)))
    fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets, seed=0)
    assert sorted(ran) == [(s, f"{s}NOTE{i}") for s in range(2) for i in range(3)]


def test_a_kind_without_a_handler_is_refused():
    mark = OwnKind("MARK", "mark it")

    @transform
    def marked(rank, schedule):
        yield from schedule.actions(rank)
        yield mark(rank, 0)

    with pytest.raises(fpipe.InputError, match=r"got 0MARK0 on rank 0, expected a kind with a handler.*Pass handler="):
        build(marked(one_f_one_b(2, 3)))
