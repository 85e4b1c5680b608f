# SPDX-License-Identifier: Apache-2.0
"""Actions, graphs, placements and schedules are values; their arguments are checked, and what never ends is noticed."""

import copy
import dataclasses
import inspect
import itertools
import math
import pickle
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import (
    KINDS,
    Action,
    ArgumentError,
    B,
    C,
    F,
    Factory,
    G,
    Graph,
    GraphError,
    I,
    Limits,
    Placement,
    R,
    ScheduleError,
    SizeError,
    U,
    VocabularyError,
    W,
    bidirectional,
    chain,
    check,
    dag,
    drawing,
    gpipe,
    linear,
    looped,
    lower,
    one_f_one_b,
    parse,
    schedule,
    simulate,
    split_backward,
    summarize,
    transform,
    vee,
)
from schedules.arguments import each, require_types
from schedules.errors import quote
from schedules.testing import graphs, schedules

# ------------------------------------------- The text form of an action is read back exactly, and nothing else is read

numbers = st.integers(0, 10**18 - 1)


@st.composite
def actions(draw):
    kind = draw(st.sampled_from(sorted(KINDS)))
    peer = draw(numbers) if KINDS[kind].mark else None
    return Action(kind, draw(numbers), draw(numbers), peer, draw(st.none() | numbers))


@given(actions())
def test_parse_undoes_str(action):
    assert parse(str(action)) == action


@given(actions())
def test_repr_evaluates(action):
    names = {"Action": Action, "B": B, "C": C, "F": F, "G": G, "I": I, "R": R, "U": U, "W": W}
    assert eval(repr(action), names) == action


@given(st.one_of(st.text(), st.text("0123FBIWCRGUSENDRECVWAIT_G<>.- ", max_size=12), actions().map(str)), st.data())
def test_parse_accepts_only_what_str_writes(text, data):
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + data.draw(st.sampled_from(["", " ", "0", "\n", "F", "٣", "<1"])) + text[at:]
    try:
        action = parse(text)
    except VocabularyError:
        return
    assert str(action) == text


INVALID = ["F", "0F", "F0", "00F0", "0F00", "+1F0", "-1F0", "0f0", "0F0,", "0X0", "0F0>1", "0SEND_F0"]
ONLY_OF_TORCH = ["0SEND_F0<1", "1RECV_F0>0", "1RECV_F0", "0SEND_F0>", "0UNSHARD", "(0F1;1B0)OVERLAP_F_B"]


@pytest.mark.parametrize("text", [*INVALID, *ONLY_OF_TORCH, "", " 0F0", "0F0\n", "9" * 5000 + "F0"])
def test_invalid_text_is_refused(text):
    with pytest.raises(VocabularyError, match="expected <stage><kind><microbatch>") as caught:
        parse(text)
    assert quote(text) in str(caught.value)


def test_constructors_show_what_they_make():
    assert list(map(str, (F(3, 0), B(0, 1), I(1, 4), W(1, 4)))) == ["3F0", "0B1", "1I4", "1W4"]


def test_the_vocabulary_cannot_be_changed():
    with pytest.raises(TypeError):
        KINDS["X"] = KINDS["F"]


# ------------------------------------------------- Stage graphs: edges run forwards, and both ends tell the same story


@given(st.integers(1, 12).flatmap(graphs))
def test_both_ends_of_an_edge_know_it(graph):
    stages = range(graph.stages)
    assert {(s, t) for s in stages for t in graph.feeds[s]} == graph.values
    assert {(s, t) for t in stages for s in graph.fed_by[t]} == graph.values
    assert {(s, t) for t in stages for s in graph.pulls[t]} == graph.cotangents
    assert {(s, t) for s in stages for t in graph.pulled_by[s]} == graph.cotangents
    assert {(s, t) for s in stages for t in graph.shares[s]} == graph.gradients
    assert {(s, t) for t in stages for s in graph.shared_by[t]} == graph.gradients


@given(st.integers(1, 12).flatmap(graphs))
def test_neighbours_come_in_stage_order(graph):
    for ends in (graph.feeds, graph.fed_by, graph.pulls, graph.pulled_by, graph.shares, graph.shared_by):
        assert all(list(row) == sorted(row) for row in ends)


@given(st.integers(1, 12).flatmap(graphs))
def test_graphs_are_values(graph):
    assert pickle.loads(pickle.dumps(graph)) == graph
    assert eval(repr(graph)) == graph
    assert hash(pickle.loads(pickle.dumps(graph))) == hash(graph)


@pytest.mark.parametrize("edge", [(1, 0), (1, 1), (-1, 1), (0, 3), (2, 3)])
@pytest.mark.parametrize("what", ["values", "cotangents"])
def test_an_edge_that_runs_backwards_or_outside_is_refused(edge, what):
    edges = {name: frozenset({edge} if name == what else ()) for name in ("values", "cotangents")}
    with pytest.raises(GraphError, match=r"got edge \(.*\), expected \(s, t\) with 0 <= s < t < 3"):
        Graph(3, **edges)


@pytest.mark.parametrize("edge", [(1, 1), (-1, 1), (1, -1), (0, 3), (3, 2)])
def test_shared_gradients_go_either_way_between_different_stages(edge):
    assert Graph(3, frozenset(), frozenset(), frozenset({(0, 2), (2, 0)})).shares == ((2,), (), (0,))
    with pytest.raises(GraphError, match=r"got edge \(.*\) of gradients, expected two different stages below 3"):
        Graph(3, frozenset(), frozenset(), frozenset({edge}))


def test_chain_and_dag():
    assert chain(1) == Graph(1, frozenset(), frozenset())
    assert chain(3) == dag(3, {(0, 1), (1, 2)})
    assert dag(3, {(0, 2)}).pulled_by == ((2,), (), ())


# --------------------------------------------------------------------------------------------------- Where stages live

places = st.sampled_from([linear, looped, vee])
counts = st.integers(1, 9)


@given(places, counts, counts)
def test_every_rank_holds_equally_many_stages_and_each_stage_once(place, ranks, chunks):
    placement = place(ranks, chunks)
    held = [placement.stages_on(rank) for rank in range(ranks)]
    assert {len(stages) for stages in held} == {chunks}
    assert sorted(stage for stages in held for stage in stages) == list(range(placement.stages))
    assert all(placement.homes[stage] == rank for rank, stages in enumerate(held) for stage in stages)
    assert all(list(stages) == sorted(stages) for stages in held)


@given(counts, counts)
def test_a_vee_turns_without_a_transfer(ranks, chunks):
    homes = vee(ranks, chunks).homes
    assert all(abs(a - b) == 1 or (a == b and a in (0, ranks - 1)) for a, b in pairwise(homes))


@given(counts)
def test_with_one_chunk_all_placements_are_the_same(ranks):
    assert linear(ranks) == looped(ranks) == vee(ranks, chunks=1) == Placement(ranks, tuple(range(ranks)))


@pytest.mark.parametrize(
    ("placement", "homes"),
    [
        (linear(3, 2), (0, 0, 1, 1, 2, 2)),
        (looped(3, 2), (0, 1, 2, 0, 1, 2)),
        (vee(3), (0, 1, 2, 2, 1, 0)),
        (vee(2, 3), (0, 1, 1, 0, 0, 1)),
    ],
)
def test_homes_are_the_ranks_of_stages(placement, homes):
    assert placement.homes == homes


def test_a_rank_may_hold_nothing_and_placements_are_values():
    placement = Placement(3, (0, 2, 2))
    assert placement.stages_on(1) == ()
    assert placement == Placement(3, (0, 2, 2))
    assert len({placement, Placement(3, (0, 2, 2))}) == 1


@pytest.mark.parametrize(
    ("homes", "mirrors", "why"),
    [
        ((0, 2), (), r"got homes=\(0, 2\), expected a rank from 0 to 1 for each of 2 stages"),
        ((0, 1), ((1,),), r"got homes=\(1,\)"),
        ((0, 1), [(1, 0)], "expected routes, in a tuple"),
    ],
)
def test_an_invalid_placement_is_refused(homes, mirrors, why):
    with pytest.raises(SizeError, match=why):
        Placement(2, homes, mirrors)


def test_microbatches_take_turns_on_the_routes():
    both = bidirectional(ranks=5, chunks=2)
    assert [both.home(3, i) for i in range(3)] == [1, 3, 1]
    assert [both.replicas(stage) for stage in (0, 4, 5, 9)] == [(0, 4), (2,), (2,), (4, 0)]
    assert [both.last(3, rank, microbatches=6) for rank in both.replicas(3)] == [4, 5]
    assert [both.stages_on(rank) for rank in (0, 2)] == [(0, 1, 8, 9), (4, 5)]


# ------------------- A schedule is a value: it equals, hashes, prints, evaluates and pickles as the call that makes it

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


def test_a_generator_with_other_parameters_is_refused():
    with pytest.raises(TypeError, match=r"got parameters \['rank', 'microbatches'\].*rank, ranks, microbatches"):

        @schedule()
        def mine(rank, microbatches):
            yield F(rank, 0)
            yield B(rank, 0)


# ----------------------- Arguments are checked by their annotations, errors stay short, and what never ends is noticed


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
    with pytest.raises(ScheduleError, match=r"rank 1, position 92, 1F0: comes after 92 actions.*\[rule: finite\]. End"):
        list(stuttering(ranks=2, microbatches=2).actions(1))


def test_what_never_ends_is_read_lazily():
    assert list(itertools.islice(stuttering(ranks=1, microbatches=10**9).actions(0), 3)) == [F(0, 0)] * 3


@pytest.mark.parametrize("body", [lambda rank, ranks, microbatches: None, lambda rank, ranks, microbatches: 3])
def test_a_schedule_is_a_generator(body):
    body.__name__ = "mine"
    with pytest.raises(ArgumentError, match=r"mine: got .* from it, expected a generator.*Write yield"):
        check(schedule()(body)(ranks=1, microbatches=1))


@pytest.mark.parametrize(
    ("name", "taken", "given"),
    [
        ("memory", "rank, ", {"limits": Limits(memory=lambda rank: 2)}),
        ("versions", "rank, ", {"limits": Limits(versions=lambda rank, ranks: 2)}),
        ("requires", "", {"requires": lambda: None}),
        ("version", "microbatch, ", {"version": lambda microbatch: 0}),
        ("ticks", "stage, ", {"ticks": min}),
    ],
)
def test_functions_of_the_arguments_take_all_of_them(name, taken, given):
    with pytest.raises(ArgumentError, match=rf"endless: got {name}=.*function \({taken}ranks, microbatches\)\. Write"):
        schedule(**given)(endless.generator)


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
