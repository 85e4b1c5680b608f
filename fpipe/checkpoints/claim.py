# SPDX-License-Identifier: Apache-2.0
"""The folder of one save, which belongs to the job that made it.

Problem. A job that was preempted may still be saving when its replacement saves to the same path. If both write into
one folder, the checkpoint is a mixture of two runs whose checksums all match. If each removes what looks like a
leftover of the other, files of a finished checkpoint are gone.

Idea. One rank makes the folder before anything is copied, and exclusively: whoever finds it there takes the next
number. It draws a token, which the manifest and every file of the save have. While the save lasts it holds a lock on a
file in the folder, which the system releases when the process ends, however it ends. So a folder that `checkpoint.json`
does not name is a leftover if, and only if, its lock is free. Whoever finishes a save looks once more at
`checkpoint.json`: if another job has replaced it since the save began, the save is dropped, and the job is told.

Invariants. Only the job that holds a folder's lock makes it the checkpoint or removes it. The folder of the highest
number is emptied, but stays: so no number is used twice, and a process of a job whose first rank was killed writes into
nobody's folder. On a file system without locks, leftovers stay.

Runs when a checkpoint is saved.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex
from typing import Final

from fpipe.checkpoints.manifest import (
    MARKER,
    MOST_SAVES,
    Manifest,
    list_saves,
    read_manifest,
    require_sidecars,
    save_folder,
    sign,
)
from fpipe.errors import InputError
from fpipe.weights.files import make_folder, sync_folder, write_error, write_new

WRITER_FILE: Final = "writer.json"
JOB: Final = token_hex(8)
LONGEST_COMMIT: Final = 10.0
"""Seconds to wait while another job replaces `checkpoint.json`, which takes milliseconds."""


class Lock:
    """An open file or folder, which may be locked; it is closed at the latest when this object is deleted.

    Ctrl-C may come between any two lines, so releasing can be begun again.
    """

    def __init__(self, path: Path, flags: int) -> None:
        self.files: list[int] = []
        self.files.append(os.open(path, flags, 0o666))

    @property
    def file(self) -> int:
        """The number of the open file."""
        return self.files[0]

    def try_to_hold(self) -> None:
        """Lock it for this process alone; raise `BlockingIOError` if another has it, `OSError` if there are none."""
        fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Unlock and close it."""
        while self.files:
            with suppress(OSError):
                fcntl.flock(self.file, fcntl.LOCK_UN)  # closing is not enough if a forked process has it, too
            os.close(self.files.pop())

    def __del__(self) -> None:
        self.release()


@dataclass(eq=False)
class Claim:
    """A save that this process has begun, and may finish.

    - `home`: the checkpoint's directory; `number`, `token`: of the save in it.
    - `before`: what was the checkpoint when this save began, if anything.
    - `lock`: the open file that holds the lock, until the save is finished or dropped.
    """

    home: Path
    number: int
    token: str
    before: Manifest | None
    lock: Lock | None
    committed: bool = False

    @classmethod
    def take(cls, home: Path) -> Claim:
        """Make the folder of a new save; remove what killed jobs have left, which may be what fills the disk."""
        make_folder(home)
        remove_leftovers(home)
        before, number = _current(home), max(list_saves(home), default=0)
        while True:
            number += 1
            _require_number(home, number)
            folder = save_folder(home, number)
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            except OSError as error:
                raise write_error(folder, 0, error) from error
            try:
                lock = _hold(folder, needs_lock=False)
            except FileNotFoundError:
                continue  # another job took it for a leftover
            except OSError as error:
                shutil.rmtree(folder, ignore_errors=True)
                raise write_error(folder / WRITER_FILE, 0, error) from error
            if lock is not None:
                return cls(home, number, f"{_job()}-{token_hex(8)}", before, lock)

    @property
    def folder(self) -> Path:
        """The folder of the save."""
        return save_folder(self.home, self.number)

    def commit(self, manifest: Manifest) -> None:
        """Make the save the checkpoint, and remove earlier ones; call this when all processes have written.

        Raises `InputError` if it can't see the files of all, or if another save became the checkpoint meanwhile.
        """
        if self.committed:
            return
        if self.lock is None:
            raise InputError(
                f"{self.folder}: got a save that has failed, expected one in progress: its files were removed. Begin "
                "another save."
            )
        require_sidecars(self.folder, manifest.shards)
        with alone_in(self.home):
            now = _current(self.home)
            self._require_latest(now)
            self._replace_marker(manifest)
        if now is not None and now.save != self.number:
            _remove(self.home, now.save)
        self.release()
        remove_leftovers(self.home)

    def _replace_marker(self, manifest: Manifest) -> None:
        text = sign(asdict(manifest))
        try:
            new = write_new(self.folder / f"{MARKER}.new", text)
            new.replace(self.home / MARKER)
            self.committed = True  # so that its files stay, even if this fails
            sync_folder(self.home)
        except OSError as error:
            raise write_error(self.home / MARKER, len(text), error) from error

    def _require_latest(self, now: Manifest | None) -> None:
        """Raise `InputError` unless `checkpoint.json` is as it was, or has an earlier save of this process."""
        if now is None or (self.before is not None and now.token == self.before.token):
            return
        if not now.token.startswith(f"{_job()}-"):
            raise InputError(
                f"{self.home}: got save {now.save} of step {now.step}, which another job finished after this one had "
                f"begun save {self.number}, expected one job at a time. That checkpoint is complete, and this save was "
                "dropped. Stop one of the jobs, or use a different path for each."
            )
        if now.save > self.number:
            raise InputError(
                f"{self.home}: got save {now.save}, which began after save {self.number} but finished first, expected "
                "them in order. The later save is the checkpoint, and the earlier one was dropped. Finish saves in the "
                "order in which they began."
            )

    def drop(self) -> None:
        """Remove what has been written, unless it is the checkpoint already.

        Ask `checkpoint.json`: Ctrl-C may have come right after it was renamed.
        """
        with suppress(InputError):  # it can't be read: nothing is removed
            self.committed |= self.lock is not None and _names(self.home, self.number)
            if self.lock is not None and not self.committed:
                _remove(self.home, self.number)
        self.release()

    def release(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None


def _require_number(home: Path, number: int) -> None:
    if number >= MOST_SAVES:
        raise InputError(
            f"{home}: got {save_folder(home, number - 1).name}, after which there is no number, expected folders that "
            "fpipe.save made. Remove it, or choose another path; nothing was overwritten."
        )


def remove_leftovers(home: Path) -> None:
    """Remove the folders of saves that nobody writes any more, and that `checkpoint.json` does not name.

    If that can't be read, nothing is removed: someone may repair it.
    """
    for number in list_saves(home):
        folder = save_folder(home, number)
        with suppress(OSError, InputError):
            if folder.is_symlink() or not folder.is_dir() or _names(home, number):
                continue
            lock = _hold(folder, needs_lock=True)
            if lock is None:
                continue
            try:
                if not _names(home, number):  # which only the owner of the lock changes
                    _remove(home, number)
            finally:
                lock.release()


def _remove(home: Path, number: int) -> None:
    """Remove the folder of a save; one without a later one is emptied, so that nobody takes its number."""
    folder = save_folder(home, number)
    with suppress(OSError):
        for entry in folder.iterdir():
            with suppress(OSError):
                entry.unlink()  # a save has no folders
        if number < max(list_saves(home)):
            folder.rmdir()


def _names(home: Path, number: int) -> bool:
    return os.path.lexists(home / MARKER) and read_manifest(home).save == number


def _current(home: Path) -> Manifest | None:
    """Return what is the checkpoint; `None` if nothing is, or nothing that can be read."""
    with suppress(InputError):
        return read_manifest(home)
    return None


def _job() -> str:
    """Return the name of this process, which is not that of a process that it forks."""
    return f"{JOB}-{os.getpid()}"


def _hold(folder: Path, needs_lock: bool) -> Lock | None:
    """Return the open file that says whose folder it is, locked; `None` if another job has it.

    On a file system without locks it is returned without one, or is `None` if that `needs_lock`.
    """
    path = folder / WRITER_FILE
    lock = Lock(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        lock.try_to_hold()
        is_mine = True
    except BlockingIOError:
        is_mine = False
    except OSError:
        is_mine = not needs_lock
    try:
        if is_mine and os.path.samestat(os.fstat(lock.file), os.lstat(path)):  # else it was removed meanwhile
            if not needs_lock:
                os.write(lock.file, json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode())
            return lock
    except FileNotFoundError:
        pass
    lock.release()
    return None


@contextmanager
def alone_in(home: Path) -> Iterator[None]:
    """Keep out other jobs that finish a save in the same folder; raise `InputError` if one does not end.

    Where a file system has no such locks, the last of two that do so within milliseconds wins, and is whole.
    """
    lock, until = Lock(home, os.O_RDONLY), time.monotonic() + LONGEST_COMMIT
    try:
        while True:
            try:
                lock.try_to_hold()
            except BlockingIOError:
                if time.monotonic() > until:
                    raise InputError(
                        f"{home}: got another job that has been finishing a save for {LONGEST_COMMIT:.0f} seconds, "
                        "expected one job at a time. Stop it, or use a different path for each job."
                    ) from None
                time.sleep(0.01)
                continue
            except OSError:
                pass
            break
        yield
    finally:
        lock.release()
