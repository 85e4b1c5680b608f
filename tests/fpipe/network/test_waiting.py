# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other beside a step takes no communicator of its own on a device, nor a wait for one."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fpipe.network import measurements
from fpipe.network.distributed import DistributedRanks
from fpipe.network.waiting import Line

ON_GPU = torch.device("cuda", 0)


class Group:
    """A group of processes 10 and 11, which notes what is posted on it by itself."""

    def __init__(self):
        self.alone = []

    def send(self, tensors, other, tag):
        self.alone.append(("send", other))

    def recv(self, tensors, other, tag):
        self.alone.append(("recv", other))


@pytest.fixture
def batches(monkeypatch):
    """What is posted in batches."""
    found = []
    monkeypatch.setattr(dist, "get_global_rank", lambda group, other: 10 + other)
    monkeypatch.setattr(dist, "P2POp", lambda kind, tensor, group, group_peer: (kind, group_peer))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: found.append(operations) or ["work"])
    return found


@pytest.mark.parametrize("device", [torch.device("cpu"), ON_GPU])
def test_messages_beside_a_step_go_over_the_communicator_of_their_group(device, batches):
    group = Group()
    line = Line(group, device, "its clock", lambda posted: None)
    line.send(torch.zeros(1), 1)
    line.receive(torch.zeros(1), 1)
    if device == ON_GPU:
        assert (batches, group.alone) == ([[(dist.isend, 1)], [(dist.irecv, 1)]], [])
    else:
        assert (batches, group.alone) == ([], [("send", 1), ("recv", 1)])


def test_clocks_are_compared_over_the_control_group(monkeypatch):
    held = []
    ranks = SimpleNamespace(
        control=SimpleNamespace(group="control"), _hold_line=lambda *given: held.append(given) or nullcontext("line")
    )
    monkeypatch.setattr(measurements, "measure_offset", lambda line: 0.5 if line == "line" else None)
    assert DistributedRanks.measure_clock_offset(ranks) == 0.5
    assert held == [("its clock", "control", torch.device("cpu"))], (
        "the host reads them, and must not wait for a device"
    )
