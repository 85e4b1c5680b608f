# SPDX-License-Identifier: Apache-2.0
"""The whole system, from one seed: ranks, network, faults and restarts end as promised, and a broken fpipe is seen."""

import os
from unittest import mock

import pytest

from fpipe.network.calls import SharedCalls
from fpipe.runtime import instructions
from fpipe.runtime.handlers import HANDLERS
from tests.common.sizes import NIGHTLY, by_night, sampled
from tests.common.world.drawing import BLOCK, draw
from tests.common.world.network import Room
from tests.common.world.verdicts import Simulator, simulate

FIRST, CASES = int(os.environ.get("SIMULATION_SEED", "0")), int(os.environ.get("SIMULATION_CASES", "2000"))
CHUNK = BLOCK
BY_DAY = (18, 60, 98, 105, 119, 4566)


def find_broken(seeds):
    """Yield the command that replays each case that does not end as promised, with what was wrong."""
    simulator = Simulator()
    for seed in seeds:
        try:
            simulator.simulate(seed)
        except Exception as error:
            yield f"python -m tests.simulation --seed {seed}", f"{type(error).__name__}: {error}"


@sampled(1)
@pytest.mark.parametrize("seed", BY_DAY)
def test_a_simulated_run_ends_as_promised(seed):
    simulate(seed)


@by_night
@pytest.mark.parametrize("first", range(FIRST, FIRST + (CASES if NIGHTLY else 1), CHUNK))
def test_many_simulated_runs_end_as_promised(first):
    assert not [*find_broken(range(first, min(first + CHUNK, FIRST + CASES)))]


@by_night
def test_a_seed_replays_the_same_run_whatever_ran_before():
    simulator = Simulator()
    assert draw(98).setup == draw(47).setup
    simulator.simulate(98)
    assert simulator.simulate(47) == simulate(47)


def reordered(self, sent, received):
    """Deliver the younger of two messages of a channel first."""
    younger, _ = self.pending[*sent.ends, sent.tag]
    if younger and len(younger[0].data) == len(sent.data):
        younger.append(sent)
        sent = younger.popleft()
    CARRY(self, sent, received)


CARRY = Room._carry


def lose_last(run, action, stage, arrived):
    """Drop the weight gradients of microbatch 1."""
    total = run.grads[action.stage]
    HANDLERS["B"](run, action, stage, arrived)
    if action.microbatch == 1:
        run.grads[action.stage] = total
    return ()


def rerun(run, action, stage, arrived):
    """Recompute from the newest buffers."""
    _, arrived = run.checkpoints[action.stage, action.microbatch]
    run.checkpoints[action.stage, action.microbatch] = run.buffers[action.microbatch][action.stage], arrived
    return HANDLERS["R"](run, action, stage, ())


BROKEN = {
    "a channel delivers out of order": mock.patch.object(Room, "_carry", reordered),
    "a failure is not told": mock.patch.object(SharedCalls, "_tell", return_value=None),
    "a recomputation starts from newer buffers": mock.patch.object(instructions, "HANDLERS", {**HANDLERS, "R": rerun}),
    "a gradient is dropped": mock.patch.object(instructions, "HANDLERS", {**HANDLERS, "B": lose_last}),
}


SEEN_BY = {"a recomputation starts from newer buffers": 10714}
"""The first of the seeds that see an error, if it takes a setup that is rare."""


@sampled(1)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_fpipe_is_seen_within_a_few_seeds(name):
    with BROKEN[name]:
        first = SEEN_BY.get(name, 5000)
        assert next(find_broken(range(first, first + 100)), None)
