# SPDX-License-Identifier: Apache-2.0
"""What benchmarks measure is what they say, and all of them run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fpipe
from benchmarks.__main__ import NAMES, run
from benchmarks.common.rounds import QUICK
from benchmarks.common.sleeping import WIDTH, Times, sleeping_model, weights_may_rest
from benchmarks.common.traffic import Traffic, measure_traffic, most
from benchmarks.splitting import least, measure
from schedules import zb_h1
from tests.common.sizes import by_night

# ------------------------ The bytes that a process sends in collectives, without other processes: a fake group of four


@pytest.fixture
def four() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_gather_sends_all_but_the_last_part_of_its_result(four):
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its older name
    found = measure_traffic(lambda: gather(torch.empty(40), torch.empty(10)))
    assert found == Traffic({"gather": 1}, {"gather": 3 * 40})


def test_each_way_to_reduce_sends_its_bytes(four):
    whole, part = torch.zeros(40), torch.zeros(10)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    assert measure_traffic(lambda: scatter(part, whole)).sent == {"reduce": 3 * 40}
    assert measure_traffic(lambda: dist.all_to_all_single(torch.zeros(40), whole)).sent == {"reduce": 3 * 40}
    assert measure_traffic(lambda: dist.all_reduce(whole)).sent == {"reduce": 2 * 3 * 40}


def test_an_exchange_of_unequal_pieces_sends_those_of_the_others(four):
    pieces, arriving = torch.zeros(12), torch.zeros(4 * 5)
    found = measure_traffic(lambda: dist.all_to_all_single(arriving, pieces, [5] * 4, [4, 5, 3, 0]))
    assert found.sent == {"reduce": 4 * (12 - 5)}


def test_messages_between_copies_are_reductions(four):
    copies = dist.new_group([0, 1])
    messages = [dist.P2POp(dist.isend, torch.zeros(10), group=group, group_peer=0) for group in (copies, None)]
    found = measure_traffic(lambda: [dist.batch_isend_irecv([one]) for one in messages], copies)
    assert found.sent == {"reduce": 40, "send": 40}


def test_the_maximum_is_taken_of_each_figure():
    found = most([Traffic({"gather": 1}, {"gather": 8}), Traffic({"gather": 2, "send": 1}, {"gather": 4, "send": 3})])
    assert found == Traffic({"gather": 2, "send": 1}, {"gather": 8, "send": 3})


# ------------------------------------------------------- Layers that sleep are split, profiled and cut like any others

LAYERS = [Times(0.0, 0.0, weight) for weight in (0.0, 0.0, 1e-4, 0.0, 0.0)]


def square(outputs):
    return (outputs**2).mean()


def test_weight_halves_sleep_by_themselves_and_layers_that_last_as_long_are_alike():
    model, x = sleeping_model(LAYERS), torch.ones(4, WIDTH)
    with weights_may_rest():
        pipe = fpipe.pipeline(model, example=(x,), loss=square, schedule=zb_h1(2, 4), cuts=["1"])
        assert "undeferred" not in str(pipe)
        assert fpipe.verify(pipe, model, (x,))
        profile = fpipe.profile(model, (x,), loss=square, microbatches=4, device=fpipe.Roofline(1e12, 1e12))
    _, first, second, third, _ = (block.digest for block in profile.blocks)
    assert first == third != second


# ------ The benchmark of split backwards runs, and counts what it says: it reads what a stage keeps between the halves


def test_it_counts_the_bytes_that_are_kept():
    layers, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    found = measure(layers, x, repeats=1)
    assert {name: kept for name, (_, kept) in found.items()} == dict.fromkeys(found, least(layers, x))


# --------------------------------------------------------------------------------------- All benchmarks of the page run


@by_night
@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_of_the_page_runs(name, monkeypatch):
    monkeypatch.setenv(QUICK, "1")
    found = run(name)
    assert not found.failed, found.rows
