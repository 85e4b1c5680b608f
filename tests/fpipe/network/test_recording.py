# SPDX-License-Identifier: Apache-2.0
"""Measured timelines say what ran, and for what it waited, and change nothing else."""

from itertools import pairwise

import pytest
import torch

import fpipe
from fpipe.network import recording
from fpipe.network.recording import DeviceStopwatch, HostStopwatch
from schedules import Action, F, Span, dualpipe, forwards, interleaved_1f1b, one_f_one_b, summarize
from tests.common.comparison import assert_same
from tests.common.running import build, run
from tests.common.schedules import SCHEDULES
from tests.common.sizes import sampled
from tests.common.zoo import ZOO

MANY = {
    **{name: make(4, 4) for name, make in SCHEDULES.items()},
    "dualpipe": dualpipe(ranks=4, microbatches=4),
    "interleaved": interleaved_1f1b(ranks=2, microbatches=4),
}


def record_step(how, evaluate=False):
    """A pipeline, and the spans of a step."""
    pipe, model, inputs, targets = build(ZOO["mlp"], how, 8)
    spans = []
    step = (fpipe.evaluate if evaluate else fpipe.value_and_grad)(pipe, record=spans.append)
    step(*pipe.init(model), inputs, targets)
    return pipe, spans


@sampled(2)
@pytest.mark.parametrize("how", MANY.values(), ids=list(MANY))
def test_recorded_actions_are_in_program_order_with_waits_in_between(how):
    pipe, spans = record_step(how)
    for rank in range(how.ranks):
        mine = [span for span in spans if span.rank == rank]
        assert [span.action for span in mine if not span.waits] == list(how.actions(rank))
        assert all(a.start <= a.end <= b.start for a, b in pairwise(mine))
        transfers = [action for action in pipe.program.actions(rank) if action.kind.startswith(("RECV", "WAIT"))]
        waited = [span.action for span in mine if span.waits]
        assert len(set(waited)) == len(waited)
        assert set(waited) <= set(transfers)


def test_a_wait_is_recorded_before_the_action_that_needs_it():
    _, spans = record_step(one_f_one_b(ranks=4, microbatches=4))
    first = [next(str(span.action) for span in spans if span.rank == rank and span.waits) for rank in range(4)]
    assert first == ["0RECV_B0<1", "1RECV_B0<2", "2RECV_B0<3", "3RECV_F2<2"]
    for rank in range(4):
        mine = [span for span in spans if span.rank == rank]
        for wait, user in pairwise(mine):
            if wait.action.kind.startswith("RECV"):
                assert (user.action.stage, user.action.microbatch) == (wait.action.stage, wait.action.microbatch)
                assert wait.action.kind.endswith(user.action.kind)


def test_a_wait_begins_before_its_value_is_made_and_ends_after():
    _, spans = record_step(one_f_one_b(ranks=4, microbatches=4))
    made = {span.action: span for span in spans if not span.waits}
    waits = [span for span in spans if span.action.kind.startswith("RECV")]
    assert len(waits) > 8
    for wait in waits:
        kind, _, i, source, _ = wait.action
        maker = made[Action(kind.removeprefix("RECV_"), source, i)]
        assert wait.start <= maker.start <= maker.end <= wait.end


def test_evaluation_is_recorded_too():
    pipe, spans = record_step(one_f_one_b(ranks=4, microbatches=4), evaluate=True)
    for rank in range(4):
        mine = [span.action for span in spans if span.rank == rank and not span.waits]
        assert mine == list(forwards(pipe.schedule).actions(rank))


@sampled(1)
@pytest.mark.parametrize("name", ["gpt", "dropping"])
def test_recording_changes_no_bit(name):
    seed = 3 if name == "dropping" else None
    pipe, model, inputs, targets = build(ZOO[name], one_f_one_b(ranks=2, microbatches=4), 8)
    want = run(pipe, model, inputs, targets, seed=seed)
    step = fpipe.value_and_grad(pipe, outputs=True, record=lambda span: None)
    out, grads = step(*pipe.init(model), inputs, targets, seed=seed)
    assert_same(type(want)(out.loss, out.outputs, grads, out.buffers), want)


def test_an_error_in_record_ends_the_step():
    """Also a `StopIteration`, which must not pass for the end of a program."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=4, microbatches=4), 8)
    for chosen in (lambda span: span.waits, lambda span: not span.waits):

        def record(span, chosen=chosen):
            if chosen(span):
                raise StopIteration

        with pytest.raises(RuntimeError, match="StopIteration"):
            fpipe.value_and_grad(pipe, record=record)(*pipe.init(model), inputs, targets)


def test_without_record_no_clock_is_read(monkeypatch):
    monkeypatch.setattr(recording, "stopwatch", None)
    monkeypatch.setattr(recording, "perf_counter", None)
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=4, microbatches=4), 8)
    fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    with pytest.raises(TypeError):
        fpipe.value_and_grad(pipe, record=print)(*pipe.init(model), inputs, targets)


# ------------------------------------------------------------------------------------------------------- on a device


class Stream:
    """A device that is `late`: it passes an event that much later than the host, in seconds, hands it over."""

    def __init__(self, late):
        self.now, self.late, self.waited = 0.0, late, 0

    def tick(self):
        self.now += 1.0
        return self.now

    def event(self):
        return StreamEvent(self)

    def clock(self):
        """The host's: until it has waited for the device it is ahead of it."""
        return self.now + self.late * bool(self.waited)


class StreamEvent:
    def __init__(self, stream):
        self.stream, self.at = stream, stream.tick() + stream.late

    def synchronize(self):
        self.stream.waited += 1

    def elapsed_time(self, other):
        assert self.stream.waited
        return (other.at - self.at) * 1000


def test_events_are_read_after_the_step_and_put_on_the_clock_of_the_host():
    stream, spans = Stream(late=100.0), []
    watch = DeviceStopwatch(spans.append, stream.event, stream.clock)
    watch.lap(1, F(1, 0), watch.mark(), watch.mark())
    watch.lap(1, F(1, 1), watch.mark(), watch.mark())
    assert not spans
    assert not stream.waited
    watch.read()
    assert spans == [Span(1, F(1, 0), 101.0, 102.0), Span(1, F(1, 1), 103.0, 104.0)]
    assert stream.waited == 1


def test_a_step_on_a_device_waits_for_it_once(monkeypatch):
    """The same spans in the same order as with the host's clock, with as many events as it takes."""
    how = one_f_one_b(ranks=4, microbatches=4)
    _, want = record_step(how)
    stream = Stream(late=5.0)
    monkeypatch.setattr(
        recording, "stopwatch", lambda device, record: DeviceStopwatch(record, stream.event, stream.clock)
    )
    _, spans = record_step(how)
    assert [span[:2] for span in spans] == [span[:2] for span in want]
    assert (stream.waited, stream.now) == (1, 2 * len(spans) + 1)
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    assert (first, last) == (stream.late + 1, stream.late + 2 * len(spans))
    assert summarize(spans, how).busy == (8.0,) * 4


def test_each_kind_of_device_has_its_stopwatch():
    assert isinstance(recording.stopwatch(torch.device("cpu"), print), HostStopwatch)
    assert isinstance(recording.stopwatch(torch.device("cuda", 0), print), DeviceStopwatch)


def test_events_are_timed_and_recorded_on_the_current_stream(monkeypatch):
    """As far as this can be seen without a device."""
    device, seen = torch.device("cuda", 1), []

    class Event:
        def __init__(self, device, *, enable_timing):
            seen.append((device, enable_timing))

        def record(self, stream):
            seen.append(stream)

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: ("current", device))
    recording.stopwatch(device, print).mark()
    assert seen == [(device, True), ("current", device)]
