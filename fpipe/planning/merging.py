# SPDX-License-Identifier: Apache-2.0
"""Combine what was measured on several devices: whatever is slowest counts.

A schedule moves at the pace of its slowest rank, so a plan made for the slowest device holds on all of them.

Runs when profiles are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from fpipe.errors import InputError
from fpipe.planning.blocks import require_same_blocks
from fpipe.planning.ranges import ActionTimes
from schedules import Link

SHARED: Final = (
    "model",
    "microbatch",
    "backward",
    "blocks",
    "hops",
    "activation",
    "residual",
    "arrivals",
    "versions",
    "parameters",
)
"""The fields that profiles of one model have in common."""
SEPARATOR: Final = "; "


def require_same_fields(got: Any, expected: Any, what: str) -> None:
    """Raise `InputError` unless two profiles are equal in what does not depend on devices."""
    for field in SHARED:
        mine, other = getattr(expected, field), getattr(got, field)
        if field == "blocks":
            require_same_blocks(other, mine, what)
        elif mine != other:
            pair = (other, mine) if isinstance(mine, str) else _first_difference(other, mine)
            raise InputError(
                f"{what}.{field}: got {pair[0]}, expected {pair[1]}, as in the profile that it is merged with. Profile "
                "the same model for the same microbatch on all devices."
            )


def _first_difference(got: Sequence[Any], expected: Sequence[Any]) -> tuple[Any, Any]:
    pairs = (pair for pair in zip(got, expected, strict=False) if pair[0] != pair[1])
    return next(pairs, (f"{len(got)} entries", f"{len(expected)} entries"))


def slowest(rows: Iterable[ActionTimes]) -> ActionTimes:
    """Return the largest of each time.

    >>> slowest([ActionTimes(1, 2, 1, 1, 1), ActionTimes(2, 1, 1, 1, 1)])
    ActionTimes(F=2, B=2, I=1, W=1, C=1)
    """
    return ActionTimes(*map(max, zip(*rows, strict=True)))


def slowest_link(links: Sequence[Link]) -> Link:
    """Return a link that is no faster than any of these, between any two ranks.

    >>> slowest_link([Link(latency=1, bandwidth=4), Link(latency=2, bandwidth=8, slow=(((0, 1), 3),))])
    Link(latency=2, bandwidth=4, bytes=0, slow=(((0, 1), 3),), back=None)
    """
    ends = sorted({ends for one in links for ends, _ in one.slow})
    factors = {pair: max(dict(one.slow).get(pair, 1) for one in links) for pair in ends}
    return Link(
        latency=max(one.latency for one in links),
        bandwidth=min(one.bandwidth for one in links),
        slow=tuple((pair, factor) for pair, factor in factors.items() if factor != 1),
    )


def join_texts(texts: Iterable[str]) -> str:
    """Return the distinct parts of texts, in alphabetical order.

    >>> join_texts(["a cpu; one gpu", "a cpu"])
    'a cpu; one gpu'
    """
    return SEPARATOR.join(sorted({part for text in texts for part in text.split(SEPARATOR)}))
