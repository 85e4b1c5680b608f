# SPDX-License-Identifier: Apache-2.0
"""Damage to the newest checkpoint of a run, and the book of it: which step can still be loaded.

A run is a folder with checkpoints in `run`, and the book beside it. None of this uses the code of fpipe.
"""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path

KINDS = ("flip", "cut", "remove")


def damage_newest(folder: Path, kind: str, seed: int) -> str:
    """Damage a file of the newest checkpoint that is whole, if there is another; return which file, or nothing."""
    whole = find_whole(folder)
    if not kind or len(whole) < 2:
        return ""
    place, book = whole[max(whole)], read_book(folder)
    file = damage(place, kind, random.Random(seed))
    (folder / "damaged.json").write_text(json.dumps([*book, sign(place)]))
    return str(file.relative_to(folder))


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint that is whole, or 0."""
    return max(find_whole(folder), default=0)


def find_whole(folder: Path) -> dict[int, Path]:
    """Return the checkpoints that were saved and not damaged, by step."""
    places = [marker.parent for marker in folder.glob("run/*/checkpoint.json")]
    whole = [place for place in places if sign(place) not in read_book(folder)]
    return {read_marker(place)["step"]: place for place in whole}


def damage(place: Path, kind: str, drawn: random.Random) -> Path:
    """Flip a bit of a file of this checkpoint, cut it, or remove it; return which."""
    file = drawn.choice([place / "checkpoint.json", *sorted((place / f"save-{read_marker(place)['save']}").iterdir())])
    data = bytearray(file.read_bytes())
    if kind == "flip":
        data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
    if kind == "cut":
        del data[drawn.randrange(len(data)) :]
    file.unlink()
    if kind != "remove":
        file.write_bytes(data)
    return file


def read_book(folder: Path) -> list[str]:
    """Return the signs of all checkpoints that were damaged."""
    book = folder / "damaged.json"
    return json.loads(book.read_text()) if book.exists() else []


def read_marker(place: Path) -> dict:
    """Return what `checkpoint.json` says."""
    return json.loads((place / "checkpoint.json").read_text())


def sign(place: Path) -> str:
    """Return what tells a save from all others in this place: `checkpoint.json` has its number."""
    marker = place / "checkpoint.json"
    return f"{place.name} {zlib.crc32(marker.read_bytes()) if marker.exists() else 0}"
