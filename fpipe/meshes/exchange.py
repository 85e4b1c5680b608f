# SPDX-License-Identifier: Apache-2.0
"""The collectives of a step: the processes that hold the same stages gather weights, and reduce gradients.

A reduction takes one message if weights are sharded: each process gets its shard of all gradients, and adds them in the
order of shards. If there are replicas, it takes two more: each process gets a portion of the gradients of all replicas,
adds them in the order of replicas, and sends the sum to all. Per process, these are the bytes of a reduce-scatter, and
of an all-reduce.

Invariant: sums are added in the order of copies, replica by replica the sums over shards. So their bits depend neither
on the backend nor on how stages are cut.

Runs in every step; layouts are made once per plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from fpipe.meshes.copies import CopyLinks
from fpipe.meshes.peers import make_room
from fpipe.meshes.pieces import FlatBuffer, Pieces
from fpipe.runtime.local import LocalHandle
from fpipe.runtime.transport import Handle, Payload
from fpipe.stages.accumulation import Gradients
from fpipe.tensors.spec import Spec
from schedules import Action


@dataclass(frozen=True)
class StageLayout:
    """The cuts of a stage's weights and gradients; `shard` is the number of the process's own shard.

    - `weights`, `totals`: the specs of the stage's parameters, and of its gradients.
    """

    weights: tuple[Spec, ...]
    totals: tuple[Spec, ...]
    shards: int
    shard: int
    replicas: int
    device: torch.device

    @cached_property
    def parameters(self) -> Pieces:
        """The shards of the parameters."""
        return Pieces(self.weights, self.shards)

    @cached_property
    def rows(self) -> Pieces:
        """The shards of the gradients."""
        return Pieces(self.totals, self.shards)

    @cached_property
    def local(self) -> tuple[Spec, ...]:
        """The specs of the gradients that this process keeps."""
        return self.totals if self.shards == 1 else self.rows.packings[self.shard].specs

    @cached_property
    def flat(self) -> FlatBuffer:
        """The portions of this process's gradients that the replicas add up."""
        return FlatBuffer(self.local, self.replicas)


class Exchange:
    """One copy's collectives in one step; it implements `fpipe.runtime.contract.StageGroup`.

    - `shards`: per stage, this copy's shards of its parameters.
    - `enter`, `leave`: put gathered weights into the parameters of a stage, and remove them.
    - `complete`: adds up the parts of a stage's gradients that the model's own modules have on several processes.
    """

    def __init__(
        self,
        links: CopyLinks,
        layouts: Mapping[int, StageLayout],
        shards: Mapping[int, Payload],
        enter: Callable[[int, Payload], None],
        leave: Callable[[int], None],
        complete: Callable[[int, Payload], Payload],
    ) -> None:
        self.links, self.layouts, self.shards = links, layouts, shards
        self.put, self.remove, self.complete = enter, leave, complete
        self.phases = [self._scatter_rows] * (links.shards.count > 1)
        self.phases += [self._scatter_portions, self._share_portions] * (links.replicas.count > 1)

    def unshard(self, stage: int, number: int) -> Handle:
        """Post an all-gather of the stage's weights."""
        layout, message = self.layouts[stage], Action("UNSHARD", stage, number)
        if not layout.weights:
            return _nothing(message)
        data = layout.parameters.pack_one(layout.shard, self.shards[stage], layout.device)
        return self.links.shards.share(message, data)

    def enter(self, stage: int, weights: Payload) -> None:
        """Put the gathered weights into the parameters of the stage."""
        layout = self.layouts[stage]
        self.put(stage, layout.parameters.join(weights) if layout.weights else ())

    def reshard(self, stage: int) -> None:
        """Remove the gathered weights."""
        self.remove(stage)

    def reduce(self, stage: int, microbatch: int, phase: int, values: Payload) -> Handle:
        """Post a phase of the reduction of the stage's gradients."""
        layout, message = self.layouts[stage], Action("REDUCE_GRAD", stage, microbatch)
        if not layout.totals:
            return _nothing(message)
        return self.phases[phase](layout, message, values if phase else self.complete(stage, values))

    def reduced(self, stage: int, values: Payload) -> Gradients:
        """Return the reduced gradients, given what the last phase gave."""
        layout = self.layouts[stage]
        if not layout.totals:
            return ()
        if self.links.replicas.count > 1:
            return layout.flat.unpack(values[0])
        return layout.rows.add(layout.shard, values)

    def _scatter_rows(self, layout: StageLayout, message: Action, values: Payload) -> Handle:
        peers, leaving = self.links.shards, [(one,) for one in layout.rows.pack(values, layout.device)]
        arriving = make_room(peers, leaving[peers.rank])
        return peers.exchange(message, leaving, arriving, tuple(piece for (piece,) in arriving))

    def _scatter_portions(self, layout: StageLayout, message: Action, values: Payload) -> Handle:
        local = layout.rows.add(layout.shard, values) if self.links.shards.count > 1 else values
        peers, buffer = self.links.replicas, layout.flat.pack(local, layout.device)
        leaving = layout.flat.parts(buffer)
        arriving = make_room(peers, leaving[peers.rank])
        return peers.exchange(message, leaving, arriving, (buffer, *arriving))

    def _share_portions(self, layout: StageLayout, message: Action, values: Payload) -> Handle:
        buffer, *arrived = values
        peers = self.links.replicas
        layout.flat.add(peers.rank, buffer, arrived)
        portions = [(data,) for data, _ in layout.flat.parts(buffer)]
        return peers.exchange(message, [portions[peers.rank]] * peers.count, portions, (buffer,))


def _nothing(message: Action) -> LocalHandle:
    """Return the handle of a message without bytes, which is never sent."""
    handle = LocalHandle("GROUP", message)
    handle.finish(())
    return handle


def shard_spec(spec: Spec, shards: int, k: int) -> Spec:
    """Return the spec of shard `k` of a tensor."""
    return spec if shards == 1 else Pieces((spec,), shards).packings[k].specs[0]
