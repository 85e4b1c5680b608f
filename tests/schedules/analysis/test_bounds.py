# SPDX-License-Identifier: Apache-2.0
"""No schedule is faster than the bound; on small problems the fastest is seldom much slower."""

from math import inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedules import Costs, Placement, Sizes, bidirectional, bound, linear, looped, vee
from schedules.errors import SizeError
from schedules.testing.strategies import graphs
from tests.common.optimum import Case, find_optimum

TIMES = st.integers(1, 8)


@st.composite
def cases(draw):
    placement = draw(st.sampled_from([linear(2), linear(3), vee(2), looped(2, 2), linear(1, 2), bidirectional(2)]))
    S, P = placement.stages, placement.ranks
    M = draw(st.integers(1, 4 if S == P else 3))
    per_stage = TIMES | st.tuples(*[TIMES] * S)
    costs = draw(st.builds(Costs, F=per_stage, B=per_stage, I=per_stage, W=per_stage, comm=st.integers(0, 3)))
    some = st.tuples(*[st.integers(1, 3)] * S)
    sizes = draw(st.sampled_from([Sizes(), Sizes(residual=0.5)]) | st.builds(Sizes, activation=some, residual=some))
    memory = tuple(draw(st.integers(1, 8) | st.just(inf)) for _ in range(P))
    return Case(costs, placement, M, memory, sizes, draw(st.booleans()), draw(st.booleans()))
def bounded(case):
    return bound(case.costs, case.placement, case.microbatches, memory=case.memory, sizes=case.sizes, split=case.split, backward=case.backward, graph=case.links)

@given(cases())
def test_x(case):
    try:
        least = bounded(case)
    except SizeError:
        assert find_optimum(case)[0]==inf
        return
    o = find_optimum(case)
    assume(o is not None)
    assert least.makespan <= o[0]*(1+1e-9)
