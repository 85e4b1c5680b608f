# SPDX-License-Identifier: Apache-2.0
"""The places of cuts: those that the user names, or those that make the largest stage as small as possible."""

from __future__ import annotations

from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fpipe import CutError
from fpipe.cutting.balance import Forbidden, Refusal, balance, refusals
from fpipe.cutting.calls import Calls
from fpipe.cutting.partition import (
    Barrier,
    Cuts,
    Evenly,
    Explicit,
    cut_at_marks,
    cut_evenly,
    cut_explicitly,
    parse_cuts,
)
from fpipe.record.captured import BatchLeaf, Buffer, Call, Constant, Observed, Parameter, Unit
from schedules import gpipe
from tests.common.layers import Block
from tests.common.sizes import NIGHTLY


def unit(path, reads=(), makes=()):
    return Unit(path, tuple(reads), tuple(makes), lambda *_: ())


def named(*names):
    """Return a module with submodules of these dotted names."""
    model = nn.Module()
    for name in names:
        inner = model
        for part in name.split("."):
            if part not in inner._modules:
                inner.add_module(part, nn.Module())
            inner = inner._modules[part]
    return model


UNITS = [unit(path) for path in ("a", "a.x", "", "b@1", "b.y@1", "c", "a@1", "d.e.f")]

KNOWN = named("a.x", "b.y", "c", "d.e.f", "empty")

CALLS = Calls.of(SimpleNamespace(units=UNITS, calls=()), KNOWN)


@pytest.mark.parametrize(
    ("cuts", "places"),
    [
        ([], ()),
        (["b"], (3,)),
        (["a.x"], (1,)),
        (["b", "c"], (3, 5)),
        (["b.y", "d"], (4, 7)),
        (["c", "d.e"], (5, 7)),
        (["b", "a@1"], (3, 6)),
        ([1, 3], (3, 6)),
        (["a.x", 2, "d"], (1, 5, 7)),
    ],
)
def test_a_stage_begins_where_a_module_is_called(cuts, places):
    assert cut_explicitly(CALLS, cuts, ()) == places


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        (["bb"], ["'bb'", "name of a module", "Did you mean one of ['b'"]),
        (["nothing like it"], ["'nothing like it'", "Did you mean one of ['a'"]),
        ([""], ["''"]),
        ([5], ["got 5", "below 5", "a, b, c, a, d"]),
        ([-1], ["got -1"]),
        (["empty"], ["'empty'", "runs no operations itself"]),
        (["a@2"], ["'a@2'", "called 2 times", "'a@1' is the second"]),
        (["a@b"], ["'a@b'", "a call that happens"]),
        (["b", "b"], ["'b' twice"]),
        (["c", "b"], ["'b' after 'c'", "Put 'b' first"]),
        (["a"], ['"the model\'s first operation"', "'a'", "no operation between"]),
        ([0], ["and 0 with no operation between"]),
        (["d", "d.e"], ["'d' and 'd.e'", "no operation between them"]),
        (["b", "a"], ["'a' after 'b'"]),
    ],
)
def test_places_that_cannot_be_cut_are_refused(cuts, words):
    with pytest.raises(CutError) as caught:
        cut_explicitly(CALLS, cuts, ())
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_no_cut_inside_a_barrier():
    barrier = Barrier(Call("b", nn.Linear, 3, 5), "a reason")
    assert cut_explicitly(CALLS, ["b", "c"], [barrier]) == (3, 5), "at its edges there is"
    with pytest.raises(CutError, match=r"'b\.y', inside 'b' \(Linear\): a reason; expected a module outside"):
        cut_explicitly(CALLS, ["b.y"], [barrier])


FOUR = gpipe(ranks=4, microbatches=4)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({}, Evenly(4, ())),
        ({"stages": 4}, Evenly(4, ())),
        ({"cuts": ["a", 3, "b"]}, Explicit(("a", 3, "b"))),
        ({"cuts": Block}, Evenly(4, (Block,))),
        ({"cuts": (Block, nn.Linear), "stages": 4}, Evenly(4, (Block, nn.Linear))),
        ({"cuts": "blocks.*"}, Evenly(4, ("blocks.*",))),
        ({"cuts": ["encoder.*", nn.Linear]}, Evenly(4, ("encoder.*", nn.Linear))),
    ],
)
def test_cuts_and_stages_are_read_as_documented(arguments, where):
    assert parse_cuts(arguments.get("cuts"), arguments.get("stages"), (), FOUR) == Cuts(where)


def test_one_item_needs_no_list():
    two = gpipe(ranks=2, microbatches=2)
    assert parse_cuts("a", None, "b", two) == Cuts(Explicit(("a",)), ("b",))
    assert parse_cuts(2, None, Block, two) == Cuts(Explicit((2,)), (Block,))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cuts": ["a", "b.*", "c"]}, "expected names and indices of modules, or else only classes and patterns"),
        ({"cuts": ["a", Block, "c"]}, "expected names and indices"),
        ({"cuts": [True, 2, 3]}, "expected names and indices"),
        ({"cuts": 1.5}, "expected names and indices"),
        ({"cuts": ["a", "b", "c"], "stages": 4}, "got both"),
        ({"cuts": []}, "got 1 stages, expected 4"),
        ({"cuts": Block, "stages": 3}, "got 3 stages, expected 4"),
        ({"stages": 0}, "got 0 stages, expected 4"),
        ({"unsplittable": [3]}, "unsplittable: got [3]"),
    ],
)
def test_invalid_cuts_and_stages_are_refused(arguments, words):
    with pytest.raises(CutError) as caught:
        parse_cuts(arguments.get("cuts"), arguments.get("stages"), arguments.get("unsplittable", ()), FOUR)
    assert words in str(caught.value)


def capture_chain(sizes, skips=(), calls=(), loss=0):
    """Return a chain of units with parameters of these sizes, the last `loss` of them after the model's output.

    `skips` are pairs of units with a value between them.
    """
    units, sources, fakes = [], {}, {}
    for k, size in enumerate(sizes):
        reads = [1000 + k] if size else []
        reads += [k - 1] if k else []
        reads += [2000 + start for start, end in skips if end == k]
        makes = [k] + [2000 + k for start, _ in skips[:1] if start == k]
        if size:
            sources[1000 + k], fakes[1000 + k] = Parameter(f"{k}"), torch.empty(size, device="meta")
        units.append(unit(f"m{k}" if k < len(sizes) - loss else "loss", reads, makes))
    outputs = (len(sizes) - 1 - loss,)
    return SimpleNamespace(units=units, sources=sources, fakes=fakes, calls=calls, outputs=outputs)


def evenly(model, stages, among=(), barriers=(), refusal=lambda positions: None):
    where = Evenly(stages, among)
    return cut_evenly(
        model, Calls.of(model, named(*[call.path for call in model.calls])), where, barriers, lambda _: refusal
    )


def largest(sizes, cuts):
    return max(sum(size + 1 for size in sizes[a:b]) for a, b in pairwise([0, *cuts, len(sizes)]))


def intervals(units):
    return st.tuples(st.integers(0, units), st.integers(0, units)).map(sorted).filter(lambda ends: ends[0] < ends[1])


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_even_cuts_are_within_a_tenth_of_the_best_of_those_allowed(sizes, data):
    """Brute force finds the best of all cuts that are outside barriers and whose stages are not refused."""
    count = len(sizes)
    stages = data.draw(st.integers(1, count))
    barriers = [Barrier(Call("x", nn.Module, *ends), "sealed") for ends in data.draw(st.lists(intervals(count)))]
    bad = data.draw(st.sets(intervals(count).map(tuple), max_size=12))

    def refusal(positions):
        found = [stage for stage in pairwise([0, *positions, count]) if stage in bad]
        stages = tuple(Forbidden(range(a, a + 1), range(b, b + 1)) for a, b in found[:1])
        return Refusal("it is refused", stages) if found else None

    places = [k for k in range(1, count) if not any(one.holds(k) for one in barriers)]
    allowed = [cuts for cuts in combinations(places, stages - 1) if refusal(cuts) is None or stages == 1]
    if not allowed:
        with pytest.raises(CutError) as caught:
            evenly(capture_chain(sizes), stages, barriers=barriers, refusal=refusal)
        assert "it is refused" in str(caught.value) or "sealed" in str(caught.value)
        return
    found = evenly(capture_chain(sizes), stages, barriers=barriers, refusal=refusal)
    full = [cuts for cuts in allowed if all(any(sizes[a:b]) for a, b in pairwise([0, *cuts, count]))]
    assert found in (full or allowed)
    assert largest(sizes, found) <= 1.1 * min(largest(sizes, cuts) for cuts in full or allowed)


def tied():
    """A chain whose last unit reads the parameter of the first."""
    model = capture_chain([100, 1, 1, 1])
    model.units[3] = unit("m3", (1000, 2), (3,))
    return model


@pytest.mark.parametrize(
    ("model", "stages", "places"),
    [
        (capture_chain([10] * 40), 2, (20,)),
        (capture_chain([10] * 40, skips=[(19, 21)]), 2, (19,)),  # fewer values cross there
        (capture_chain([10] * 40, skips=[(5, 35)]), 2, (20,)),  # that would be more than a tenth worse
        (tied(), 2, (1,)),
        (capture_chain([100, 9, 9, 9, 9, 9, 9]), 4, (1, 3, 5)),
        (capture_chain([0, 100, 1, 1], skips=[(1, 3)]), 2, (2,)),  # each has a parameter, although more values cross
        (capture_chain([0, 0, 1]), 3, (1, 2)),  # if there is another choice
        (capture_chain([1, 1, 1, 50], loss=1), 2, (2,)),  # the loss has a stage of its own only
        (capture_chain([1, 1, 1, 50], loss=1), 4, (1, 2, 3)),  # if nothing else is left
    ],
)
def test_even_cuts_balance_stages_then_what_crosses(model, stages, places):
    assert evenly(model, stages) == places


def test_even_cuts_go_where_more_values_cross_if_all_else_is_refused():
    def refusal(cuts):
        return None if cuts == (3,) else Refusal("no", (Forbidden(range(1), range(cuts[0], 1 + cuts[0])),))

    assert evenly(capture_chain([1, 1, 1, 1, 1, 1], skips=[(1, 4)]), 2, refusal=refusal) == (3,)


def test_more_stages_than_places_are_refused():
    with pytest.raises(CutError, match="got 4, expected at most 3"):
        evenly(capture_chain([1, 1, 1]), 4)


def test_even_cuts_are_at_the_selected_calls_only():
    kinds = [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear, nn.Tanh]
    model = capture_chain([50, 1, 1, 1, 1, 1], calls=[Call(f"b.{k}", kind, k, k + 1) for k, kind in enumerate(kinds)])
    assert evenly(model, 2) == (1,)
    assert evenly(model, 2, (nn.Linear,)) == (2,)
    assert evenly(model, 2, ("b.[35]",)) == (3,)
    assert evenly(model, 3, ("b.3", nn.Linear)) == (2, 4)
    for among, words in (
        ((nn.Linear,), "got 2 calls of the class Linear at which a stage can begin, expected at least 3 for 4 stages"),
        ((nn.ReLU,), "cuts: got the class ReLU, which no call of a module matches"),
        (("*",), "cuts: got '*', which no call of a module matches"),
    ):
        with pytest.raises(CutError) as caught:
            evenly(model, 4, among)
        assert words in str(caught.value)


def test_positions_are_found_again_by_the_calls_around_them():
    model = named("a", "b", "c", "drop")

    def calls(*paths):
        return Calls.of(SimpleNamespace(units=[unit(path) for path in paths], calls=()), model)

    known = calls("a", "drop", "", "b", "b@1", "c")
    fewer = calls("a", "", "", "b", "b@1", "b@1", "c", "c")
    marks = [known.marks(k) for k in (1, 2, 4, 5)]
    assert cut_at_marks(calls("a", "drop", "b", "b@1", "c"), marks, "in eval mode") == (1, 2, 3, 4)
    assert cut_at_marks(fewer, [known.marks(k) for k in (1, 4, 5)], "in eval mode") == (1, 4, 6)
    with pytest.raises(CutError, match=r"stage 1, in eval mode: .* the end of 'drop', where it begins in the example"):
        cut_at_marks(fewer, [known.marks(2)], "in eval mode")
    with pytest.raises(CutError, match="stage 2, in eval mode: got no operations"):
        cut_at_marks(calls("a", "b"), marks[:2], "in eval mode")


@st.composite
def chains(draw):
    """Sizes, places to cut, what crosses, and stages that are refused."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    count = len(sizes)
    places = sorted(draw(st.sets(st.integers(1, max(1, count - 1)), max_size=count))) if count > 1 else []
    crossing = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    pairs = st.tuples(st.integers(0, count), st.integers(0, count)).map(sorted)
    bad = draw(st.lists(st.tuples(pairs, pairs), max_size=3))
    return sizes, places, crossing, [Forbidden(range(*a), range(b[0], b[1] + 1)) for a, b in bad]


def weight(sizes, crossing, cuts):
    """What is made least, in this order."""
    stages = [sum(sizes[a:b]) for a, b in pairwise([0, *cuts, len(sizes)])]
    return max(stages), sum(crossing[cut] for cut in cuts), sum(stage**2 for stage in stages)


@given(chains(), st.integers(1, 5), st.sampled_from([1.0, 1.5]))
def test_even_cuts_are_the_best_of_those_not_refused(chain, stages, slack):
    sizes, places, crossing, bad = chain

    def refused(cuts):
        bounds = list(pairwise([0, *cuts, len(sizes)]))
        return [one for one in bad if any(a in one.begins and b in one.stops for a, b in bounds)]

    def refusal(cuts):
        return Refusal("refused", tuple(refused(cuts))[:1]) if refused(cuts) else None

    allowed = [cuts for cuts in combinations(places, stages - 1) if not refused(cuts)]
    found = balance(places, sizes, stages, refusal, crossing, slack)
    if not allowed:
        assert isinstance(found, Refusal)
        assert found.reason == ("refused" if len(places) >= stages - 1 else "")
        return
    best = min(weight(sizes, crossing, cuts) for cuts in allowed)
    assert found in allowed
    got = weight(sizes, crossing, found)
    assert got[0] <= slack * best[0]
    assert got == best or (slack > 1 and got[1:] < best[1:])


SOURCES = {0: BatchLeaf(0), 1: Buffer("b"), 2: Parameter("p"), 3: Constant(None), 4: BatchLeaf(1)}


@st.composite
def programs(draw):
    """Units that read values, make one, which may be a view, and may write memory of what they read; one may make the
    next value of the buffer."""
    count = draw(st.integers(2, 6))
    storage, views, written, units = {value: value for value in SOURCES}, set(), {}, []
    for k in range(count):
        reads = draw(st.lists(st.sampled_from(sorted(storage)), min_size=1, max_size=3, unique=True))
        made = 10 + k
        unit = Unit(f"m{k}", tuple(reads), (made,), lambda *_: ())
        of = draw(st.sampled_from([None, None, *reads]))
        storage[made] = made if of is None else storage[of]
        views |= {made} if of is not None and draw(st.booleans()) else set()
        changed = draw(st.sampled_from([None, None, *[v for v in reads if v not in (2, 3) or k == 5]]))
        written[unit] = frozenset() if changed is None else frozenset([storage[changed]])
        units.append(unit)
    observed = Observed(storage, written, {}, frozenset(views))
    outputs = tuple(draw(st.lists(st.sampled_from(sorted(storage)[5:]), max_size=2, unique=True)))
    new = draw(st.sampled_from([None, *sorted(storage)[5:]]))
    return SimpleNamespace(
        slices=(),
        units=tuple(units),
        sources=SOURCES,
        loss=None,
        outputs=outputs,
        aux=(),
        observed=observed,
        trainable=frozenset(),
        reassigned={} if new is None else {1: new},
    )


@settings(max_examples=300 if NIGHTLY else 60)
@given(programs())
def test_every_stage_that_a_refusal_forbids_is_refused(program):
    count = len(program.units)
    refusal = refusals(program)
    asked = {cuts: refusal(cuts) for k in range(1, count) for cuts in combinations(range(1, count), k)}
    stages = {cuts: list(pairwise([0, *cuts, count])) for cuts in asked}
    for cuts, refused in asked.items():
        if refused is None:
            continue
        forbidden = {(a, b) for one in refused.stages for a in one.begins for b in one.stops if a < b}
        assert set(stages[cuts]) & forbidden
        for others, answer in asked.items():
            assert answer is not None or not set(stages[others]) & forbidden, (refused, cuts, others)
