# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint, and the one file that says which of them count.

Problem. A checkpoint is many files, written by many processes, any of which may die at any time. What is read later
must be all of one save, and a save that fails must not harm the one before.

Idea. A save writes into a folder of its own (`fpipe.checkpoints.claim`), and nothing refers to it. Once every process
has finished, one of them writes a new `checkpoint.json`, which names the folder, and renames it into place: one atomic
operation. The folder of the save before is removed only after that.

    path/checkpoint.json                              which folder counts; step and data
    path/save-3/model-00001-of-00002.safetensors      tensors of the first process
    path/save-3/model-00001-of-00002.json             its numbers, and size and checksum of that file
    path/save-3/model-00002-of-00002.safetensors
    path/save-3/model-00002-of-00002.json
    path/save-3/writer.json                           whose save it is: its lock is held while it is written

A bit may flip on a disk or on the way there, so every file has a checksum (CRC-32): JSON in itself, tensors in the JSON
beside them. It has the token of its save, too. When a checkpoint is loaded, each process reads some of the files once
more to compare, and all agree.

Invariants. At every moment `checkpoint.json` is absent, or names a folder whose files are complete. Nothing in a file
is used before its checksum is right, and no name in it leads out of the folder.

Runs when a checkpoint is saved or loaded.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from fpipe.errors import InputError
from fpipe.tensors.arguments import require_arguments
from fpipe.weights.files import AnyPath, as_path, read_text, require_regular, write_durably
from schedules.errors import quote

MARKER = "checkpoint.json"
FORMAT = 3
MOST_PROCESSES = 2**16
MOST_STEPS = 2**63
MOST_SAVES = 10**18
PIECE = 2**20
SAVE = re.compile(r"save-([0-9]{1,18})")


@dataclass(frozen=True)
class Manifest:
    """The contents of `checkpoint.json`.

    - `save`: the number of the save, and of its folder; `token`: what all of its files have, and no others.
    - `shards`: how many processes wrote it.
    - `step`, `data`: the caller's, `data` as JSON; `has_state`: whether it has the state of an optimizer.
    """

    save: int
    token: str
    shards: int
    step: int
    has_state: bool
    data: Any
    version: int = FORMAT

    def folder(self, home: Path) -> Path:
        """Return the folder of this save in a checkpoint's directory."""
        return save_folder(home, self.save)

    def shard_files(self, home: Path) -> list[Path]:
        """Return the files of tensors that are in that folder."""
        return sorted(self.folder(home).glob("*.safetensors"))


@dataclass(frozen=True)
class Sidecar:
    """The file that a process writes beside its tensors.

    - `token`: that of the save.
    - `size`, `checksum`: the bytes of its safetensors file, and their CRC-32; 0 if it has none.
    - `numbers`: numbers in the state of the optimizer, by flat name.
    - `on_device`: scalar tensors of that state that were on the pipeline's device; others are in host memory.
    """

    token: str
    size: int
    checksum: int
    numbers: dict[str, float]
    on_device: list[str]


def save_folder(home: Path, number: int) -> Path:
    """Return the folder of a save in a checkpoint's directory."""
    return home / f"save-{number}"


def shard_name(index: int, count: int) -> str:
    """Return the name of the file of process `index` of `count`.

    >>> shard_name(0, 4)
    'model-00001-of-00004.safetensors'
    """
    return f"model-{index + 1:05}-of-{count:05}.safetensors"


def is_checkpoint(path: AnyPath) -> bool:
    """Return whether `fpipe.save` has ever finished at `path`, so that `fpipe.load` has something to read.

    Raise `InputError` for a folder that this process may not read.

    >>> import fpipe
    >>> fpipe.is_checkpoint("nowhere")
    False
    """
    require_arguments(is_checkpoint, locals())
    with _readable(as_path(path)):
        return (as_path(path) / MARKER).is_file()


def require_checkpoint_or_nothing(home: Path) -> None:
    """Raise `InputError` if `home` has files, but no checkpoint, or can't be read."""
    with _readable(home):
        if not home.exists():
            return
    others = [] if is_checkpoint(home) or not home.is_dir() else _list_others(home)
    if others or not home.is_dir():
        raise InputError(
            f"{home}: got {f'a directory with {others[:5]}' if others else 'a file'}, expected a checkpoint, an empty "
            "directory, or nothing. Choose another path; nothing was overwritten."
        )


def _list_others(home: Path) -> list[str]:
    """Return what is not left from a save that was interrupted."""
    with _readable(home):
        return sorted(entry.name for entry in home.iterdir() if not SAVE.fullmatch(entry.name))


@contextmanager
def _readable(home: Path) -> Iterator[None]:
    """Raise `InputError` for a folder that this process may not read, or that is on a file system that fails."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{home}: got {type(error).__name__}: {error}, expected a folder that this process may read and search. "
            "Change its permissions, or choose another path."
        ) from error


def list_saves(home: Path) -> list[int]:
    """Return the numbers of all saves in a directory, interrupted ones included."""
    with _readable(home):
        found = [SAVE.fullmatch(entry.name) for entry in home.iterdir()]
    return [int(match[1]) for match in found if match]


def write_sidecar(shard: Path, token: str, numbers: dict[str, float], on_device: list[str]) -> None:
    """Write what belongs to the tensors in `shard`, which may have none."""
    size, checksum = (shard.stat().st_size, sum_file(shard)) if shard.exists() else (0, 0)
    write_durably(shard.with_suffix(".json"), sign(asdict(Sidecar(token, size, checksum, numbers, on_device))))


def sum_file(path: Path) -> int:
    """Return the checksum of a file."""
    found = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            found = zlib.crc32(piece, found)
    return found


def sign(fields: Mapping[str, Any]) -> str:
    """Return fields as JSON, with their checksum.

    >>> sign({"step": 3})
    '{"crc32": 145879999, "step": 3}'
    """
    return json.dumps({"crc32": zlib.crc32(json.dumps(fields).encode()), **fields})


def require_sidecars(folder: Path, shards: int) -> None:
    """Raise `InputError` unless this process sees the files of all."""
    missing = [path.name for path in _sidecars(folder, shards) if not path.exists()]
    if missing:
        raise InputError(
            f"{folder}: got no {missing[:5]}, expected the files of all {shards} processes. Save to a file system that "
            "they share."
        )


def read_manifest(home: Path) -> Manifest:
    """Return what `checkpoint.json` says; raise `InputError` if there is none that this version can read."""
    if not is_checkpoint(home):
        raise InputError(
            f"{home}: got no {MARKER}, expected a checkpoint. Check the path; a save that was interrupted leaves none."
        )
    found = _read_signed(home / MARKER)
    if found.get("version") != FORMAT:
        raise InputError(
            f"{home / MARKER}: got {quote(found)}, expected a checkpoint of version {FORMAT}. Check the path, or load "
            "it with the version of fpipe that saved it."
        )
    manifest: Manifest = _build(home / MARKER, Manifest, found)
    if not (
        1 <= manifest.save < MOST_SAVES and 1 <= manifest.shards <= MOST_PROCESSES and 0 <= manifest.step < MOST_STEPS
    ):
        raise InputError(
            f"{home / MARKER}: got save {quote(manifest.save)} of {quote(manifest.shards)} processes at step "
            f"{quote(manifest.step)}, expected a save and processes from 1, at most {MOST_PROCESSES} processes, and a "
            f"step from 0 to 2**63 - 1. {AGAIN}"
        )
    return manifest


def read_sidecars(home: Path, manifest: Manifest, index: int, count: int) -> Iterator[Sidecar]:
    """Yield what each process wrote; raise `InputError` for a file that is missing, cut off, altered or unexpected.

    Of `count` processes that call this, number `index` reads every `count`th file to compare its checksum.
    """
    folder = manifest.folder(home)
    sidecars = [(path, _build(path, Sidecar, _read_signed(path))) for path in _sidecars(folder, manifest.shards)]
    shards = [path.with_suffix(".safetensors") for path, sidecar in sidecars if sidecar.size]
    unexpected = sorted(path.name for path in {*folder.glob("*.safetensors")} - {*shards})
    if unexpected:
        raise InputError(f"{folder}: got {unexpected[:5]}, expected only what fpipe.save wrote. Remove them.")
    for k, (path, sidecar) in enumerate(sidecars):
        if sidecar.token != manifest.token:
            raise InputError(
                f"{path}: got a file of save {quote(sidecar.token)}, expected one of save {quote(manifest.token)}: the "
                f"files are of two saves. {AGAIN}"
            )
        if not all(isinstance(one, int | float) for one in sidecar.numbers.values()):
            raise InputError(f"{path}: got {quote(sidecar.numbers)}, expected numbers by name. Check the path.")
        if not all(isinstance(name, str) for name in sidecar.on_device):
            raise InputError(f"{path}: got {quote(sidecar.on_device)}, expected names. Check the path.")
        _require_whole(path.with_suffix(".safetensors"), sidecar, k % count == index)
        yield sidecar


def _require_whole(shard: Path, sidecar: Sidecar, reads: bool) -> None:
    """Raise `InputError` unless a file of tensors has its size and, if this process `reads` it, its checksum."""
    size = require_regular(shard) if shard.exists() else 0
    if size != sidecar.size:
        got = f"{size} bytes" if size else "no file"
        raise InputError(f"{shard}: got {got}, expected {sidecar.size} bytes. {AGAIN}")
    if not size or not reads:
        return
    found = sum_file(shard)
    if found != sidecar.checksum:
        raise InputError(
            f"{shard}: got the checksum {found:08x}, expected {sidecar.checksum:08x}: the file was altered after the "
            f"save. {AGAIN}"
        )


AGAIN = "Copy the checkpoint again, or load an earlier one."


def _sidecars(folder: Path, count: int) -> list[Path]:
    return [(folder / shard_name(index, count)).with_suffix(".json") for index in range(count)]


def _read_signed(path: Path) -> dict[str, Any]:
    text = read_text(path, "a file of a checkpoint")
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise InputError(f"{path}: got {quote(fields)}, expected the fields of a checkpoint. Check the path.")
        checksum = fields.pop("crc32", None)
        expected = zlib.crc32(json.dumps(fields).encode())
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # also of nesting that can be read, but not written
        raise InputError(
            f"{path}: got {type(error).__name__}: {error}, expected a file of a checkpoint. {AGAIN}"
        ) from error
    if checksum != expected and fields.get("version", FORMAT) == FORMAT:
        raise InputError(f"{path}: got the checksum {quote(checksum)}, expected that of {quote(fields)}. {AGAIN}")
    return fields


def _build(path: Path, kind: Any, found: Mapping[str, Any]) -> Any:
    for name, hint in get_type_hints(kind).items():
        expected = get_origin(hint) or hint
        if name not in found or (expected is not Any and type(found[name]) is not expected):
            got = f"{name}={quote(found[name])}" if name in found else f"no {name}"
            what = "any value" if expected is Any else expected.__name__
            raise InputError(f"{path}: got {got}, expected {what}, as fpipe.save writes it. Check the path.")
    unknown = sorted({*found} - {*get_type_hints(kind)})
    if unknown:
        raise InputError(f"{path}: got the fields {quote(unknown)}, expected none of these. Check the path.")
    return kind(**found)
