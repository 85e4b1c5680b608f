# SPDX-License-Identifier: Apache-2.0
"""The laws of transforms that add actions, or groups: `update_weights`, `reduce_gradients`, `shard` and `repeat`."""

import io
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    KINDS,
    Action,
    Costs,
    ProgramError,
    ScheduleError,
    SizeError,
    Sizes,
    U,
    breadth_first,
    chain,
    check,
    connect,
    defer_weights,
    drawing,
    dualpipe,
    families,
    forwards,
    gpipe,
    interleaved_1f1b,
    lower,
    merge_backward,
    mirror,
    offload,
    one_f_one_b,
    overlap,
    pipedream,
    recompute,
    reduce_gradients,
    repeat,
    seq_1f1b,
    shard,
    simulate,
    split_backward,
    update_weights,
    zb_h1,
    zb_v,
)
from schedules.files import read_csv, write_csv
from schedules.playing.rows import edit
from schedules.proof.interpreter import ideal, interpret, prove
from schedules.proof.networks import fifo
from schedules.testing import conformance, orders, schedules
from tests.common.routes import between, by_threes
from tests.common.rows import rows
from tests.common.sizes import sampled

EVERY = [getattr(families, name) for name in families.__all__]
FAMILIES = [factory for factory in EVERY if not factory.__name__.startswith("pipedream")]
TRANSFORMS = [split_backward, merge_backward, recompute, offload, overlap, mirror]
TIED = replace(chain(4), gradients=frozenset({(0, 3)}))


def require_proved(s, graph):
    """Require that a schedule and its program are correct."""
    check(s, graph)
    check(lower(s, graph))
    prove(s, graph)


def require_updates_of_the_whole_gradient(s, graph):
    """Require that it is correct, and that every update applies the sum of all gradient terms, on every rank."""
    require_proved(s, graph)
    for meaning in (ideal(s, graph), interpret(lower(s, graph), fifo)):
        assert meaning.updates == (meaning.sums if s.backward else ((),) * s.stages)


def require_gathered(s, graph, limit):
    """Require that it is correct, gathers what it reads, and keeps at most so many stages gathered."""
    require_proved(s, graph)
    for row in rows(s):
        gathered = set()
        for action in row:
            if action.kind == "UNSHARD":
                gathered.add(action.stage)
            elif action.kind == "RESHARD":
                gathered.remove(action.stage)
            assert len(gathered) <= limit
            assert not KINDS[action.kind].reads or action.stage in gathered


CONFORMING = {
    "moved": lambda ranks, microbatches: offload(one_f_one_b(ranks, microbatches)),
    "moved slices": lambda ranks, microbatches, slices=1: offload(seq_1f1b(ranks, microbatches, slices)),
    "moved and recomputed": lambda ranks, microbatches: offload(recompute(zb_v(ranks, microbatches))),
    "updated": lambda ranks, microbatches: update_weights(one_f_one_b(ranks, microbatches)),
    "updated vee": lambda ranks, microbatches: update_weights(zb_v(ranks, microbatches)),
    "updated replicas": lambda ranks, microbatches: update_weights(dualpipe(ranks, microbatches)),
    "reduced": lambda ranks, microbatches: reduce_gradients(one_f_one_b(ranks, microbatches)),
    "reduced vee": lambda ranks, microbatches: reduce_gradients(zb_v(ranks, microbatches)),
    "reduced replicas": lambda ranks, microbatches: reduce_gradients(dualpipe(ranks, microbatches)),
    "reduced, updated": lambda ranks, microbatches: update_weights(reduce_gradients(one_f_one_b(ranks, microbatches))),
    "updated, reduced": lambda ranks, microbatches: reduce_gradients(update_weights(dualpipe(ranks, microbatches))),
    "updated, on several routes": lambda ranks, microbatches: update_weights(
        reduce_gradients(between(ranks, microbatches))
    ),
    "sharded, on several routes": lambda ranks, microbatches: shard(between(ranks, microbatches), 2),
    "repeated, on several routes": lambda ranks, microbatches: repeat(by_threes(ranks, microbatches), 2),
    "sharded": lambda ranks, microbatches, limit=1: shard(interleaved_1f1b(ranks, microbatches, 3), limit),
    "sharded replicas": lambda ranks, microbatches: shard(dualpipe(ranks, microbatches), 2),
    "sharded versions": lambda ranks, microbatches: shard(pipedream(ranks, microbatches), 1),
    "repeated": lambda ranks, microbatches, times=1: repeat(one_f_one_b(ranks, microbatches), times),
    "repeated replicas": lambda ranks, microbatches: repeat(dualpipe(ranks, 2 * microbatches), 2),
    "groups": lambda ranks, microbatches: shard(reduce_gradients(repeat(breadth_first(ranks, microbatches, 2), 3)), 1),
}


@sampled(1)
@pytest.mark.parametrize("name", CONFORMING)
def test_schedules_with_additions_conform(name):
    conformance(CONFORMING[name])()


@settings(deadline=None)
@given(orders(), st.integers(2, 4))
def test_any_correct_order_stays_correct(case, limit):
    s, graph = case
    require_gathered(shard(s, limit), graph, limit)
    s = connect(edit(s, rows(s, without="U")), graph)
    reduced, updated = reduce_gradients(s), update_weights(reduce_gradients(s))
    require_updates_of_the_whole_gradient(update_weights(s), graph)
    require_updates_of_the_whole_gradient(updated, graph)
    for one in (reduced, updated):
        require_gathered(shard(one, limit), graph, limit)


@settings(deadline=None)
@given(orders(microbatches=3))
def test_any_correct_order_is_repeated(case):
    s, graph = case
    s = connect(edit(s, rows(s, without="U")), graph)
    with suppress(SizeError):  # more microbatches on one route than on the other
        require_proved(repeat(s, 2), graph)


ADDED = [
    ("U", update_weights, require_updates_of_the_whole_gradient),
    ("REDUCE_GRAD", reduce_gradients, require_proved),
]


@sampled(1)
@pytest.mark.parametrize(("kind", "added", "require"), ADDED)
@settings(deadline=None)
@given(schedules(FAMILIES), st.lists(st.sampled_from(TRANSFORMS), max_size=3), st.sampled_from([*TRANSFORMS, None]))
def test_families_stay_correct_under_transforms_before_and_after(kind, added, require, s, before, after):
    for change in before:
        with suppress(SizeError):  # what cannot be mirrored
            s = change(s)
    s = added(s)
    require(s, chain(s.stages))
    if after not in (mirror, None):
        require(after(s), chain(s.stages))


@pytest.mark.parametrize(("kind", "added", "require"), ADDED)
@settings(deadline=None)
@given(schedules(FAMILIES))
def test_one_action_per_stage_is_added_right_after_its_last_gradient(kind, added, require, s):
    for before, now in zip(rows(s), rows(added(s)), strict=True):
        assert [a for a in now if a.kind != kind] == before
        made = [(a, b) for a, b in pairwise(now) if b.kind == kind]
        assert len(made) == len({b.stage for _, b in made}) == len({a.stage for a in before if s.backward})
        assert all(a.stage == b.stage and (a.kind == "G" or KINDS[a.kind].after == "done") for a, b in made)


@settings(deadline=None)
@given(schedules(EVERY), st.integers(1, 4))
def test_every_family_is_sharded_at_any_limit_that_fits_its_turns(s, limit):
    fused = any(action.kind == "OVERLAP_F" for row in rows(s) for action in row)
    require_gathered(shard(s, max(limit, 1 + fused)), chain(s.stages), max(limit, 1 + fused))
    assert rows(shard(s, limit + 1), without=("UNSHARD", "RESHARD")) == rows(s)
    for row in rows(shard(s, s.stages + 1)):  # with room for all, each stage is gathered once between updates
        gathers = sum(action.kind == "UNSHARD" for action in row)
        assert gathers <= len({action.stage for action in row}) + sum(action.kind == "U" for action in row)


@settings(deadline=None)
@given(schedules(FAMILIES), st.integers(1, 3), st.sampled_from([split_backward, recompute, overlap]))
def test_every_family_is_repeated_in_the_memory_of_one_group(s, times, change):
    with suppress(SizeError):
        several = repeat(s, times)
        require_proved(several, chain(s.stages))
        require_proved(change(several), chain(s.stages))
        assert several.microbatches == times * s.microbatches
        assert simulate(several).peak_memory == simulate(s).peak_memory


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            lambda: update_weights(pipedream(2, 3)),
            r"got schedule=.*expected one that updates no weights",
        ),
        (lambda: update_weights(update_weights(gpipe(2, 3))), "expected one that updates no weights"),
        (lambda: reduce_gradients(reduce_gradients(gpipe(1, 1))), "reduces no gradients"),
        (lambda: reduce_gradients(pipedream(2, 4)), "updates each stage once, after its last gradient"),
        (lambda: mirror(reduce_gradients(gpipe(2, 2))), "Mirror it first, and insert them afterwards"),
        (lambda: shard(shard(gpipe(1, 1), 1), 1), "gathers no weights"),
        (lambda: repeat(shard(gpipe(1, 1), 1), 2), "Repeat it first, then add them"),
        (lambda: repeat(reduce_gradients(gpipe(1, 1)), 2), "Repeat it first"),
        (lambda: repeat(pipedream(1, 1), 2), "one without U"),
        (lambda: repeat(dualpipe(2, 5), 2), "Choose an even number of microbatches"),
    ],
)
def test_schedules_that_cannot_be_changed_are_refused(call, why):
    with pytest.raises(SizeError, match=why):
        list(call().actions(0))


@pytest.mark.parametrize("added", [update_weights, reduce_gradients])
def test_a_schedule_without_backwards_stays_unchanged(added):
    s = forwards(gpipe(ranks=2, microbatches=3))
    assert rows(added(s)) == rows(s)


# ------------------------------------------------------------------------------------------------------------- updates


def test_a_stage_that_waits_for_a_shared_gradient_is_updated_at_the_end():
    s = update_weights(connect(interleaved_1f1b(ranks=2, microbatches=2, chunks=2), TIED))
    assert [str(a) for a in rows(s)[1]][-4:] == ["1B0", "1B1", "1U1", "3U1"]
    require_updates_of_the_whole_gradient(s, TIED)
    too_early = connect(update_weights(interleaved_1f1b(ranks=2, microbatches=2, chunks=2)), TIED)
    with pytest.raises(ScheduleError, match="ordered"):
        check(too_early)


@pytest.mark.parametrize(
    ("factory", "picture"),
    [
        (one_f_one_b, "rank 0 |F0 F1 .  .  B0    .  B1    U1 |\nrank 1 |.  F0 B0    F1 B1    U1 .  .  |"),
        (zb_h1, "rank 0 |F0 F1 .  I0 W0 I1 W1 U1 |\nrank 1 |.  F0 I0 F1 I1 W0 W1 U1 |"),
        (dualpipe, "rank 0 |0F0 1F1 1B1     0I0 0W0g0U0g1U1 |\nrank 1 |0F1 1F0 1B0     0I1 0W1g0U1g1U0 |"),
    ],
)
def test_pictures(factory, picture):
    assert drawing.text(update_weights(factory(ranks=2, microbatches=2)), Costs(U=1)) == picture


def test_updates_hide_in_the_drain_unless_the_last_rank_has_one():
    s = one_f_one_b(ranks=8, microbatches=16)
    drained = simulate(s).makespan
    frozen_first, equal, heavy_last = (0, *[2] * 7), 2, (*[2] * 7, 16)
    spent = [simulate(update_weights(s), Costs(U=U)).makespan - drained for U in (frozen_first, equal, heavy_last)]
    assert spent == [0, 2, 2]


@settings(deadline=None)
@given(schedules(FAMILIES))
def test_updates_survive_a_file(s):
    file = io.StringIO()
    write_csv(update_weights(s), file)
    file.seek(0)
    assert rows(read_csv(file)) == rows(update_weights(s))


def test_weight_gradients_are_not_deferred_past_what_uses_them():
    s = split_backward(one_f_one_b(ranks=2, microbatches=4))
    deferred = defer_weights(update_weights(s), memory=3)
    require_updates_of_the_whole_gradient(deferred, chain(2))
    assert [row[-1] for row in rows(deferred)] == [U(0, 3), U(1, 3)]
    require_proved(defer_weights(reduce_gradients(s), memory=4), chain(2))


def test_the_proof_refuses_an_update_with_part_of_the_gradient():
    s = update_weights(gpipe(ranks=2, microbatches=2))
    meaning = ideal(s)
    meaning.require(chain(2), 2)
    partial = replace(meaning, updates=(meaning.updates[0], ("part",)))
    with pytest.raises(ProgramError, match=r"the update of stage 1: got part .* Update after the last gradient"):
        partial.require(chain(2), 2)


# --------------------------------------------------------------------------------------------------------- collectives


def test_a_shared_gradient_is_sent_once_it_is_reduced():
    tied = replace(chain(2), gradients=frozenset({(1, 0)}))
    program = lower(reduce_gradients(gpipe(ranks=2, microbatches=1)), tied)
    row = [str(action) for action in program.actions(1)]
    assert row.index("1SEND_G0>0") == row.index("1REDUCE_GRAD0") + 1


def test_a_collective_does_not_delay_the_receives():
    """The receive of a value is posted as early as without collectives."""
    plain, gathered = gpipe(ranks=2, microbatches=3), rows(gpipe(ranks=2, microbatches=3))
    gathered[1].insert(1, Action("RESHARD", 1, 0))
    gathered[1].insert(1, Action("UNSHARD", 1, 1))
    assert rows(lower(edit(plain, gathered)), without=("UNSHARD", "RESHARD")) == rows(lower(plain))


def test_weights_are_gathered_one_pass_early_where_there_is_room():
    s = shard(interleaved_1f1b(ranks=1, microbatches=1, chunks=3), limit=2)
    assert " ".join(map(str, s.actions(0))) == (
        "0UNSHARD0 1UNSHARD0 0F0 0RESHARD0 2UNSHARD0 1F0 2F0 2B0 2RESHARD0 0UNSHARD1 1B0 1RESHARD0 0B0 0RESHARD1"
    )
    assert simulate(s, Costs(UNSHARD=1)).makespan == 1 + 3 * (1 + 2)  # only the first gathering is waited for


def count_gathers(s):
    return [sum(action.kind == "UNSHARD" for action in row) for row in rows(shard(s, limit=1))]


@pytest.mark.parametrize(("group", "gathers", "peak"), [(1, 17, 8), (2, 9, 10), (4, 5, 14), (8, 3, 22)])
def test_larger_groups_gather_less_and_hold_more(group, gathers, peak):
    s = repeat(breadth_first(ranks=2, microbatches=group, chunks=2), 8 // group)
    assert count_gathers(s) == [gathers, gathers]
    assert simulate(shard(s, limit=1), sizes=Sizes(gathered=6)).peak_memory == (peak, peak)


def test_the_order_of_interleaved_1f1b_gathers_more_in_the_same_memory():
    plain = interleaved_1f1b(ranks=2, microbatches=8, chunks=2)
    assert count_gathers(plain) == [23, 9]
    assert max(simulate(shard(plain, 1), sizes=Sizes(gathered=6)).peak_memory) <= 14
    assert max(simulate(shard(plain, 2), sizes=Sizes(gathered=6)).peak_memory) > 14
    assert simulate(shard(gpipe(2, 8), 1)).makespan == simulate(gpipe(2, 8)).makespan
