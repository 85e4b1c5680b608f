# SPDX-License-Identifier: Apache-2.0
"""`reduce_gradients` reduces the gradient of every stage once, as early as its rank has it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    Action,
    SizeError,
    chain,
    check,
    connect,
    defer_weights,
    dualpipe,
    forwards,
    gpipe,
    lower,
    mirror,
    one_f_one_b,
    pipedream,
    reduce_gradients,
    split_backward,
    update_weights,
    zb_v,
)
from schedules.proof.interpreter import prove
from schedules.testing import conformance, orders, schedules
from tests.common.rows import edit, rows
from tests.common.transforms import (
    FAMILIES,
    TRANSFORMS,
    require_correct_among,
    require_proved,
    require_right_after_the_last_gradient,
    require_updates_of_the_whole_gradient,
)

test_reduced_1f1b_conforms = conformance(lambda ranks, microbatches: reduce_gradients(one_f_one_b(ranks, microbatches)))
test_reduced_v_conforms = conformance(lambda ranks, microbatches: reduce_gradients(zb_v(ranks, microbatches)))
test_reduced_replicas_conform = conformance(lambda ranks, microbatches: reduce_gradients(dualpipe(ranks, microbatches)))
test_reduced_and_updated_stages_conform = conformance(
    lambda ranks, microbatches: update_weights(reduce_gradients(one_f_one_b(ranks, microbatches)))
)
test_updated_and_reduced_replicas_conform = conformance(
    lambda ranks, microbatches: reduce_gradients(update_weights(dualpipe(ranks, microbatches)))
)


@settings(deadline=None)
@given(orders())
def test_any_correct_order_stays_correct(case):
    s, graph = case
    s = connect(edit(s, rows(s, without="U")), graph)
    require_proved(reduce_gradients(s), graph)
    require_updates_of_the_whole_gradient(update_weights(reduce_gradients(s)), graph)


@settings(deadline=None)
@given(schedules(FAMILIES), st.lists(st.sampled_from(TRANSFORMS), max_size=2), st.sampled_from([*TRANSFORMS, None]))
def test_families_stay_correct_under_transforms_before_and_after(s, before, after):
    require_correct_among(reduce_gradients, require_proved, s, before, after)


@settings(deadline=None)
@given(schedules(FAMILIES))
def test_a_reduction_comes_right_after_the_last_gradient(s):
    require_right_after_the_last_gradient("REDUCE_GRAD", reduce_gradients, s)


def test_deferred_weight_gradients_come_before_the_reduction():
    s = defer_weights(reduce_gradients(split_backward(one_f_one_b(ranks=2, microbatches=4))), memory=4)
    check(s)
    prove(s)


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
    for row, same in zip(rows(lower(edit(plain, gathered))), rows(lower(plain)), strict=True):
        kept = [action for action in row if action.kind not in ("UNSHARD", "RESHARD")]
        assert kept == same


@pytest.mark.parametrize(
    ("s", "why"),
    [
        (reduce_gradients(gpipe(ranks=1, microbatches=1)), "reduces no gradients"),
        (pipedream(ranks=2, microbatches=4), "updates each stage once, after its last gradient"),
    ],
)
def test_a_schedule_that_cannot_be_reduced_is_refused(s, why):
    with pytest.raises(SizeError, match=why):
        list(reduce_gradients(s).actions(0))


def test_collectives_are_not_mirrored():
    with pytest.raises(SizeError, match="Mirror it first, and insert them afterwards"):
        list(mirror(reduce_gradients(gpipe(ranks=2, microbatches=2))).actions(0))


def test_a_schedule_without_backwards_stays_unchanged():
    s = forwards(gpipe(ranks=2, microbatches=2))
    assert rows(reduce_gradients(s)) == rows(s)
