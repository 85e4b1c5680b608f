# SPDX-License-Identifier: Apache-2.0
"""A fault that is planted in one action is found, and named by result, rank, action and operator."""

import operator
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fpipe
from schedules import dualpipe, gpipe, one_f_one_b, recompute, zb_h1, zb_h2
from tests.common.cases import BACKWARDS
from tests.common.planted_faults import FAULTS, NoFaultError, plant
from tests.common.running import build
from tests.common.sizes import few, sampled
from tests.common.zoo import ZOO

SCHEDULES = {
    "one_f_one_b": lambda M: one_f_one_b(4, M),
    "gpipe": lambda M: gpipe(4, M),
    "zb_h1": lambda M: zb_h1(4, M),
    "zb_h2": lambda M: zb_h2(4, M),
    "recomputed": lambda M: recompute(one_f_one_b(4, M)),
    "dualpipe": lambda M: dualpipe(4, M),
}


MESHES = {
    "shard": fpipe.Place(mesh={"pp": 4, "fsdp": 2}, shard="fsdp"),
    "three": fpipe.Place(mesh={"pp": 4, "fsdp": 3}, shard="fsdp"),
    "dp": fpipe.Place(mesh={"pp": 4, "dp": 2}, dp="dp"),
}


def find(fault, M, choose, backward="autograd"):
    """Plant a fault; return the rank and the action that it strikes, and the proof."""
    case = ZOO[fault.model]
    how = SCHEDULES[fault.schedule](M)
    place, rows = MESHES.get(fault.mesh, fpipe.Place()), 12 * M if fault.mesh else 2 * M
    pipe, model, inputs, targets = build(
        case, how, rows, capture="trace", backward=backward, tied=fault.tied, place=place
    )
    rank, action = plant(fault, pipe, model, inputs, targets, choose)
    sgd = fpipe.optimizer(torch.optim.SGD, lr=0.5, momentum=0.5) if fault.kind == "U" else None
    return rank, action, fpipe.prove(pipe, model, inputs, targets, seed=3, optimizer=sgd)


def require_named(fault, rank, action, proof):
    """Raise unless what differs is named: by a result, by an operator, and by the action that the fault struck."""
    assert not proof.is_complete
    assert all(one.leaf and one.operator and one.why for one in proof.unproved)
    if not fault.later:
        places = {one.place for one in proof.unproved}
        assert any(f"rank {rank}, " in one and one.endswith(f", {action}") for one in places), (action, places)


def test_there_are_sixty_faults():
    assert len(FAULTS) >= 90


@sampled(18)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_named(fault):
    for k in range(5, 400, 7):
        try:
            found = find(fault, 4, partial(operator.mod, k))
        except NoFaultError:
            continue
        return require_named(fault, *found)
    raise AssertionError("the fault strikes nowhere")


@settings(max_examples=few(9), deadline=None)
@given(st.sampled_from([*FAULTS.values()]), st.integers(4, 6), st.integers(0, 1000), st.sampled_from(BACKWARDS))
def test_a_fault_drawn_at_random_is_named(fault, microbatches, k, backward):
    try:
        found = find(fault, microbatches, partial(operator.mod, k), backward)
    except NoFaultError:
        return assume(False)
    require_named(fault, *found)
