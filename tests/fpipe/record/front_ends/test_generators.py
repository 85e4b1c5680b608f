# SPDX-License-Identifier: Apache-2.0
"""A forward that draws random numbers from other generators than torch's is refused by the name of its module."""

import random
import time
from contextlib import contextmanager
from threading import Event, Thread

import numpy as np
import pytest
import torch
from torch import nn

import fpipe
from tests.common.running import staged
from tests.common.sizes import covering, sampled

OWN, PYTHONS = np.random.default_rng(0), random.Random(0)
FORWARDS = {
    "a factor": ("Python's random", lambda x: x * torch.tensor(random.random())),
    "a branch": ("Python's random", lambda x: x if random.random() < 2 else -x),
    "an array": ("numpy.random", lambda x: x * torch.from_numpy(np.random.rand(4).astype("float32"))),
    "a span": ("numpy.random", lambda x: torch.cat([x[:, :2], x[:, 2:] * torch.tensor(np.random.randint(2))], 1)),
    "numpy's own generator": ("behaves differently", lambda x: x * torch.tensor(OWN.random())),
    "arrays of numpy's own generator": (
        "behaves differently",
        lambda x: x * torch.tensor(OWN.random(4, dtype="float32")),
    ),
    "Python's own generator": ("behaves differently", lambda x: x * torch.tensor(PYTHONS.random())),
    "time": ("behaves differently", lambda x: x * torch.tensor(time.perf_counter())),
}


class Drawing(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.inner, self.drawn = nn.Linear(4, 4), forward

    def forward(self, x):
        return self.inner(self.drawn(x))


def pipeline(model, cuts=("1",), **more):
    return staged(model, (torch.ones(2, 4),), cuts=cuts, loss=torch.mean, **more)


@sampled(2)
@covering(name=[*FORWARDS], backward=["autograd", "graph"])
def test_drawing_from_other_generators_is_refused(name, backward):
    what, forward = FORWARDS[name]
    model = nn.Sequential(nn.Linear(4, 4), Drawing(forward), nn.Linear(4, 4))
    with pytest.raises(fpipe.CaptureError, match=rf"module 1: got a forward that .*{what}"):
        pipeline(model, cuts=["2"], gradients=fpipe.Gradients(backward=backward))


def test_a_loss_that_draws_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(fpipe.CaptureError, match=r"module loss: got a forward that draws from numpy\.random"):
        staged(model, (torch.ones(2, 4),), loss=lambda y: y.mean() * np.random.rand())


def test_a_forward_that_restores_the_generators_is_allowed():
    def quiet(x):
        states = random.getstate(), np.random.get_state()
        random.random(), np.random.rand()
        random.setstate(states[0])
        np.random.set_state(states[1])
        return x

    pipeline(nn.Sequential(Drawing(quiet), nn.Linear(4, 4)), cuts=["1"])


@contextmanager
def another_thread(draw, seconds):
    """Call `draw` in another thread again and again, at random times, `seconds` apart on average."""
    done, times = Event(), random.Random(0)

    def loop():
        while not done.is_set():
            draw()
            done.wait(times.uniform(0, 2 * seconds))

    thread = Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@sampled(1)
@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy"])
def test_another_thread_may_draw_during_a_capture(draw):
    deep = nn.Sequential(*[nn.Linear(4, 4) for _ in range(60)])
    with another_thread(draw, seconds=0.01):
        pipeline(deep)


def test_a_draw_of_the_forward_is_found_beside_another_thread():
    model = nn.Sequential(nn.Linear(4, 4), Drawing(FORWARDS["a factor"][1]), *[nn.Linear(4, 4) for _ in range(60)])
    with (
        another_thread(random.random, seconds=0.01),
        pytest.raises(fpipe.CaptureError, match=r"module 1: got a forward that draws from Python's random"),
    ):
        pipeline(model)


def test_a_draw_in_the_first_call_of_a_process_is_refused():
    kept = []

    def forward(x):
        kept or kept.append(random.random())
        return x * kept[0]

    with pytest.raises(fpipe.CaptureError, match="got a forward that draws from Python's random"):
        pipeline(nn.Sequential(nn.Linear(4, 4), Drawing(forward)))
