# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts spread over processes, which exchange their tokens inside of each layer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.common.generators import seeded
from tests.common.tensor_parallel import local

WIDTH, EXPERTS, TOKENS, WEIGHT = 8, 4, 6, 0.5


class Layer(nn.Module):
    """Send each token to the expert that a router chooses, up to a capacity; add the layer's balance loss.

    Process `k` of `n` along the mesh has the experts from `k * EXPERTS / n` on; without a mesh, all of them. Balance is
    over the tokens of all processes.
    """

    def __init__(self, capacity: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.capacity, self.group = capacity, None if mesh is None else mesh.get_group()
        self.peers, mine = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        self.router = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        up, down = torch.randn(EXPERTS, WIDTH, WIDTH) / 3, torch.randn(EXPERTS, WIDTH, WIDTH) / 3
        self.up, self.down = (nn.Parameter(one.chunk(self.peers)[mine].clone()) for one in (up, down))

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights of the router and of this process's experts."""
        return self.router, self.up, self.down

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, balance = given
        router, up, down = self.read()
        shares = (x @ router.T).softmax(-1)
        gate, chosen = shares.max(-1)
        sent = nn.functional.one_hot(chosen, EXPERTS)
        place = (sent.cumsum(0) - 1)[..., None] == torch.arange(self.capacity)
        slots = (sent[..., None] * place).to(x.dtype)
        arrived = self.exchange(torch.einsum("nec,nd->ecd", slots, x))
        done = self.exchange(self.apply_experts(arrived, up, down))
        out = torch.einsum("nec,ecd->nd", slots * gate[:, None, None], done)
        return x + out, balance + EXPERTS * (self.count(sent) * shares.mean(0)).sum()

    def count(self, sent: Tensor) -> Tensor:
        """Return the fraction of the tokens of all processes that each expert was chosen for."""
        counts = sent.sum(0).float()
        total = counts.clone()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)  # in place
        return total / (self.peers * counts.sum())

    def exchange(self, slots: Tensor) -> Tensor:
        """Send every process its part of the slots."""
        if self.group is None:
            return slots
        arrived = all_to_all_single_autograd(slots.reshape(self.peers, -1), None, None, self.group)
        return arrived.reshape(slots.shape)

    def apply_experts(self, slots: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """Apply this process's experts to the slots that arrived: first those of process 0."""
        own = slots.reshape(self.peers, len(up), self.capacity, WIDTH)
        return (torch.einsum("pecd,edh->pech", own, up).tanh() @ down).reshape(slots.shape)


class PlacedLayer(Layer):
    """The same with DTensors: experts are sharded, and each process has its part of the router's gradient."""

    def __init__(self, capacity: int, mesh: DeviceMesh) -> None:
        super().__init__(capacity, None)
        self.group, self.peers = mesh.get_group(), mesh.size()
        for name, place in (("router", Replicate()), ("up", Shard(0)), ("down", Shard(0))):
            whole = getattr(self, name).detach()
            setattr(self, name, nn.Parameter(distribute_tensor(whole, mesh, [place], src_data_rank=None)))

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        router, up, down = super().read()
        assert isinstance(router, DTensor)
        return router.to_local(grad_placements=[Partial()]), local(up), local(down)


class Mixture(nn.Module):
    """Four layers of experts; the output and the sum of their balance losses."""

    def __init__(self, capacity: int, mesh: DeviceMesh | None = None, layer: type[Layer] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[layer(capacity, mesh) for _ in range(4)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers((x, x.new_zeros(())))


def loss(outputs: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
    """Return the mean error per number, and the balance losses."""
    out, balance = outputs
    return nn.functional.mse_loss(out, wanted) + WEIGHT * balance


def tokens(microbatches: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a batch of tokens, and what they should become."""
    drawn = seeded(seed)
    return torch.randn(TOKENS * microbatches, WIDTH, generator=drawn), torch.randn(
        TOKENS * microbatches, WIDTH, generator=drawn
    )
