# SPDX-License-Identifier: Apache-2.0
"""Amounts of memory as users write them: a number of bytes, or a text such as "80GB".

Runs when a plan is made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf
from typing import Any, Final, TypeAlias

from fpipe.errors import InputError

Amount: TypeAlias = float | str
BYTES_BY_UNIT: Final[dict[str, int]] = {
    **{"": 1, "b": 1},
    **{f"{letter}b": 1000**k for k, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**k for k, letter in enumerate("kmgt", 1)},
}


def parse_bytes(where: str, amount: Amount) -> float:
    """Return a number of bytes. Raise `InputError`, naming `where`, for anything but a number above 0.

    >>> parse_bytes("memory", "80GB"), parse_bytes("memory", "1.5 GiB")
    (80000000000.0, 1610612736.0)
    """
    if isinstance(amount, str):
        match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", amount)
        if match and match[2].lower() in BYTES_BY_UNIT:
            return float(match[1]) * BYTES_BY_UNIT[match[2].lower()]
    elif isinstance(amount, int | float) and not isinstance(amount, bool) and 0 < amount <= inf:
        return float(amount)
    raise InputError(
        f'{where}: got {amount!r}, expected a number of bytes above 0, or a text such as "80GB" or "512 MiB". Correct '
        "it."
    )


def parse_caps(memory: Amount | Sequence[Amount] | None, ranks: int) -> tuple[float, ...]:
    """Return the bytes that each rank may hold; without a limit, infinity."""
    if memory is None:
        return (inf,) * ranks
    if isinstance(memory, str | int | float):
        return (parse_bytes("memory", memory),) * ranks
    caps = tuple(parse_bytes(f"memory[{rank}]", one) for rank, one in enumerate(_listed(memory)))
    if len(caps) != ranks:
        raise InputError(f"memory: got {len(caps)} amounts, expected {ranks}: one for each rank. Correct it.")
    return caps


def _listed(memory: Any) -> list[Any]:
    if not isinstance(memory, Sequence):
        raise InputError(f"memory: got {memory!r}, expected a number of bytes, or one for each rank. Correct it.")
    return list(memory)
