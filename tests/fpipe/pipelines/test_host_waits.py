# SPDX-License-Identifier: Apache-2.0
"""The host waits for its device only where the page on promises says so."""

import pytest
import torch
from torch import nn

import fpipe
from schedules import gpipe, one_f_one_b, zb_h1
from tests.common.cases import mse
from tests.common.options import grouped
from tests.common.sizes import sampled
from tests.common.waits import HostWaits


class Model(nn.Module):
    """Dropout, a buffer that is written, and a parameter that the forward reads twice."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        h = self.drop(self.norm(self.first(x)))
        return self.last(torch.tanh(self.second(self.second(h))))


class Branch(nn.Module):
    """It asks for a value in every forward."""

    def forward(self, h):
        return h if h.sum() > 0 else -h


class Asking(Model):
    """A module of it asks for a value."""

    def __init__(self):
        super().__init__()
        self.drop = Branch()


def count(inputs, targets):
    return (targets != -100).sum()


class Training:
    """One of everything, once all that happens only the first time has happened."""

    def __init__(self, how, model=Model, options=None, **given):
        torch.manual_seed(0)
        self.model, self.batch = model(), (torch.randn(8, 4), torch.randn(8, 1))
        more = {"cuts": ["second"]} if model is Model else {}
        (x, y), self.given = self.batch, given
        self.pipe = fpipe.pipeline(
            self.model, example=(x,), targets=y, loss=mse, schedule=how, **grouped(more), **(grouped(options or {}))
        )
        self.params, self.buffers = self.pipe.init(self.model)
        self.step, self.evaluation = fpipe.value_and_grad(self.pipe), fpipe.evaluate(self.pipe)
        init, self.update = fpipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.state = init(self.params)
        self.grads = self.run()
        for what in WAYS.values():
            what(self)

    def run(self, **given):
        x, y = self.batch
        return self.step(self.params, self.buffers, (x,), y, **{"seed": 1, **self.given, **given})[1]

    def waits(self, way):
        with HostWaits(self.params, self.buffers, self.batch, self.grads, self.state) as waits:
            WAYS[way](self)
        return waits.found


WAYS = {
    "step": lambda t: t.run(),
    "accumulation": lambda t: t.run(onto={name: grad.clone() for name, grad in t.grads.items()}),
    "scaled step": lambda t: t.run(scale=1024.0),
    "evaluation": lambda t: t.evaluation(t.params, t.buffers, (t.batch[0],), t.batch[1]),
    "clip": lambda t: fpipe.clip(t.pipe, t.grads, 1.0),
    "clip_value": lambda t: fpipe.clip_value(t.grads, 1.0),
    "norm": lambda t: fpipe.norm(t.pipe, t.grads),
    "all_finite": lambda t: fpipe.all_finite(t.pipe, t.grads),
    "update": lambda t: t.update(t.grads, t.state, t.params),
}
SCHEDULES = {"GPipe": gpipe(2, 4), "1F1B": one_f_one_b(2, 4), "ZB-H1": zb_h1(2, 4)}


@sampled(1)
@pytest.mark.parametrize("how", SCHEDULES)
def test_the_host_waits_for_nothing_where_a_model_asks_nothing(how):
    training = Training(SCHEDULES[how])
    assert [way for way in WAYS if training.waits(way)] == []


class Scripted:
    """The same in a script for one device, around a drop-in module."""

    def __init__(self):
        torch.manual_seed(0)
        self.batch = torch.randn(8, 4), torch.randn(8, 1)
        x, y = self.batch
        self.model = fpipe.Pipelined(Model(), loss=mse, example=(x,), targets=y, schedule=one_f_one_b(2, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for what in (*SCRIPTS.values(), *SCRIPTS.values()):
            what(self)

    def train(self, losses=1, keeps=False):
        x, y = self.batch
        for _ in range(losses):
            self.model(x, targets=y, steps=losses).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not keeps)

    def clear_late(self):
        x, y = self.batch
        loss = self.model(x, targets=y)
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        self.optimizer.step()

    def evaluate(self):
        x, y = self.batch
        self.model.eval()
        self.model(x, targets=y)
        self.model(x)
        self.model.train()

    def waits(self, way):
        grads = [p.grad for p in self.model.parameters()]
        marked = dict(self.model.named_parameters()), dict(self.model.named_buffers()), self.batch, grads
        with HostWaits(*marked, [*self.optimizer.state.values()]) as waits:
            SCRIPTS[way](self)
        return [place[-1] for place in waits.found]


SCRIPTS = {
    "evaluation": lambda s: s.evaluate(),
    "step": lambda s: s.train(),
    "accumulation": lambda s: s.train(losses=2),
    "step that keeps .grad": lambda s: s.train(keeps=True),
    "gradients cleared late": lambda s: s.clear_late(),
}


def test_a_script_for_one_device_waits_for_the_cotangent_of_each_loss_and_for_gradients_that_are_cleared_late():
    script = Scripted()
    cotangent, cleared = "delivery.py, take", "delivery.py, _require_as_left"
    assert {way: script.waits(way) for way in SCRIPTS} == {
        "evaluation": [],
        "step": [cotangent],
        "accumulation": [cotangent, cotangent],
        "step that keeps .grad": [cotangent],
        "gradients cleared late": [cleared, cotangent],
    }


def test_the_host_waits_once_in_a_step_for_the_weights_of_its_microbatches():
    training = Training(SCHEDULES["1F1B"], options={"weight": count})
    assert len(training.waits("step")) == len(training.waits("evaluation")) == 1
    assert not training.waits("clip")


def test_the_host_waits_where_a_model_asks_for_a_value():
    """Once per forward, and for each gradient that its answer may have left out; so the count is not blind."""
    training = Training(gpipe(1, 4), model=Asking, options={"unsplittable": ["drop"]})
    found = [" ".join(places) for places in training.waits("step")]
    assert sum("handlers.py, _forward" in place for place in found) == 4
    assert all("_forward" in place or "earlier_sums.py, is_untouched" in place for place in found)
