# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that were damaged, or written by someone who knows of the checksums; then loaded, or saved over."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zlib
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import fpipe
from fpipe.checkpoints.manifest import sign
from fpipe.tensors.tree import flatten
from schedules import gpipe
from tests.common.fuzzing.bounds import REFUSED, ask, call
from tests.common.fuzzing.mutations import list_entries, mutate_bytes, mutate_value, plant

MARKER, SHARD = "checkpoint.json", "save-1/model-00001-of-00001.safetensors"
SIDECAR = "save-1/model-00001-of-00001.json"
NAMES = (MARKER, SHARD, SIDECAR, "save-1/writer.json")
PLANTED = (*NAMES, "save-1", "checkpoint.json.new", "save-2", "save-7", "save-1/extra.safetensors", "save-0", "save-1x")
PLANTED += ("save-999999999999999999", "save-2/model-00001-of-00001.safetensors", "thesis.tex")


class Checkpoints:
    """A small pipeline, and a checkpoint of it as bytes by name."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
        example = torch.randn(4, 3)
        how = gpipe(ranks=2, microbatches=2)
        self.pipe = fpipe.pipeline(self.model, example=(example,), loss=torch.mean, schedule=how)
        params, buffers = self.pipe.init(self.model)
        state = {"0.bias": {"step": 2**70, "sum": torch.randn(64)}, "2.weight": {"rate": 0.1, "on": True}}
        self.run = {"params": params, "buffers": buffers, "state": state, "step": 7}
        self.run["data"] = {"a": (1, example), "b": [2.5, None, "text"]}
        with tempfile.TemporaryDirectory() as folder:
            fpipe.save(self.pipe, folder, **self.run)
            self.files = {name: Path(folder, name).read_bytes() for name in list_files(Path(folder))}
            self.original = to_bits(fpipe.load(self.pipe, folder))

    def try_one(self, seed: int) -> str:
        """Damage a checkpoint; load it, or save over it. Return how that ended."""
        drawn = Random(seed)
        with tempfile.TemporaryDirectory() as folder:
            home, outside = Path(folder, "run"), Path(folder, "outside")
            outside.mkdir()
            (outside / "precious").write_text("mine")
            write_files(home, self.files)
            known = [self._damage(drawn, home, outside) for _ in range(drawn.choice((1, 1, 1, 2, 3)))]
            ways = [self._load, self._load, self._load, self._save]
            elsewhere = list_entries(outside)  # the damage itself may have gone through a link
            ended = drawn.choice(ways)(home, all(known))
            assert list_entries(outside) == elsewhere, "a file elsewhere was changed"
        return ended

    def _damage(self, drawn: Random, home: Path, outside: Path) -> bool:
        """Change something; return whether whoever did it did not hide it from checksums."""
        kind = drawn.choice(
            ("bytes", "bytes", "bytes", "fields", "fields", "fields", "header", "header", "nest", "entry", "link")
        )
        name = drawn.choice(NAMES)
        file = home / name
        if kind == "entry":
            place = home / drawn.choice(PLANTED)
            if not os.path.lexists(place.parent):
                place.parent.mkdir()
            if place.parent.is_dir():
                plant(drawn, place)
            return True
        if kind == "link":
            place, target = home / drawn.choice(PLANTED), outside / drawn.choice(("precious", "", "new"))
            if place.parent.is_dir() and not os.path.lexists(place):
                place.symlink_to(target)
            return True
        if kind == "bytes":
            if file.is_file() and not file.is_symlink():
                file.write_bytes(mutate_bytes(drawn, file.read_bytes()))
            return True
        try:
            if kind == "header":
                self._change_header(drawn, home / SHARD)
                resign_shard(home)
            elif name != SHARD:
                fields = json.loads(read_regular(file))
                fields.pop("crc32", None)
                file.write_text(sign_deep(drawn, fields) if kind == "nest" else sign(mutate_value(drawn, fields)))
        except (OSError, ValueError, AttributeError, TypeError, LookupError, RecursionError, struct.error):
            pass  # what an earlier change left can't be changed any more, or written
        return False

    def _change_header(self, drawn: Random, shard: Path) -> None:
        data = read_regular(shard)
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        for _ in range(drawn.choice((1, 1, 2, 4))):
            header = mutate_value(drawn, header)
        text = json.dumps(header).encode()
        stated = drawn.choice((len(text),) * 8 + (0, len(text) + 1, 2**25, 2**62, 2**64 - 1))
        shard.write_bytes(struct.pack("<Q", stated) + text + data[8 + length :])

    def _load(self, home: Path, is_accident: bool) -> str:
        data = [one.read_bytes() for one in home.rglob("*.safetensors") if one.is_file() and one.stat().st_size < 2**20]
        found = ask(fpipe.load, self.pipe, home, most_read=bound_reading(home))
        if found is REFUSED:
            return "load: refused"
        if not is_accident:
            leaves = [one for one in flatten(tuple(found))[0] if isinstance(one, Tensor)]
            odd = [one for one in leaves if one.numel() and not any(to_bytes(one) in some for some in data)]
            assert not odd, f"values that are in no file: {odd[0]}"
            assert found.step >= 0
            return "load: as the files say"
        assert to_bits(found) == self.original, "another value than was saved"
        return "load: as saved"

    def _save(self, home: Path, is_accident: bool) -> str:
        save = partial(fpipe.save, self.pipe, home, **self.run)
        found = ask(call, partial(call, save, expected=OSError), most_read=bound_reading(home))
        if isinstance(found, OSError):
            assert "expected" in str(found), found
            return "save: not written"
        if found is REFUSED:
            return "save: refused"
        again = ask(fpipe.load, self.pipe, home, most_read=bound_reading(home))
        assert again is not REFUSED, "what was saved can't be loaded"
        assert to_bits(again) == self.original, "another value than was saved"
        return "save: right"


def bound_reading(home: Path) -> int:
    """Return how many bytes a save or a load may read: some times those of the files that are there."""
    return 20 * sum(file.stat().st_size for file in home.rglob("*") if file.is_file()) + 2**16


def resign_shard(home: Path) -> None:
    """Make size and checksum of the tensors right again."""
    data, sidecar = read_regular(home / SHARD), home / SIDECAR
    fields = json.loads(read_regular(sidecar)) | {"size": len(data), "checksum": zlib.crc32(data)}
    fields.pop("crc32", None)
    sidecar.write_text(sign(fields))


def read_regular(file: Path) -> bytes:
    """Return the bytes of a file; raise `OSError` for whatever else an earlier change has put there."""
    if file.is_symlink() or not file.is_file():
        raise OSError(f"{file} is no file any more")
    return file.read_bytes()


def sign_deep(drawn: Random, fields: dict[str, Any]) -> str:
    """Return fields, one of which holds a value in many levels, with the checksum that a reader computes."""
    key, levels = drawn.choice(list(fields)), drawn.choice((50, 99, 100, 101, 300, 900, 3000))
    before, after = drawn.choice((("[", "]"), ('{"a": ', "}"), ('{"$tuple": [', "]}")))
    text = json.dumps({**fields, key: "HERE"}).replace('"HERE"', before * levels + "1" + after * levels)
    return f'{{"crc32": {zlib.crc32(text.encode())}, {text[1:]}'


def write_files(home: Path, files: dict[str, bytes]) -> None:
    """Write files by their names in a folder."""
    for name, content in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(content)


def list_files(home: Path) -> list[str]:
    """Return the names of all files in a folder."""
    return [str(file.relative_to(home)) for file in sorted(home.rglob("*")) if file.is_file()]


def to_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's values."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def to_bits(value: Any) -> Any:
    """Return a value with its tensors as bytes, to compare."""
    if isinstance(value, Tensor):
        return str(value.dtype), list(value.shape), to_bytes(value)
    if isinstance(value, dict):
        return {name: to_bits(one) for name, one in value.items()}
    return [type(value).__name__, *map(to_bits, value)] if isinstance(value, list | tuple) else repr(value)
