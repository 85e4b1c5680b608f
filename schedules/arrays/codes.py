# SPDX-License-Identifier: Apache-2.0
"""The actions of all ranks as arrays of integers.

Problem. In a schedule of a million actions, most of the time goes into making tuples and looking into them.

Idea. Read the actions once, and number them, rank by rank. What each one is, and who makes what it needs, are arrays
over these numbers.

Invariant: codes hold valid actions, each on the rank of its stage. A schedule with others has none, nor has one with
actions that update weights or go on beside the rank's other ones.

Runs when a large schedule is checked, lowered or simulated.
"""

from __future__ import annotations

import marshal
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from schedules.language.actions import BESIDE, KINDS, Action
from schedules.language.schedule import Schedule

Numbers: TypeAlias = NDArray[np.intp]
PASSES = tuple(kind for kind, word in KINDS.items() if word.after and kind not in BESIDE)
CODE_OF: Mapping[str, int] = MappingProxyType({kind: code for code, kind in enumerate((*PASSES, "G"))})
"""The kinds that have a code: passes, then the sum of gradients."""
_code_of = dict(CODE_OF).__getitem__
_LETTERS: Final = frozenset(kind for kind in CODE_OF if len(kind) == 1)
_CODE_OF_LETTER: Final = bytes(CODE_OF.get(chr(letter), 0) for letter in range(256))
"""The codes of kinds that are one letter, which are translated at once."""
ROW_END: Final = len(CODE_OF)
"""The code of what comes after the last action of a rank."""
MOST_OF_UNIT: Final = 4
"""The most passes of a unit on its stage: a checkpointed forward, its recomputation, and the halves of a backward."""
READ_AT_ONCE: Final = 512
"""So many actions stay in the processor's cache, and out of the garbage collector's way."""
_VERSION: Final = 2
_NOTHING, _INTEGER = marshal.dumps((), _VERSION), marshal.dumps(0, _VERSION)[:1]
_PACKED: Final = np.dtype([("type", "S1"), ("value", "<i4")])
"""How `marshal` packs an integer: other types, `bool` among them, and larger integers have other first bytes."""


class Codes(NamedTuple):
    """All actions by number, those of a rank in a row; after each row comes one number more, its end.

    - `kinds`, `stages`, `units`: of each number. A unit is a microbatch or a slice of one (`playing.outputs.unit_of`).
    - `firsts`, `ends`: of each rank, its first number and its end.
    """

    kinds: NDArray[np.int8]
    stages: NDArray[np.int32]
    units: NDArray[np.int32]
    firsts: Numbers
    ends: Numbers


def encode(schedule: Schedule) -> Codes | None:
    """Return the codes of a schedule, or `None` if it has none."""
    kinds, columns, ends = bytearray(), [array("i") for _ in range(2 + (schedule.slices > 1))], list[int]()
    with suppress(Exception):  # the loops over actions say what is wrong
        for rank in range(schedule.ranks):
            packed = [bytearray() for _ in columns]
            for chunk in _chunks(schedule, rank):
                names, numbers = _read(chunk, schedule.slices > 1)
                kinds += names
                for some, more in zip(packed, numbers, strict=True):
                    some += marshal.dumps(more, _VERSION)[len(_NOTHING) :]
            for column, some in zip(columns, packed, strict=True):
                column.frombytes(_unpack(some))
                column.append(0)
            ends.append(len(kinds))
            kinds.append(ROW_END)
    if len(ends) < schedule.ranks:
        return None
    s, i, *part = (np.frombuffer(column, np.int32) for column in columns)
    codes = Codes(np.frombuffer(kinds, np.int8), s, i, np.append(0, np.array(ends)[:-1] + 1), np.array(ends))
    return _number_units(schedule, codes, *part) if _are_placed(schedule, codes) else None


def _unpack(packed: bytearray) -> bytes:
    """Return integers as an array has them. Raise some error for anything else: the first has its type in its place."""
    found = np.frombuffer(packed, _PACKED)
    if (found["type"] != _INTEGER).any():
        raise TypeError
    return found["value"].astype(np.int32).tobytes()


def _chunks(schedule: Schedule, rank: int) -> Iterator[list[Action]]:
    """Yield the actions of a rank, some at a time; no more than there may be."""
    most = len(schedule.placement.stages_on(rank)) * (MOST_OF_UNIT * schedule.microbatches * schedule.slices + 1)
    actions = islice(schedule.actions(rank), most + 1)
    while chunk := [*islice(actions, READ_AT_ONCE)]:
        yield chunk


def _read(chunk: list[Action], sliced: bool) -> tuple[bytes, list[tuple[int, ...]]]:
    """Return the fields of actions; of a slice one more, and 0 for none. Raise some error if one has no code."""
    if [*map(type, chunk)].count(Action) < len(chunk):
        raise TypeError
    names, stages, microbatches, peers, slices = zip(*chunk, strict=True)
    if peers.count(None) < len(chunk) or (not sliced and slices.count(None) < len(chunk)):
        raise TypeError
    numbers = [stages, microbatches]
    if sliced:
        numbers.append(tuple(0 if one is None else one if type(one) is bool else one + 1 or -1 for one in slices))
    found = "".join(names).encode().translate(_CODE_OF_LETTER) if {*names} <= _LETTERS else bytes(map(_code_of, names))
    return found, numbers


def _are_placed(schedule: Schedule, codes: Codes) -> bool:
    """Return whether all actions, so far with their microbatches as units, are on the ranks of their stages."""
    sizes = (codes.stages, schedule.stages), (codes.units, schedule.microbatches)
    if any(one.min() < 0 or one.max() >= size for one, size in sizes):
        return False
    routes = np.array(schedule.placement.routes)
    homes = routes[codes.units % len(routes), codes.stages] if len(routes) > 1 else routes[0][codes.stages]
    return bool(
        (np.delete(homes, codes.ends) == np.repeat(np.arange(len(codes.ends)), codes.ends - codes.firsts)).all()
    )


def _number_units(schedule: Schedule, codes: Codes, slices: NDArray[np.int32] | None = None) -> Codes | None:
    """Return the codes with slices as units, or `None` if a slice is missing, or does not exist."""
    if slices is None:
        return codes
    passes = codes.kinds < len(PASSES)
    if (slices[passes] < 1).any() or slices.max() > schedule.slices or slices[~passes].any():
        return None
    return codes._replace(units=codes.units * schedule.slices + np.maximum(slices - 1, 0))
