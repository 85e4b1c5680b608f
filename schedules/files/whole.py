# SPDX-License-Identifier: Apache-2.0
"""Text files that are whole or not there.

Problem. Whoever is interrupted while it writes leaves half a file, in the place of a good one.

Idea. Write another file beside it, which is renamed when it is whole: one atomic operation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import TextIO


@contextmanager
def open_whole(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Open a text file to write; it replaces the one at `path` at the end of the block, unless this raises.

    A link leads to the file to replace. What is there and no regular file, such as a pipe, is written in place.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        with place.open("w", encoding="utf-8", newline="") as file:
            yield file
        return
    new = place.with_name(f".{token_hex(8)}.new")
    try:
        with new.open("x", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(place)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
