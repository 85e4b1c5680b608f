# SPDX-License-Identifier: Apache-2.0
"""A schedule is a value: it equals, hashes, prints, evaluates and pickles as the call that makes it."""

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Iterator

import pytest
from hypothesis import given

from schedules import B, F, Factory, SizeError, gpipe, looped, one_f_one_b, schedule, vee
from schedules.testing import schedules

both = schedules([gpipe, one_f_one_b])


@given(both)
def test_a_schedule_prints_and_pickles_as_the_call_that_makes_it(s):
    for again in (eval(repr(s)), pickle.loads(pickle.dumps(s)), copy.deepcopy(s)):
        assert again == s
        assert hash(again) == hash(s)
        assert (again.ranks, again.microbatches, again.placement) == (s.ranks, s.microbatches, s.placement)


@given(both)
def test_actions_are_generated_lazily_and_anew_each_time(s):
    assert isinstance(s.actions(0), Iterator)
    assert list(s.actions(0)) == list(s.actions(0))


@given(both, both)
def test_schedules_are_equal_exactly_when_their_calls_are(s, t):
    assert (s == t) == (repr(s) == repr(t))


def test_a_schedule_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        gpipe(2, 2).ranks = 3


def test_positional_named_and_default_arguments_are_one_call():
    @schedule(placement=looped)
    def mine(rank, ranks, microbatches, chunks=2, flavour="plain"):
        yield from ()

    assert mine(2, 3) == mine(ranks=2, microbatches=3, chunks=2, flavour="plain")
    assert repr(mine(2, 3)) == "mine(ranks=2, microbatches=3, chunks=2, flavour='plain')"
    assert mine(2, 3).stages == 4
    assert mine(2, 3, chunks=5).placement == looped(2, 5)


def test_without_chunks_the_default_of_the_placement_applies():
    @schedule(placement=vee)
    def mine(rank, ranks, microbatches):
        yield from ()

    assert mine(3, 1).stages == 6


def test_the_factory_looks_like_the_function_that_a_caller_sees():
    assert list(inspect.signature(gpipe).parameters) == ["ranks", "microbatches"]
    assert gpipe.__name__ == "gpipe"
    assert gpipe.__doc__.startswith("All forwards")
    assert isinstance(gpipe, Factory)
    assert pickle.loads(pickle.dumps(gpipe)) is gpipe
    assert repr(gpipe) == "schedules.families.fill_drain.gpipe"


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
@pytest.mark.parametrize("name", ["ranks", "microbatches"])
def test_sizes_are_positive_integers(size, name):
    with pytest.raises(SizeError, match=f"gpipe: got {name}={size!r}, expected an integer of at least 1"):
        gpipe(**{"ranks": 2, "microbatches": 2, name: size})


def test_chunks_must_be_positive_integers():
    @schedule(placement=looped)
    def mine(rank, ranks, microbatches, chunks=2):
        yield from ()

    with pytest.raises(SizeError, match="mine: got chunks=0"):
        mine(2, 2, chunks=0)


def test_a_generator_with_other_parameters_is_refused():
    with pytest.raises(TypeError, match=r"got parameters \['rank', 'microbatches'\].*rank, ranks, microbatches"):

        @schedule()
        def mine(rank, microbatches):
            yield F(rank, 0)
            yield B(rank, 0)
