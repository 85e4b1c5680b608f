# SPDX-License-Identifier: Apache-2.0
"""Parcels: what waits to be used while a schedule runs on formulas (values, cotangents, a stage's saved state)."""

from __future__ import annotations

from typing import NamedTuple

from schedules.language.actions import KINDS, Action
from schedules.language.graph import Graph


class Parcel(NamedTuple):
    """Something stage `source` makes for one use by stage `target`; the two are the same for a stage's saved state."""

    kind: str
    source: int
    target: int
    microbatch: int
    slice: int | None = None

    def __str__(self) -> str:
        unit = f"{self.microbatch}" if self.slice is None else f"{self.microbatch}.{self.slice}"
        return f"{self.kind} {self.source}>{self.target} of microbatch {unit}"


def parcel_of(message: Action) -> Parcel:
    """Return the parcel a transfer carries.

    >>> from schedules import parse
    >>> print(parcel_of(parse("2SEND_F1>5")))
    F 2>5 of microbatch 1
    """
    assert message.peer is not None, "a message has a peer stage"
    return Parcel(KINDS[message.kind].carries, message.stage, message.peer, message.microbatch, message.slice)


def parcels_for(action: Action, graph: Graph, slices: int) -> list[Parcel]:
    """Return the parcels that a forward, a full backward or an input half takes."""
    kind, s, i, _, part = action
    before, after = (None, None) if part is None else (part - 1, part + 1)
    if KINDS[kind].crosses == "F":
        cache = [Parcel("cache", s, s, i, before)] if part else []
        return [*cache, *(Parcel("F", p, s, i, part) for p in graph.fed_by[s])]
    later = [Parcel("later", s, s, i, after)] if after is not None and after < slices else []
    cotangents = (Parcel("B", t, s, i, part) for t in graph.pulled_by[s])
    return [Parcel("residuals", s, s, i, part), *later, *cotangents]
