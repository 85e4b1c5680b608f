# SPDX-License-Identifier: Apache-2.0
"""An expectation holds for exactly equal values, and lists how other values differ."""

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe.record.reads.expectations import Expectations

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(width=16) | st.sampled_from(["", "a", "b"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | inner.map(lambda one: SimpleNamespace(x=one))
    ),
    max_leaves=6,
)


def exact(value):
    """Return a value with the type of everything in it."""
    if isinstance(value, dict):
        return dict, sorted((key, exact(one)) for key, one in value.items())
    if isinstance(value, list):
        return list, [exact(one) for one in value]
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace, exact(vars(value))
    return type(value), repr(value)


@settings(max_examples=200)
@given(VALUES, VALUES)
def test_an_expectation_holds_for_exactly_equal_values(value, other):
    expectation = Expectations().expect(value)
    assert expectation.holds(value)
    assert not list(expectation.differences(value, "here"))
    if repr(exact(value)) != repr(exact(other)):
        assert not expectation.holds(other)
        assert list(expectation.differences(other, "here"))


def test_an_expectation_of_an_object_that_contains_itself():
    inside = SimpleNamespace(n=1)
    inside.me, inside.all = inside, [inside]
    expectation = Expectations().expect(inside)
    assert expectation.holds(inside)
    inside.n = 2
    assert [one.where for one in expectation.differences(inside, "x")] == ["x.n"]
