# SPDX-License-Identifier: Apache-2.0
"""Problems that are small enough for exhaustive search."""

from math import inf

from hypothesis import strategies as st

from schedules import Costs, Placement, SizeError, Sizes, bidirectional, bound, linear, looped, vee
from tests.common.optimum import Case

PLACEMENTS = [linear(2), linear(3), vee(2), looped(2, 2), linear(1, 2), bidirectional(2), Placement(3, (2, 0))]


@st.composite
def cases(draw):
    placement = draw(st.sampled_from(PLACEMENTS))
    S, P = placement.stages, placement.ranks
    time, some = st.integers(1, 8), st.tuples(*[st.integers(1, 3)] * S)
    passes = dict.fromkeys("FBIW", time | st.tuples(*[time] * S))
    costs = draw(st.builds(Costs, **passes, comm=st.integers(0, 3)))
    sizes = draw(st.sampled_from([Sizes(), Sizes(residual=0.5)]) | st.builds(Sizes, activation=some, residual=some))
    memory = tuple(draw(st.integers(1, 8) | st.just(inf)) for _ in range(P))
    microbatches = draw(st.integers(1, 4 if S == 2 else 3))
    return Case(costs, placement, microbatches, memory, sizes, draw(st.booleans()), draw(st.booleans()))


def bound_case(case):
    """Return the least makespan that the bound leaves, or infinity if it says that nothing fits."""
    more = {"split": case.split, "backward": case.backward, "sizes": case.sizes}
    try:
        return bound(case.costs, case.placement, case.microbatches, memory=case.memory, **more).makespan
    except SizeError:
        return inf


def is_searchable(case):
    """Return whether every rank has something to do, and no half keeps more than its forward did."""
    routes, stages = case.placement.routes[: case.microbatches], range(case.placement.stages)
    busy = {rank for route in routes for rank in route} == set(range(case.placement.ranks))
    shrinks = all(case.sizes.growth("I", s) <= 0 for s in stages)
    return busy and shrinks and len(routes) == len(case.placement.routes)
