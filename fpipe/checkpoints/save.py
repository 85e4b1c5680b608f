# SPDX-License-Identifier: Apache-2.0
"""Save a training run, whole or not at all, while it goes on.

Problem. Ranks hold different parts, some parts are on several ranks, and any rank may fail at any time. Writing takes
longer than a step.

Idea. Every parameter and buffer has one owner (`Pipeline.owners`), which writes it, and the optimizer's state of it,
under its name in the model. So the files say nothing about ranks or cuts. The values are copied to host memory, a
thread writes the copy into a folder that the first rank has made (`fpipe.checkpoints.claim`), and when every rank is
done, that rank makes it the checkpoint (`fpipe.checkpoints.manifest`).

Invariant: all ranks agree that the checkpoint is saved, or all raise and the earlier one is intact.

Runs when a checkpoint is saved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fpipe.checkpoints.claim import Claim
from fpipe.checkpoints.encoding import encode_tree, flatten_slots, require_slots
from fpipe.checkpoints.manifest import MOST_STEPS, Manifest, require_checkpoint_or_nothing, shard_name, write_sidecar
from fpipe.errors import InputError
from fpipe.network.agreement import Field
from fpipe.network.fingerprint import describe_value
from fpipe.network.waiting import Awaited, await_all, break_group, reporting
from fpipe.pipelines.handshake import call_together
from fpipe.pipelines.inputs import State
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.step import hold_plain
from fpipe.tensors.names import accept_trees
from fpipe.tensors.placed import require_plain, whole_tensor
from fpipe.tensors.spec import Spec
from fpipe.training.optimizers import OptimizerState
from fpipe.weights.files import as_path
from fpipe.weights.safetensors import removing_on_error, require_savable, write_safetensors
from schedules.errors import quote
from schedules.status import showing


@accept_trees("params", "buffers")
@showing("save")
def save(
    pipe: Pipeline,
    path: str | os.PathLike[str],
    *,
    params: State,
    buffers: State | None = None,
    state: OptimizerState | None = None,
    step: int = 0,
    data: Any = None,
) -> None:
    """Save parameters, buffers and optimizer state at `path`, whole or not at all; every rank calls this.

    - `params`, `buffers`: this process's, as `pipe.init` and the steps return them.
    - `state`: the optimizer's, `{parameter name: {slot: tensor or number}}`, as `fpipe.optimizer` has it; `None` saves
      none.
    - `step`, `data`: anything else that the run needs: a number, and a tree of dicts, lists, tuples, tensors, numbers,
      strings and `None`. They must be the same on every rank.

    The checkpoint is a directory, on a file system that all ranks share. Its names are the model's, so any pipeline of
    the same model loads it: other ranks, cuts, schedules. It has no pickles. An existing checkpoint at `path` is
    replaced in one atomic operation, so even if a process is killed, `path` has either the old one or the new one.
    Every rank needs host memory for a copy of what it owns. Sharded tensors are gathered, one at a time, and saved
    whole.

    Raises `InputError`, naming the leaf, for values that do not fit the pipeline or that a checkpoint can't hold, and
    for a `path` with other files; if only some ranks fail, `TransportError` on the others. An existing checkpoint at
    `path` then stays intact.

    >>> import tempfile, torch, fpipe
    >>> from schedules import gpipe, one_f_one_b
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)), torch.ones(4, 4)
    >>> pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=gpipe(ranks=2, microbatches=2))
    >>> params, buffers = pipe.init(model)
    >>> other = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=one_f_one_b(1, 4))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fpipe.save(pipe, folder, params=params, step=3, data={"epoch": 1})
    ...     found = fpipe.load(other, folder)
    >>> found.step, found.data, torch.equal(found.params["0.weight"], params["0.weight"])
    (3, {'epoch': 1}, True)
    """
    begin_save(pipe, path, params=params, buffers=buffers, state=state, step=step, data=data)()


@accept_trees("params", "buffers")
def begin_save(
    pipe: Pipeline,
    path: str | os.PathLike[str],
    *,
    params: State,
    buffers: State | None = None,
    state: OptimizerState | None = None,
    step: int = 0,
    data: Any = None,
) -> Callable[[], None]:
    """Begin to save as `save` does, and return the function that finishes it; every rank calls both.

    Values are copied to host memory at once, so they may change afterwards, and a thread writes them while training
    continues. Call the returned function some steps later, or right before the next save: it waits for the files of all
    ranks, and then the checkpoint exists.

    Raises what `save` raises: at once for wrong arguments, and from the returned function if files can't be written.

    >>> import tempfile, torch, fpipe
    >>> from schedules import gpipe
    >>> model, x = torch.nn.Linear(4, 1), torch.ones(2, 4)
    >>> pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=gpipe(ranks=1, microbatches=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     finish = fpipe.begin_save(pipe, folder, params=pipe.init(model)[0], step=3)
    ...     began = fpipe.is_checkpoint(folder)
    ...     finish()
    ...     began, fpipe.is_checkpoint(folder)
    (False, True)
    """
    with call_together(begin_save, {"pipe": pipe, "path": path}):
        home = as_path(path)
        if pipe.rechecks.is_worth_it:
            pipe.rechecks.run(pipe.captures)
        held = require_whole_state(pipe, params, buffers)
        require_slots({} if state is None else state, params)
        tree = encode_tree(data)
        fields = _compare(home, state is not None, step, data)
        require_checkpoint_or_nothing(home)
        pipe.ranks.agree(lambda: fields)
        claim = Claim.take(home) if own_index(pipe) == 0 and pipe.copies.is_first else None
        with _dropped_on_error(claim):
            told = pipe.ranks.exchange_text(f"{claim.number} {claim.token}" if claim else "", "its folder")
            number, token = next(text for text in told if text).split(" ")
            share = _collect(pipe, params, held, state, tree)
            manifest = Manifest(int(number), token, count_processes(pipe), step, state is not None, share.data)
            writing = _start(share, manifest.folder(home) / shard_name(own_index(pipe), manifest.shards), token)

    def finish() -> None:
        with _dropped_on_error(claim), pipe.ranks.enter_call("the end of a save"):
            writing.result()
            pipe.ranks.agree(about="its files")
            if claim is not None:
                claim.commit(manifest)
            pipe.ranks.agree(about="its commit")

    return finish


@contextmanager
def _dropped_on_error(claim: Claim | None) -> Iterator[None]:
    """Remove the files of a save that fails, once no rank of it writes any more."""
    try:
        yield
    except BaseException:
        if claim is not None:
            claim.drop()
        raise


def own_index(pipe: Pipeline) -> int:
    """Return the number of this process among those of the pipeline."""
    return pipe.ranks.ranks[0] // len(pipe.ranks.ranks)


def count_processes(pipe: Pipeline) -> int:
    """Return the number of processes of the pipeline."""
    return pipe.schedule.ranks // len(pipe.ranks.ranks)


@dataclass(frozen=True)
class _Share:
    """Copies of the tensors that this process writes, numbers by flat name, scalars on its device, and data as JSON.

    `writes`: whether it writes at all.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, float]
    on_device: list[str]
    data: Any
    writes: bool


def _collect(
    pipe: Pipeline, params: State, buffers: State, state: OptimizerState | None, tree: tuple[Any, dict[str, Tensor]]
) -> _Share:
    """Return copies of what this process writes; gather shards one by one, which all their holders must do."""
    data, extra = tree
    kept, numbers = flatten_slots(state or {}, owned_names(pipe, params))
    tensors = {
        **{f"params.{name}": params[name] for name in owned_names(pipe, params)},
        **{f"buffers.{name}": buffers[name] for name in owned_names(pipe, buffers)},
        **kept,
        **(extra if own_index(pipe) == 0 else {}),
    }
    scalars = [name for name, value in kept.items() if not value.dim() and value.device.type != "cpu"]
    return _Share(copy_to_host(pipe, tensors), numbers, scalars, data, pipe.copies.is_first)


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


def copy_to_host(pipe: Pipeline, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies in host memory, none of which shares memory with another: a file has no strides.

    Shards are gathered one by one, which all their holders must do. Only the first of all copies keeps what it gathers.
    """
    group, keep = pipe.copies.groups[0], pipe.copies.is_first

    def gather(tensor: Tensor) -> Tensor:
        if group is None:
            return whole_tensor(tensor)
        pipe.ranks.wait(sharded := ShardedTensor(tensor, group))
        return sharded.tensor

    wholes = ((name, gather(tensor.detach())) for name, tensor in tensors.items())
    return {name: torch.empty(t.shape, dtype=t.dtype).copy_(t) for name, t in wholes if keep}


def require_whole_state(pipe: Pipeline, params: State, buffers: State | None) -> State:
    """Return the buffers; raise `InputError`, naming the leaf, unless these are this process's parameters and buffers.

    `None` stands for the buffers of a model without any.
    """
    if pipe.copies.mesh is None:  # else, one process of the mesh writes
        repair = "Build it with fpipe.Place(mesh=mesh) instead of group, or save with torch.distributed.checkpoint."
        require_plain("params", pipe.training.placed, repair)
    expected: Mapping[str, Spec] = pipe.training.assembly.buffers
    if buffers is None and expected:
        raise InputError(
            f"buffers: got none, expected {list(expected)[:5]}: without them, the model computes something else. Pass "
            "those of the last step, as in buffers=out.buffers."
        )
    buffers = {} if buffers is None else buffers
    plain = hold_plain(pipe, params, buffers)
    for name, value in {**plain.params, **plain.buffers}.items():
        require_savable(name, value)
    return buffers


def owned_names(pipe: Pipeline, held: State) -> list[str]:
    """Return those of the parameters or buffers held here that this process writes."""
    return [name for name in held if pipe.owners[name] in pipe.ranks.ranks]


def _compare(home: Path, has_state: bool, step: object, data: object) -> list[Field]:
    if type(step) is not int or not 0 <= step < MOST_STEPS:
        raise InputError(
            f"step: got {quote(step)}, expected an int from 0 to 2**63 - 1. Pass the number of steps done, and others "
            "in data=."
        )
    return [
        Field.of("path", [str(home)]),
        Field.of("step", [str(step)]),
        Field.of("state", ["an optimizer's" if has_state else "none"]),
        Field.of("data", describe_value(data)),
    ]


def _start(share: _Share, shard: Path, token: str) -> Future[None]:
    """Write this process's files in a thread; on a mesh, one process writes for all that have the same stages."""
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fpipe save")
    try:
        return thread.submit(_write, share, shard, token)
    finally:
        thread.shutdown(wait=False)


def _write(share: _Share, shard: Path, token: str) -> None:
    if not share.writes:
        return
    with removing_on_error(shard, share.tensors, shard.with_suffix(".json"), shard.with_suffix(".json.new")):
        if share.tensors:
            write_safetensors(shard, share.tensors)
        write_sidecar(shard, token, share.numbers, share.on_device)
