# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: written, and read as one mapping from names to tensors, each only on access.

Problem. A checkpoint has many files, and together they may not fit into the memory of one process.

Idea. The mapping knows the names, from the index or from the headers of the files. A value is read on access, from a
file that is opened for that one read: its pages are freed with the tensor, whereas pages of a file that stays open
would count as the process's own memory.

Runs when `fpipe.safetensors` is called and its values are read, as by `pipe.init`, and for checkpoints and exports.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.tensors.arguments import require_arguments
from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import same_bits
from fpipe.weights.files import AnyPath, as_path, join_inside, read_text, require_regular, write_error
from schedules.errors import printable, quote
from schedules.status import say

INDEX = "model.safetensors.index.json"
MOST_HEADER = 2**25
"""More bytes than the names, shapes and dtypes of any file take. The library allows three times as many, and takes half
a minute to read them."""


@dataclass(frozen=True, eq=False)
class Safetensors(Mapping[str, Tensor]):
    """Tensors by name, read on access; `files` has, for each name, the files that contain it."""

    files: Mapping[str, Sequence[Path]]

    def __getitem__(self, name: str) -> Tensor:
        first, *others = [_read_tensor(path, name) for path in self.files[name]]
        if not all(same_bits(first, other) for other in others):
            raise InputError(
                f"{name}: got different values in {list(map(str, self.files[name]))}, expected the same in all. "
                "Leave out files of other checkpoints."
            )
        return first

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __contains__(self, name: object) -> bool:
        return name in self.files


def safetensors(paths: AnyPath | Iterable[AnyPath]) -> Safetensors:
    """Return the tensors in safetensors files by name, each read on access; `pipe.init` takes the result.

    `paths` is one or several of: a file, an index (`*.safetensors.index.json`), or a directory, which means its
    model.safetensors.index.json if there is one, else all *.safetensors in it. A name may be in several files, with
    the same value (a parameter that several ranks hold and save). Needs the library safetensors. Raises `InputError`
    for files that can't be read, here or on access. An index names files of its own directory only.

    >>> import fpipe, tempfile, torch
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, f"{folder}/model.safetensors")
    ...     values = fpipe.safetensors(folder)
    ...     sorted(values), values["bias"]
    (['bias', 'weight'], tensor([0., 0.]))
    """
    require_arguments(safetensors, locals())
    files: dict[str, list[Path]] = {}
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        for name, file in _list_names(as_path(path)):
            files.setdefault(name, []).append(file)
    return Safetensors(files)


def _list_names(path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_dir():
        inside = [path / INDEX] if (path / INDEX).exists() else sorted(path.glob("*.safetensors"))
        if not inside:
            raise InputError(f"{path}: got no *.safetensors, expected at least one. Pass the directory that has them.")
        for file in inside:
            yield from _list_names(file)
    elif path.suffix == ".json":
        yield from ((name, join_inside(path.parent, one, str(path))) for name, one in read_index(path).items())
    else:
        with wrap_read_errors(path), open_safetensors(path) as file:
            yield from ((name, path) for name in list(file.keys()))


def read_index(path: Path) -> Mapping[str, object]:
    """Return the file of every name, as an index says."""
    text = read_text(path, "an index of safetensors files")
    with wrap_read_errors(path):
        index = json.loads(text)
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict):
        raise InputError(
            f"{path}: got {quote(index)}, expected an index with a weight_map, a dict from names to files. Download "
            "the file again."
        )
    return found


def _read_tensor(path: Path, name: str) -> Tensor:
    with wrap_read_errors(path), open_safetensors(path) as file:
        return _get_tensor(file, name)


def _get_tensor(file: Any, name: str) -> Tensor:
    """Return a tensor of an open file; raise the `KeyboardInterrupt` that torch has turned into an error of its own.

    Torch reads the mapped file's first byte in Python, and drops what a signal handler raises there.
    """
    try:
        tensor: Tensor = file.get_tensor(name)
    except ValueError as error:
        if "UntypedStorage" not in str(error):
            raise
        raise KeyboardInterrupt from error
    return tensor


def read_specs(path: Path) -> dict[str, Spec]:
    """Return the spec of each tensor in a file, by name; values stay on the disk. Raise `InputError` for a damaged one.

    The library compares the header with the size of the file, so no shape is larger than what is there; but one without
    elements may have any sizes, of which torch makes no tensor.
    """
    with wrap_read_errors(path), open_safetensors(path) as file:
        known: dict[tuple[str, tuple[int, ...]], Spec] = {}  # by dtype and shape in the header
        return {name: _read_spec(file, name, known) for name in list(file.keys())}


def _read_spec(file: Any, name: str, known: dict[tuple[str, tuple[int, ...]], Spec]) -> Spec:
    """Return the spec of a tensor; the first of its kind is opened, which takes forty times as long as the header."""
    header = file.get_slice(name)
    kind = header.get_dtype(), tuple(header.get_shape())
    if kind not in known:
        known[kind] = Spec.of(_get_tensor(file, name))
        known[kind].empty("meta")
    return known[kind]


def read_into(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill those of these tensors whose names a file has; the caller has compared dtypes and shapes."""
    with wrap_read_errors(path), open_safetensors(path) as file:
        found = tensors.keys() & {*file.keys()}
        for k, name in enumerate(found):
            say(f"reading {path.name}", k / len(found))
            tensors[name].copy_(_get_tensor(file, name))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous host tensors, by name, into a file that stays if the machine fails."""
    from safetensors.torch import save_file

    say(f"writing {path.name}")
    save_file(dict(tensors), path, metadata={"format": "pt"})  # without which transformers refuses the file
    with path.open("rb") as file:
        os.fsync(file.fileno())
    _require_small_header(path)  # else nobody could load it


@contextmanager
def removing_on_error(path: Path, tensors: Mapping[str, Tensor], *beside: Path) -> Iterator[None]:
    """Remove the file of these tensors if it can't be written, and those `beside` it; raise `OSError`."""
    try:
        yield
    except Exception as error:
        for one in (path, *beside):
            with suppress(OSError):
                one.unlink()  # a full disk has room again, for others, too
        raise write_error(path, sum(tensor.nbytes for tensor in tensors.values()), error) from error


def require_savable(where: str, tensor: Tensor) -> None:
    """Raise `InputError` unless a safetensors file can hold such a tensor."""
    from safetensors.torch import save

    try:
        save({"": torch.empty(0, dtype=tensor.dtype)})
    except KeyError:
        raise InputError(
            f"{where}: got {Spec.of(tensor)}, expected a dtype that safetensors files have. Convert it; for a complex "
            "one, take torch.view_as_real."
        ) from None
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"a tensor on {tensor.device} of layout {tensor.layout}"
        raise InputError(
            f"{where}: got {kind}, expected a dense one with values. Pass tensor.to_dense(); give tensors on the meta "
            "device values first."
        )


def open_safetensors(path: Path) -> Any:
    """Return the open file, as a context manager."""
    require_regular(path)
    _require_small_header(path)
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def _require_small_header(path: Path) -> None:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if MOST_HEADER < size <= path.stat().st_size:
        raise InputError(
            f"{path}: got a header of {size} bytes, expected at most {MOST_HEADER}, which is enough for some 200,000 "
            "tensors. Split the file."
        )


@contextmanager
def wrap_read_errors(path: Path) -> Iterator[None]:
    """Turn errors while reading `path` into an `InputError` that names it."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        got = printable(str(error).partition("\n")[0])
        raise InputError(
            f"{path}: got {type(error).__name__}: {got}, expected a complete safetensors file or index. Check the "
            "path, and download the file again if it is truncated."
        ) from error
