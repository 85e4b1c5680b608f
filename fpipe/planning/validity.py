# SPDX-License-Identifier: Apache-2.0
"""Check that the numbers of a profile make sense, wherever they came from.

Runs whenever a profile is made or read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, isnan
from typing import Any, Final

from fpipe.errors import InputError
from fpipe.planning.ranges import TIMED

MOST_BLOCKS: Final = 10_000
"""More blocks than any model has; tables of all their runs would still fit into memory."""
MOST_TEXT: Final = 10_000


def require_valid_profile(profile: Any) -> None:
    """Raise `InputError`, naming the field, for a profile whose numbers make no sense."""
    count = len(profile.blocks)
    if not 0 < count <= MOST_BLOCKS:
        raise _invalid("blocks", f"{count} of them", f"1 to {MOST_BLOCKS}")
    for name in ("model", "microbatch", "backward", "device"):
        require_text(name, getattr(profile, name))
    for k, block in enumerate(profile.blocks):
        require_text(f"blocks[{k}].name", block.name)
        require_text(f"blocks[{k}].digest", block.digest)
        require_size(f"blocks[{k}].units", block.units)
        for j, (path, ordinal, end) in enumerate(block.marks):
            require_text(f"blocks[{k}].marks[{j}][0]", path)
            require_size(f"blocks[{k}].marks[{j}][1]", ordinal)
            if not isinstance(end, bool):
                raise _invalid(f"blocks[{k}].marks[{j}][2]", end, "true or false")
    for name in ("times", "versions"):
        if len(getattr(profile, name)) != count:
            raise _invalid(name, f"{len(getattr(profile, name))} entries", f"{count}, one for each block")
    for where, times in [("fixed", profile.fixed), *((f"times[{k}]", row) for k, row in enumerate(profile.times))]:
        for kind in TIMED:
            require_seconds(f"{where}.{kind}", getattr(times, kind))
    require_seconds("step", profile.step)
    for k, size in enumerate(profile.versions):
        require_size(f"versions[{k}]", size)
    _require_memory(profile, count)
    for (source, target), factor in profile.link.slow:
        require_size("link.slow", source)
        require_size("link.slow", target)
        require_seconds("link.slow", factor)


def _require_memory(profile: Any, count: int) -> None:
    """Raise `InputError` for memory or messages of blocks that do not exist, or in another order."""
    for k, (source, target, forward, back) in enumerate(profile.hops):
        _require_blocks(f"hops[{k}]", (source, target), count)
        require_size(f"hops[{k}][2]", forward)
        require_size(f"hops[{k}][3]", back)
    for k, (source, target, size, saved) in enumerate(profile.arrivals):
        _require_blocks(f"arrivals[{k}]", (source, target), count)
        require_size(f"arrivals[{k}][2]", size)
        require_size(f"arrivals[{k}][3]", saved)
        if not target <= saved <= count:
            raise _invalid(f"arrivals[{k}][3]", saved, f"a number of blocks from {target} to {count}")
    for name in ("activation", "residual", "parameters"):
        for k, (size, blocks) in enumerate(getattr(profile, name)):
            require_size(f"{name}[{k}][0]", size)
            _require_blocks(f"{name}[{k}][1]", blocks, count)


def _require_blocks(where: str, blocks: Sequence[Any], count: int) -> None:
    for number in blocks:
        require_size(where, number)
    if not blocks or blocks[-1] >= count or any(a >= b for a, b in pairwise(blocks)):
        raise _invalid(where, list(blocks), f"ascending numbers of blocks below {count}")


def require_text(where: str, got: object) -> None:
    """Raise `InputError` unless this is a text of bearable length."""
    if not isinstance(got, str) or len(got) > MOST_TEXT:
        raise _invalid(where, f"{str(got)[:80]!r}", f"a text of at most {MOST_TEXT} characters")


def require_size(where: str, got: object) -> None:
    """Raise `InputError` unless this is an integer of at least 0."""
    if not isinstance(got, int) or isinstance(got, bool) or not 0 <= got < 2**62:
        raise _invalid(where, got, "an integer of at least 0")


def require_seconds(where: str, got: object) -> None:
    """Raise `InputError` unless this is a finite number of at least 0."""
    if not isinstance(got, int | float) or isinstance(got, bool) or isnan(got) or not 0 <= got < inf:
        raise _invalid(where, got, "a finite number of at least 0")


def _invalid(where: str, got: object, expected: str) -> InputError:
    return InputError(f"{where}: got {got}, expected {expected}. Profile the model again.")
