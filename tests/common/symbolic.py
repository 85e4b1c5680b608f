# SPDX-License-Identifier: Apache-2.0
"""Symbolic stages, which make formulas of what they are given; and schedules that an executor can run on them."""

from hypothesis import strategies as st

from fpipe.runtime.contract import StageCrossing
from fpipe.runtime.local import LocalHandle
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


def crossings(what, edges):
    """One record per edge; cotangents go from the later stage to the earlier one."""
    return [
        StageCrossing(s, t, (what,) * width(s, t), tuple(f"{what}{s}>{t}/{k}" for k in range(width(s, t))))
        for s, t in edges
    ]


class Symbolic:
    """Stage `s` of a graph, for one slice of a microbatch; what it leaves for the next slice is its carry."""

    def __init__(self, graph: Graph, s: int, part: int = 0, slices: int = 1) -> None:
        self.index, last = s, graph.stages - 1
        before, after = [(s, s)] * (part > 0), [(s, s)] * (part < slices - 1)
        self.results = ("result",) if s == last else ()
        self.gets = crossings("F", [*before, *[(p, s) for p in graph.fed_by[s]]])
        self.gives = crossings("F", [*[(s, t) for t in graph.feeds[s]], *after])
        self.pulls = crossings("B", [*before, *[(s, p) for p in graph.pulls[s]]])
        self.pulled_by = crossings("B", [*[(t, s) for t in graph.pulled_by[s]], *after])
        self.shares = crossings("G", [(s, t) for t in graph.shares[s]])
        self.shared_by = crossings("G", [(p, s) for p in graph.shared_by[s]])
        self.totals = ("total",)

    def forward(self, params, buffers, inputs, key):
        kept = make("F", params, inputs, key)
        outputs = [make(spec, kept) for spec in self.results]
        outputs += [make(spec, kept) for one in self.gives for spec in one.specs]
        return tuple(outputs), (*buffers, key), Residuals(kept)

    def evaluate(self, params, buffers, inputs, key):
        return self.forward(params, buffers, inputs, key)[:2]

    def backward(self, residuals, cotangents, onto=()):
        return self._pull(residuals, cotangents), (*onto, make("W", residuals.kept, cotangents))

    def _pull(self, residuals, cotangents):
        return tuple(make(spec, residuals.kept, cotangents) for one in self.pulls for spec in one.specs)

    def backward_input(self, residuals, cotangents):
        return self._pull(residuals, cotangents), (residuals, cotangents)

    def backward_weight(self, deferred, onto=()):
        residuals, cotangents = deferred
        return (*onto, make("W", residuals.kept, cotangents))

    def offload(self, residuals):
        return Moved(residuals)

    def reload(self, action, residuals):
        handle = LocalHandle("GROUP", action)
        handle.finish((residuals.residuals,))
        return handle

    def add(self, first, second):
        return (*first, *second)

    def complete(self, total):
        return (total,)

    def gradients_for(self, peer, total):
        if peer == self.index:
            return self.complete(total)
        (specs,) = [one.specs for one in self.shares if one.target == peer]
        return tuple(make(spec, *total) for spec in specs)


class Moved:
    """What a forward keeps, off the device."""

    def __init__(self, residuals):
        self.residuals = residuals


class Residuals:
    """What a forward keeps."""

    def __init__(self, kept):
        self.kept = kept


def stages_of(graph, held, schedule):
    """The stages of each unit: a microbatch, or a slice of one."""
    each = [{s: Symbolic(graph, s, k, schedule.slices) for s in held} for k in range(schedule.slices)]
    return each * schedule.microbatches


def unit_of(action, schedule):
    return action.microbatch * schedule.slices + (action.slice or 0)


def batch(s, unit):
    return (make("batch", s, unit),)


def key(unit):
    return 100 + unit


@st.composite
def runnable(draw):
    """Any correct schedule without updates, and the graph that it is correct for."""
    return draw(orders().filter(lambda case: "U" not in set(map(kind_of, actions(case[0])))))


def kind_of(action):
    return action.kind


def actions(schedule):
    return (action for rank in range(schedule.ranks) for action in schedule.actions(rank))
