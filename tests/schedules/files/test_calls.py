# SPDX-License-Identifier: Apache-2.0
"""A schedule that was written as JSON and read again is equal, and nothing else in a file becomes one."""

import json

import pytest

from schedules import (
    B,
    F,
    SizeError,
    TableError,
    chain,
    connect,
    defer_weights,
    one_f_one_b,
    recompute,
    repeat,
    schedule,
    zb_auto,
    zb_h1,
    zb_v,
)
from schedules.commands.subjects import transforms
from schedules.files.calls import NAMED_TRANSFORMS, read_call, spell_call
from schedules.replay.costs import Costs, Link


def there_and_back(how):
    return read_call(json.loads(json.dumps(spell_call(how))))


@pytest.mark.parametrize(
    "how",
    [
        zb_v(4, 8),
        recompute(one_f_one_b(2, 4), stages=(0,)),
        repeat(recompute(one_f_one_b(2, 4)), times=2),
        defer_weights(zb_h1(3, 6), memory=2.5),
        zb_auto(2, 4, memory=6, costs=Costs(F=(1, 2), comm=Link(latency=0.5, slow=(((0, 1), 2.0),)))),
    ],
)
def test_a_schedule_comes_back_equal(how):
    assert there_and_back(how) == how


def test_a_schedule_of_ones_own_comes_back_action_by_action():
    @schedule()
    def one_at_a_time(rank, ranks, microbatches):
        for i in range(microbatches):
            yield F(rank, i)
            yield B(rank, i)

    how = one_at_a_time(2, 3)
    found = there_and_back(recompute(how))
    assert [[*found.actions(rank)] for rank in range(2)] == [[*recompute(how).actions(rank)] for rank in range(2)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("gpipe", "expected the call of a schedule"),
        ({"schedule": "gpipe"}, "expected a name and its arguments"),
        ({"schedule": "os", "arguments": {}}, "expected a built-in schedule"),
        ({"schedule": "gpipe", "arguments": {"ranks": 2, "rows": 1}}, "got ['rows']"),
        ({"schedule": "gpipe", "arguments": {"ranks": 2}}, "missing a required argument"),
        ({"schedule": "recompute", "arguments": {"schedule": 3}}, "got 3, expected a schedule"),
        ({"value": "Costs", "arguments": {}}, "expected the call of a schedule"),
    ],
)
def test_anything_else_is_refused(call, words):
    with pytest.raises(TableError, match=words.replace("[", r"\[")):
        read_call(call)


def test_calls_inside_calls_have_an_end():
    call = {"schedule": "gpipe", "arguments": {"ranks": 2, "microbatches": 2}}
    for _ in range(2000):
        call = {"schedule": "recompute", "arguments": {"schedule": call}}
    with pytest.raises(TableError, match="deep"):
        read_call(call)


def test_sizes_are_those_that_the_factory_takes():
    with pytest.raises(SizeError, match="ranks=0"):
        read_call({"schedule": "gpipe", "arguments": {"ranks": 0, "microbatches": 1}})


def test_every_transform_of_schedules_alone_can_be_named():
    assert {one.__name__ for one in NAMED_TRANSFORMS} == {*transforms()} - {"connect"}


def test_a_stage_graph_is_refused_rather_than_lost():
    with pytest.raises(TableError, match="expected the chain"):
        spell_call(connect(one_f_one_b(3, 3), chain(3)))
