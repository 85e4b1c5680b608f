# SPDX-License-Identifier: Apache-2.0
"""`reduce_gradients` reduces the gradient of every stage once, as early as its rank has it."""

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    KINDS,
    Action,
    SizeError,
    chain,
    check,
    connect,
    defer_weights,
    dualpipe,
    families,
    forwards,
    gpipe,
    lower,
    merge_backward,
    mirror,
    one_f_one_b,
    overlap,
    pipedream,
    recompute,
    reduce_gradients,
    split_backward,
    update_weights,
    zb_v,
)
from schedules.proof.interpreter import ideal, interpret, prove
from schedules.proof.networks import fifo
from schedules.testing import conformance, orders, schedules
from tests.common.rows import edit, rows

TRANSFORMS = [split_backward, merge_backward, recompute, overlap, mirror]
FAMILIES = [getattr(families, name) for name in families.__all__ if not name.startswith("pipedream")]

test_reduced_1f1b_conforms = conformance(lambda ranks, microbatches: reduce_gradients(one_f_one_b(ranks, microbatches)))
test_reduced_v_conforms = conformance(lambda ranks, microbatches: reduce_gradients(zb_v(ranks, microbatches)))
test_reduced_replicas_conform = conformance(lambda ranks, microbatches: reduce_gradients(dualpipe(ranks, microbatches)))
test_reduced_and_updated_stages_conform = conformance(
    lambda ranks, microbatches: update_weights(reduce_gradients(one_f_one_b(ranks, microbatches)))
)
test_updated_and_reduced_replicas_conform = conformance(
    lambda ranks, microbatches: reduce_gradients(update_weights(dualpipe(ranks, microbatches)))
)


def require_correct(s, graph):
    check(s, graph)
    check(lower(s, graph))
    prove(s, graph)


@settings(deadline=None)
@given(orders())
def test_any_correct_order_stays_correct(case):
    s, graph = case
    s = connect(edit(s, rows(s, without="U")), graph)
    require_correct(reduce_gradients(s), graph)
    both = update_weights(reduce_gradients(s))
    require_correct(both, graph)
    for meaning in (ideal(both, graph), interpret(lower(both, graph), fifo)):
        assert meaning.updates == (meaning.sums if s.backward else ((),) * s.stages)


@settings(deadline=None)
@given(schedules(FAMILIES), st.lists(st.sampled_from(TRANSFORMS), max_size=2), st.sampled_from([*TRANSFORMS, None]))
def test_families_stay_correct_under_transforms_before_and_after(s, several, last):
    for change in several:
        with suppress(SizeError):  # what cannot be mirrored
            s = change(s)
    s = reduce_gradients(s)
    require_correct(s, chain(s.stages))
    if last not in (mirror, None):
        require_correct(last(s), chain(s.stages))


@settings(deadline=None)
@given(schedules(FAMILIES))
def test_a_reduction_comes_right_after_the_last_gradient(s):
    for before, after in zip(rows(s), rows(reduce_gradients(s)), strict=True):
        assert [a for a in after if a.kind != "REDUCE_GRAD"] == before
        made = [(a, b) for a, b in pairwise(after) if b.kind == "REDUCE_GRAD"]
        assert len(made) == len({b.stage for _, b in made}) == len({a.stage for a in before if s.backward})
        assert all(a.stage == b.stage and (a.kind == "G" or KINDS[a.kind].after == "done") for a, b in made)


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
