# SPDX-License-Identifier: Apache-2.0
"""The look of every kind of action, the same in all pictures.

Most color-blind viewers can tell the colors apart (Okabe and Ito, "Color Universal Design", 2008), and a letter repeats
the information. Stages of one rank differ in lightness.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from schedules.arguments import each, require_types
from schedules.errors import ArgumentError, quote
from schedules.language.actions import KINDS

Paint: TypeAlias = Callable[[str, str], str]
MARKED = "#ff3030"


class Look(NamedTuple):
    """The look of a kind: the letter in its label, its color, its name, and the `joint` after its label."""

    letter: str
    color: str
    name: str
    joint: str = ""


LOOKS: Mapping[str, Look] = MappingProxyType(
    {
        "F": Look("F", "#56b4e9", "forward"),
        "C": Look("C", "#3f97dc", "checkpointed forward"),
        "OVERLAP_F": Look("F", "#8c9cf0", "forward, overlapped with the backward after it", "&"),
        "R": Look("R", "#cc79a7", "recomputation"),
        "B": Look("B", "#45c484", "backward"),
        "I": Look("I", "#e69f00", "backward, input half"),
        "W": Look("W", "#efe04a", "backward, weight half"),
        "G": Look("G", "#a6a6a6", "sum of the replicas' gradients"),
        "U": Look("U", "#e5743a", "update"),
        "OFFLOAD": Look("O", "#b7b3e6", "move off the device"),
        "RELOAD": Look("L", "#9fc9a3", "move back to the device"),
        "UNSHARD": Look("A", "#1f78a8", "gather of weights"),
        "RESHARD": Look("E", "#8fd3d8", "end of gathered weights"),
        "REDUCE_GRAD": Look("D", "#a8745c", "data-parallel reduction of a gradient"),
    }
)


WAIT = Look("-", "#ebe3d0", "wait for a transfer")


def look_of(kind: str) -> Look:
    """Return the look of `kind`: a transfer looks like a wait, an unknown kind is light gray."""
    return LOOKS.get(kind) or (WAIT if kind in KINDS else Look(kind, "#d0d0d0", kind))


GRAYS: Mapping[str, int] = MappingProxyType(
    {"F": 255, "C": 240, "OVERLAP_F": 248, "R": 222, "B": 190, "I": 175, "W": 210, "G": 150, "U": 140}
)


def gray_of(kind: str) -> str:
    """Return the gray of `kind`, light enough for a label in black.

    >>> gray_of("F"), gray_of("B"), gray_of("WAIT_F")
    ('#ffffff', '#bebebe', '#ebebeb')
    """
    level = GRAYS.get(kind, 160 if kind in LOOKS else 235)
    return f"#{level:02x}{level:02x}{level:02x}"


@cache
def shade(kind: str, lightness: float) -> str:
    """Return the color of `kind`; a `lightness` of 0 to 1 moves it up to halfway to white.

    >>> shade("F", 0), shade("F", 1)
    ('#56b4e9', '#aadaf4')
    """
    mixed = (round(part + (255 - part) * lightness / 2) for part in _rgb(look_of(kind).color))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _rgb(color: str) -> tuple[int, int, int]:
    try:
        red, green, blue = bytes.fromhex(color[1:])
    except (TypeError, ValueError):
        raise ArgumentError(
            f"ansi: got color={quote(color)}, expected red, green and blue, as in '#56b4e9'. Write it like this."
        ) from None
    return red, green, blue


def plain(text: str, color: str) -> str:
    """Return `text` unchanged."""
    return text


def ansi(text: str, color: str) -> str:
    r"""Return `text` in black on the nearest of a terminal's 256 colors.

    >>> ansi("F0", shade("F", 0))
    '\x1b[38;5;16;48;5;74mF0\x1b[0m'
    """
    red, green, blue = (bisect(_MIDDLES, part) for part in _rgb(color))
    return f"\x1b[38;5;16;48;5;{16 + 36 * red + 6 * green + blue}m{text}\x1b[0m"


_MIDDLES = (48, 115, 155, 195, 235)  # midpoints between a channel's levels: 0, 95, 135, 175, 215, 255


def legend(kinds: Iterable[str], paint: Paint = plain) -> str:
    """Return one line that explains the letters.

    >>> legend({"B", "F"})
    'F forward   B backward'
    """
    require_types(legend, locals())
    used = set(each("kinds", kinds, str, ArgumentError))
    shown = [kind for kind in LOOKS if kind in used] + sorted(used - set(LOOKS))
    looks = dict.fromkeys(look_of(kind) for kind in shown)
    return "   ".join(f"{paint(one.letter + one.joint, one.color)} {one.name}" for one in looks)
