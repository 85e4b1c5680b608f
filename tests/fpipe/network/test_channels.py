# SPDX-License-Identifier: Apache-2.0
"""A message says what it is and arrives as it was sent; another in its place is never used."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import TransportError
from fpipe.network.channels import LINE, ON_DEVICE, SMALL_BYTES, DistributedChannel, Envelope, order_in_rounds
from fpipe.network.trail import AHEAD, PER_LAP, Trail
from fpipe.network.waiting import Awaited, PendingWorks
from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import same_bits
from schedules import chimera, dualpipe, interleaved_1f1b, lower, one_f_one_b, parse, zb_v
from tests.common.sizes import few
from tests.common.waits import Clock

CPU = torch.device("cpu")
MESSAGE = parse("0SEND_F3>1")
END = Awaited("result of a step (call 1)", (1,), None)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), max_size=3).map(tuple)
LARGE = st.sampled_from([(SMALL_BYTES // 4,), (SMALL_BYTES // 4 + 1,), (2, SMALL_BYTES // 8, 3)])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])


def random_tensor(shape, dtype, turned):
    tensor = torch.randint(0, 2, shape).to(dtype)
    return tensor.movedim(0, -1) if turned and shape else tensor


TENSORS = st.lists(st.builds(random_tensor, SHAPES | LARGE, DTYPES, st.booleans()), max_size=4)


class Wire:
    """A process group of two, whose sends are met by its receives in order; it aborts as Gloo does."""

    def __init__(self):
        self.sent, self.operations = [], 0

    def send(self, tensors, target, tag):
        self.sent += [tensor.clone() for tensor in tensors]
        self.operations += 1
        return self

    def recv(self, tensors, source, tag):
        (tensor,) = tensors
        data = self.sent.pop(0)
        assert data.numel() <= tensor.numel(), "Gloo aborts the process"
        tensor[: data.numel()] = data
        return self

    def wait(self):
        """It has been done."""


def channels(trail=None):
    wire = Wire()
    return wire, DistributedChannel(wire, 0, 1, CPU, trail), DistributedChannel(wire, 0, 1, CPU, trail)


@pytest.mark.parametrize("place", ["on a CPU", "on a device"])
@settings(max_examples=few(60))
@given(TENSORS)
def test_messages_arrive_as_sent(place, tensors):
    """On a device each is one send, and aligned as memory is there."""
    on_device = place == "on a device"
    wire, one, two = channels(Trail(Clock().copy) if on_device else None)
    specs = tuple(map(Spec.of, tensors))
    for _ in range(2):
        before = wire.operations
        one.send(MESSAGE, tuple(tensors), specs).wait()
        assert not on_device or wire.operations == before + 1
        handle = two.receive(MESSAGE, tuple(map(Spec.of, tensors)))
        handle.wait()
        found = handle.take()
        assert not wire.sent
        assert len(found) == len(tensors)
        for got, want in zip(found, tensors, strict=True):
            assert same_bits(got, want)
            assert got.stride() == want.stride()
            assert not got.numel() or got.data_ptr() % LINE == 0, "laid out as if it had been allocated"
            assert not on_device or got.storage_offset() * got.element_size() % ON_DEVICE.line == 0


def test_small_tensors_travel_together():
    wire, one, _ = channels()
    tensors = (torch.ones(3), torch.ones(SMALL_BYTES), torch.ones(2, 2), torch.ones(SMALL_BYTES))
    one.send(MESSAGE, tensors, tuple(map(Spec.of, tensors)))
    assert wire.operations == 3


@pytest.mark.parametrize(
    ("sent", "spec", "words"),
    [
        (parse("0SEND_F2>1"), Spec.of(torch.ones(4)), ["got 0SEND_F2>1 of 16 bytes", "that of 1RECV_F3<0 of 16 bytes"]),
        (parse("2SEND_B3>1"), Spec.of(torch.ones(4)), ["got 2SEND_B3>1"]),
        (MESSAGE, Spec.of(torch.ones(3)), ["got 0SEND_F3>1 of 12 bytes, with tensors of other", "of 16 bytes"]),
        (MESSAGE, Spec.of(torch.ones(4, dtype=torch.int32)), ["with tensors of other shapes or dtypes"]),
        (MESSAGE, Spec.of(torch.ones(2, 2)), ["with tensors of other shapes or dtypes"]),
    ],
)
def test_another_message_in_its_place_is_refused(sent, spec, words):
    _, one, two = channels()
    one.send(sent, (spec.allocate(),), (spec,))
    handle = two.receive(MESSAGE, (Spec.of(torch.ones(4)),))
    handle.wait()
    with pytest.raises(TransportError) as raised:
        handle.take()
    assert all(word in str(raised.value) for word in words), raised.value


def exchange(trail, sent, wanted=None):
    """Messages that one end sends and the other one takes, on a device."""
    _, one, two = channels(trail)
    spec = Spec.of(torch.ones(4))
    for message, want in zip(sent, wanted or sent, strict=True):
        one.send(message, (torch.ones(4),), (spec,)).wait()
        handle = two.receive(want, (spec,))
        handle.wait()
        handle.take()


def test_a_wrong_message_on_a_device_is_refused_once_the_device_has_passed_it_and_nobody_waits_for_it():
    clock = Clock()
    trail = Trail(clock.copy)
    exchange(trail, [MESSAGE] * (PER_LAP - 1) + [parse("0SEND_F2>1")], [MESSAGE] * PER_LAP)
    trail.read()
    assert not clock.waits, "the device is not there yet"
    clock.events[0].reached = True
    with pytest.raises(TransportError, match="got 0SEND_F2>1"):
        trail.read()
    trail.read()
    assert not clock.waits


@pytest.mark.parametrize("rounds", [1, AHEAD, AHEAD + 1, 3 * AHEAD])
def test_the_host_is_a_few_messages_ahead_of_its_device(rounds):
    clock = Clock()
    trail = Trail(clock.copy)
    for _ in range(rounds * PER_LAP):
        exchange(trail, [MESSAGE])
        if (overdue := trail.find_overdue()) is not None:
            overdue.wait()
            overdue.compare()
        assert len(trail.open) + PER_LAP * len(trail.laps) <= PER_LAP * (AHEAD + 1)
    assert clock.waits == max(0, rounds - AHEAD)
    assert len(clock.events) == rounds, "nothing is left"
    trail.close_lap(END)
    assert trail.laps[-1].event is clock.events[-1]
    assert (trail.laps[-1].awaited, [*trail.laps[-1].messages]) == (END, [])


def test_what_a_device_has_not_passed_is_known():
    clock = Clock()
    trail = Trail(clock.copy)
    exchange(trail, [MESSAGE] * (PER_LAP + 1))
    trail.close_lap(END)
    first, last = clock.events
    assert trail.find_unfinished().event is first
    first.reached = True
    assert trail.find_unfinished().awaited == END
    last.reached = True
    assert trail.find_unfinished() is None


def test_what_a_device_waits_for_is_known_before_a_lap_is_over(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda group: group)
    clock = Clock()
    trail = Trail(clock.copy)
    first, second = (END._replace(what=what, group="nccl") for what in "ab")
    host = END._replace(group="gloo")
    for awaited in (first, host, second):
        trail.follow(PendingWorks([], awaited))
    trail.follow(trail.find_unfinished())
    assert (len(clock.events), trail.groups) == (2, {"nccl"}), "the host has waited for the others itself"
    assert trail.find_unfinished().awaited == first
    clock.events[0].reached = True
    assert trail.find_unfinished().awaited == second
    trail.follow(PendingWorks([], second))
    assert len(trail.points) == 2, "what a device has passed is dropped"


def test_a_wrong_message_is_refused_when_the_host_waits_for_its_device():
    trail = Trail(Clock().copy)
    exchange(trail, [parse("0SEND_F2>1")] + [MESSAGE] * (3 * PER_LAP - 1), [MESSAGE] * 3 * PER_LAP)
    with pytest.raises(TransportError, match="got 0SEND_F2>1"):
        trail.find_overdue().compare()


def test_bytes_that_are_not_a_message_are_refused():
    envelope = Envelope(MESSAGE, (Spec.of(torch.ones(4)),), CPU)
    with pytest.raises(TransportError, match="got unknown bytes"):
        envelope.require(torch.full((LINE,), 7, dtype=torch.uint8))


# ----------------------------------------------------------------------------------------------------- few rounds


def rounds(order):
    """How long it takes to set up channels in this order, if each takes one unit of time of both its ranks."""
    free = Counter()
    for ends in order:
        start = max(free[rank] for rank in ends)
        free.update({rank: start + 1 - free[rank] for rank in ends})
    return max(free.values(), default=0)


ROUTES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda ends: ends[0] != ends[1]), unique=True)


@given(ROUTES, st.randoms())
def test_every_rank_sets_up_its_channels_in_one_order_of_few_rounds(routes, random):
    order = order_in_rounds(routes)
    assert sorted(order) == sorted(routes)
    random.shuffle(routes)
    assert order_in_rounds(routes) == order
    most = max(Counter(rank for ends in routes for rank in ends).values(), default=0)
    assert rounds(order) < max(2 * most, 1)


@pytest.mark.parametrize("ranks", [4, 64, 512])
@pytest.mark.parametrize(
    ("make", "most"),
    [(one_f_one_b, 4), (zb_v, 4), (partial(interleaved_1f1b, chunks=2), 4), (dualpipe, 6), (chimera, 6)],
)
def test_start_up_takes_as_many_rounds_for_many_ranks_as_for_few(make, most, ranks):
    channels = lower(make(ranks=ranks, microbatches=ranks)).channels
    assert rounds(order_in_rounds(channels)) <= most
    assert ranks == 4 or rounds(channels) > 60
