# SPDX-License-Identifier: Apache-2.0
"""Profiles and plans that are kept in a folder, for the next start of the same job.

Problem. Every start of a job measures its model again, and searches for a minute.

Idea. An entry is a file named after a digest of everything that its value follows from: what the model computes, block
by block, the batch, the arguments, the machine, torch's version and settings, and the code of fpipe. A change of any of
these leads to another name. What runs inside one operation of the user's, such as a custom autograd function, no record
shows, so the files that the user has imported count as they are. So entries are not stale, only unused.

Invariant: an entry that is damaged, or in the place of another, counts as none. Reading runs no code of a file.

Runs when `fpipe.profile` and `fpipe.plan` are called with a `cache`.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import torch

import schedules
from fpipe.errors import InputError, PipelineError
from fpipe.planning.documents import Format
from fpipe.planning.plan import Plan
from fpipe.planning.profile import Profile
from fpipe.record.model.snapshot import user_files
from fpipe.tensors.settings import settings

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptFile:
    """The file of a profile or a plan in a folder; `digest` is that of what the value follows from."""

    folder: Path
    made: type[Profile] | type[Plan]
    digest: str

    @classmethod
    def of(cls, folder: Path, made: type[Profile] | type[Plan], lines: Iterable[str]) -> KeptFile:
        """Return the file of a value that follows from what these lines describe, and from the code and machine."""
        found = blake2b(digest_size=16)
        for line in (*_describe_code(), *_describe_user_files(), *describe_machine(), *lines):
            found.update(f"{line}\n".encode())
        return cls(folder, made, found.hexdigest())

    @property
    def format(self) -> Format:
        """The format of the file, which no other file has."""
        return Format(f"{self.made.__name__} {self.digest}", 1, "Remove the file.")

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.folder / f"{self.made.__name__.lower()}-{self.digest}.json"

    def find(self) -> Any:
        """Return the value that is kept; `None` if there is none, or none that can be used."""
        try:
            value = self.format.load(self.path, self.made)
            if isinstance(value, Plan):
                value.require_consistent()
        except PipelineError as error:
            if self.path.exists():
                _LOG.warning("%s. It is not used, and made again.", error)
            return None
        return value

    def keep(self, value: Any) -> None:
        """Keep a value; if the folder can't be written, only say so, since the value is there."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.format.save(self.path, value)
        except (OSError, InputError) as error:
            _LOG.warning("%s: got %s, expected a folder that can be written. Nothing was kept.", self.folder, error)


@cache
def _describe_code() -> tuple[str, ...]:
    """Return lines that differ if the code of fpipe, its version, or that of torch does."""
    homes = Path(__file__).parents[1], Path(str(schedules.__file__)).parent
    files = sorted(path for home in homes for path in home.rglob("*.py"))
    stats = [path.stat() for path in files]
    return (
        f"fpipe {schedules.__version__}, torch {torch.__version__}",
        *[f"{path.name} {one.st_size} {one.st_mtime_ns}" for path, one in zip(files, stats, strict=True)],
    )


def _describe_user_files() -> Iterator[str]:
    """Yield a line for each imported file outside of libraries, with a digest of its contents."""
    for name in sorted(user_files()):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is not None and os.path.isfile(path):
            yield f"{name} {blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()}"


def describe_machine() -> Iterator[str]:
    """Yield lines that differ if times measured here would, or what torch computes."""
    yield f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} processors"
    yield from (line for line in _read_processors() if line.startswith("model name"))
    yield f"{torch.get_num_threads()} threads, {settings()}"


def _read_processors() -> list[str]:
    """Return what Linux says of the processors; nothing elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
