# SPDX-License-Identifier: Apache-2.0
"""Files that someone else may have written: regular ones, of limited size, and never outside of their directory.

Problem. A name in a file may lead anywhere, a path may be a pipe that never ends, and a length may be any number.

Idea. Every file is opened here, after a look at its kind and its size. Names from files are joined to their directory
here, too. A file is written under another name, and renamed when it is whole.

Runs when weights, checkpoints, profiles and plans are read or written.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path, PurePosixPath
from typing import Final, TypeAlias

from fpipe.errors import InputError
from schedules.errors import quote
from schedules.files.whole import open_whole

AnyPath: TypeAlias = str | os.PathLike[str]
MOST_READ: Final = 2**28
"""The most bytes of a text that is read whole."""
ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/{1,2}[^/]")
"""`s3://bucket/run`, and what `Path` makes of it; a drive has one letter."""


def as_path(path: AnyPath) -> Path:
    """Return a path; raise `InputError` for anything else, and for a text that no file system takes."""
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise InputError(f"path: got {quote(path)}, expected a path without null characters. Pass that of a file.")
    if ADDRESS.match(str(path)):
        raise InputError(
            f"path: got {quote(path)}, which is an address, expected the path of a file on this machine or on a file "
            "system that it has mounted. Mount it, or copy the files."
        )
    try:
        str(path).encode()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # it may be made, or nothing is there
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"path: got {quote(path)}, which is not a valid path ({type(error).__name__}), expected the path of a "
            "file. Correct it."
        ) from error
    return Path(path)


def make_folder(path: Path) -> None:
    """Make a folder and those around it, unless they are there; raise `InputError` if there can be none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{path}: got {type(error).__name__}: {error}, expected a folder that can be made and written. Choose "
            "another path, or change its owner."
        ) from error


def write_whole(path: AnyPath, text: str) -> None:
    """Write a file, whole or not at all; raise `InputError` if there can be none at this path."""
    try:
        with open_whole(as_path(path)) as file:
            file.write(text)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: got {type(error).__name__}: {error}, expected a file. Choose another path."
        ) from error


def write_durably(path: Path, text: str) -> None:
    """Write a file that is whole or absent, even if the machine fails."""
    write_new(path.with_name(f"{path.name}.new"), text).replace(path)
    sync_folder(path.parent)


def write_new(path: Path, text: str) -> Path:
    """Write a new file, in place of any other or of a link, which is not followed; return its path."""
    path.unlink(missing_ok=True)
    with path.open("x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return path


def sync_folder(folder: Path) -> None:
    """Make the names of the files in a folder stay if the machine fails."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_error(path: Path, size: int, error: Exception) -> OSError:
    """Return the error of a file of `size` bytes that could not be written, with the bytes that are free."""
    try:
        free = f"{shutil.disk_usage(path.parent).free} bytes free"
    except OSError:
        free = "no such folder"
    text = (
        f"{path}: got {type(error).__name__}: {error}, with {free}, expected to write {size} bytes. What was written "
        "has been removed, and nothing was overwritten. Make room, or choose another path."
    )
    told = re.search(r"\(os error (\d+)\)", str(error))  # as the library safetensors says it
    number = int(told[1]) if told else getattr(error, "errno", None)
    return OSError(text) if number is None else OSError(number, text)


def require_regular(path: Path) -> int:
    """Return the size of a file in bytes; raise `InputError` for a directory, a pipe, a device, or nothing."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: got {type(error).__name__}: {error}, expected a file. Check the path.") from error
    if not stat.S_ISREG(found.st_mode):
        raise InputError(
            f"{path}: got a {stat.filemode(found.st_mode)[0]!r} entry, which is no regular file, expected a file. "
            "Check the path."
        )
    return found.st_size


def read_text(path: Path, expected: str) -> str:
    """Return the text of a file; raise `InputError` if there is none, it is too large, or it is no text."""
    size = require_regular(path)
    if size > MOST_READ:
        raise InputError(f"{path}: got {size} bytes, expected {expected}, of at most {MOST_READ}. Check the path.")
    try:
        with path.open("rb") as file:
            return file.read(MOST_READ).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: got {type(error).__name__}: {error}, expected {expected}. Check the path."
        ) from error


def join_inside(home: Path, name: object, where: str) -> Path:
    """Return the path of a file that another file in `home` names; raise `InputError` for one that leads elsewhere.

    A link in the directory may lead anywhere: whoever made it could have put the file there.

    >>> join_inside(Path("model"), "model-00001.safetensors", "the index").as_posix()
    'model/model-00001.safetensors'
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) and "\0" not in name and "\\" not in name else ()
    if not parts or ".." in parts or PurePosixPath(*parts).is_absolute():
        raise InputError(
            f"{where}: got the file name {quote(name)}, expected one inside {home}. Download the files again, or name "
            "them yourself."
        )
    return home.joinpath(*parts)
