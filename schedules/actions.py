# SPDX-License-Identifier: Apache-2.0
"""The vocabulary: what one rank can be told to do.

Problem. A schedule is checked, simulated, drawn, written to files and run; all of these must mean the same thing by
the same word.

Idea. An action is a small frozen tuple. One table, `KINDS`, holds every word; text form and parser are derived from
it. So the vocabulary grows by a row (recomputation, offload, an update, each of a stage and up to a microbatch), by
what the row's word needs and makes (`schedules.replay`) and by its handler in the executor, never by a second
vocabulary. A field that only some actions carry (a sequence slice, a weight version) gets a mark of its own in the
text, as `peer` has `>` and `<`. A replica of a stage is a stage of the graph, on another rank, with microbatches of its
own.

Letters used throughout: `P` ranks, `S` stages, `M` microbatches; `r` a rank, `s` and `t` stages, `i` a microbatch.

Invariant: `parse(str(a)) == a` for every action, and `parse` accepts nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from schedules.errors import VocabularyError


class Kind(NamedTuple):
    """One word of the vocabulary: what it says, and the mark before the peer stage (empty where there is no peer)."""

    meaning: str
    mark: str = ""


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "F": Kind("forward"),
        "B": Kind("full backward: gradients of inputs and of weights"),
        "I": Kind("input half of the backward: gradients of inputs"),
        "W": Kind("weight half of the backward: gradients of weights"),
        "SEND_F": Kind("post the send of a value to a later stage", ">"),
        "RECV_F": Kind("post the receive of a value from an earlier stage", "<"),
        "WAIT_F": Kind("let go of a sent value: the later stage has consumed it", ">"),
        "SEND_B": Kind("post the send of a cotangent to an earlier stage", ">"),
        "RECV_B": Kind("post the receive of a cotangent from a later stage", "<"),
        "WAIT_B": Kind("let go of a sent cotangent: the earlier stage has consumed it", ">"),
        "SEND_G": Kind("post the send of the gradient summed up to this microbatch to another holder", ">"),
        "RECV_G": Kind("post the receive of that gradient from the parameter's owner", "<"),
        "WAIT_G": Kind("let go of a sent gradient: the other holder has it", ">"),
    }
)


class Action(NamedTuple):
    """One thing that one rank does: `kind`, on `stage`, for `microbatch`.

    `peer` is the stage at the other end of a transfer; compute actions have none. Build compute actions with
    `F B I W`, and any action from its text with `parse`.

    >>> str(F(3, 0)), str(Action("SEND_F", 2, 1, 5))
    ('3F0', '2SEND_F1>5')
    """

    kind: str
    stage: int
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.microbatch}"
        return text if self.peer is None else f"{text}{KINDS[self.kind].mark}{self.peer}"

    def __repr__(self) -> str:
        if self.peer is None:
            return f"{self.kind}({self.stage}, {self.microbatch})"
        return f"Action({self.kind!r}, {self.stage}, {self.microbatch}, {self.peer})"


def F(stage: int, microbatch: int) -> Action:
    """Forward of one microbatch through one stage."""
    return Action("F", stage, microbatch)


def B(stage: int, microbatch: int) -> Action:
    """Full backward: gradients of the stage's inputs and of its weights."""
    return Action("B", stage, microbatch)


def I(stage: int, microbatch: int) -> Action:  # noqa: E743 - the field's name for it
    """Input half of the backward: gradients of the stage's inputs only (arXiv 2401.10241, section 2, there `B`)."""
    return Action("I", stage, microbatch)


def W(stage: int, microbatch: int) -> Action:
    """Weight half of the backward: gradients of the stage's weights (arXiv 2401.10241, section 2)."""
    return Action("W", stage, microbatch)


_NUMBER = r"(0|[1-9][0-9]{0,17})"  # bounded: a longer one counts nothing, and int() would refuse it in its own words
_TEXT = re.compile(rf"{_NUMBER}([A-Z_]+){_NUMBER}(?:([<>]){_NUMBER})?", re.ASCII)


def parse(text: str) -> Action:
    """Read one action from its text form.

    Raises `VocabularyError` for anything that `str` would not have written: unknown kinds, blanks, leading zeros, a
    missing or superfluous peer.

    >>> parse("1I4"), parse("5RECV_F1<2")
    (I(1, 4), Action('RECV_F', 5, 1, 2))
    """
    found = _TEXT.fullmatch(text)
    if not found or found[2] not in KINDS or (found[4] or "") != KINDS[found[2]].mark:
        known = " ".join(KINDS)
        raise VocabularyError(
            f"got {text!r}, expected <stage><kind><microbatch> as in 3F0, with the peer stage behind it for a transfer "
            f"as in 2SEND_F1>5 or 5RECV_F1<2. Use one of the kinds {known}, and no blanks."
        )
    peer = None if found[5] is None else int(found[5])
    return Action(found[2], int(found[1]), int(found[3]), peer)
