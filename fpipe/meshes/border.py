# SPDX-License-Identifier: Apache-2.0
"""The border between a user's tensors and a step's: DTensors outside, plain local tensors inside.

A model that `parallelize_module` has changed has DTensor parameters. So has what `pipe.init` returns, and a step takes
and returns them, with the mesh and the placements that the model's have. Everything in between is plain.

Runs when parameters are made, and in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fpipe.errors import InputError
from fpipe.tensors.placed import Placed, is_placed, local_part
from fpipe.tensors.torch_private import finish_collective


def unwrap_state(what: str, tensors: dict[str, Tensor], placed: Mapping[str, Placed]) -> dict[str, Tensor]:
    """Return the local tensors of `tensors`, by name; `placed` says how DTensors must be placed.

    Raise `InputError`, naming the leaf, for a plain tensor where a DTensor is expected, and the reverse, and for one
    that is placed otherwise.
    """
    given: Any = tensors  # its type is checked later
    if not isinstance(given, Mapping) or not (placed or any(map(is_placed, given.values()))):
        return tensors
    for name, tensor in tensors.items():
        require_same_placement(f"{what}[{name!r}]", tensor, placed.get(name))
    return {name: finish_collective(local_part(tensor)) for name, tensor in tensors.items()}


def wrap_state(tensors: Mapping[str, Tensor], placed: Mapping[str, Placed]) -> dict[str, Tensor]:
    """Return the DTensors of local tensors that `placed` names, and the other tensors as they are."""
    return {**tensors, **{name: place.place(tensors[name]) for name, place in placed.items() if name in tensors}}


def require_same_placement(where: str, tensor: Tensor, expected: Placed | None) -> None:
    """Raise `InputError` unless a tensor is placed as expected; `None` stands for a plain tensor."""
    got = Placed.of(tensor) if isinstance(tensor, DTensor) else None
    if (got is None and expected is None) or not isinstance(tensor, Tensor):  # other checks refuse what is no tensor
        return
    if got is None or expected is None:
        raise InputError(
            f"{where}: got {got or 'a plain tensor'}, expected {expected or 'a plain tensor'}. Pass what "
            "pipe.init(model) and a step return; call parallelize_module before building the pipeline."
        )
    if (got.mesh, got.placements, got.shape) != (expected.mesh, expected.placements, expected.shape):
        raise InputError(
            f"{where}: got {got}, expected {expected}. Pass what pipe.init(model) and a step return, or call "
            "tensor.redistribute(placements=...)."
        )


def require_plain(what: str, placed: Mapping[str, Placed], repair: str) -> None:
    """Raise `InputError` if there are DTensors; `repair` is a sentence that says what to do instead."""
    for name, one in placed.items():
        raise InputError(f"{what}: got a model whose leaf {name} is {one}, expected plain tensors. {repair}")
