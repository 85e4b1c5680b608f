# SPDX-License-Identifier: Apache-2.0
"""The state that a verification starts from and continues with: of one process, and of the whole model.

Runs when `verify` is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fpipe.pipelines.inputs import State
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.step import hold_plain
from fpipe.tensors.placed import Placed, local_part, whole_tensor, wrap_state

RATE = 2**-10  # the learning rate between steps; scaling by a power of two is exact


def read_state(module: nn.Module) -> tuple[State, State]:
    """Return the parameters and buffers of a module, by its own names."""
    return {name: p.detach() for name, p in module.named_parameters()}, dict(module.named_buffers())


def gather_shards(pipe: Pipeline, tensors: State) -> State:
    """Return the tensors without shards; the processes that hold the others must call this."""
    if pipe.copies.shards == 1 or pipe.copies.is_local:
        return tensors
    split = {**pipe.holdings.split_gradients, **pipe.holdings.split}
    return {name: _gather_one(tensor, split.get(name)) for name, tensor in tensors.items()}


def _gather_one(tensor: Tensor, split: Placed | None) -> Tensor:
    """Return a tensor without shards: plain, or as the model's modules split it."""
    whole = whole_tensor(tensor.detach())
    return whole if split is None else distribute_tensor(whole, split.mesh, split.placements, src_data_rank=None)


def gather_state(pipe: Pipeline, module: nn.Module, params: State, buffers: State) -> tuple[State, State]:
    """Return the whole model's state, gathered from all processes; every rank must call this at the same time."""
    with pipe.ranks.enter_call("verify"):
        hold_plain(pipe, params, buffers)
        pipe.ranks.agree(about="the state to verify from")
        known, homes, placed = pipe.training.assembly, pipe.schedule.placement.homes, pipe.training.placed
        owners: dict[str, int] = {}
        for stage in pipe.stages:
            for name in (*stage.parameters, *stage.buffers, *stage.unused):
                owners.setdefault(name, homes[stage.index])
        params, buffers = (
            {name: local_part(one) for name, one in held.items()} for held in (gather_shards(pipe, params), buffers)
        )

        def all_of(share: State, specs: Mapping[str, object], names: list[str]) -> State:
            return {
                name: pipe.ranks.broadcast(
                    share[name].detach() if owners[name] in pipe.ranks.ranks else None, every[name], owners[name]
                )
                for name in names
            }

        every = {**known.parameters, **known.buffers}
        first, second = [name for name, _ in module.named_parameters()], [name for name, _ in module.named_buffers()]
        return wrap_state(all_of(params, every, first), placed), wrap_state(all_of(buffers, every, second), placed)


def descend(params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> State:
    """Return the parameters after one step of plain gradient descent."""
    with torch.no_grad():
        moved = {name: p - RATE * _placed_like(p, grads[name]) if name in grads else p for name, p in params.items()}
    return {name: p.detach().requires_grad_(params[name].requires_grad) for name, p in moved.items()}


def _placed_like(p: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient with the placements of its parameter."""
    return grad.redistribute(placements=p.placements) if isinstance(p, DTensor) and isinstance(grad, DTensor) else grad


@contextmanager
def lend_state(module: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Iterator[None]:
    """Put these values into the module; afterwards, restore its own."""
    values = {**params, **buffers}
    seats = [(name, local_part(one)) for name, one in (*module.named_parameters(), *module.named_buffers())]
    before = [(tensor, tensor.data) for _, tensor in seats]
    for name, tensor in seats:
        value = local_part(values[name])
        if tensor.data_ptr() != value.data_ptr():
            tensor.data = value.detach().clone()
    try:
        yield
    finally:
        for tensor, old in before:
            tensor.data = old
