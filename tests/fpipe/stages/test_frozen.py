# SPDX-License-Identifier: Apache-2.0
"""Only what trains gets gradients; stages below the lowest trained parameter have no backward and get no cotangents.

Counted while a step runs: every message, every forward that keeps something, every call of autograd.
"""

from collections import Counter
from functools import partial
from itertools import product

import pytest
from torch import nn

from fpipe.runtime.local import LocalChannel
from fpipe.stages import autograd
from fpipe.stages.stage import ModelStage
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import build, run
from tests.common.schedules import SCHEDULES
from tests.common.sizes import in_turn, sampled

MICROBATCHES = 3


class Adapted(nn.Module):
    """A frozen linear and a low-rank one beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def trained():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def frozen():
    return trained().requires_grad_(False)


def empty():
    return nn.Sequential(nn.Tanh())


def chain(*stages):
    """A stage each."""
    return Case(lambda: nn.Sequential(*[make() for make in stages]), rows_of(), mse, ("1", "2", "3"))


class Skipping(nn.Sequential):
    """The gradient of the first part comes around the second from the third."""

    def forward(self, x):
        x = self[0](x)
        return self[3](self[2](x, self[1](x.detach())))


class Join(nn.Module):
    def forward(self, x, aside):
        return x * aside


def skipping():
    return Case(lambda: Skipping(trained(), frozen(), Join(), frozen()), rows_of(), mse, ("1", "2", "3"))


CASES = {  # the case, the edges on which cotangents travel, and the stages that have a backward
    "everything": (chain(trained, trained, trained, trained), {(3, 2), (2, 1), (1, 0)}, {0, 1, 2, 3}),
    "the upper half": (chain(frozen, frozen, trained, trained), {(3, 2)}, {2, 3}),
    "the head": (chain(frozen, frozen, frozen, trained), set(), {3}),
    "the first": (chain(trained, frozen, frozen, frozen), {(3, 2), (2, 1), (1, 0)}, {0, 1, 2, 3}),
    "one in the middle": (chain(frozen, trained, frozen, frozen), {(3, 2), (2, 1)}, {1, 2, 3}),
    "nothing": (chain(frozen, frozen, frozen, frozen), set(), set()),
    "adapters everywhere": (chain(Adapted, Adapted, Adapted, Adapted), {(3, 2), (2, 1), (1, 0)}, {0, 1, 2, 3}),
    "adapters above": (chain(frozen, frozen, Adapted, Adapted), {(3, 2)}, {2, 3}),
    "a stage without parameters": (chain(trained, empty, empty, trained), {(3, 2), (2, 1), (1, 0)}, {0, 1, 2, 3}),
    "none trained below it": (chain(frozen, empty, trained, empty), {(3, 2)}, {2, 3}),
    "around a stage": (skipping(), {(3, 2), (2, 0)}, {0, 2, 3}),
}


@sampled(2)
@pytest.mark.parametrize(
    ("what", "way"), in_turn(CASES, product(["trace", "export"], ["one_f_one_b", "split_backward"])), ids=str
)
def test_frozen_stages_send_keep_and_compute_nothing(what, way, monkeypatch):
    capture, kind = way
    case, edges, backwards = CASES[what]
    built = _, model, inputs, targets = build(
        case,
        SCHEDULES[kind](ranks=4, microbatches=MICROBATCHES),
        2 * MICROBATCHES,
        capture=capture,
        backward="autograd",
    )
    run(*built)  # plans are made at the first step
    sent, kept, calls = Counter(), Counter(), Counter()
    send, walk = LocalChannel.send, autograd.run_backward

    def sending(channel, message, payload, specs):
        sent[message.kind, message.stage, message.peer] += 1
        return send(channel, message, payload, specs)

    def keeping(stage, *arguments):
        *found, residuals = stage.functions.forward(*arguments)
        kept[stage.index] += residuals is not None
        return *found, residuals

    def differentiating(*arguments, **how):
        calls["walk"] += 1
        return walk(*arguments, **how)

    monkeypatch.setattr(LocalChannel, "send", sending)
    monkeypatch.setattr(ModelStage, "forward", property(lambda stage: partial(keeping, stage)))
    monkeypatch.setattr(autograd, "run_backward", differentiating)
    got = run(*built)
    monkeypatch.undo()
    assert {ends for ends in sent if ends[0] == "SEND_B"} == {("SEND_B", *edge) for edge in edges}
    assert set(sent.values()) == {MICROBATCHES}
    assert {stage for stage, count in kept.items() if count} == backwards
    if kind == "one_f_one_b":
        assert calls["walk"] == MICROBATCHES * len(backwards)
    assert got.grads.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert_same(got, loop(model, case.loss, inputs, targets, MICROBATCHES))
