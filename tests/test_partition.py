# SPDX-License-Identifier: Apache-2.0
"""Where a model is cut: by name, or so that the largest stage is as small as it can be."""

from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fpipe import CutError
from fpipe.capture.contract import Parameter, Unit
from fpipe.partition import cut_at, even


def unit(path, reads=(), makes=()):
    return Unit(path, tuple(reads), tuple(makes), lambda *_: ())


UNITS = [unit(path) for path in ("a", "a.x", "", "b@1", "b.y@1", "c", "a@1", "d.e.f")]
KNOWN = ["", "a", "a.x", "b", "b.y", "c", "d", "d.e", "d.e.f", "empty"]


@pytest.mark.parametrize(
    ("cuts", "places"),
    [
        ([], ()),
        (["b"], (3,)),
        (["a.x"], (1,)),
        (["b", "c"], (3, 5)),
        (["b.y", "d"], (4, 7)),
        (["c", "d.e"], (5, 7)),
    ],
)
def test_a_stage_begins_where_a_module_is_first_called(cuts, places):
    assert cut_at(UNITS, cuts, KNOWN) == places


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        (["bb"], ["'bb'", "name of a module", "Did you mean one of ['b'"]),
        (["nothing like it"], ["'nothing like it'", "Did you mean one of ['a'"]),
        ([""], ["''"]),
        ([3], ["3"]),
        (["empty"], ["'empty'", "runs no operation of its own"]),
        (["b", "b"], ["'b' twice"]),
        (["c", "b"], ["'b' after 'c'", "Put 'b' first"]),
        (["a"], ['"the model\'s first operation"', "'a'", "no operation between"]),
        (["d", "d.e"], ["'d' and 'd.e'", "no operation between them"]),
        (["b", "a"], ["'a' after 'b'"]),
    ],
)
def test_what_cannot_be_cut(cuts, words):
    with pytest.raises(CutError) as caught:
        cut_at(UNITS, cuts, KNOWN)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def captured(sizes, skips=()):
    """A chain of units with parameters of these sizes; `skips` are pairs of units with a value between them."""
    units, sources, fakes = [], {}, {}
    for k, size in enumerate(sizes):
        reads = [1000 + k] if size else []
        reads += [k - 1] if k else []
        reads += [2000 + start for start, end in skips if end == k]
        makes = [k] + [2000 + k for start, _ in skips[:1] if start == k]
        if size:
            sources[1000 + k], fakes[1000 + k] = Parameter(f"{k}"), torch.empty(size, device="meta")
        units.append(unit(f"m{k}", reads, makes))
    return SimpleNamespace(units=units, sources=sources, fakes=fakes)


def largest(sizes, cuts):
    return max(sum(size + 1 for size in sizes[a:b]) for a, b in pairwise([0, *cuts, len(sizes)]))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_even_cuts_are_the_best(sizes, data):
    stages = data.draw(st.integers(1, len(sizes)))
    found = even(captured(sizes), stages)
    assert list(found) == sorted(set(found))
    assert len(found) == stages - 1
    assert all(0 < cut < len(sizes) for cut in found)
    best = min(largest(sizes, cuts) for cuts in combinations(range(1, len(sizes)), stages - 1))
    assert largest(sizes, found) == best


def test_even_cuts_avoid_places_where_more_values_cross():
    assert even(captured([1, 1, 1, 1, 1, 1]), 2) == (3,)
    (cut,) = even(captured([1, 1, 1, 1, 1, 1], skips=[(1, 4)]), 2)
    assert cut in (1, 5), "not inside the skip"


def test_a_tied_parameter_counts_once():
    model = captured([100, 1, 1, 1])
    model.units[3] = unit("m3", (1000, 2), (3,))
    assert even(model, 2) == (1,)


def test_no_more_stages_than_places():
    with pytest.raises(CutError, match="got 4, expected at most 3"):
        even(captured([1, 1, 1]), 4)
