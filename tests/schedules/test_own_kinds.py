# SPDX-License-Identifier: Apache-2.0
"""Kinds of actions that users add are checked, simulated, lowered, drawn and proved like all others."""

import pickle

import pytest

from schedules import (
    B,
    Costs,
    Device,
    F,
    OwnKind,
    ProgramError,
    ScheduleError,
    Sizes,
    TableError,
    TimelineError,
    VocabularyError,
    certify,
    check,
    critical_path,
    drawing,
    forward_only,
    gpipe,
    lower,
    one_f_one_b,
    recompute,
    run_on_device,
    seq_1f1b,
    simulate,
    split_backward,
    transform,
)
from schedules.files import read_csv, write_csv
from schedules.playing.rows import edit
from schedules.proof.interpreter import prove
from schedules.testing import conformance
from tests.common.rows import rows

COLLECT = OwnKind("COLLECT", "collect garbage", time=0.5)
PACK = OwnKind("PACK", "compress what a forward keeps", "forward", "packed", time=0.25, growth=-0.75)
UNPACK = OwnKind("UNPACK", "decompress it", "packed", "forward", time=0.25, growth=0.75)


@transform
def packed(rank, schedule):
    """Compress what each forward keeps until its backward, and collect garbage now and then."""
    for action in schedule.actions(rank):
        kind, s, i, _, part = action
        if kind in ("B", "I"):
            yield UNPACK(s, i, part)
        yield action
        if kind in ("F", "R"):
            yield PACK(s, i, part)
        if kind == "B" and not part:
            yield COLLECT(s, i)


MADE = {
    "plain": lambda ranks, microbatches: packed(one_f_one_b(ranks, microbatches)),
    "split and recomputed": lambda ranks, microbatches: packed(recompute(split_backward(gpipe(ranks, microbatches)))),
    "sliced": lambda ranks, microbatches: packed(seq_1f1b(ranks, microbatches, slices=2)),
}


@pytest.mark.parametrize("name", MADE)
def test_schedules_with_own_kinds_conform(name):
    conformance(MADE[name], sizes={"ranks": [1, 3], "microbatches": [1, 4]})()


def test_they_take_time_and_change_memory():
    s = packed(gpipe(ranks=2, microbatches=4))
    found, plain = simulate(s, Costs(F=1, B=2)), simulate(gpipe(ranks=2, microbatches=4), Costs(F=1, B=2))
    assert found.busy == tuple(busy + 4 * (0.25 + 0.25 + 0.5) for busy in plain.busy)
    assert (plain.peak_memory, found.peak_memory) == ((4, 4), (1.75, 1.75))
    assert simulate(s, sizes=Sizes(activation=8)).peak_memory == (14, 14)
    assert run_on_device(lower(s), Device()).memory == (1.75, 1.75)
    assert "COLLECT" in drawing.text(s, Costs(F=4, B=4))
    assert critical_path(s)


WRONG = [
    ([F(0, 0), PACK(0, 0), B(0, 0)], "0B0: needs a microbatch in state 'forward', and finds it in state 'packed'"),
    ([F(0, 0), UNPACK(0, 0)], "0UNPACK0: needs a microbatch in state 'packed', and finds it in state 'forward'"),
    ([F(0, 0), PACK(0, 0)], "what follows state 'packed', never runs"),
    ([F(0, 0), COLLECT(0, 0), COLLECT(0, 0), B(0, 0)], "0COLLECT0: has already run"),
    ([F(0, 0), *[PACK(0, 0), UNPACK(0, 0)] * 2, B(0, 0)], "0PACK0: has already run"),
    ([COLLECT(0, 1)], "microbatch 1 does not exist"),
    ([COLLECT(1, 0)], "stage 1 does not exist"),
    ([COLLECT(0, 0, 0)], "slice 0 does not exist"),
]


@pytest.mark.parametrize(("row", "why"), WRONG)
def test_each_rule_names_the_culprit(row, why):
    broken = edit(gpipe(1, 1), [row])
    with pytest.raises(ScheduleError) as caught:
        check(broken)
    assert why in str(caught.value)
    with pytest.raises((ProgramError, ScheduleError)):
        prove(broken)


def test_without_backwards_only_those_that_change_nothing_are_left():
    def row(*more):
        return edit(forward_only(1, 1), [[F(0, 0), *more]])

    check(row(COLLECT(0, 0)))
    with pytest.raises(ScheduleError, match=r"0PACK0: serves a backward, and this schedule has no backwards"):
        check(row(PACK(0, 0), UNPACK(0, 0)))


def test_a_kind_is_a_value():
    again = pickle.loads(pickle.dumps(PACK))
    assert again == PACK
    assert (hash(again), again.before, again.growth) == (hash(PACK), "forward", -0.75)
    assert repr(PACK(0, 1)) == "Action('PACK', 0, 1)"
    with pytest.raises(AttributeError):
        PACK.time = 2


@pytest.mark.parametrize(
    "given",
    [
        ("F", "taken"),
        ("pack", "not in capitals"),
        ("PACK", "one state", "forward"),
        ("PACK", "the same", "packed", "packed"),
        ("PACK", "no state of its own", "forward", "halved"),
        ("PACK", "ends a microbatch", "packed", "done"),
        ("PACK", "grows without a state", "", "", 0, 1),
    ],
)
def test_a_kind_that_means_nothing_is_refused(given):
    with pytest.raises(VocabularyError, match=r"OwnKind: got .*Correct these"):
        OwnKind(*given)


def test_files_and_pages_hold_the_kinds_of_the_table_only(tmp_path):
    write_csv(packed(gpipe(1, 1)), tmp_path / "rows.csv")
    assert rows(packed(gpipe(1, 1)))[0][1] == PACK(0, 0)
    with pytest.raises(TableError, match=r"0PACK0.*expected a compute action"):
        read_csv(tmp_path / "rows.csv")
    with pytest.raises(ProgramError, match=r"certify: got actions of your own kinds \[.COLLECT., .PACK., .UNPACK.\]"):
        certify(packed(gpipe(1, 1)))
    with pytest.raises(TimelineError, match=r"got 0PACK0 in .* expected actions of the kinds in schedules.KINDS"):
        drawing.page({"packed": drawing.Panel(packed(gpipe(1, 1)))})
