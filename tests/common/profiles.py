# SPDX-License-Identifier: Apache-2.0
"""Profiles that nobody measured."""

from __future__ import annotations

from hypothesis import strategies as st

from fpipe.cutting.calls import Mark
from fpipe.planning.blocks import ModelBlock
from fpipe.planning.profile import Profile
from fpipe.planning.ranges import ActionTimes, Arrival, Hop, Spread
from schedules import Link

BYTES = st.integers(0, 2**40)
SECONDS = st.floats(0, 100)
TIMES = st.builds(ActionTimes, *[SECONDS] * 5)
LINKS = st.builds(
    Link,
    latency=SECONDS,
    bandwidth=st.sampled_from([1.0, 1e9, float("inf")]),
    slow=st.sampled_from([(), (((0, 1), 2.5),), (((0, 1), 2.5), ((1, 0), 0.5))]),
)


def block(k: int) -> ModelBlock:
    """Return a block whose name is its number."""
    return ModelBlock(f"m{k}", (Mark(f"m{k}", 0, False), Mark(f"m{k}", 1, True)), 1, f"{k:x}")


@st.composite
def profiles(draw, blocks: int | None = None) -> Profile:
    """Draw a profile, of so many blocks."""
    count = draw(st.integers(1, 6)) if blocks is None else blocks
    users = st.sets(st.integers(0, count - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    spreads = st.lists(st.builds(Spread, BYTES, users), max_size=4).map(tuple)
    ends = st.sets(st.integers(0, count - 1), min_size=2, max_size=2).map(sorted) if count > 1 else st.nothing()
    pairs = draw(st.lists(ends, max_size=4)) if count > 1 else []
    return Profile(
        model="Model",
        microbatch="float32[1]",
        backward="by autograd",
        device=draw(st.sampled_from(["one", "two", "one; two"])),
        blocks=tuple(map(block, range(count))),
        times=tuple(draw(st.lists(TIMES, min_size=count, max_size=count))),
        fixed=draw(TIMES),
        step=draw(SECONDS),
        hops=tuple(Hop(a, b, draw(BYTES), draw(BYTES)) for a, b in pairs),
        activation=draw(spreads),
        residual=draw(spreads),
        arrivals=tuple(Arrival(a, b, draw(BYTES), draw(st.integers(b, count))) for a, b in pairs),
        versions=tuple(draw(st.lists(BYTES, min_size=count, max_size=count))),
        parameters=draw(spreads),
        link=draw(LINKS),
    )


def cuts_of(blocks: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw cuts: ascending numbers of blocks."""
    return st.sets(st.integers(1, blocks - 1)).map(lambda found: tuple(sorted(found))) if blocks > 1 else st.just(())


def plain_profile(blocks: int) -> Profile:
    """Return a profile in which every block takes as long as its number, and keeps as many bytes."""
    numbers = range(blocks)
    return Profile(
        model="Model",
        microbatch="float32[1]",
        backward="by autograd",
        device="one",
        blocks=tuple(map(block, numbers)),
        times=tuple(ActionTimes(*[float(k)] * 5) for k in numbers),
        fixed=ActionTimes(*[0.5] * 5),
        step=0.25,
        hops=tuple(Hop(k, k + 1, 8, 4) for k in numbers[:-1]),
        activation=tuple(Spread(k, (k,)) for k in numbers),
        residual=tuple(Spread(1, (k,)) for k in numbers),
        arrivals=tuple(Arrival(k, k + 1, 8, k + 1) for k in numbers[:-1]),
        versions=(0,) * blocks,
        parameters=tuple(Spread(k, (k,)) for k in numbers),
        link=Link(latency=1.0),
    )
