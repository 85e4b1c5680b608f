# SPDX-License-Identifier: Apache-2.0
"""Threads of one process: whatever they share, each gets the bits that it would get alone."""

import sys
import threading

import pytest
import torch

import fpipe
from tests.common.comparison import assert_same
from tests.common.options import grouped
from tests.common.running import build, run, run_reference
from tests.common.schedules import SCHEDULES
from tests.common.sizes import covering, sampled
from tests.common.zoo import ZOO

HOW = SCHEDULES["one_f_one_b"](ranks=2, microbatches=4)


@pytest.fixture(autouse=True)
def _turns_are_short():
    """Threads are interrupted between almost any two lines."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*acts):
    """Run these in threads of their own, which start together; raise what the first of them raises."""
    failures, start = [], threading.Barrier(len(acts))

    def act(function):
        try:
            start.wait(60)
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=act, args=(function,)) for function in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@sampled(2)
@covering(name=["mlp", "dropping"], backward=["autograd", "graph"])
def test_one_pipeline_runs_in_two_threads(name, backward):
    """Each has parameters of its own, which are put into the places of the one skeleton."""
    seed = 5 if ZOO[name].random else None
    pipe, model, inputs, targets = build(ZOO[name], HOW, 8, capture="trace", backward=backward)
    other = ZOO[name].make(8)[0]
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    wants = [run(pipe, one, inputs, targets, seed=seed) for one in (model, other)]

    def steps(one, want, function):
        for _ in range(6):
            assert_same(function(pipe, one, inputs, targets, seed=seed), want)

    at_once(
        *[lambda one=one, want=want: steps(one, want, run) for one, want in zip((model, other), wants, strict=True)]
    )


def test_a_step_runs_beside_the_reference_and_a_capture():
    pipe, model, inputs, targets = build(ZOO["dropping"], HOW, 8)
    want = run(pipe, model, inputs, targets, seed=5)
    whole = run_reference(pipe, model, inputs, targets, seed=5)

    def steps():
        for _ in range(4):
            assert_same(run(pipe, model, inputs, targets, seed=5), want)

    def references():
        for _ in range(4):
            assert_same(run_reference(pipe, model, inputs, targets, seed=5), whole)

    def captures():
        one = ZOO["dropping"]
        options = {"example": inputs, "targets": targets, "loss": one.loss, "schedule": HOW, "cuts": one.at(2)}
        another = fpipe.pipeline(
            model, **grouped(options)
        )  # no new model: its initializers would draw, or seed, beside a step
        assert_same(run(another, model, inputs, targets, seed=5), want)

    at_once(steps, references, captures)


def test_pipelines_in_two_threads_draw_as_each_would_alone():
    """The default generator is one for all; and it is as it was when all are done."""
    both = [build(ZOO["dropping"], HOW, 8) for _ in range(2)]
    wants = [run(*built, seed=seed) for seed, built in enumerate(both)]
    before = torch.get_rng_state()

    def steps(seed):
        for _ in range(6):
            assert_same(run(*both[seed], seed=seed), wants[seed])

    at_once(lambda: steps(0), lambda: steps(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_runs_within_a_step_of_the_same_thread():
    """As what `record` is called with may take one."""
    pipe, model, inputs, targets = build(ZOO["mlp"], HOW, 8)
    want, found = run(pipe, model, inputs, targets), []

    def record(span):
        if not found:
            found.append(run(pipe, model, inputs, targets))

    step = fpipe.value_and_grad(pipe, record=record)
    step(*pipe.init(model), inputs, targets)
    assert_same(found[0], want)
