# SPDX-License-Identifier: Apache-2.0
"""The vocabulary: what one rank can be told to do.

Problem. A schedule is checked, simulated, drawn, written to files and run; all of these must mean the same thing by
the same word.

Idea. An action is a small frozen tuple. One table, `KINDS`, holds every word, and what the word does to a microbatch
(where in its life on the stage it may come, and where it leaves it) and to other stages (what crosses an edge for it).
Text form, parser, rules, replay and lowering read that table. So the vocabulary grows by a row and by the row's handler
in the executor, never by a second vocabulary. A field that only some actions carry has a mark of its own in the text:
`peer` has `>` and `<`, `slice` has a dot. A replica of a stage is the same stage on another rank: the microbatch tells
which (`schedules.placement`).

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
    """One word of the vocabulary.

    - `meaning`: what it says.
    - `mark`: stands before the peer stage in the text; empty where there is no peer.
    - `before`, `after`: where a microbatch stands on the stage before and after: `""` not begun, `kept` with only its
      inputs kept, `forward` with all that its backward needs, `halved` with only its weight gradient to come, `done`.
      Both are empty for what is done once for many microbatches, and for transfers.
    - `crosses`: what it takes from and gives to other stages: `F` values, `B` cotangents, or nothing.
    """

    meaning: str
    mark: str = ""
    before: str = ""
    after: str = ""
    crosses: str = ""


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "F": Kind("forward", "", "", "forward", "F"),
        "B": Kind("full backward: gradients of inputs and of weights", "", "forward", "done", "B"),
        "I": Kind("input half of the backward: gradients of inputs", "", "forward", "halved", "B"),
        "W": Kind("weight half of the backward: gradients of weights", "", "halved", "done"),
        "C": Kind("checkpointed forward: keeps its inputs only", "", "", "kept", "F"),
        "R": Kind("recomputation of a checkpointed forward, for its backward", "", "kept", "forward"),
        "OVERLAP_F": Kind("forward, overlapped with the backward behind it", "", "", "forward", "F"),
        "G": Kind("sum of the gradients of all replicas of the stage, each up to its last microbatch"),
        "U": Kind("update of the weights with the gradients up to this microbatch: a new version"),
        "SEND_F": Kind("post the send of a value to a later stage", ">"),
        "RECV_F": Kind("post the receive of a value from an earlier stage", "<"),
        "WAIT_F": Kind("let go of a sent value: the later stage has consumed it", ">"),
        "SEND_B": Kind("post the send of a cotangent to an earlier stage", ">"),
        "RECV_B": Kind("post the receive of a cotangent from a later stage", "<"),
        "WAIT_B": Kind("let go of a sent cotangent: the earlier stage has consumed it", ">"),
        "SEND_G": Kind("post the send of the gradient summed up to this microbatch to another holder", ">"),
        "RECV_G": Kind("post the receive of that gradient from another holder", "<"),
        "WAIT_G": Kind("let go of a sent gradient: the other holder has it", ">"),
    }
)


class Action(NamedTuple):
    """One thing that one rank does: `kind`, on `stage`, for `microbatch`.

    `peer` is the stage at the other end of a transfer; compute actions have none. `slice` is the number of a slice of
    the microbatch's sequence, where a schedule cuts it. Build compute actions with `F B I W` and `C R G U`, and any
    action from its text with `parse`.

    >>> str(F(3, 0)), str(F(3, 0, slice=2)), str(Action("SEND_F", 2, 1, 5))
    ('3F0', '3F0.2', '2SEND_F1>5')
    """

    kind: str
    stage: int
    microbatch: int
    peer: int | None = None
    slice: int | None = None

    def __str__(self) -> str:
        kind, stage, microbatch, peer, part = self
        text = f"{stage}{kind}{microbatch}" if part is None else f"{stage}{kind}{microbatch}.{part}"
        return text if peer is None else f"{text}{KINDS[kind].mark}{peer}"

    def __repr__(self) -> str:
        kind, stage, microbatch, peer, part = self
        cut = "" if part is None else f", slice={part}"
        if peer is None and len(kind) == 1:
            return f"{kind}({stage}, {microbatch}{cut})"
        return f"Action({kind!r}, {stage}, {microbatch}{'' if peer is None else f', {peer}'}{cut})"


_new = tuple.__new__  # what Action(...) comes to, in half the time: schedules are made of these calls


def F(stage: int, microbatch: int, slice: int | None = None) -> Action:
    """Forward of one microbatch, or of one slice of it, through one stage."""
    return _new(Action, ("F", stage, microbatch, None, slice))


def B(stage: int, microbatch: int, slice: int | None = None) -> Action:
    """Full backward: gradients of the stage's inputs and of its weights."""
    return _new(Action, ("B", stage, microbatch, None, slice))


def I(stage: int, microbatch: int, slice: int | None = None) -> Action:  # noqa: E743 - the field's name for it
    """Input half of the backward: gradients of the stage's inputs only (arXiv 2401.10241, section 2, there `B`)."""
    return _new(Action, ("I", stage, microbatch, None, slice))


def W(stage: int, microbatch: int, slice: int | None = None) -> Action:
    """Weight half of the backward: gradients of the stage's weights (arXiv 2401.10241, section 2)."""
    return _new(Action, ("W", stage, microbatch, None, slice))


def C(stage: int, microbatch: int, slice: int | None = None) -> Action:
    """Checkpointed forward: keeps its inputs only, so that an `R` must come before the backward (arXiv 1604.06174)."""
    return _new(Action, ("C", stage, microbatch, None, slice))


def R(stage: int, microbatch: int, slice: int | None = None) -> Action:
    """Recomputation: the forward again, from the inputs kept, now keeping all that the backward needs."""
    return _new(Action, ("R", stage, microbatch, None, slice))


def G(stage: int, microbatch: int, slice: int | None = None) -> Action:
    """Sum of the gradients of all replicas of the stage; `microbatch` is the last one of the replica on this rank."""
    return _new(Action, ("G", stage, microbatch, None, slice))


def U(stage: int, microbatch: int, slice: int | None = None) -> Action:
    """Update of the stage's weights with the gradients up to `microbatch` that no update has used: a new version."""
    return _new(Action, ("U", stage, microbatch, None, slice))


_NUMBER = r"(0|[1-9][0-9]{0,17})"  # bounded: a longer one counts nothing, and int() would refuse it in its own words
_TEXT = re.compile(rf"{_NUMBER}([A-Z_]+){_NUMBER}(?:\.{_NUMBER})?(?:([<>]){_NUMBER})?", re.ASCII)


def parse(text: str) -> Action:
    """Read one action from its text form.

    Raises `VocabularyError` for anything that `str` would not have written: unknown kinds, blanks, leading zeros, a
    missing or superfluous peer.

    >>> parse("1I4"), parse("5RECV_F1<2")
    (I(1, 4), Action('RECV_F', 5, 1, 2))
    """
    found = _TEXT.fullmatch(text)
    if not found or found[2] not in KINDS or (found[5] or "") != KINDS[found[2]].mark:
        known = " ".join(KINDS)
        raise VocabularyError(
            f"got {text!r}, expected <stage><kind><microbatch> as in 3F0, or 3F0.2 for a slice, with the peer stage "
            f"behind it for a transfer as in 2SEND_F1>5 or 5RECV_F1<2. Use one of the kinds {known}, and no blanks."
        )
    part, peer = (None if number is None else int(number) for number in (found[4], found[6]))
    return Action(found[2], int(found[1]), int(found[3]), peer, part)
