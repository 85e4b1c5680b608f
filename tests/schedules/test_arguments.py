# SPDX-License-Identifier: Apache-2.0
"""Arguments are checked by their annotations, errors stay short, and what never ends is noticed."""

import itertools
import math

import pytest

from schedules import (
    ArgumentError,
    B,
    F,
    ScheduleError,
    SizeError,
    check,
    drawing,
    linear,
    lower,
    one_f_one_b,
    schedule,
    simulate,
    split_backward,
    summarize,
    transform,
)
from schedules.arguments import each, require_types
from schedules.errors import quote


@schedule(placement=linear)
def endless(rank, ranks, microbatches):
    for i in itertools.count():
        yield F(rank, 0)
        yield B(rank, i)


@schedule(placement=linear)
def stuttering(rank, ranks, microbatches):
    yield from itertools.repeat(F(rank, 0))


READERS = {
    "check": check,
    "simulate": simulate,
    "print": str,
    "text": drawing.text,
    "lower": lambda s: [list(lower(s).actions(rank)) for rank in range(s.ranks)],
    "transform": lambda s: list(split_backward(s).actions(0)),
}


@pytest.mark.parametrize("factory", [endless, stuttering])
@pytest.mark.parametrize("reader", READERS)
def test_a_generator_that_never_ends_is_refused_by_all_that_read_it(reader, factory):
    s = factory(ranks=2, microbatches=2)
    if reader in ("print", "text"):
        assert "[rule: " in READERS[reader](s)
        return
    with pytest.raises(ScheduleError):
        READERS[reader](s)


def test_the_error_says_that_the_generator_does_not_end():
    with pytest.raises(ScheduleError, match=r"rank 1, position 84, 1F0: comes after 84 actions.*\[rule: finite\]. End"):
        list(stuttering(ranks=2, microbatches=2).actions(1))


def test_what_never_ends_is_read_lazily():
    assert list(itertools.islice(stuttering(ranks=1, microbatches=10**9).actions(0), 3)) == [F(0, 0)] * 3


@pytest.mark.parametrize("body", [lambda rank, ranks, microbatches: None, lambda rank, ranks, microbatches: 3])
def test_a_schedule_is_a_generator(body):
    body.__name__ = "mine"
    with pytest.raises(ArgumentError, match=r"mine: got .* from it, expected a generator.*Write yield"):
        check(schedule()(body)(ranks=1, microbatches=1))


def test_decorators_need_parentheses_and_functions():
    with pytest.raises(ArgumentError, match=r"expected a placement. Write @schedule\(\) with parentheses"):

        @schedule
        def mine(rank, ranks, microbatches):
            yield F(rank, 0)

    for decorator in (schedule(), transform):
        with pytest.raises(ArgumentError, match="got 3, expected a generator function"):
            decorator(3)


def test_calls_with_other_names_are_refused():
    for arguments in ({"ranks": 2}, {"ranks": 2, "microbatches": 2, "chunks": 2}):
        with pytest.raises(ArgumentError, match=r"one_f_one_b: got a call with .*expected one_f_one_b\(ranks, micro"):
            one_f_one_b(**arguments)


def test_sizes_are_refused_before_anything_of_that_size_is_made():
    for make in (
        lambda: linear(10**12),
        lambda: one_f_one_b(ranks=2**21, microbatches=1),
        lambda: linear(2**15, 2**15),
    ):
        with pytest.raises(SizeError, match=r"expected an integer of at least 1, .*at most 1048576"):
            make()


class Rude:
    def __repr__(self):
        raise RuntimeError("no")


def test_errors_quote_values_briefly():
    for value in ("x" * 10**6, list(range(10**6)), {k: k for k in range(10**5)}, 10**5000, Rude()):
        assert len(quote(value)) < 200


def test_annotations_are_checked():
    def draw(width: int | None, height: float = 1.0, *, name: str = "", paint=None) -> None:
        require_types(draw, locals())

    draw(None, math.inf, name="x", paint=3)
    for arguments in (("2",), (True,), (2.5,), (2, "3"), (2, math.nan), (2, True)):
        with pytest.raises(ArgumentError, match=r"draw: got (width|height)=.*, expected .*\. Pass "):
            draw(*arguments)


def test_lists_that_never_end_are_noticed(monkeypatch):
    monkeypatch.setattr("schedules.arguments.MOST_ENTRIES", 9)
    with pytest.raises(ArgumentError, match=r"names\[9\]: got 'a', expected at most 9 values"):
        list(each("names", itertools.repeat("a"), str, ArgumentError))


def test_spans_are_checked_as_they_are_read():
    with pytest.raises(ValueError, match="span 0: got 0, expected a Span"):
        summarize(itertools.count(), one_f_one_b(1, 1))
