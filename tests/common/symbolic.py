# SPDX-License-Identifier: Apache-2.0
"""Symbolic stages, which make formulas of what they are given; and schedules that an executor can run on them."""

from hypothesis import strategies as st

from fpipe.runtime.executor import Port
from schedules import Graph
from schedules.proof.formulas import formula
from schedules.testing import orders


class Formula(str):
    """A formula that can be watched."""


def make(*parts):
    return Formula(formula(*parts))


def width(s, t):
    """How many values cross an edge."""
    return 1 + (s + t) % 2


class Symbolic:
    """Stage `s` of a graph."""

    def __init__(self, graph: Graph, s: int) -> None:
        self.index, last = s, graph.stages - 1
        self.results = ("result",) if s == last else ()
        self.gets = self._ports("F", [(p, s) for p in graph.fed_by[s]])
        self.gives = self._ports("F", [(s, t) for t in graph.feeds[s]])
        self.pulls = self._ports("B", [(p, s) for p in graph.pulls[s]])
        self.pulled_by = self._ports("B", [(s, t) for t in graph.pulled_by[s]])
        self.shares = self._ports("G", [(s, t) for t in graph.shares[s]])
        self.shared_by = self._ports("G", [(p, s) for p in graph.shared_by[s]])
        self.totals = ("total",)

    def _ports(self, what, edges):
        return [
            Port(t if s == self.index else s, tuple(f"{what}{s}>{t}/{k}" for k in range(width(s, t)))) for s, t in edges
        ]

    def forward(self, params, buffers, inputs, key):
        kept = make("F", params, inputs, key)
        outputs = [make(spec, kept) for spec in self.results]
        outputs += [make(spec, kept) for port in self.gives for spec in port.specs]
        return tuple(outputs), (*buffers, key), Residuals(kept)

    def evaluate(self, params, buffers, inputs, key):
        return self.forward(params, buffers, inputs, key)[:2]

    def backward(self, residuals, cotangents, onto=()):
        return self._pull(residuals, cotangents), self._added(make("W", residuals.kept, cotangents), onto)

    def _added(self, grads, onto):
        return (*onto, grads) if onto else grads

    def _pull(self, residuals, cotangents):
        return tuple(make(spec, residuals.kept, cotangents) for port in self.pulls for spec in port.specs)

    def backward_input(self, residuals, cotangents):
        return self._pull(residuals, cotangents), (residuals, cotangents)

    def backward_weight(self, deferred, onto=()):
        residuals, cotangents = deferred
        return self._added(make("W", residuals.kept, cotangents), onto)

    def accumulate(self, total, grads, count):
        assert count == len(total)
        return (*total, grads)

    def finished(self, total):
        return total

    def shared(self, total, peer):
        if peer == self.index:
            return total
        (specs,) = [port.specs for port in self.shares if port.peer == peer]
        return tuple(make(spec, *total) for spec in specs)


class Residuals:
    """What a forward keeps."""

    def __init__(self, kept):
        self.kept = kept


def batch(s, i):
    return (make("batch", s, i),)


def key(i):
    return 100 + i


@st.composite
def runnable(draw):
    """Any correct schedule of whole microbatches without updates, and the graph that it is correct for."""
    return draw(orders().filter(lambda case: case[0].slices == 1 and "U" not in set(map(kind_of, actions(case[0])))))


def kind_of(action):
    return action.kind


def actions(schedule):
    return (action for rank in range(schedule.ranks) for action in schedule.actions(rank))
