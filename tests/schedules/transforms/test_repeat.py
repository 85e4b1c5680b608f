# SPDX-License-Identifier: Apache-2.0
"""`repeat` runs a schedule for one group of microbatches after the other, in the memory of one group."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    SizeError,
    Sizes,
    breadth_first,
    chain,
    check,
    connect,
    dualpipe,
    families,
    gpipe,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    overlap,
    pipedream,
    recompute,
    reduce_gradients,
    repeat,
    shard,
    simulate,
    split_backward,
)
from schedules.proof.interpreter import prove
from schedules.testing import conformance, orders, schedules
from tests.common.rows import edit, rows

FAMILIES = [getattr(families, name) for name in families.__all__ if not name.startswith("pipedream")]

test_repeated_1f1b_conforms = conformance(
    lambda ranks, microbatches, times=1: repeat(one_f_one_b(ranks, microbatches), times)
)
test_repeated_replicas_conform = conformance(lambda ranks, microbatches: repeat(dualpipe(ranks, 2 * microbatches), 2))
test_repeated_groups_are_sharded_and_reduced = conformance(
    lambda ranks, microbatches: shard(reduce_gradients(repeat(breadth_first(ranks, microbatches, 2), 3)), 1)
)


def require_correct(s, graph):
    check(s, graph)
    check(lower(s, graph))
    prove(s, graph)


@settings(deadline=None)
@given(orders(microbatches=3))
def test_any_correct_order_stays_correct(case):
    s, graph = case
    s = connect(edit(s, rows(s, without="U")), graph)
    with suppress(SizeError):  # more microbatches on one route than on the other
        require_correct(repeat(s, 2), graph)


@settings(deadline=None)
@given(schedules(FAMILIES), st.integers(1, 3), st.sampled_from([split_backward, recompute, overlap]))
def test_every_family_stays_correct_in_the_memory_of_one_group(s, times, change):
    with suppress(SizeError):
        several = repeat(s, times)
        require_correct(several, chain(s.stages))
        require_correct(change(several), chain(s.stages))
        assert several.microbatches == times * s.microbatches
        assert simulate(several).peak_memory == simulate(s).peak_memory


def count_gathers(s):
    return [sum(action.kind == "UNSHARD" for action in row) for row in rows(shard(s, limit=1))]


@pytest.mark.parametrize(("group", "gathers", "peak"), [(1, 17, 8), (2, 9, 10), (4, 5, 14), (8, 3, 22)])
def test_larger_groups_gather_less_and_hold_more(group, gathers, peak):
    s = repeat(breadth_first(ranks=2, microbatches=group, chunks=2), 8 // group)
    assert count_gathers(s) == [gathers, gathers]
    assert simulate(shard(s, limit=1), sizes=Sizes(gathered=6)).peak_memory == (peak, peak)


def test_the_order_of_the_families_gathers_more_in_the_same_memory():
    plain = interleaved_1f1b(ranks=2, microbatches=8, chunks=2)
    assert count_gathers(plain) == [23, 9]
    assert max(simulate(shard(plain, 1), sizes=Sizes(gathered=6)).peak_memory) <= 14
    assert max(simulate(shard(plain, 2), sizes=Sizes(gathered=6)).peak_memory) > 14


@pytest.mark.parametrize(
    ("s", "why"),
    [
        (shard(gpipe(1, 1), 1), "Repeat it first, then add them"),
        (reduce_gradients(gpipe(1, 1)), "Repeat it first"),
        (pipedream(1, 1), "one without U"),
    ],
)
def test_updates_and_collectives_are_not_repeated(s, why):
    with pytest.raises(SizeError, match=why):
        list(repeat(s, 2).actions(0))


@pytest.mark.parametrize("times", [0, -1, True, 1.0])
def test_the_number_of_times_is_positive(times):
    with pytest.raises(SizeError, match=r"repeat: got times=.*, expected an integer of at least 1"):
        repeat(gpipe(1, 1), times)


def test_groups_do_not_split_routes():
    with pytest.raises(SizeError, match="Choose an even number of microbatches"):
        repeat(dualpipe(2, 5), 2)
