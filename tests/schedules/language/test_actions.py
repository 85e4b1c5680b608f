# SPDX-License-Identifier: Apache-2.0
"""The text form of an action is read back exactly, and nothing else is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import KINDS, Action, B, C, F, G, I, R, U, VocabularyError, W, parse
from schedules.errors import quote

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


@pytest.mark.parametrize(
    "text",
    ["", "F", "0F", "F0", "00F0", "0F00", "+1F0", "-1F0", "0f0", " 0F0", "0F0\n", "0F0,", "0X0", "0F0>1", "0SEND_F0"],
)
def test_invalid_text_is_refused(text):
    require_refused(text)


@pytest.mark.parametrize(
    "text", ["0SEND_F0<1", "1RECV_F0>0", "1RECV_F0", "0SEND_F0>", "0UNSHARD", "(0F1;1B0)OVERLAP_F_B", "9" * 5000 + "F0"]
)
def test_actions_that_only_torch_has_are_refused(text):
    require_refused(text)


def require_refused(text):
    with pytest.raises(VocabularyError, match="expected <stage><kind><microbatch>") as caught:
        parse(text)
    assert quote(text) in str(caught.value)


def test_constructors_show_what_they_make():
    assert list(map(str, (F(3, 0), B(0, 1), I(1, 4), W(1, 4)))) == ["3F0", "0B1", "1I4", "1W4"]


def test_the_vocabulary_cannot_be_changed():
    with pytest.raises(TypeError):
        KINDS["X"] = KINDS["F"]
