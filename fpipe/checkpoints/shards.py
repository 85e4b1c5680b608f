# SPDX-License-Identifier: Apache-2.0
"""One safetensors file per process, written and read by `torch.distributed.checkpoint` (DCP).

Problem. DCP exchanges pickles between ranks and keeps its own metadata in one; nothing here may be unpickled from a
peer or a file. When it reads, it casts dtypes without a word.

Idea. DCP's planners, and its storage for safetensors, also work without collectives: each process writes one file and
reads from all. Names, dtypes and shapes are in the headers, so they are known before any value is read. Stock tools
read the files, too: `torch.distributed.checkpoint.load` with its `HuggingFaceStorageReader`, or `fpipe.safetensors`.

Invariant: tensors are read only into tensors of the dtype and shape in the file; the caller compares them first.

Runs when a checkpoint is saved or loaded, and when weights are exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fpipe.errors import InputError
from fpipe.meshes.copies import PipelineCopies
from fpipe.network.ranks import Ranks
from fpipe.network.waiting import Awaited, await_all, break_group, reporting
from fpipe.tensors.placed import whole_tensor
from fpipe.tensors.spec import Spec
from fpipe.weights.safetensors import open_safetensors, require_library, wrap_read_errors


def shard_name(index: int, count: int) -> str:
    """Return the name of the file of process `index` of `count`.

    >>> shard_name(0, 4)
    'model-00001-of-00004.safetensors'
    """
    return f"model-{index + 1:05}-of-{count:05}.safetensors"


class ShardedTensor:
    """A tensor whose shards are still to be gathered from all processes of a group, which wait for them together."""

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        self.tensor, self.group = tensor, group

    @property
    def awaited(self) -> Awaited:
        """The shards of the others."""
        return await_all("a shard to save", self.group)

    def wait(self) -> None:
        """Gather the shards; raise `BrokenWaitError` if one does not come."""
        with reporting(self.awaited):
            self.tensor = whole_tensor(self.tensor)

    def give_up(self) -> None:
        """Break the group."""
        break_group(self.group)


def copy_to_host(ranks: Ranks, copies: PipelineCopies, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies in host memory, none of which shares memory with another: a file has no strides.

    Shards are gathered one by one, which all their holders must do. Only the first of all copies keeps what it gathers.
    """

    def gather(tensor: Tensor) -> Tensor:
        if copies.groups[0] is None:
            return whole_tensor(tensor)
        ranks.wait(sharded := ShardedTensor(tensor, copies.groups[0]))
        return sharded.tensor

    keep = copies.is_first
    wholes = ((name, gather(tensor.detach())) for name, tensor in tensors.items())
    return {name: torch.empty(t.shape, dtype=t.dtype).copy_(t) for name, t in wholes if keep}


def require_savable(where: str, tensor: Tensor) -> None:
    """Raise `InputError` unless a safetensors file can hold such a tensor."""
    require_library()
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
            f"{where}: got {kind}, expected a dense one with values. "
            "Pass tensor.to_dense(), and make what is on the meta device first."
        )


def write_shard(folder: Path, tensors: Mapping[str, Tensor], index: int, count: int) -> None:
    """Write contiguous host tensors into the file of process `index` of `count`; without tensors, write none."""
    from torch.distributed import checkpoint as dcp

    numbers = {"": count, **dict.fromkeys(tensors, index + 1)}  # DCP names files "of" the largest of these
    writer: Any = dcp.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=numbers)
    planner: Any = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    [plan], _ = planner.create_global_plan([planner.create_local_plan()])
    [plan] = writer.prepare_global_plan([plan])
    writer.write_data(planner.finish_plan(plan), planner).wait()


def read_specs(folder: Path) -> dict[str, Spec]:
    """Return the dtype and shape of each tensor in a folder's files, by name; raise `InputError` for a damaged one."""
    from torch.distributed import checkpoint as dcp

    for path in sorted(folder.glob("*.safetensors")):
        with wrap_read_errors(path), open_safetensors(path):
            pass  # which compares the header with the size of the file, so no shape is larger than what is there
    reader: Any = dcp.HuggingFaceStorageReader(str(folder))
    with wrap_read_errors(folder):
        found = reader.read_metadata().state_dict_metadata
    return {
        name: Spec.of(torch.empty(one.size, dtype=one.properties.dtype, device="meta")) for name, one in found.items()
    }


def read_into(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill these tensors with the values of their names, from any of the folder's files."""
    from torch.distributed import checkpoint as dcp

    reader: Any = dcp.HuggingFaceStorageReader(str(folder))
    planner: Any = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with wrap_read_errors(folder):
        metadata = reader.read_metadata()
        planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        [plan] = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        [plan] = reader.prepare_global_plan([plan])
        reader.read_data(planner.finish_plan(plan), planner).wait()
