# SPDX-License-Identifier: Apache-2.0
"""A message says what it is and arrives as it was sent; another in its place is never used."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import TransportError
from fpipe.network.channels import LINE, SMALL_BYTES, DistributedChannel, DistributedTransport, Envelope
from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import same_bits
from schedules import parse
from tests.common.sizes import few

CPU = torch.device("cpu")
MESSAGE = parse("0SEND_F3>1")
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


def channels():
    wire, unread = Wire(), []
    return wire, DistributedChannel(wire, 0, 1, CPU, unread), DistributedChannel(wire, 0, 1, CPU, unread)


@settings(max_examples=few(60))
@given(TENSORS)
def test_messages_arrive_as_sent(tensors):
    wire, one, two = channels()
    specs = tuple(map(Spec.of, tensors))
    for _ in range(2):
        one.send(MESSAGE, tuple(tensors), specs).wait()
        handle = two.receive(MESSAGE, tuple(map(Spec.of, tensors)))
        handle.wait()
        found = handle.take()
        assert not wire.sent
        assert len(found) == len(tensors)
        for got, want in zip(found, tensors, strict=True):
            assert same_bits(got, want)
            assert got.stride() == want.stride()
            assert not got.numel() or got.data_ptr() % LINE == 0, "laid out as if it had been allocated"


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


def test_headers_on_a_device_are_read_before_the_next_step():
    transport = object.__new__(DistributedTransport)
    good, bad = (Envelope(message, (Spec.of(torch.ones(4)),), CPU) for message in (MESSAGE, parse("0SEND_F2>1")))
    transport.unread = [(good, good.header)]
    transport.read()
    transport.unread = [(good, good.header), (good, bad.header)]
    with pytest.raises(TransportError, match="got 0SEND_F2>1"):
        transport.read()
    assert not transport.unread


def test_bytes_that_are_not_a_message_are_refused():
    envelope = Envelope(MESSAGE, (Spec.of(torch.ones(4)),), CPU)
    with pytest.raises(TransportError, match="got unknown bytes"):
        envelope.require(torch.full((LINE,), 7, dtype=torch.uint8))
