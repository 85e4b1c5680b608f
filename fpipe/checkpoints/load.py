# SPDX-License-Identifier: Apache-2.0
"""Load a training run into any pipeline of the same model.

Problem. The pipeline that saved a checkpoint had other ranks, cuts and stages, and perhaps another model.

Idea. Names in the files are the model's, and every process knows the model's names, shapes and dtypes, whoever holds
them. So each compares the whole checkpoint with the whole model first, and all come to the same verdict. Then each
reads what it holds, from whichever files have it: a parameter that is on several ranks is read by each of them.

Invariant: nothing is read before every rank has agreed that the checkpoint fits; nothing is cast.

Runs when a checkpoint is loaded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fpipe.checkpoints.encoding import DATA_PREFIX, STATE_PREFIX, decode_tree, find_parameter, unflatten_slots
from fpipe.checkpoints.manifest import AGAIN, Manifest, read_manifest, read_sidecars
from fpipe.checkpoints.save import count_processes, own_index
from fpipe.errors import InputError
from fpipe.meshes.holdings import whole_specs
from fpipe.network.agreement import Field
from fpipe.pipelines.handshake import agree_on_arguments, call_together
from fpipe.pipelines.inputs import State
from fpipe.pipelines.pipeline import Pipeline
from fpipe.tensors.spec import Spec
from fpipe.training.optimizers import OptimizerState
from fpipe.weights.files import AnyPath, as_path
from fpipe.weights.safetensors import read_into, read_specs
from schedules.errors import quote
from schedules.status import showing


class Checkpoint(NamedTuple):
    """A training run as it was saved: the share of this process.

    - `params`, `buffers`: this process's share, as `pipe.init` returns them.
    - `state`: the optimizer's, by parameter name, for the parameters of this process; `None` if none was saved.
    - `step`, `data`: as they were saved; tensors in `data` are in host memory.
    """

    params: State
    buffers: State
    state: OptimizerState | None
    step: int
    data: Any


@showing("load")
def load(pipe: Pipeline, path: AnyPath | Sequence[AnyPath]) -> Checkpoint:
    """Return this process's share of the checkpoint at `path`; every rank calls this.

    If you pass several paths, it is the one with the most steps among those that are whole, by sizes and checksums. So
    a run that saves to two paths in turn can continue if its last checkpoint is damaged.

    The pipeline may have other ranks, cuts and another schedule than the one that saved it. A parameter that several
    ranks hold is read by each. The run then continues bit for bit as without the interruption. Values are moved to the
    pipeline's device, and are not cast.

    Raises `InputError`, on every rank, before any value is read: if there is no finished checkpoint at `path`, if a
    file is missing, truncated or altered, and, naming the leaf, if names, shapes or dtypes are not those of the model.

    See `save` for an example.
    """
    with call_together(load, locals()):
        paths = as_path(path) if isinstance(path, str | os.PathLike) else [*map(as_path, path)]
        agree_on_arguments(pipe, path=str(paths) if isinstance(paths, Path) else [*map(str, paths)])
        saved = _Saved.open(pipe, paths) if isinstance(paths, Path) else _choose(pipe, paths)
        _require_model(saved, pipe)
        pipe.ranks.agree(lambda: [Field.of("checkpoint", [str(saved.path), str(saved.manifest), *saved.sums])])
        values = saved.read(pipe)
        pipe.ranks.agree(about="its values")
        return _divide(saved, pipe, values)


@dataclass(frozen=True)
class _Saved:
    """A checkpoint, before any value is read: its manifest, every tensor's spec, and what is not a tensor.

    `sums` are lines with the size and checksum of each file of tensors.
    """

    path: Path
    manifest: Manifest
    sums: Sequence[str]
    specs: Mapping[str, Spec]
    numbers: Mapping[str, float]
    on_device: frozenset[str]

    @classmethod
    def open(cls, pipe: Pipeline, path: Path) -> _Saved:
        """Read everything but the values; raise `InputError` if a file is missing or damaged.

        Processes divide the files, to compare their checksums.
        """
        manifest = read_manifest(path)
        sidecars = [*read_sidecars(path, manifest, own_index(pipe), count_processes(pipe))]
        numbers = {name: value for sidecar in sidecars for name, value in sidecar.numbers.items()}
        shards = [read_specs(shard) for shard in manifest.shard_files(path)]
        on_device = frozenset(name for sidecar in sidecars for name in sidecar.on_device)
        sums = [f"file {k}: {one.size} bytes, checksum {one.checksum:08x}" for k, one in enumerate(sidecars)]
        specs = {name: spec for found in shards for name, spec in found.items()}
        _require_names(path, [name for found in shards for name in found], numbers)
        decode_tree(manifest.data, specs)
        return cls(path, manifest, sums, specs, numbers, on_device)

    def names(self, prefix: str) -> list[str]:
        """Return the names of tensors and numbers that begin with `prefix`, without it."""
        flat = [*self.specs, *self.numbers]
        return [name.removeprefix(prefix) for name in flat if name.startswith(prefix)]

    def read(self, pipe: Pipeline) -> dict[str, Tensor]:
        """Return the tensors that this process holds, by their names in the files."""
        held = pipe.training
        params, buffers = whole_specs(held.params, held.placed), whole_specs(held.buffers, held.placed)
        values = {f"params.{name}": spec.empty() for name, spec in params.items()}
        values |= {f"buffers.{name}": spec.empty() for name, spec in buffers.items()}
        for name, spec in self.specs.items():
            if name.startswith(STATE_PREFIX):
                owner = find_parameter(name, params)
                if owner is not None:
                    values[name] = self._blank(name, spec, params[owner])
            elif name.startswith(DATA_PREFIX):
                values[name] = spec.empty("cpu")
        for shard in self.manifest.shard_files(self.path):
            read_into(shard, values)
        return values

    def _blank(self, name: str, spec: Spec, parameter: Spec) -> Tensor:
        """Return where to read a tensor of the optimizer's state: beside its parameter, and in its layout.

        Optimizers keep scalars, such as the number of steps, in host memory unless they were told otherwise.
        """
        if spec.shape == parameter.shape and spec.shape:
            return (parameter if parameter.dtype == spec.dtype else replace(parameter, dtype=spec.dtype)).empty()
        host = not spec.shape and name not in self.on_device
        return spec.empty("cpu" if host else parameter.device)


def _require_names(path: Path, tensors: Sequence[str], numbers: Collection[str]) -> None:
    """Raise `InputError` unless every name is in one place, and is of a kind that `save` writes there."""
    kinds = ("params.", "buffers.", STATE_PREFIX, DATA_PREFIX)
    wrong = [name for name in tensors if not name.startswith(kinds)]
    wrong += [name for name in numbers if not name.startswith(STATE_PREFIX)]
    wrong += [name for name, count in Counter([*tensors, *numbers]).items() if count > 1]
    if wrong:
        raise InputError(
            f"{path}: got {quote(wrong)}, expected tensors that begin with one of {kinds}, numbers that begin with "
            f"{STATE_PREFIX!r}, and each name once. {AGAIN}"
        )


def _choose(pipe: Pipeline, paths: Sequence[Path]) -> _Saved:
    """Return the checkpoint with the most steps of those that are whole for all ranks; raise `InputError` for none."""
    if not paths:
        raise InputError("path: got no path in the list, expected at least one. Pass those that the run saved to.")
    steps, errors = dict[Path, int](), list[str]()
    for path in paths:
        try:
            steps[path] = read_manifest(path).step
        except InputError as error:
            errors.append(str(error))
    newest = sorted(steps, key=lambda path: -steps[path])
    pipe.ranks.agree(lambda: [Field.of("checkpoints", [f"{path} of step {steps[path]}" for path in newest])])
    for path in newest:
        saved = None
        try:
            saved = _Saved.open(pipe, path)
        except InputError as error:
            errors.append(str(error))
        if all(pipe.ranks.agree(about=str(path), note=int(saved is not None))) and saved is not None:
            return saved
    raise InputError(
        f"path: got {len(paths)} paths, expected at least one with a checkpoint that is whole on every rank. Start "
        f"from the beginning, or repair one of these: {' '.join(errors)}"
    )


def _require_model(saved: _Saved, pipe: Pipeline) -> None:
    """Raise `InputError` unless names, shapes and dtypes are the model's, all of them and no others."""
    whole = pipe.training.assembly
    for kind, expected in (("params", whole.parameters), ("buffers", whole.buffers)):
        found = dict.fromkeys(saved.names(f"{kind}."))
        missing, extra = [n for n in expected if n not in found], [n for n in found if n not in expected]
        if missing or extra:
            raise InputError(
                f"{saved.path}: got {len(found)} {kind}, expected the model's {len(expected)} (missing {missing[:5]}, "
                f"unexpected {extra[:5]}). Build the pipeline from the model that was saved."
            )
        for name, spec in whole_specs(expected, whole.placed).items():
            got = saved.specs[f"{kind}.{name}"]
            if (got.shape, got.dtype) != (spec.shape, spec.dtype):
                raise InputError(
                    f"{saved.path}, {kind}[{name!r}]: got {got}, expected {spec} as in the model; values are never "
                    "cast. Build the pipeline from a model of the checkpoint's shapes and dtypes."
                )
    for name in saved.names(STATE_PREFIX):
        if find_parameter(f"{STATE_PREFIX}{name}", whole.parameters) is None:
            raise InputError(
                f"{saved.path}: got optimizer state {name!r}, expected the state of the model's parameters only. Build "
                "the pipeline from the model that was saved."
            )


def _divide(saved: _Saved, pipe: Pipeline, values: Mapping[str, Tensor]) -> Checkpoint:
    """Return the values under the names that the caller knows them by."""
    manifest, held = saved.manifest, pipe.training
    params, buffers = pipe.adopt(
        {
            **{name: pipe.holdings.take_part(name, values[f"params.{name}"]) for name in held.params},
            **{name: pipe.holdings.take_part(name, values[f"buffers.{name}"]) for name in held.buffers},
        }
    )
    flat = {**values, **_adopt_slots(pipe, values), **saved.numbers}
    state = unflatten_slots({name: flat[name] for name in flat if name.startswith(STATE_PREFIX)}, params)
    data = decode_tree(manifest.data, values)
    return Checkpoint(params, buffers, state if manifest.has_state else None, manifest.step, data)


def _adopt_slots(pipe: Pipeline, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimizer's tensors that have the shape of their parameter, as this process holds parameters."""
    held, found, specs = pipe.holdings, {}, whole_specs(pipe.training.params, pipe.training.placed)
    for name, value in values.items():
        owner = find_parameter(name, specs) if name.startswith(STATE_PREFIX) else None
        if owner is not None and value.dim() and tuple(value.shape) == specs[owner].shape:
            found[name] = held.adopt(owner, held.take_part(owner, value))
    return found
