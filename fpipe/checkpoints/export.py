# SPDX-License-Identifier: Apache-2.0
"""Export the weights of a pipeline as Hugging Face libraries read them.

Problem. Every rank has a part of the weights, and a directory that is exported to again has earlier ones. Who reads it
in between must not get a mixture.

Idea. A model is safetensors files, and an index of what is where. Every rank writes a file of the parameters and
buffers that it owns, under a name that no other export has. All know who owns what, so one of them writes the index
once all files are there, and renames it into place: one atomic operation. Only then it removes the files of earlier
exports. It knows them by their names, and refuses a directory with any others.

Runs when weights are exported.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from torch import Tensor

from fpipe.checkpoints.claim import alone_in
from fpipe.checkpoints.save import copy_to_host, count_processes, own_index, owned_names, require_whole_state
from fpipe.errors import InputError
from fpipe.network.agreement import Field
from fpipe.pipelines.handshake import call_together
from fpipe.pipelines.inputs import State
from fpipe.pipelines.pipeline import Pipeline
from fpipe.tensors.names import accept_trees
from fpipe.weights.files import as_path, make_folder, write_durably, write_error
from fpipe.weights.loading import list_transient_buffers
from fpipe.weights.safetensors import INDEX, read_index, removing_on_error, write_safetensors
from schedules.status import showing

EXPORTED: Final = re.compile(r"model-[0-9a-f]{8}-[0-9]{5}-of-[0-9]{5}\.safetensors")


@accept_trees("params", "buffers")
@showing("export")
def export(pipe: Pipeline, path: str | os.PathLike[str], params: State, buffers: State | None = None) -> None:
    """Write the model's weights into the directory `path`, in the format of `from_pretrained`; every rank calls this.

    The directory then has one safetensors file for each rank, and `model.safetensors.index.json`. It holds the model's
    state dict, each tied parameter once. `fpipe.safetensors(path)` reads it, and so does `from_pretrained` of a Hugging
    Face model, after `model.config.save_pretrained(path)` has added the configuration.

    Weights that `export` has written there before are replaced in one atomic operation. Raises `InputError`, naming the
    leaf, for values that do not fit the pipeline, and for a directory that has other weights; if only some ranks fail,
    `TransportError` on the others. Files at `path` then stay intact.

    >>> import tempfile, torch, fpipe
    >>> from schedules import gpipe
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)), torch.ones(2, 4)
    >>> pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=gpipe(ranks=2, microbatches=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fpipe.export(pipe, folder, *pipe.init(model))
    ...     sorted(fpipe.safetensors(folder))
    ['0.bias', '0.weight', '1.bias', '1.weight']
    """
    with call_together(export, {"pipe": pipe, "path": path, "params": params}):
        home, index, count = as_path(path), own_index(pipe), count_processes(pipe)
        held = {**params, **require_whole_state(pipe, params, buffers)}
        require_no_other_weights(home)
        pipe.ranks.agree(lambda: [Field.of("path", [str(home)])])
        transient, writes = list_transient_buffers(pipe.model), pipe.copies.is_first
        told = pipe.ranks.exchange_text(token_hex(4) if index == 0 and writes else "", "the name of its files")
        token = next(text for text in told if text)
        mine, file = [n for n in owned_names(pipe, held) if n not in transient], home / _file_name(token, index, count)
        tensors = copy_to_host(pipe, {name: held[name] for name in mine})
        whole = _index(pipe, transient, token)
        try:
            if writes:
                _write(file, tensors)
            pipe.ranks.agree(about="its files")
            if index == 0 and writes:
                _replace(home, whole)
            pipe.ranks.agree(about="its index")
        except BaseException:
            if writes and file.name not in _files_of(home):
                with suppress(OSError):
                    file.unlink()
            raise


def require_no_other_weights(home: Path) -> None:
    """Raise `InputError` for a file, and for a directory with weights that `export` did not write."""
    files = {entry.name for entry in home.glob("*.safetensors")} | _files_of(home)
    others = sorted(name for name in files if not EXPORTED.fullmatch(name))
    if others or home.is_file():
        raise InputError(
            f"{home}: got {others[:5] or 'a file'}, expected a directory with no weights but those of an earlier "
            "export, or none. Choose another path, or remove them first: otherwise the weights of two models would be "
            "mixed."
        )


def _files_of(home: Path) -> set[str]:
    """Return the files that the index in a directory names; the index itself if that can't be read."""
    if not os.path.lexists(home / INDEX):
        return set()
    try:
        return {str(name) for name in read_index(home / INDEX).values()}
    except InputError:
        return {INDEX}


def _file_name(token: str, index: int, count: int) -> str:
    return f"model-{token}-{index + 1:05}-of-{count:05}.safetensors"


def _write(file: Path, tensors: Mapping[str, Tensor]) -> None:
    make_folder(file.parent)
    with removing_on_error(file, tensors):
        if tensors:
            write_safetensors(file, tensors)


def _replace(home: Path, index: Mapping[str, Any]) -> None:
    """Make files that all ranks have written the model, and remove those of earlier exports."""
    files = {*index["weight_map"].values()}
    with alone_in(home):
        missing = sorted(name for name in files if not (home / name).exists())
        if missing:
            raise InputError(
                f"{home}: got no {missing[:5]}, expected the files of all ranks. Export to a file system that they "
                "share, and to a path that no other job uses."
            )
        text = json.dumps(index, indent=2)
        try:
            write_durably(home / INDEX, text)
        except OSError as error:
            raise write_error(home / INDEX, len(text), error) from error
        for entry in home.glob("*.safetensors"):
            if entry.name not in files and EXPORTED.fullmatch(entry.name):
                entry.unlink(missing_ok=True)


def _index(pipe: Pipeline, transient: set[str], token: str) -> dict[str, Any]:
    """Return the index of the whole model: the file of each leaf, and the bytes of all."""
    whole, each, count = pipe.training.assembly, len(pipe.ranks.ranks), count_processes(pipe)
    specs = {name: spec for name, spec in {**whole.parameters, **whole.buffers}.items() if name not in transient}
    size = sum(spec.empty("meta").nbytes for spec in specs.values())
    places = {name: _file_name(token, pipe.owners[name] // each, count) for name in specs}
    return {"metadata": {"total_size": size}, "weight_map": places}
