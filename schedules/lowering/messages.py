# SPDX-License-Identifier: Apache-2.0
"""Messages: what one rank sends another, named so that both ends agree."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from schedules.language.actions import Action

Message: TypeAlias = tuple[str, int, int, int, int | None]
"""The payload (`F` value, `B` cotangent, `G` gradient), source stage, microbatch, target stage and slice."""

SENDS: Mapping[str, str] = MappingProxyType({"F": "SEND_F", "B": "SEND_B", "G": "SEND_G"})
RECEIVES: Mapping[str, str] = MappingProxyType({"F": "RECV_F", "B": "RECV_B", "G": "RECV_G"})
WAITS: Mapping[str, str] = MappingProxyType({"F": "WAIT_F", "B": "WAIT_B", "G": "WAIT_G"})


def transfer(word: str, message: Message) -> Action:
    """Return the `SEND`, `RECV` or `WAIT` action of a message.

    >>> str(transfer("RECV", ("F", 0, 3, 1, None)))
    '1RECV_F3<0'
    """
    what, s, i, t, part = message
    return Action(f"{word}_{what}", t, i, s, part) if word == "RECV" else Action(f"{word}_{what}", s, i, t, part)
