# SPDX-License-Identifier: Apache-2.0
"""`shard` gathers every stage before it is read, keeps at most so many gathered, and frees them all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    KINDS,
    Costs,
    SizeError,
    breadth_first,
    chain,
    check,
    connect,
    dualpipe,
    families,
    gpipe,
    interleaved_1f1b,
    lower,
    pipedream,
    reduce_gradients,
    shard,
    simulate,
    update_weights,
)
from schedules.proof.interpreter import prove
from schedules.testing import conformance, orders, schedules
from tests.common.rows import edit, rows

FAMILIES = [getattr(families, name) for name in families.__all__]

test_sharded_interleaving_conforms = conformance(
    lambda ranks, microbatches, limit=1: shard(interleaved_1f1b(ranks, microbatches, 3), limit)
)
test_sharded_replicas_conform = conformance(lambda ranks, microbatches: shard(dualpipe(ranks, microbatches), 2))
test_sharded_versions_conform = conformance(lambda ranks, microbatches: shard(pipedream(ranks, microbatches), 1))


def require_correct(s, graph, limit):
    check(s, graph)
    check(lower(s, graph))
    prove(s, graph)
    for row in rows(s):
        gathered = set()
        for action in row:
            if action.kind == "UNSHARD":
                gathered.add(action.stage)
            elif action.kind == "RESHARD":
                gathered.remove(action.stage)
            assert len(gathered) <= limit
            assert not KINDS[action.kind].reads or action.stage in gathered


@settings(deadline=None)
@given(orders(), st.integers(2, 4))
def test_any_correct_order_stays_correct_and_within_the_limit(case, limit):
    s, graph = case
    require_correct(shard(s, limit), graph, limit)
    s = connect(edit(s, rows(s, without="U")), graph)
    require_correct(shard(reduce_gradients(s), limit), graph, limit)
    require_correct(shard(update_weights(reduce_gradients(s)), limit), graph, limit)


@settings(deadline=None)
@given(schedules(FAMILIES), st.integers(1, 4))
def test_every_family_is_sharded_at_any_limit_that_fits_its_turns(s, limit):
    fused = any(action.kind == "OVERLAP_F" for row in rows(s) for action in row)
    require_correct(shard(s, max(limit, 1 + fused)), chain(s.stages), max(limit, 1 + fused))
    assert [[a for a in row if a.kind not in ("UNSHARD", "RESHARD")] for row in rows(shard(s, limit + 1))] == rows(s)


@settings(deadline=None)
@given(schedules(FAMILIES))
def test_a_rank_with_room_for_all_its_stages_gathers_each_once_between_updates(s):
    for row in rows(shard(s, s.stages + 1)):
        gathers = sum(action.kind == "UNSHARD" for action in row)
        assert gathers <= len({action.stage for action in row}) + sum(action.kind == "U" for action in row)


def test_weights_are_gathered_one_pass_early_where_there_is_room():
    s = shard(interleaved_1f1b(ranks=1, microbatches=1, chunks=3), limit=2)
    assert " ".join(map(str, s.actions(0))) == (
        "0UNSHARD0 1UNSHARD0 0F0 0RESHARD0 2UNSHARD0 1F0 2F0 2B0 2RESHARD0 0UNSHARD1 1B0 1RESHARD0 0B0 0RESHARD1"
    )
    assert simulate(s, Costs(UNSHARD=1)).makespan == 1 + 3 * (1 + 2)  # only the first gathering is waited for


def test_breadth_first_gathers_seldom():
    def gathers(s):
        return sum(action.kind == "UNSHARD" for row in rows(s) for action in row)

    assert gathers(shard(interleaved_1f1b(2, 8, 2), limit=1)) == 32
    assert gathers(shard(breadth_first(2, 8, 2), limit=1)) == 6
    assert simulate(shard(gpipe(2, 8), 1)).makespan == simulate(gpipe(2, 8)).makespan


@pytest.mark.parametrize(
    ("s", "limit", "why"),
    [
        (shard(gpipe(1, 1), 1), 1, "gathers no weights"),
        (gpipe(1, 1), 0, r"got limit=0, expected an integer of at least 1. Choose limit >= 1"),
    ],
)
def test_what_cannot_be_sharded_is_refused(s, limit, why):
    with pytest.raises(SizeError, match=why):
        list(shard(s, limit).actions(0))
