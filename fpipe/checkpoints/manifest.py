# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint, and the one file that says which of them count.

Problem. A checkpoint is many files, written by many processes, any of which may die at any time. What is read later
must be all of one save, and a save that fails must not harm the one before.

Idea. A save writes into a folder of its own, and nothing refers to it. Once every process has finished, one of them
writes `checkpoint.json`, which names the folder, beside the old one, and renames it into place: one atomic operation.
Folders of earlier saves are removed only after that.

    path/checkpoint.json                              which folder counts; step and data
    path/save-3/model-00001-of-00002.safetensors      tensors of the first process
    path/save-3/model-00001-of-00002.json             its numbers, and the size of that file
    path/save-3/model-00002-of-00002.safetensors
    path/save-3/model-00002-of-00002.json

Invariant: at every moment `checkpoint.json` is absent, or names a folder whose files are complete.

Runs when a checkpoint is saved or loaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fpipe.arguments import require_arguments
from fpipe.checkpoints.shards import shard_name
from fpipe.errors import InputError

MARKER = "checkpoint.json"
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """The contents of `checkpoint.json`.

    - `save`: the number of the save, and of its folder; `shards`: how many processes wrote it.
    - `step`, `data`: the caller's, `data` as JSON; `has_state`: whether it has the state of an optimizer.
    """

    save: int
    shards: int
    step: int
    has_state: bool
    data: Any
    version: int = FORMAT

    def folder(self, home: Path) -> Path:
        """Return the folder of this save in a checkpoint's directory."""
        return home / f"save-{self.save}"


@dataclass(frozen=True)
class Sidecar:
    """The file that a process writes beside its tensors.

    - `size`: the bytes of its safetensors file; 0 if it has none.
    - `numbers`: numbers in the state of the optimizer, by flat name.
    - `on_device`: scalar tensors of that state that were on the pipeline's device; others are in host memory.
    """

    size: int
    numbers: dict[str, float]
    on_device: list[str]


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether `fpipe.save` has ever finished at `path`, so that `fpipe.load` has something to read.

    >>> import fpipe
    >>> fpipe.is_checkpoint("nowhere")
    False
    """
    require_arguments(is_checkpoint, locals())
    return (Path(path) / MARKER).is_file()


def next_save(home: Path) -> int:
    """Return the number of the next save; raise `InputError` if `home` has files, but no checkpoint."""
    if not home.exists():
        return 1
    others = [] if is_checkpoint(home) or not home.is_dir() else _list_others(home)
    if others or not home.is_dir():
        raise InputError(
            f"{home}: got {f'a directory with {others[:5]}' if others else 'a file'}, expected a checkpoint, an empty "
            "directory, or nothing. Choose another path; nothing was overwritten."
        )
    return max(list_saves(home), default=0) + 1


def _list_others(home: Path) -> list[str]:
    """Return what is not left from a save that was interrupted."""
    left = re.compile(rf"{re.escape(MARKER)}\.new|save-\d+")
    return sorted(entry.name for entry in home.iterdir() if not left.fullmatch(entry.name))


def list_saves(home: Path) -> list[int]:
    """Return the numbers of all saves in a directory, interrupted ones included."""
    found = [re.fullmatch(r"save-(\d+)", entry.name) for entry in home.iterdir()]
    return [int(match[1]) for match in found if match]


def write_sidecar(folder: Path, index: int, count: int, numbers: dict[str, float], on_device: list[str]) -> None:
    """Write what belongs to the tensors that process `index` has written."""
    shard = folder / shard_name(index, count)
    sidecar = Sidecar(shard.stat().st_size if shard.exists() else 0, numbers, on_device)
    write_durably(shard.with_suffix(".json"), json.dumps(asdict(sidecar)))


def write_durably(path: Path, text: str) -> None:
    """Write a file that is whole or absent, even if the machine fails."""
    new = path.with_name(f"{path.name}.new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def commit(home: Path, manifest: Manifest) -> None:
    """Make a save the checkpoint at `home`, and remove earlier ones; one process calls this when all have written.

    Raises `InputError` if it can't see the files of all.
    """
    folder = manifest.folder(home)
    sidecars = _sidecars(folder, manifest.shards)
    missing = [path.name for path in sidecars if not path.exists()]
    if missing:
        raise InputError(
            f"{folder}: got no {missing[:5]}, expected the files of all {manifest.shards} processes. Save to a file "
            "system that they share, and finish saves in the order in which they began."
        )
    write_durably(home / MARKER, json.dumps(asdict(manifest)))
    for number in list_saves(home):
        if number < manifest.save:
            shutil.rmtree(home / f"save-{number}", ignore_errors=True)


def read_manifest(home: Path) -> Manifest:
    """Return what `checkpoint.json` says; raise `InputError` if there is none that this version can read."""
    if not is_checkpoint(home):
        raise InputError(
            f"{home}: got no {MARKER}, expected a checkpoint. Check the path; a save that was interrupted leaves none."
        )
    found = _read_json(home / MARKER)
    if not isinstance(found, dict) or found.get("version") != FORMAT:
        raise InputError(
            f"{home / MARKER}: got {str(found)[:80]}, expected a checkpoint of version {FORMAT}. Check the path, or "
            "load it with the version of fpipe that saved it."
        )
    manifest: Manifest = _build(home / MARKER, Manifest, found)
    return manifest


def read_sidecars(home: Path, manifest: Manifest) -> Iterator[Sidecar]:
    """Yield what each process wrote; raise `InputError` for a file that is missing or cut off."""
    for path in _sidecars(manifest.folder(home), manifest.shards):
        sidecar = _build(path, Sidecar, _read_json(path))
        shard = path.with_suffix(".safetensors")
        size = shard.stat().st_size if shard.exists() else 0
        if size != sidecar.size:
            raise InputError(
                f"{shard}: got {f'{size} bytes' if size else 'no file'}, expected {sidecar.size} bytes. Copy the "
                "checkpoint again, or load an earlier one."
            )
        yield sidecar


def _sidecars(folder: Path, count: int) -> list[Path]:
    return [(folder / shard_name(index, count)).with_suffix(".json") for index in range(count)]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: got {type(error).__name__}: {error}, expected a file of a checkpoint. Copy the checkpoint again, "
            "or load an earlier one."
        ) from error


def _build(path: Path, kind: Any, fields: Any) -> Any:
    """Return the value of a dataclass that a file describes."""
    try:
        return kind(**fields)
    except TypeError as error:
        raise InputError(
            f"{path}: got {error}, expected a checkpoint that fpipe.save wrote. Check the path."
        ) from error
