# SPDX-License-Identifier: Apache-2.0
"""Parameters that are split over processes: DTensors, made from plain local tensors and taken apart again.

Problem. `torch.distributed.tensor.parallel.parallelize_module` turns parameters into DTensors. What a pipeline holds,
adds and sends are plain tensors.

Idea. Outside of a stage there are local tensors only. A `Placed` says how a local tensor is part of a whole; `enter`
makes the DTensor that the modules expect, and `leave` returns the local tensor of a DTensor. Both are differentiable.
A gradient that is still to be summed over processes (`Partial`) stays so, as it does in the `.grad` of a DTensor, and
microbatches are added before processes are. Only a gradient whose local tensor has another shape than the value's is
redistributed: autograd accepts no other, and the owner of a part needs that part only.

A step takes and returns parameters with the mesh and the placements that the model's have: `unwrap_state` and
`wrap_state` stand at its border.

Invariant: the gradient that reaches a value has the same placements in every microbatch. `Arrivals` notes them when the
backward runs on fake tensors.

Runs when a plan is made, and in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe.errors import CaptureError, InputError
from fpipe.tensors.torch_private import finish_collective, is_dtensor, make_dtensor, unfinished_class

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

Placements: TypeAlias = "tuple[Placement, ...]"


@dataclass(frozen=True)
class Placed:
    """The place of a local tensor in a whole: the mesh, the placement along each of its dimensions, the whole's layout.

    `shape` and `stride` are those of the whole.
    """

    mesh: DeviceMesh
    placements: Placements
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> Placed:
        """Return how the local tensor of `tensor` is placed."""
        return cls(tensor.device_mesh, tensor.placements, tuple(tensor.shape), tensor.stride())

    @property
    def is_complete(self) -> bool:
        """True if every process has the whole."""
        return all(one.is_replicate() for one in self.placements)

    def place(self, local: Tensor) -> Tensor:
        """Return the DTensor that `local` is part of, without a graph; it shares its memory."""
        return make_dtensor(local, self.mesh, self.placements, torch.Size(self.shape), self.stride)

    def move(self, placements: Placements) -> Placed:
        """Return the same whole with other placements."""
        return replace(self, placements=placements)

    def __str__(self) -> str:
        names = self.mesh.mesh_dim_names or ()
        return f"a DTensor of shape {list(self.shape)} with placements {self.placements} on mesh {names or self.mesh}"


class Arrivals:
    """The placements of the gradients that reach placed values, by value: noted once, when a plan is made."""

    def __init__(self) -> None:
        self.placements: dict[int, Placements] = {}

    def of(self, value: int, placed: Placed) -> Placed:
        """Return how the gradient of a value is placed; like the value itself if it gets none."""
        return placed.move(self.placements.get(value, placed.placements))

    def local(self, value: int, placed: Placed, shape: torch.Size, grad: DTensor) -> Tensor:
        """Return the local tensor of the gradient that reaches a value, whose own local tensor has this shape.

        Raise `CaptureError` if its placements are not those of other uses of the value, which are added to it.
        """
        fits = local_part(grad).shape == shape
        expected = self.placements.setdefault(value, grad.placements if fits else _without_partial(placed.placements))
        if grad.placements != expected:
            if any(one.is_partial() for one in expected):
                raise CaptureError(
                    f"a value that several stages use, {Placed.of(grad)}: got a gradient with these placements, "
                    f"expected {expected} as in its other uses, since stages add local tensors. Cut the model "
                    "elsewhere, or redistribute the value where it is used."
                )
            grad = grad.redistribute(placements=expected)
        return finish_collective(local_part(grad))


def _without_partial(placements: Placements) -> Placements:
    from torch.distributed.tensor import Replicate

    return tuple(Replicate() if one.is_partial() else one for one in placements)


class Enter(torch.autograd.Function):
    """Makes a DTensor of a local tensor."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, placed: Placed, value: int, arrivals: Arrivals) -> Tensor:
        """Return the DTensor that `local` is part of."""
        ctx.known, ctx.arrivals = (value, placed, local.shape), arrivals
        ctx.set_materialize_grads(False)
        return placed.place(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the local tensor of the gradient, with the placements that it arrives with."""
        return None if grads[0] is None else ctx.arrivals.local(*ctx.known, grads[0]), None, None, None


class Leave(torch.autograd.Function):
    """Takes the local tensor out of a DTensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, value: int, arrivals: Arrivals) -> Tensor:
        """Return the local tensor, once it is complete."""
        ctx.placed, ctx.value, ctx.arrivals = Placed.of(tensor), value, arrivals
        ctx.set_materialize_grads(False)
        local = finish_collective(local_part(tensor))
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient as a DTensor with the placements that it left the value's user with."""
        (grad,) = grads
        return None if grad is None else ctx.arrivals.of(ctx.value, ctx.placed).place(grad), None, None


class Finish(torch.autograd.Function):
    """Waits for the collective that computes a tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Return the tensor, once it is complete."""
        local = finish_collective(tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient itself."""
        return grads[0]


def enter(local: Tensor, placed: Placed, value: int, arrivals: Arrivals) -> Tensor:
    """Return the DTensor that `local` is part of, differentiably; `value` is the number under which it is known."""
    made: Any = Enter.apply(local, placed, value, arrivals)  # type: ignore[no-untyped-call]
    return made  # type: ignore[no-any-return]


def leave(tensor: Tensor, value: int, arrivals: Arrivals) -> Tensor:
    """Return the plain local tensor of a tensor, differentiably; a plain tensor is returned as is."""
    if is_dtensor(tensor):
        return Leave.apply(tensor, value, arrivals)  # type: ignore[no-any-return, no-untyped-call]
    if isinstance(tensor, unfinished_class()):
        return Finish.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]
    return tensor


def require_whole_result(where: str, placed: Placed | None) -> None:
    """Raise `CaptureError` for a result of which each process has only a part; `None` stands for a plain tensor."""
    if placed is not None and not placed.is_complete:
        raise CaptureError(
            f"{where}: got {placed}, expected a plain tensor, or a DTensor that is whole on every process: a step "
            "would return a part as if it were the whole. Return tensor.full_tensor()."
        )


def holder_classes() -> tuple[type[Tensor], ...]:
    """Return the classes of tensors that hold a local tensor: one part of a whole, or one that is still computed."""
    from torch.distributed.tensor import DTensor

    return DTensor, unfinished_class()


def is_holder(tensor: Tensor) -> bool:
    """Return whether a tensor holds a local tensor: one part of a whole, or one that a collective still computes."""
    return isinstance(tensor, unfinished_class()) or is_dtensor(tensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, without a graph and sharing its memory; any other tensor as is."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def expand_like(leaf: Tensor, value: Tensor) -> Tensor:
    """Return a tensor like a plain tensor or a DTensor, all of whose elements are the one in `value`, in its memory."""
    local = value.expand(local_part(leaf).shape)
    return Placed.of(leaf).place(local) if is_dtensor(leaf) else local


def without_partial(tensor: Tensor) -> Tensor:
    """Return a DTensor summed over processes, if it is still to be; any other tensor as is."""
    if not is_dtensor(tensor) or not any(one.is_partial() for one in tensor.placements):
        return tensor
    return tensor.redistribute(placements=_without_partial(tensor.placements))


def complete_part(placed: Placed, local: Tensor) -> Tensor:
    """Return a local tensor summed over processes, if it is still to be."""
    if not any(one.is_partial() for one in placed.placements):
        return local
    return finish_collective(local_part(without_partial(placed.place(local))))


def complete_place(placed: Placed) -> Placed:
    """Return the place of a tensor once it is summed over processes."""
    return placed.move(_without_partial(placed.placements))


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor, which all processes of its mesh must ask for; any other tensor as is."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def storage_holder(tensor: Tensor) -> Tensor:
    """Return the tensor whose storage has the elements of `tensor` on this process."""
    tensor = local_part(tensor)
    return tensor.elem if isinstance(tensor, unfinished_class()) else tensor


def unwrap_state(what: str, tensors: dict[str, Tensor], placed: Mapping[str, Placed]) -> dict[str, Tensor]:
    """Return the local tensors of `tensors`, by name; `placed` says how DTensors must be placed.

    Raise `InputError`, naming the leaf, for a plain tensor where a DTensor is expected, and the reverse, and for one
    that is placed otherwise.
    """
    given: Any = tensors  # its type is checked later
    if not isinstance(given, Mapping) or not (placed or any(is_dtensor(one) for one in given.values())):
        return tensors
    for name, tensor in tensors.items():
        require_same_placement(f"{what}[{name!r}]", tensor, placed.get(name))
    return {name: finish_collective(local_part(tensor)) for name, tensor in tensors.items()}


def wrap_state(tensors: Mapping[str, Tensor], placed: Mapping[str, Placed]) -> dict[str, Tensor]:
    """Return the DTensors of local tensors that `placed` names, and the other tensors as they are."""
    return {**tensors, **{name: place.place(tensors[name]) for name, place in placed.items() if name in tensors}}


def require_same_placement(where: str, tensor: Tensor, expected: Placed | None) -> None:
    """Raise `InputError` unless a tensor is placed as expected; `None` stands for a plain tensor."""
    got = Placed.of(tensor) if is_dtensor(tensor) else None
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
