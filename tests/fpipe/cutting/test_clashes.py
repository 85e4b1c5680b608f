# SPDX-License-Identifier: Apache-2.0
"""One refusal tells of many stages: all of them are refused, and the one that was refused is among them."""

from itertools import combinations, pairwise
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe.cutting.balance import refusals
from fpipe.record.captured import BatchLeaf, Buffer, Constant, Observed, Parameter, Unit

SOURCES = {0: BatchLeaf(0), 1: Buffer("b"), 2: Parameter("p"), 3: Constant(None), 4: BatchLeaf(1)}


@st.composite
def programs(draw):
    """Units that read values, make one, which may be a view, and may write memory of what they read; one may make the
    next value of the buffer."""
    count = draw(st.integers(2, 6))
    storage, views, written, units = {value: value for value in SOURCES}, set(), {}, []
    for k in range(count):
        reads = draw(st.lists(st.sampled_from(sorted(storage)), min_size=1, max_size=3, unique=True))
        made = 10 + k
        unit = Unit(f"m{k}", tuple(reads), (made,), lambda *_: ())
        of = draw(st.sampled_from([None, None, *reads]))
        storage[made] = made if of is None else storage[of]
        views |= {made} if of is not None and draw(st.booleans()) else set()
        changed = draw(st.sampled_from([None, None, *[v for v in reads if v not in (2, 3) or k == 5]]))
        written[unit] = frozenset() if changed is None else frozenset([storage[changed]])
        units.append(unit)
    observed = Observed(storage, written, {}, frozenset(views))
    outputs = tuple(draw(st.lists(st.sampled_from(sorted(storage)[5:]), max_size=2, unique=True)))
    new = draw(st.sampled_from([None, *sorted(storage)[5:]]))
    return SimpleNamespace(
        units=tuple(units),
        sources=SOURCES,
        loss=None,
        outputs=outputs,
        observed=observed,
        trainable=frozenset(),
        reassigned={} if new is None else {1: new},
    )


@settings(max_examples=300)
@given(programs())
def test_every_stage_that_a_refusal_forbids_is_refused(program):
    count = len(program.units)
    refusal = refusals(program)
    asked = {cuts: refusal(cuts) for k in range(1, count) for cuts in combinations(range(1, count), k)}
    stages = {cuts: list(pairwise([0, *cuts, count])) for cuts in asked}
    for cuts, refused in asked.items():
        if refused is None:
            continue
        forbidden = {(a, b) for one in refused.stages for a in one.begins for b in one.stops if a < b}
        assert set(stages[cuts]) & forbidden
        for others, answer in asked.items():
            assert answer is not None or not set(stages[others]) & forbidden, (refused, cuts, others)
