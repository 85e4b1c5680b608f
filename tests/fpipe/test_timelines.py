# SPDX-License-Identifier: Apache-2.0
"""What ranks recorded becomes one timeline; tests/distributed has those of several processes."""

import json
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.network import measurements
from fpipe.network.measurements import difference
from fpipe.network.ranks import Ranks
from schedules import KINDS, Action, B, Costs, F, Span, gpipe, lower, parse, simulate, spans, split_backward, summarize
from schedules.drawing import svg, trace
from schedules.errors import TimelineError
from tests.common.running import build
from tests.common.schedules import SCHEDULES
from tests.common.zoo import ZOO

SIZES = st.none() | st.integers(0, 10)
ACTIONS = st.builds(Action, st.sampled_from(list(KINDS)), st.integers(0, 4096), st.integers(0, 2**40), SIZES, SIZES)


class Elsewhere(Ranks):
    """The first of two processes, whose clock is `late`; the other passes these rows."""

    def __init__(self, late, rows):
        super().__init__(1)
        self.late, self.rows, self.places = late, rows, (0, 1)

    def measure_clock_offset(self):
        return self.late

    def gather_rows(self, rows):
        return [rows, self.rows]


def numbers(rank, start, end, action):
    kind, stage, i, peer, part = action
    numbers = [list(KINDS).index(kind), stage, i, -1 if peer is None else peer, -1 if part is None else part]
    return torch.tensor([[rank, *numbers, start, end]], dtype=torch.float64)


def pipe_of(ranks):
    return SimpleNamespace(ranks=ranks, schedule=gpipe(2, 2), program=lower(gpipe(2, 2)))


@given(ACTIONS, ACTIONS, st.floats(-1e6, 1e6), st.integers(0, 1000), st.integers(0, 1000))
def test_spans_of_all_ranks_are_put_on_one_clock(mine, other, late, start, lasts):
    pipe = pipe_of(Elsewhere(late, numbers(1, start, start + lasts, other)))
    first = Span(0, F(0, 0), late - 1, late)
    found = fpipe.timeline(pipe, [first, Span(0, mine, late + 1, late + 3)])
    assert found[0] == Span(0, F(0, 0), 0, pytest.approx(1))
    assert found[1] == Span(0, mine, pytest.approx(2), pytest.approx(4))
    assert found[2:] == (Span(1, other, pytest.approx(1 + start), pytest.approx(1 + start + lasts)),)
    assert all(type(one) is int or one is None for span in found for one in (span.rank, *span.action[1:]))


def test_waits_for_the_step_before_are_left_out():
    pipe = pipe_of(Ranks(2))
    wait = parse("1RECV_F0<0")
    recorded = [Span(0, parse("0WAIT_F0>1"), 4, 10), Span(1, wait, 2, 12), Span(1, F(1, 0), 12, 14)]
    found = fpipe.timeline(pipe, [*recorded, Span(0, F(0, 0), 10, 11)])
    assert found == (Span(0, F(0, 0), 0, 1), Span(1, wait, 0, 2), Span(1, F(1, 0), 2, 4))
    assert fpipe.timeline(pipe, []) == ()


def test_spans_of_unknown_ranks_are_refused():
    pipe = pipe_of(Ranks(2))
    with pytest.raises(fpipe.InputError, match=r"spans\[1\]: got 2B0 of rank 2, expected spans of ranks \[0, 1\]"):
        fpipe.timeline(pipe, [Span(0, F(0, 0), 0, 1), Span(2, B(2, 0), 0, 1)])


@pytest.mark.parametrize("name", ["one_f_one_b", "split_backward"])
def test_a_measured_timeline_is_printed_above_the_simulated_one(name):
    """In one process ranks take turns: they compute one at a time, transfers cost nothing."""
    pipe, model, inputs, targets = build(ZOO["mlp"], SCHEDULES[name](4, 4), 8)
    recorded = []
    step = fpipe.value_and_grad(pipe, record=recorded.append)
    step(*pipe.init(model), inputs, targets)
    found = fpipe.timeline(pipe, recorded)
    assert [span.rank for span in found] == sorted(span.rank for span in recorded)
    for rank in range(4):
        assert [s.action for s in found if s.rank == rank] == [s.action for s in recorded if s.rank == rank]
    costs = fpipe.costs(pipe, found, found)
    assert costs == fpipe.costs(pipe, found)
    assert costs.comm == 0
    assert all(0 < time < 1 for kind in "FBIW" for time in getattr(costs, kind))
    measured, simulated = summarize(found, pipe.schedule), simulate(pipe.schedule, costs, pipe.program.graph)
    assert sum(measured.busy) <= measured.makespan
    for rank in range(4):
        assert measured.busy[rank] + measured.waited[rank] <= measured.span + 1e-9
    assert simulated.makespan < measured.makespan
    both = {"measured": found, "simulated": list(spans(pipe.schedule, costs, pipe.program.graph))}
    assert svg(both).count("<title>") == sum(map(len, both.values()))
    assert trace(both, microseconds=1e6).count('"ph":"X"') == sum(map(len, both.values()))


def test_costs_are_estimated_for_the_schedule_of_the_pipeline():
    pipe, *_ = build(ZOO["mlp"], SCHEDULES["one_f_one_b"](2, 2), 8)
    found = fpipe.costs(pipe, list(spans(split_backward(pipe.schedule), Costs(I=3, W=4))))
    assert (found.B, found.comm) == ((7, 7), 0)


# ------------------------------------------------------------------------------------------------------------- clocks


TRIPS = st.lists(st.tuples(st.floats(1e-5, 1e-2), st.floats(0, 1), st.floats(0, 100)), min_size=1, max_size=8)


@given(TRIPS, st.floats(-1e4, 1e4) | st.just(0.0))
def test_offsets_of_clocks_are_as_exact_as_the_shortest_round_trip_allows(trips, offset):
    """Of trips of any length, answered anywhere between question and return."""
    asked = [(start, start + share * lasts - offset, start + lasts) for lasts, share, start in trips]
    shortest = min(lasts for lasts, *_ in trips)
    assert abs(difference(asked) - offset) <= shortest + 1e-9
    if abs(offset) > shortest + 1e-9:
        assert abs(difference(asked) - offset) <= shortest / 2 + 1e-9
    if offset == 0:
        assert difference(asked) == 0


class Queued:
    """Messages of a device: what is received is there only once the host asks for its value, which takes 5 seconds."""

    def __init__(self, monkeypatch):
        self.now, self.sent = 0.0, []
        monkeypatch.setattr(measurements, "perf_counter", lambda: self.now)
        self.device = torch.device("cpu")
        monkeypatch.setattr(measurements.torch, "zeros", lambda *shape, **options: self)

    def send(self, tensor, other):
        self.sent.append(tensor)

    def receive(self, tensor, other):
        assert tensor is self

    def item(self):
        self.now += 5.0
        return 77.0


def test_clocks_are_read_once_a_message_has_arrived_on_the_device(monkeypatch):
    queue = Queued(monkeypatch)
    assert list(measurements._ask(queue))[:2] == [(0.0, 77.0, 5.0), (5.0, 77.0, 10.0)]
    queue.sent.clear()
    queue.now = 0.0
    measurements._answer(queue, 1)
    assert [answer.item() for answer in queue.sent[:2]] == [5.0, 10.0]


def test_a_recording_is_a_page_over_its_prediction(tmp_path):
    one = gpipe(2, 1)
    made = [*map(Span, (0, 0, 1, 1), map(parse, ("0F0", "0B0", "1F0", "1B0")), (0, 6, 1, 2), (1, 8, 2, 5))]
    pipe = SimpleNamespace(ranks=Ranks(2), schedule=one, program=lower(one))
    found = fpipe.timeline(pipe, [*made, Span(0, parse("0RECV_B0<1"), 1, 6)])
    found.page(tmp_path / "step.html")
    data = re.search(r'id="data">(.*?)</script>', (tmp_path / "step.html").read_text(), re.DOTALL)[1]
    measured, predicted = json.loads(data)["panels"]
    assert (measured["name"], measured["ends"], measured["waits"]) == (
        "measured",
        [[1, 8], [2, 5]],
        [[], []],  # in one process, ranks wait for their turns
    )
    assert (predicted["name"], predicted["ends"], predicted["time"]) == ("predicted", [[1, 7], [2, 5]], "s")
    assert found._repr_html_().startswith("<div><code>gpipe(ranks=2, microbatches=1), measured in seconds</code>")
    again = pickle.loads(pickle.dumps(found))
    assert (again, again.schedule, again.together) == (found, one, True)


def test_a_page_of_two_steps_is_refused(tmp_path):
    one = gpipe(1, 1)
    pipe = SimpleNamespace(ranks=Ranks(1), schedule=one, program=lower(one))
    twice = [Span(0, action, start, start + 1) for start, action in enumerate([F(0, 0), B(0, 0)] * 2)]
    with pytest.raises(TimelineError, match="rank 0: got 0F0 twice, expected one step"):
        fpipe.timeline(pipe, twice).page(tmp_path / "step.html")


def test_a_page_that_cannot_be_written_names_its_path(tmp_path):
    one = gpipe(1, 1)
    pipe = SimpleNamespace(ranks=Ranks(1), schedule=one, program=lower(one))
    found = fpipe.timeline(pipe, [Span(0, F(0, 0), 0, 1), Span(0, B(0, 0), 1, 3)])
    with pytest.raises(fpipe.InputError, match=r"step\.html: got FileNotFoundError"):
        found.page(tmp_path / "missing" / "step.html")
