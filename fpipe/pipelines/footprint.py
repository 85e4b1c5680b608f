# SPDX-License-Identifier: Apache-2.0
"""The bytes that a microbatch holds on each stage, measured before anything is allocated.

Problem. Which schedule fits into memory depends on what stages keep between their actions, which is hard to predict:
what autograd saves, what remains of it after the input half, and what two operations save in common.

Idea. A stage's own functions are run once on fake tensors. All memory that they allocate is tracked by weak references.
The stage keeps whatever is still alive once everything but the result is dropped: saved by autograd, in a closure, or
on a custom function's context. So every kind of stage is measured in the same way.

Only memory that comes and goes with a microbatch counts, once per stage. Parameters, buffers, constants, the leaves of
the batch, and what a stage computes once for all microbatches stay for the whole step under any schedule, so they don't
count; a microbatch is mostly a view of its batch. Values from other stages count, as if they came from another rank.
Gradients, results and messages in transit don't: no stage keeps them. What a rank keeps for a later stage, while other
ranks use it, counts with the stage that made it, like an activation.

Limits. Fake tensors miss workspaces whose size only the kernel knows, such as that of oneDNN's LSTM. Compiled functions
are measured as the graphs that they were compiled from.

Runs when `pipe.sizes` is first read, or a pipeline first printed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

import optree
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fpipe.record.captured import BatchLeaf, Buffer, Parameter, Tensors
from fpipe.record.fakes.assumed_values import assume_values
from fpipe.runtime.contract import StageCrossing
from fpipe.stages.assembly import Assembly
from fpipe.stages.prologue import Feed
from fpipe.stages.stage import ModelStage
from fpipe.tensors.random import preserve_generators
from fpipe.tensors.spec import OptionalSpec
from fpipe.tensors.torch_private import TorchDispatchMode
from schedules import Placement, Sizes


class Footprint(NamedTuple):
    """The bytes that a microbatch holds on a stage.

    - `inputs`: after a checkpointed forward; `activation`: after a forward; `residual`: after the input half.
    """

    inputs: int
    activation: int
    residual: int


def measure_sizes(assembly: Assembly, placement: Placement) -> Sizes:
    """Return the sizes of an assembly's stages in bytes, for `schedules.simulate`.

    `weight` is the size of the stage's parameters, one version, without gradients. A parameter that several stages of a
    rank use counts once.
    """
    found = measure_footprints(assembly)
    return Sizes(
        activation=tuple(one.activation for one in found),
        inputs=tuple(one.inputs for one in found),
        residual=tuple(one.residual for one in found),
        weight=_parameter_bytes(assembly, placement),
    )


def join_sizes(slices: Sequence[Sizes]) -> Sizes:
    """Return the sizes of whole microbatches, given those of their slices, which have the same weights.

    >>> join_sizes([Sizes(activation=(3, 1), weight=(5, 5)), Sizes(activation=(4, 1), weight=(5, 5))]).activation
    (7, 2)
    """
    if len(slices) == 1:
        return slices[0]
    rows = {name: [getattr(one, name) for one in slices] for name in ("activation", "inputs", "residual")}
    sums = {
        name: tuple(map(sum, zip(*found, strict=True))) for name, found in rows.items() if isinstance(found[0], tuple)
    }
    return replace(slices[0], **sums)


def shard_sizes(sizes: Sizes, shards: int) -> Sizes:
    """Return the sizes of stages whose parameters are sharded: each rank holds its share, and gathers the rest.

    >>> shard_sizes(Sizes(weight=(6, 5)), 2)
    Sizes(activation=1, inputs=0, residual=None, weight=(3, 3), gathered=(3, 2))
    """
    assert isinstance(sizes.weight, tuple), "measured by stage"
    own = tuple(-(-int(whole) // shards) for whole in sizes.weight)
    if shards == 1:
        return sizes
    rest = tuple(int(whole) - mine for whole, mine in zip(sizes.weight, own, strict=True))
    return replace(sizes, weight=own, gathered=rest)


def measure_footprints(assembly: Assembly) -> tuple[Footprint, ...]:
    """Return what a microbatch holds on each stage of an assembly; run the stages once on fake tensors."""
    with run_on_fakes(assembly) as arguments:
        return tuple(sum_holdings(measure_holdings(*arguments(stage))) for stage in assembly.stages)


class Holding(NamedTuple):
    """A piece of memory that a stage allocates or gets for a microbatch.

    - `held`: the bytes of it that the stage holds at each of three times, as in `Footprint`; 0 where it is free.
    - `crossing`: the tensors in it that cross to or from other stages: which of `CROSSINGS`, and its number there. A
      cotangent counts only if it fills the memory.
    """

    held: Footprint
    crossing: tuple[tuple[str, int], ...]


CROSSINGS: Final = ("gets", "leaves", "pulled_by", "pulls")
"""The tensors that a stage gets in its forward and returns from it, and in its backward."""


def sum_holdings(holdings: Iterable[Holding]) -> Footprint:
    """Return what a microbatch holds on a stage."""
    held = [one.held for one in holdings]
    return Footprint(*[sum(size) for size in zip(*held, strict=True)]) if held else Footprint(0, 0, 0)


class FakeArguments(NamedTuple):
    """A stage and its arguments on fake tensors: parameters as leaves, buffers, and what enters it from the batch."""

    stage: ModelStage
    params: Tensors
    buffers: Tensors
    feed: Feed


@contextmanager
def run_on_fakes(assembly: Assembly) -> Iterator[Callable[[ModelStage], FakeArguments]]:
    """Return the context to run stages of an assembly in on fake tensors, and the function that makes arguments."""
    captured = assembly.captured
    fakes = {source: captured.fakes[value] for value, source in captured.sources.items()}
    devices = {tensor.device for tensor in fakes.values()} | {torch.device("cpu")}

    def arguments(stage: ModelStage) -> FakeArguments:
        params = stage.leaves({name: fakes[Parameter(name)] for name in stage.parameters})
        buffers = tuple([fakes[Buffer(name)] for name in stage.buffers])
        leaves = tuple([fakes[BatchLeaf(leaf)] for leaf in stage.batch])
        return FakeArguments(stage, params, buffers, Feed(stage.prologue, [leaves], buffers))

    with (
        preserve_generators(device for device in devices if device.type in ("cpu", "cuda")),
        captured.mode,
        assume_values(captured.mode),
        torch.enable_grad(),
    ):
        yield arguments


def measure_holdings(stage: ModelStage, params: Tensors, buffers: Tensors, feed: Feed) -> list[Holding]:
    """Return the memory of a microbatch on one stage, whose arguments are fake tensors.

    Memory that is alive after everything is dropped is not the microbatch's.
    """
    with MemoryWatch() as made:
        given = copy_changed(stage, buffers), make_arrivals(stage.gets)
        crossing = {"gets": made.find(given[1])}
        inputs = made.alive()
        outputs, _, residuals = stage.forward(params, given[0], feed(0) + given[1], 0)
        crossing["leaves"] = made.find(outputs)
        kept = [outputs[k] for k in stage.keeps]
        del given, outputs, _
        activation = made.alive()
        inputs |= {number: activation[number] for numbers in made.find(kept) for number in numbers}
        del kept
        arriving = make_arrivals(stage.pulled_by)
        crossing["pulled_by"] = made.find(arriving, whole=True)
        outgoing, deferred = stage.backward_input(residuals, arriving)
        crossing["pulls"] = made.find(outgoing, whole=True)
        del residuals, arriving, outgoing
        residual = made.alive()
        del deferred
        stays = made.alive().keys()
    tensors = defaultdict[int, list[tuple[str, int]]](list)
    for what, numbers in crossing.items():
        for k, found in enumerate(numbers):
            for number in found:
                tensors[number].append((what, k))
    return [
        Holding(Footprint(*[then.get(number, 0) for then in (inputs, activation, residual)]), tuple(tensors[number]))
        for number in made.storages
        if number not in stays
    ]


def copy_changed(stage: ModelStage, buffers: Tensors) -> Tensors:
    """Return the stage's buffers; those that it changes are copies, since each microbatch has its own version."""
    changed = stage.wiring.modified_buffers
    return tuple([buffer.clone() if k in changed else buffer for k, buffer in enumerate(buffers)])


def make_arrivals(crossings: Sequence[StageCrossing]) -> Tensors:
    """Return tensors like those that arrive from other stages, in the layout that a transport gives them."""
    specs = [spec.whole if isinstance(spec, OptionalSpec) else spec for one in crossings for spec in one.specs]
    return tuple([spec.unpack(spec.buffer()) for spec in specs])


def _parameter_bytes(assembly: Assembly, placement: Placement) -> tuple[int, ...]:
    """Return, per stage, the bytes of the parameters that no earlier stage already places on all of its ranks."""
    here: list[set[str]] = []
    for stage in assembly.stages:
        ranks = set(placement.replicas(stage.index))
        earlier = [names for s, names in enumerate(here) if ranks <= set(placement.replicas(s))]
        here.append({*stage.parameters, *stage.unused}.difference(*earlier))
    specs = assembly.parameters
    return tuple(sum(specs[name].nbytes for name in names & specs.keys()) for names in here)


class MemoryWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that tracks the memory of everything that operations return, without keeping it alive.

    Invariant: a weak reference keeps the identifier of its storage from being reused.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in optree.tree_leaves(found):
            for dense in _dense_parts(tensor):
                storage = dense.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self.storages.setdefault(storage._cdata, (reference, storage.nbytes()))
        return found

    def find(self, tensors: Iterable[Tensor | None], whole: bool = False) -> list[list[int]]:
        """Return, per tensor, the identifiers of its storages that are tracked; if `whole`, of those that it fills."""
        return [
            [
                number
                for dense in _dense_parts(tensor)
                if (number := dense.untyped_storage()._cdata) in self.storages
                and (not whole or dense.nbytes >= self.storages[number][1])
            ]
            for tensor in tensors
        ]

    def alive(self) -> dict[int, int]:
        """Return the size of each storage that is still alive, by its identifier."""
        return {number: size for number, (storage, size) in self.storages.items() if not storage.expired()}  # type: ignore[no-untyped-call]


def _dense_parts(leaf: object) -> tuple[Tensor, ...]:
    """Return the strided tensors that a result consists of: itself, or the indices and values of a sparse one."""
    if not isinstance(leaf, Tensor):
        return ()
    if leaf.layout is torch.sparse_coo:
        return leaf._indices(), leaf._values()
    return (leaf,) if leaf.layout is torch.strided else ()
