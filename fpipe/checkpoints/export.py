# SPDX-License-Identifier: Apache-2.0
"""Write the weights as Hugging Face libraries read them: safetensors files, and an index of what is where.

Every rank writes a file of the parameters and buffers that it owns. All know who owns what, so one of them writes the
index, once all files are there: without it, the directory is no model.

Runs when weights are exported.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from fpipe.checkpoints.manifest import shard_name, write_durably
from fpipe.checkpoints.save import copy_to_host, count_processes, own_index, owned_names, require_whole_state
from fpipe.errors import InputError
from fpipe.network.agreement import Field
from fpipe.pipelines.handshake import call_together
from fpipe.pipelines.inputs import State
from fpipe.pipelines.pipeline import Pipeline
from fpipe.weights.files import as_path, make_folder
from fpipe.weights.loading import list_transient_buffers
from fpipe.weights.safetensors import INDEX, write_safetensors


def export(pipe: Pipeline, path: str | os.PathLike[str], params: State, buffers: State | None = None) -> None:
    """Write the model's weights into the directory `path`, in the format of `from_pretrained`; every rank calls this.

    The directory then has one safetensors file for each rank, and `model.safetensors.index.json`. It holds what the
    model's state dict has, each tied parameter once. `fpipe.safetensors(path)` reads it, and so does `from_pretrained`
    of a Hugging Face model, once `model.config.save_pretrained(path)` has put the configuration beside it.

    Raises `InputError`, naming the leaf, for values that do not fit the pipeline, and for a directory that already has
    weights; if only some ranks fail, `TransportError` on the others.

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
        _require_no_weights(home)
        pipe.ranks.agree(lambda: [Field.of("path", [str(home)])])
        transient = list_transient_buffers(pipe.model)
        mine, writes = [n for n in owned_names(pipe, held) if n not in transient], pipe.copies.is_first
        tensors = copy_to_host(pipe.ranks, pipe.copies, {name: held[name] for name in mine})
        if writes:
            make_folder(home)
            if tensors:
                write_safetensors(home / shard_name(index, count), tensors)
        pipe.ranks.agree(about="its files")
        if index == 0 and writes:
            write_durably(home / INDEX, json.dumps(_index(pipe, transient), indent=2))
        pipe.ranks.agree(about="its index")


def _require_no_weights(home: Path) -> None:
    found = sorted(entry.name for entry in [*home.glob("*.safetensors"), *home.glob(INDEX)])
    if found or home.is_file():
        raise InputError(
            f"{home}: got {found[:5] or 'a file'}, expected a directory without weights, or none. Choose another path, "
            "or remove them first: a mixture of two models would be loaded without a word."
        )


def _index(pipe: Pipeline, transient: set[str]) -> dict[str, object]:
    """Return the index of the whole model: the file of each leaf, and the bytes of all."""
    whole, each, count = pipe.training.assembly, len(pipe.ranks.ranks), count_processes(pipe)
    specs = {name: spec for name, spec in {**whole.parameters, **whole.buffers}.items() if name not in transient}
    size = sum(spec.empty("meta").nbytes for spec in specs.values())
    places = {name: shard_name(pipe.owners[name] // each, count) for name in specs}
    return {"metadata": {"total_size": size}, "weight_map": places}
