# SPDX-License-Identifier: Apache-2.0
"""Change bytes, JSON values, words and folders, as accidents and people do; everything from a generator of numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.common.hostile import PLANTS, places, replaced

NUMBERS = (0, 1, 2, 3, -1, -5, 7, 255, 2**16, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**62))
FRACTIONS = (0.0, -0.0, 0.5, 1e-320, 1e300, -1.5, 3.0)
WORDS = (
    "",
    "x",
    "0",
    "F32",
    "I64",
    "BOOL",
    "F4",
    "\0",
    "../x",
    "/etc/passwd",
    "\x1b[2J",
    "a" * 2000,
    "\ud800",
    "'\"\n,;",
)
CONTAINERS: tuple[Any, ...] = ([], {}, [0], [[]], {"": 0}, {"$tensor": "data.0"}, {"$tuple": [1]}, {"a": {"b": [None]}})
CONSTANTS = (None, True, False)
RAW = (b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"-", b"0", b"e999", b"NaN", b"\xff\xfe", b"\0", b"\n", b",", b'"')


def draw_value(drawn: Random) -> Any:
    """Return a value that JSON can write: a number at some limit, a word, a container, a constant."""
    return drawn.choice(drawn.choice((NUMBERS, NUMBERS, FRACTIONS, WORDS, CONTAINERS, CONSTANTS)))


def mutate_value(drawn: Random, value: Any) -> Any:
    """Return a JSON value with one thing changed: replaced, moved, dropped, doubled, renamed, or added."""
    way = drawn.choice(list(places(value)))
    old = value
    for key in way:
        old = old[key]
    return replaced(value, way, _change(drawn, value, old))


def _change(drawn: Random, whole: Any, old: Any) -> Any:
    if isinstance(old, dict) and old and drawn.random() < 0.7:
        key, other = drawn.choice(list(old)), drawn.choice([*old, drawn.choice(WORDS)])
        rest = {name: one for name, one in old.items() if name != key}
        return drawn.choice([rest, {**rest, other: old[key]}, {**old, drawn.choice(WORDS): draw_value(drawn)}])
    if isinstance(old, list) and old and drawn.random() < 0.7:
        k = drawn.randrange(len(old))
        return drawn.choice([old[:k] + old[k + 1 :], [*old, old[k]], old[::-1], old * 3, [*old, draw_value(drawn)]])
    if isinstance(old, int | float) and not isinstance(old, bool) and drawn.random() < 0.5:
        return drawn.choice([old + 1, old - 1, -old, old * 2, old * 1e300 if abs(old) < 1e8 else 0, str(old)])
    if drawn.random() < 0.2:
        every = list(places(whole))
        for key in drawn.choice(every):
            whole = whole[key]
        return whole
    return draw_value(drawn)


def mutate_bytes(drawn: Random, data: bytes) -> bytes:
    """Return bytes as a disk, an interrupted copy or a careless edit leaves them."""
    start, stop = sorted((drawn.randint(0, len(data)), drawn.randint(0, len(data))))
    before, part, after = data[:start], data[start:stop], data[stop:]
    if drawn.random() < 0.4 and data:
        place = drawn.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << drawn.randrange(8)]) + data[place + 1 :]
    number = drawn.choice(NUMBERS[:15]) % 2**64
    return drawn.choice(
        [
            before,
            after,
            before + after,
            before + bytes(len(part)) + after,
            before + part + part + after,
            after + part + before,
            before + drawn.choice(RAW) + part + after,
            before + drawn.choice(RAW) + data[min(start + 1, len(data)) :],
            number.to_bytes(8, "little") + data[8:],
        ]
    )


def mutate_words(drawn: Random, words: list[str], others: list[str]) -> list[str]:
    """Return a list of words with a few of them dropped, doubled, moved, replaced by others, or damaged."""
    for _ in range(drawn.choice((1, 1, 1, 2, 3, 6))):
        k = drawn.randrange(len(words) + 1)
        rest, here = words[k + 1 :], words[k : k + 1]
        damaged = mutate_bytes(drawn, "".join(here).encode(errors="replace"))[:6000].decode("latin-1")
        other = drawn.choice([*others, drawn.choice(WORDS), str(drawn.choice(NUMBERS))])
        words = drawn.choice(
            [
                words[:k] + rest,
                words[:k] + here + here + rest,
                words[:k] + rest[:1] + here + rest[1:],
                [*words[:k], other, *rest],
                [*words[:k], other, *here, *rest],
                [*words[:k], damaged, *rest],
            ]
        )
    return words


def plant(drawn: Random, path: Path) -> None:
    """Put something else in the place of a file or a folder: nothing, a pipe, a link, a folder, a device."""
    if path.is_dir() and not path.is_symlink():
        away = path.with_name(f"moved-{drawn.randrange(10**9)}")
        path.rename(away)
        more: dict[str, Callable[[Path], object]] = {"a link to it": lambda one: one.symlink_to(away.name)}
    else:
        path.unlink(missing_ok=True)
        more = {"a link to nothing": lambda one: one.symlink_to(one.parent / "nowhere"), "empty": Path.touch}
    every = {**PLANTS, **more}
    every[drawn.choice(list(every))](path)


def list_entries(folder: Path) -> dict[str, str]:
    """Return what is in a folder: for each entry its kind, and the content of a file."""
    found = {}
    for entry in sorted(folder.rglob("*")):
        is_file = entry.is_file() and not entry.is_symlink()
        found[str(entry.relative_to(folder))] = entry.read_bytes().hex() if is_file else str(os.lstat(entry).st_mode)
    return found
