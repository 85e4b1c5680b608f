# SPDX-License-Identifier: Apache-2.0
"""The vocabulary: the actions one rank can run.

Problem. A schedule is checked, simulated, drawn, written to files and run, and all of these must agree on what each
action means.

Idea. An action is a small frozen tuple. One table, `KINDS`, lists every kind of action and its effect on a microbatch
(the state it must be in on the stage, and the state it is left in) and on other stages (what crosses an edge). The text
form, parser, rules, replay and lowering all read that table, so extending the vocabulary takes one row plus a handler
in the executor, never a second vocabulary. Kinds of users come with their rows. Optional fields have their own marks in
the text: `>` and `<` for `peer`, a dot for `slice`. Both ends name a message by the action that sends it. A replica of
a stage is the same stage on another rank; the microbatch determines which one runs it (`schedules.language.placement`).

Letters used throughout: `P` ranks, `S` stages, `M` microbatches; `r` a rank, `s` and `t` stages, `i` a microbatch.

Invariant: `parse(str(a)) == a` for every action, and `parse` accepts nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from schedules.errors import VocabularyError, quote


class Kind(NamedTuple):
    """One kind of action.

    - `meaning`: a one-line description.
    - `before`, `after`: the state of the microbatch on the stage before and after the action: `""` not started, `kept`
      only its inputs saved, `forward` all residuals saved, `hosted` all of them saved elsewhere, `halved` only its
      weight gradient still to compute, `done`. Both are empty for transfers, and for what serves many microbatches.
    - `crosses`: what the action exchanges with other stages: `F` values, `B` cotangents, or nothing.
    - `reads`: true if the action reads the stage's weights. A weight half does not: it multiplies what the input half
      left, activations and gradients.
    - `beside`: the lane of an action that goes on beside the rank's other ones, those of a lane one after the other.
    - `does`, `carries`: of a transfer, what it does with a message, `SEND`, `RECV` or `WAIT`, and the payload: `F`
      value, `B` cotangent, `G` gradient. Both are empty for all others, which have no peer.
    """

    meaning: str
    before: str = ""
    after: str = ""
    crosses: str = ""
    reads: bool = False
    beside: str = ""
    does: str = ""
    carries: str = ""

    @property
    def mark(self) -> str:
        """The character before the peer stage in the text form; empty for actions without a peer."""
        return {"": "", "RECV": "<"}.get(self.does, ">")


def is_own(kind: str) -> bool:
    """Return whether a kind comes with its row, as those of users do (`schedules.own_kinds`)."""
    return isinstance(getattr(kind, "row", None), Kind)


class _Vocabulary(dict[str, Kind]):
    """The rows by name, and those that come with their kinds."""

    def __missing__(self, kind: str) -> Kind:
        if is_own(kind):
            return kind.row  # type: ignore[attr-defined, no-any-return]
        raise KeyError(kind)


KINDS: Mapping[str, Kind] = MappingProxyType(
    _Vocabulary(
        {
            "F": Kind("forward", "", "forward", "F", True),
            "B": Kind("unsplit backward: gradients of inputs and of weights", "forward", "done", "B", True),
            "I": Kind("input half of the backward: gradients of inputs", "forward", "halved", "B", True),
            "W": Kind("weight half of the backward: gradients of weights", "halved", "done"),
            "C": Kind("checkpointed forward: keeps only its inputs", "", "kept", "F", True),
            "R": Kind("recomputation of a checkpointed forward, for its backward", "kept", "forward", reads=True),
            "OVERLAP_F": Kind("forward, overlapped with the backward after it", "", "forward", "F", True),
            "G": Kind("sum of the gradients of all replicas of the stage, each up to its last microbatch"),
            "U": Kind("update of the weights with the gradients up to this microbatch: a new version"),
            "OFFLOAD": Kind("move what a forward keeps off the device", "forward", "hosted", beside="out"),
            "RELOAD": Kind("move it back, for its backward", "hosted", "forward", beside="back"),
            "UNSHARD": Kind("gather the stage's weights from the shards of its data-parallel group", beside="group"),
            "RESHARD": Kind("free the gathered weights", beside="group"),
            "REDUCE_GRAD": Kind("reduce the gradient up to this microbatch, the last, over the group", beside="group"),
            "SEND_F": Kind("post the send of a value to a later stage", does="SEND", carries="F"),
            "RECV_F": Kind("post the receive of a value from an earlier stage", does="RECV", carries="F"),
            "WAIT_F": Kind("release a sent value: the later stage has consumed it", does="WAIT", carries="F"),
            "SEND_B": Kind("post the send of a cotangent to an earlier stage", does="SEND", carries="B"),
            "RECV_B": Kind("post the receive of a cotangent from a later stage", does="RECV", carries="B"),
            "WAIT_B": Kind("release a sent cotangent: the earlier stage has consumed it", does="WAIT", carries="B"),
            "SEND_G": Kind(
                "post the send of the gradient summed up to this microbatch to another holder", does="SEND", carries="G"
            ),
            "RECV_G": Kind("post the receive of that gradient from another holder", does="RECV", carries="G"),
            "WAIT_G": Kind("release a sent gradient: the other holder has it", does="WAIT", carries="G"),
        }
    )
)


GATHERINGS = frozenset({"UNSHARD", "RESHARD"})
"""The kinds whose number counts the gatherings of the stage on its rank."""
BESIDE: Mapping[str, str] = MappingProxyType({kind: word.beside for kind, word in KINDS.items() if word.beside})
"""The kinds that go on beside the rank's other actions, with their lanes."""
COLLECTIVES = frozenset(kind for kind, lane in BESIDE.items() if lane == "group")
"""The kinds that concern a stage's data-parallel group, and no other rank of the pipeline."""
SENDS: Mapping[str, str] = MappingProxyType({word.carries: kind for kind, word in KINDS.items() if word.does == "SEND"})
"""The kinds of sends, by what they carry."""
RECEIVES, WAITS = (
    MappingProxyType({SENDS[word.carries]: kind for kind, word in KINDS.items() if word.does == does})
    for does in ("RECV", "WAIT")
)
"""The kinds of receives, and of waits, by the kind of their send."""


class Action(NamedTuple):
    """One action of one rank: `kind`, on `stage`, for `microbatch`.

    `peer` is the stage at the other end of a transfer, and `None` for compute actions. `slice` is the index of a slice
    of the microbatch's sequence, if the schedule cuts sequences. Build compute actions with `F B I W` and `C R G U`,
    and any action from its text form with `parse`.

    `UNSHARD` and `RESHARD` serve many microbatches, so their number counts the gatherings of the stage on its rank: 0,
    1, 2, and so on; with several routes, they are numbers of the rank's microbatches. It may go beyond the last one.
    `SEND_G` to one of several other replicas has the place of that replica as its slice.

    >>> str(F(3, 0)), str(F(3, 0, slice=2)), str(Action("SEND_F", 2, 1, 5))
    ('3F0', '3F0.2', '2SEND_F1>5')
    >>> str(Action("UNSHARD", 3, 0)), str(Action("REDUCE_GRAD", 3, 7))
    ('3UNSHARD0', '3REDUCE_GRAD7')
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


Message: TypeAlias = Action
"""A message, named by the action that sends it: `SEND_F`, `SEND_B` or `SEND_G`, source, microbatch, target, slice."""
new_tuple = tuple.__new__  # `new_tuple(Action, ...)` takes half the time of `Action(...)`; it is called by the million


def F(stage: int, microbatch: int, slice: int | None = None) -> Action:
    """Return the forward of one microbatch, or of one slice of it, through one stage."""
    return new_tuple(Action, ("F", stage, microbatch, None, slice))


def B(stage: int, microbatch: int, slice: int | None = None) -> Action:
    """Return the full backward: gradients of the stage's inputs and weights."""
    return new_tuple(Action, ("B", stage, microbatch, None, slice))


def I(stage: int, microbatch: int, slice: int | None = None) -> Action:  # noqa: E743 - the standard name
    """Return the input half of the backward: gradients of the inputs only (arXiv 2401.10241, section 2, there `B`)."""
    return new_tuple(Action, ("I", stage, microbatch, None, slice))


def W(stage: int, microbatch: int, slice: int | None = None) -> Action:
    """Return the weight half of the backward: gradients of the stage's weights (arXiv 2401.10241, section 2)."""
    return new_tuple(Action, ("W", stage, microbatch, None, slice))


def C(stage: int, microbatch: int, slice: int | None = None) -> Action:
    """Return a checkpointed forward: it saves only its inputs, so its backward needs an `R` (arXiv 1604.06174)."""
    return new_tuple(Action, ("C", stage, microbatch, None, slice))


def R(stage: int, microbatch: int, slice: int | None = None) -> Action:
    """Return the recomputation: the forward again from its saved inputs, now saving all that the backward needs."""
    return new_tuple(Action, ("R", stage, microbatch, None, slice))


def G(stage: int, microbatch: int, slice: int | None = None) -> Action:
    """Return the sum of the gradients of all replicas; `microbatch` is the last one that this rank's replica runs."""
    return new_tuple(Action, ("G", stage, microbatch, None, slice))


def U(stage: int, microbatch: int, slice: int | None = None) -> Action:
    """Return the weight update that applies all gradients up to `microbatch` not yet applied: a new version."""
    return new_tuple(Action, ("U", stage, microbatch, None, slice))


def message_of(transfer: Action) -> Message:
    """Return the message that an action sends, receives, or waits for: the same at both ends.

    >>> str(message_of(parse("1RECV_F0<0"))), str(message_of(parse("0WAIT_F0>1")))
    ('0SEND_F0>1', '0SEND_F0>1')
    """
    kind, stage, i, peer, part = transfer
    does, carries = KINDS[kind][-2:]
    source, target = (peer, stage) if does == "RECV" else (stage, peer)
    return new_tuple(Action, (SENDS[carries], source, i, target, part))


def receive_of(message: Message) -> Action:
    """Return the action that receives a message."""
    kind, source, i, target, part = message
    return new_tuple(Action, (RECEIVES[kind], target, i, source, part))


def wait_of(message: Message) -> Action:
    """Return the action that waits until a message is sent."""
    kind, source, i, target, part = message
    return new_tuple(Action, (WAITS[kind], source, i, target, part))


_NUMBER = r"(0|[1-9][0-9]{0,17})"  # bounded: no longer number is valid, and int() would raise its own error


@cache
def _pattern() -> re.Pattern[str]:
    """Return the pattern of an action's text, compiled when it is first needed."""
    return re.compile(rf"{_NUMBER}([A-Z_]+){_NUMBER}(?:\.{_NUMBER})?(?:([<>]){_NUMBER})?", re.ASCII)


def parse(text: str) -> Action:
    """Return the action that `text` spells.

    Raise `VocabularyError` for anything `str` would not write: unknown kinds, blanks, leading zeros, a missing or
    unexpected peer.

    >>> parse("1I4"), parse("5RECV_F1<2")
    (I(1, 4), Action('RECV_F', 5, 1, 2))
    """
    found = _pattern().fullmatch(text) if isinstance(text, str) else None
    if not found or found[2] not in KINDS or (found[5] or "") != KINDS[found[2]].mark:
        known = " ".join(KINDS)
        raise VocabularyError(
            f"got {quote(text)}, expected <stage><kind><microbatch> as in 3F0, or 3F0.2 for a slice; a transfer ends "
            f"with its peer stage, as in 2SEND_F1>5 or 5RECV_F1<2. Use one of the kinds {known}, and no blanks."
        )
    part, peer = (None if number is None else int(number) for number in (found[4], found[6]))
    return Action(found[2], int(found[1]), int(found[3]), peer, part)
