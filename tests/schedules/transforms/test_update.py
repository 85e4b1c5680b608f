# SPDX-License-Identifier: Apache-2.0
"""`update_weights` updates every stage once, with its whole gradient, as early as its rank has it."""

import io
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    Costs,
    ProgramError,
    ScheduleError,
    SizeError,
    U,
    chain,
    check,
    connect,
    defer_weights,
    drawing,
    dualpipe,
    forwards,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    pipedream,
    simulate,
    split_backward,
    update_weights,
    zb_h1,
    zb_v,
)
from schedules.files.csv import read_csv, write_csv
from schedules.proof.interpreter import ideal
from schedules.testing import conformance, orders, schedules
from tests.common.rows import edit, rows
from tests.common.transforms import (
    FAMILIES,
    TRANSFORMS,
    require_correct_among,
    require_right_after_the_last_gradient,
    require_updates_of_the_whole_gradient,
)

TIED = replace(chain(4), gradients=frozenset({(0, 3)}))

test_updated_1f1b_conforms = conformance(lambda ranks, microbatches: update_weights(one_f_one_b(ranks, microbatches)))
test_updated_v_conforms = conformance(lambda ranks, microbatches: update_weights(zb_v(ranks, microbatches)))
test_updated_copies_conform = conformance(lambda ranks, microbatches: update_weights(dualpipe(ranks, microbatches)))


@settings(deadline=None)
@given(orders())
def test_any_correct_order_stays_correct_and_updates_with_the_whole_gradient(case):
    s, graph = case
    require_updates_of_the_whole_gradient(update_weights(connect(edit(s, rows(s, without="U")), graph)), graph)


@settings(deadline=None)
@given(schedules(FAMILIES), st.lists(st.sampled_from(TRANSFORMS), max_size=3), st.sampled_from([*TRANSFORMS, None]))
def test_families_stay_correct_under_transforms_before_and_after(s, before, after):
    require_correct_among(update_weights, require_updates_of_the_whole_gradient, s, before, after)


@settings(deadline=None)
@given(schedules(FAMILIES))
def test_an_update_comes_right_after_the_last_gradient(s):
    require_right_after_the_last_gradient("U", update_weights, s)


def test_a_stage_that_waits_for_a_shared_gradient_is_updated_at_the_end():
    s = update_weights(connect(interleaved_1f1b(ranks=2, microbatches=2, chunks=2), TIED))
    assert [str(a) for a in rows(s)[1]][-4:] == ["1B0", "1B1", "1U1", "3U1"]
    require_updates_of_the_whole_gradient(s, TIED)
    too_early = connect(update_weights(interleaved_1f1b(ranks=2, microbatches=2, chunks=2)), TIED)
    with pytest.raises(ScheduleError, match="ordered"):
        check(too_early)


@pytest.mark.parametrize(
    ("schedule", "picture"),
    [
        (
            one_f_one_b(ranks=2, microbatches=2),
            "rank 0 |F0 F1 .  .  B0    .  B1    U1 |\nrank 1 |.  F0 B0    F1 B1    U1 .  .  |",
        ),
        (
            zb_h1(ranks=2, microbatches=2),
            "rank 0 |F0 F1 .  I0 W0 I1 W1 U1 |\nrank 1 |.  F0 I0 F1 I1 W0 W1 U1 |",
        ),
        (
            dualpipe(ranks=2, microbatches=2),
            "rank 0 |0F0 1F1 1B1     0I0 0W0g0U0g1U1 |\nrank 1 |0F1 1F0 1B0     0I1 0W1g0U1g1U0 |",
        ),
    ],
    ids=["1F1B", "ZB-H1", "DualPipe"],
)
def test_pictures(schedule, picture):
    assert drawing.text(update_weights(schedule), Costs(U=1)) == picture


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


def test_a_schedule_without_backwards_updates_nothing():
    s = forwards(gpipe(ranks=2, microbatches=3))
    assert rows(update_weights(s)) == rows(s)


@pytest.mark.parametrize("updated", [pipedream(2, 3), update_weights(gpipe(2, 3))])
def test_a_schedule_that_updates_is_refused(updated):
    with pytest.raises(SizeError, match=r"update_weights: got schedule=.*expected one that updates no weights"):
        check(update_weights(updated))


def test_weight_gradients_are_not_deferred_past_the_update():
    s = defer_weights(update_weights(split_backward(one_f_one_b(ranks=2, microbatches=4))), memory=3)
    require_updates_of_the_whole_gradient(s, chain(2))
    assert [row[-1] for row in rows(s)] == [U(0, 3), U(1, 3)]


def test_the_proof_refuses_an_update_with_part_of_the_gradient():
    s = update_weights(gpipe(ranks=2, microbatches=2))
    meaning = ideal(s)
    meaning.require(chain(2), 2)
    partial = replace(meaning, updates=(meaning.updates[0], ("part",)))
    with pytest.raises(ProgramError, match=r"the update of stage 1: got part .* Update after the last gradient"):
        partial.require(chain(2), 2)
