# SPDX-License-Identifier: Apache-2.0
"""One process: messages meet in order, a deadlock is known at once, and a broken order is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpipe import DeadlockError, PipelineError, TransportError
from fpipe.network.distributed import DistributedRanks
from fpipe.network.ranks import Ranks
from fpipe.runtime.contract import StageCrossing
from fpipe.runtime.executor import Execution, Inputs
from fpipe.runtime.instructions import link
from fpipe.runtime.local import LocalTransport, drive
from schedules import Action, Placement, parse


class Echo:
    """A stage in a chain that passes on what it gets."""

    results = shares = shared_by = totals = ()

    def __init__(self, s, stages):
        before, after = [s - 1] * (s > 0), [s + 1] * (s < stages - 1)
        self.gets = [StageCrossing(peer, s, ("x",), (None,)) for peer in before]
        self.gives = [StageCrossing(s, peer, ("x",), (None,)) for peer in after]
        self.pulls = [StageCrossing(s, peer, ("x",), (None,)) for peer in before]
        self.pulled_by = [StageCrossing(peer, s, ("x",), (None,)) for peer in after]

    def forward(self, params, buffers, inputs, key):
        return inputs, buffers, "kept"

    def backward(self, residuals, cotangents, onto):
        return cotangents or ("cotangent",), ()


def start(*rows, homes=None):
    """One execution per row of actions, one stage on each rank unless `homes` says otherwise."""
    homes = tuple(range(len(rows))) if homes is None else homes
    placement, transport = Placement(len(rows), homes), LocalTransport()
    executions = []
    for rank, row in enumerate(rows):
        stages = {s: Echo(s, len(homes)) for s, home in enumerate(homes) if home == rank}
        nothing = dict.fromkeys(stages)
        inputs = Inputs([nothing] * 9, [nothing] * 9, lambda s, i: ("x",) if s == 0 else (), range(9))
        executions.append(Execution(rank, link(map(parse, row.split()), stages, placement), transport, inputs))
    return executions


def test_messages_cross_in_both_directions():
    executions = start("0RECV_B0<1 0F0 0SEND_F0>1 0B0 0WAIT_F0>1", "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1WAIT_B0>0")
    assert len(drive(executions)) == 2


def test_waiting_for_a_message_that_nobody_sends_is_a_deadlock_at_once():
    executions = start("0F0 0SEND_F0>1 0RECV_B0<1 0B0", "1RECV_F0<0 1F0")
    with pytest.raises(DeadlockError) as caught:
        drive(executions)
    message = str(caught.value)
    assert "rank 0, position 3, 0B0: waits for 0RECV_B0<1" in message
    assert "rank 1" not in message, "it has finished"
    assert "schedules.check" in message
    assert isinstance(caught.value, PipelineError)


def test_a_deadlock_names_every_rank():
    """Each of three ranks waits for the next: 0 for a cotangent of 1, 1 for one of 2, 2 for a value of 1."""
    executions = start("0F0 0RECV_B0<1 0B0", "1RECV_B0<2 1B0", "2RECV_F0<1 2F0")
    with pytest.raises(DeadlockError) as caught:
        drive(executions)
    lines = str(caught.value).splitlines()
    assert lines[1:4] == [
        "rank 0, position 2, 0B0: waits for 0RECV_B0<1",
        "rank 1, position 1, 1B0: waits for 1RECV_B0<2",
        "rank 2, position 1, 2F0: waits for 2RECV_F0<1",
    ]


def test_a_send_that_nobody_receives_is_a_deadlock_too():
    executions = start("0F0 0SEND_F0>1 0WAIT_F0>1", "")
    with pytest.raises(DeadlockError, match=r"rank 0, position 2, 0WAIT_F0>1: waits for 0SEND_F0>1"):
        drive(executions)


def test_messages_out_of_order_are_both_named():
    executions = start("0F0 0F1 0SEND_F0>1 0SEND_F1>1", "1RECV_F1<0 1RECV_F0<0 1F0 1F1")
    with pytest.raises(TransportError) as caught:
        drive(executions)
    message = str(caught.value)
    assert "got 0SEND_F0>1" in message
    assert "expected the message of 1RECV_F1<0" in message
    assert "channel" in message
    assert "lower()" in message


def test_messages_of_two_stages_on_one_channel_are_told_apart():
    executions = start("0F0 0SEND_F0>1 2RECV_F0<1", "3RECV_F0<2", homes=(0, 1, 0, 1))
    with pytest.raises(TransportError, match=r"got 0SEND_F0>1.*, expected the message of 3RECV_F0<2"):
        drive(executions)


@given(st.permutations(range(6)), st.integers(0, 63))
def test_a_channel_is_first_in_first_out_whichever_end_posts_first(payloads, ends_first):
    """Sends and receives posted in any interleaving: the k-th receive gets what the k-th send sent."""
    channel = LocalTransport().channel(0, 1)
    messages = [Action("SEND_F", 0, i, 1) for i in range(6)]
    handles = []
    for i in range(6):
        if ends_first >> i & 1:
            channel.send(messages[i], (payloads[i],), ())
            handles.append(channel.receive(messages[i], ()))
        else:
            handles.append(channel.receive(messages[i], ()))
            channel.send(messages[i], (payloads[i],), ())
    assert [handle.payload for handle in handles] == [(payload,) for payload in payloads]
    assert all(handle.is_done for handle in handles)


def test_the_two_directions_are_two_channels():
    transport = LocalTransport()
    value = transport.channel(0, 1).receive(parse("0SEND_F0>1"), ())
    cotangent = transport.channel(1, 0).receive(parse("1SEND_B0>0"), ())
    transport.channel(1, 0).send(parse("1SEND_B0>0"), ("b",), ())
    transport.channel(0, 1).send(parse("0SEND_F0>1"), ("f",), ())
    assert (value.payload, cotangent.payload) == (("f",), ("b",))


def test_ranks_that_are_processes_inherit_nothing_from_those_of_one():
    inherited = {name for name in vars(Ranks) if not name.startswith("_")} - vars(DistributedRanks).keys()
    assert inherited == {"agree_if_any", "run"}, "only what calls the others"


def test_all_ranks_are_in_this_process():
    ranks = Ranks(3)
    assert ranks.ranks == (0, 1, 2)
    assert (ranks.agree_if_any(True), ranks.agree_if_any(False)) == (True, False)
