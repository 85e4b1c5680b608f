# SPDX-License-Identifier: Apache-2.0
"""Symbolic stages and weights, which make formulas of what they are given; and schedules to run on them."""

from collections import Counter, defaultdict
from functools import partial

from hypothesis import strategies as st

from fpipe.runtime.contract import StageCrossing
from fpipe.runtime.local import LocalHandle
from schedules import Action, Graph, Schedule
from schedules.proof.formulas import formula
from schedules.testing import orders


class Formula(str):
    """A formula that can be watched; a term of a gradient knows the key of its unit."""

    key: int


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
        return tuple(outputs), (*buffers, key), Residuals(kept, key)

    def evaluate(self, params, buffers, inputs, key):
        return self.forward(params, buffers, inputs, key)[:2]

    def backward(self, residuals, cotangents, onto=()):
        return self._pull(residuals, cotangents), (*onto, self._term(residuals, cotangents))

    def _term(self, residuals, cotangents):
        term = make("W", residuals.kept, cotangents)
        term.key = residuals.key
        return term

    def _pull(self, residuals, cotangents):
        return tuple(make(spec, residuals.kept, cotangents) for one in self.pulls for spec in one.specs)

    def backward_input(self, residuals, cotangents):
        return self._pull(residuals, cotangents), (residuals, cotangents)

    def backward_weight(self, deferred, onto=()):
        return (*onto, self._term(*deferred))

    def offload(self, residuals):
        return Moved(residuals)

    def reload(self, action, residuals):
        return posted(action, (residuals.residuals,))

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

    def __init__(self, kept, key):
        self.kept, self.key = kept, key


def posted(action, payload):
    """What was posted, and is done."""
    handle = LocalHandle("GROUP", action)
    handle.finish(payload)
    return handle


class SymbolicWeights:
    """The weights of one rank, of which updates make versions; and the group that gathers them, and reduces gradients.

    - `found`: per stage that is updated in flight, the terms that each update applied.
    - `phases`: how many messages a reduction takes.
    """

    def __init__(self, schedule: Schedule, rank: int, phases: int = 1) -> None:
        self.rule, self.slices, self.phases = schedule.version, schedule.slices, phases
        counts = Counter(action.stage for action in schedule.actions(rank) if action.kind == "U")
        self.in_flight = {s for s, count in counts.items() if count > 1}
        self.sharded = {action.stage for action in schedule.actions(rank) if action.kind == "UNSHARD"}
        self.made = dict.fromkeys(schedule.placement.stages_on(rank), 0)
        self.gathered: dict[int, int] = {}
        self.used: dict[tuple[int, int], int] = {}
        self.found = defaultdict(list)

    def of_units(self, units: int) -> list["OfUnit"]:
        """The weights of each unit, by stage."""
        return [OfUnit(partial(self.take, unit // self.slices)) for unit in range(units)]

    def take(self, i: int, s: int) -> str:
        """What microbatch `i` uses of stage `s`, which is there; its first use decides which version."""
        self.require_gathered(s)
        if (s, i) not in self.used:
            self.used[s, i] = self.made[s] if self.rule is None else self.rule(i)
            assert self.rule is not None or self.gathered.get(s, self.made[s]) == self.made[s], "gathered anew"
        return weights(s, self.used[s, i])

    def require_gathered(self, s: int) -> None:
        assert s not in self.sharded or s in self.gathered, f"stage {s} is gathered"

    def update(self, s, i, grads, shared):
        """Apply the gradients up to microbatch `i`."""
        assert s not in self.gathered
        self.made[s] += 1
        if s in self.in_flight:
            now = tuple(term for term in grads[s] if (term.key - key(0)) // self.slices <= i)
            grads[s] = tuple(term for term in grads[s] if term not in now)
            self.found[s].append(now)
        return s, i, dict(grads), {edge: copy for edge, copy in shared.items() if edge[1] == s}

    def unshard(self, s, number):
        return posted(Action("UNSHARD", s, number), (self.made[s],))

    def enter(self, s, gathered):
        (self.gathered[s],) = gathered

    def reshard(self, s):
        del self.gathered[s]

    def reduce(self, s, i, phase, values):
        values = (("reduced", *values[0]), 0) if phase == 0 else (values[0], values[1] + 1)
        assert values[1] == phase
        return posted(Action("REDUCE_GRAD", s, i), values)

    def reduced(self, s, values):
        assert values[1] == self.phases - 1, "after the last phase"
        return values[0]


class OfUnit:
    """Something of one unit, by stage."""

    def __init__(self, take):
        self.take = take

    def __getitem__(self, s):
        return self.take(s)


def weights(s, version):
    """A version of a stage's weights."""
    return f"params {s}, {version}"


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
