# SPDX-License-Identifier: Apache-2.0
"""What `check` says of collectives in wrong places. (That it is right: test_never_wrong.py.)"""

import pytest

from schedules import Action, ScheduleError, check, dualpipe, forward_only, gpipe, one_f_one_b, reduce_gradients
from schedules.files.csv import table
from tests.common.rows import edit, rows

GATHERED = "0UNSHARD0,0F0,0RESHARD0,0UNSHARD1,0B0,0RESHARD1"


def violation(row, of=None):
    with pytest.raises(ScheduleError) as caught:
        check(table(rows=(row,)) if of is None else of)
    return str(caught.value)


def test_a_gathered_stage_and_a_reduced_gradient_are_accepted():
    check(table(rows=(GATHERED,)))
    check(table(rows=(f"{GATHERED},0REDUCE_GRAD0,0U0",)))
    check(table(rows=("0UNSHARD0,0F0,0I0,0RESHARD0,0W0",)))  # the weight half reads no weights


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "0UNSHARD0,0F0,0RESHARD0,0B0",
            "rank 0, position 3, 0B0: reads weights that are not gathered [rule: gathered]. "
            "Add 0UNSHARD1 before it, or free them later.",
        ),
        (
            "0F0,0UNSHARD0,0B0,0RESHARD0",
            "rank 0, position 1, 0UNSHARD0: comes after a pass through stage 0, which read weights that were not "
            "gathered [rule: gathered]. Move it before the stage's first pass.",
        ),
        (
            "0UNSHARD0,0UNSHARD1,0F0,0B0,0RESHARD1",
            "rank 0, position 1, 0UNSHARD1: gathers weights that are gathered already [rule: gathered]. "
            "Free them before it, or drop 0UNSHARD1.",
        ),
        (
            "0UNSHARD1,0F0,0B0,0RESHARD1",
            "rank 0, position 0, 0UNSHARD1: is not numbered as gathering 0 of its stage [rule: gathered]. "
            "Write 0UNSHARD0.",
        ),
        (
            "0RESHARD0,0F0,0B0",
            "rank 0, position 0, 0RESHARD0: frees weights that are not gathered [rule: gathered]. "
            "Drop 0RESHARD0, or gather them before it.",
        ),
        (
            "0UNSHARD0,0F0,0B0,0RESHARD1",
            "rank 0, position 3, 0RESHARD1: does not have the number of the gathering that it ends, 0 "
            "[rule: gathered]. Write 0RESHARD0.",
        ),
        (
            "0UNSHARD0,0F0,0B0",
            "rank 0, position 3, end of its actions: 0RESHARD0 never runs: the weights stay gathered "
            "[rule: gathered]. Add it to rank 0.",
        ),
        (
            "0UNSHARD0,0F0,0B0,0U0,0RESHARD0",
            "rank 0, position 3, 0U0: updates the shards while the weights are gathered, which would then be out of "
            "date [rule: gathered]. Put 0RESHARD0 before it.",
        ),
        (
            "0F0,0REDUCE_GRAD0,0B0",
            "rank 0, position 1, 0REDUCE_GRAD0: comes before the backward of microbatch 0 [rule: reduced]. "
            "Move it later.",
        ),
        (
            "0F0,0B0,0REDUCE_GRAD0,0REDUCE_GRAD0",
            "rank 0, position 3, 0REDUCE_GRAD0: has already run [rule: reduced]. "
            "Drop 0REDUCE_GRAD0: a gradient is reduced once.",
        ),
        (
            "0F0,0B0,0U0,0REDUCE_GRAD0",
            "rank 0, position 3, 0REDUCE_GRAD0: comes after 0U0, which updated with a gradient that was not reduced "
            "[rule: reduced]. Move it earlier.",
        ),
        (
            "0F0,0B0,0F1,0B1,0REDUCE_GRAD0",
            "rank 0, position 4, 0REDUCE_GRAD0: is not named after the last microbatch that this rank runs, 1 "
            "[rule: reduced]. Write 0REDUCE_GRAD1.",
        ),
    ],
)
def test_each_rule_names_the_culprit(row, message):
    assert violation(row) == message


def test_all_stages_are_reduced_or_none():
    schedule = reduce_gradients(gpipe(ranks=2, microbatches=1))
    left_out = edit(schedule, [rows(schedule)[0], rows(schedule, without=("REDUCE_GRAD",))[1]])
    assert violation("", left_out) == (
        "rank 1, position 2, end of its actions: 1REDUCE_GRAD0 never runs, though the gradients of other stages are "
        "reduced [rule: reduced]. Add it to rank 1."
    )


def test_replicas_are_summed_before_they_are_reduced():
    first, *others = rows(reduce_gradients(dualpipe(ranks=2, microbatches=4)))
    at = next(at for at, action in enumerate(first) if action.kind == "REDUCE_GRAD")
    first[at - 1], first[at] = first[at], first[at - 1]
    message = violation("", edit(reduce_gradients(dualpipe(ranks=2, microbatches=4)), [first, *others]))
    assert f"{first[at - 1]}: comes before {first[at]} has summed the gradients of the replicas" in message


def test_a_schedule_without_backwards_has_nothing_to_reduce():
    schedule = forward_only(ranks=1, microbatches=1)
    reduced = edit(schedule, [[*rows(schedule)[0], Action("REDUCE_GRAD", 0, 0)]])
    assert "0REDUCE_GRAD0: has no gradient to reduce: this schedule has no backwards" in violation("", reduced)


@pytest.mark.parametrize(("number", "why"), [(-1, "gathering -1 does not exist"), (9, "is not numbered as gathering")])
def test_gatherings_are_counted_from_0(number, why):
    schedule = one_f_one_b(ranks=1, microbatches=1)
    assert why in violation("", edit(schedule, [[Action("UNSHARD", 0, number), *rows(schedule)[0]]]))
