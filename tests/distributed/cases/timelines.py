# SPDX-License-Identifier: Apache-2.0
"""Spans, and the timeline that all ranks build from them."""

from __future__ import annotations

import time

import torch

import fpipe
from fpipe.network import clocks, recording
from schedules import KINDS, Action, B, F, one_f_one_b
from tests.common.running import build
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import gather, raises
from tests.distributed.cases.registry import case


@case
def spans_are_recorded(rank, size):
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    spans = []
    fpipe.value_and_grad(pipe, record=spans.append)(*pipe.init(model), inputs, targets)
    assert [span.action for span in spans if not span.waits] == list(pipe.schedule.actions(rank))
    assert {span.rank for span in spans} == {rank}


@case
def timelines_of_all_ranks(rank, size):
    """Every rank gets the same timeline, where no value is used before it is computed, even if clocks are far apart."""
    clock = time.perf_counter
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    for apart, tolerance in ((0.0, 0.0), (1000.0, 1.0)):
        recording.perf_counter = clocks.perf_counter = lambda late=apart * rank: clock() - late
        spans = []
        fpipe.value_and_grad(pipe, record=spans.append)(*pipe.init(model), inputs, targets)
        found = fpipe.timeline(pipe, spans)
        assert found == gather(found)[0]
        assert min(span.start for span in found) == 0 <= max(span.end for span in found) < 500
        require_causal(pipe, found, tolerance)
        own = [span for span in found if span.rank == rank]
        mine = spans[len(spans) - len(own) :]  # without the waits that ended before the step began elsewhere
        assert [span.action for span in own] == [span.action for span in mine]
        for got, want in zip(own[1:], mine[1:], strict=True):
            assert abs((got.end - got.start) - (want.end - want.start)) < 1e-6
        costs = fpipe.costs(pipe, found)
        assert 0 < costs.comm < 500
        assert len(costs.F) == len(costs.B) == size
        spans.clear()
        fpipe.evaluate(pipe, record=spans.append)(*pipe.init(model), inputs, targets)
        forwards = [span.action for span in fpipe.timeline(pipe, spans) if not span.waits]
        assert forwards == [F(stage, i) for stage in range(size) for i in range(4)]
    recording.perf_counter = clocks.perf_counter = clock
    rows = pipe.ranks.gather_rows(torch.full((rank, 3), float(rank), dtype=torch.float64))
    assert [one.tolist() for one in rows] == [[[float(r)] * 3] * r for r in range(size)]
    with raises(fpipe.InputError, "spans[0]: got", f"of rank {(rank + 1) % size}", f"of ranks [{rank}]"):
        fpipe.timeline(pipe, [span for span in found if span.rank == (rank + 1) % size])


def require_causal(pipe, found, tolerance):
    """Require the schedule's actions; none begins, and no wait for it ends, before its input is computed."""
    ended = {span.action: span.end for span in found}
    for r in range(pipe.schedule.ranks):
        actions = [span.action for span in found if span.rank == r and not span.waits]
        assert actions == list(pipe.schedule.actions(r))
    for span in found:
        kind, s, i, peer, _ = span.action
        if KINDS[kind].does == "RECV":
            assert span.end >= ended[Action(KINDS[kind].carries, peer, i)] - tolerance
        if kind == "F" and s:
            assert span.start >= ended[F(s - 1, i)] - tolerance
        if kind == "B" and s < pipe.schedule.stages - 1:
            assert span.start >= ended[B(s + 1, i)] - tolerance
