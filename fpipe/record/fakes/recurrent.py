# SPDX-License-Identifier: Apache-2.0
"""Recurrent networks on fake tensors, and in graphs: one call, however long the sequence.

Problem. On a CPU, `torch.gru` and its like loop over the sequence in C++, with a dozen operators per step. On fake
tensors, all of them go through Python; a graph would hold every one.

Idea. The shapes, strides and bytes of what such a call makes are linear in the length of the sequence. So the loop runs
for two steps and for three, and the rest is extrapolated. In a graph, `RecurrentForward` makes the whole call under
autograd, and `RecurrentBackward` runs the backward of what autograd kept: the same operators in the same order, so the
same bits.

A call that does not loop (oneDNN's LSTM, cuDNN), is short, or runs under autocast, runs as it is.

Runs when a plan is made; `RecurrentForward` and `RecurrentBackward` run in every step, in stages that are graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import optree
import torch
from torch import Tensor

from fpipe.record.captured import Tensors, current_casts
from fpipe.tensors.effects import Effects
from fpipe.tensors.fake import Fakes, note_effects
from fpipe.tensors.torch_private import (
    PAD,
    DisableTorchFunction,
    FakeTensor,
    active_fake_mode,
    current_dispatch_mode,
    without_modes,
)

RECURRENT = frozenset({torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu})
"""The functions that loop over a sequence."""
SHORT = 3
"""The longest sequence whose loop runs on fake tensors."""


class KeptRecurrence(NamedTuple):
    """The tensors that a call keeps for its backward: outputs, inputs, and views of these that are made after it.

    A backward from such a view reaches the input before any backward from the outputs does.
    """

    outputs: Tensors
    inputs: Tensors
    views: Tensors


class RecurrentForward:
    """A recurrent call on other tensors; returns its outputs, and what `RecurrentBackward` takes.

    `needs`: whether each tensor requires a gradient.
    """

    def __init__(self, call: RecurrentCall) -> None:
        self.function, self.leaves, self.spec = call.function, call.blank, call.spec
        self.places, self.needs, self.draws = call.places, call.needs, call.draws
        self.__name__ = self.function.__name__

    def __call__(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Make the call."""
        given = [one.detach().requires_grad_(need) for one, need in zip(tensors, self.needs, strict=True)]
        with torch.set_grad_enabled(any(self.needs)):
            outputs = _call(self.function, self.leaves, self.spec, self.places, given)
            views = tuple([one.view_as(one) for one in given])
        return *[one.detach() for one in outputs], KeptRecurrence(outputs, tuple(given), views)


class RecurrentBackward:
    """The backward of a recurrent call; returns the gradients of its inputs `wanted`."""

    def __init__(self, function: Any, wanted: tuple[int, ...]) -> None:
        self.wanted, self.__name__ = wanted, f"the backward of {function.__name__}"

    def __call__(
        self, kept: KeptRecurrence, cotangents: Sequence[Tensor | None], sums: Sequence[Tensor | None]
    ) -> Tensors:
        """Return the gradients, for the cotangents of the outputs that have one.

        `sums` are earlier parts of the gradients, to which autograd adds those of each step one by one.
        """
        pairs = [(one, grad) for one, grad in zip(kept.outputs, cotangents, strict=True) if grad is not None]
        pairs += [(kept.views[k], part) for k, part in zip(self.wanted, sums, strict=True) if part is not None]
        roots, grads = zip(*pairs, strict=True)
        return torch.autograd.grad(roots, [kept.inputs[k] for k in self.wanted], grads)


def _call(function: Any, leaves: Sequence[Any], spec: Any, places: Sequence[int], tensors: Sequence[Tensor]) -> Tensors:
    """Return what a function returns for these tensors in their places among its arguments."""
    filled = list(leaves)
    for k, tensor in zip(places, tensors, strict=True):
        filled[k] = tensor
    args, kwargs = optree.tree_unflatten(spec, filled)
    return tuple(function(*args, **kwargs))


@runtime_checkable
class NotesRecurrence(Protocol):
    """A listener that is told of recurrent calls and of their backwards."""

    def note_recurrent(self, call: RecurrentCall, outputs: Tensors) -> None:
        """Note a call."""

    def note_recurrent_backward(
        self, call: RecurrentCall, cotangents: Sequence[Tensor | None], grads: Sequence[Tensor | None]
    ) -> None:
        """Note the backward of a call."""


class ShortRecurrence(NamedTuple):
    """The results of a short call: outputs, gradients of the inputs, and the bytes that autograd keeps.

    `operators`: how many it calls. `drawn`: the devices that it draws random numbers on.
    """

    outputs: Tensors
    grads: Sequence[Tensor | None]
    nbytes: int
    operators: int
    drawn: tuple[torch.device, ...]


@dataclass(eq=False)
class RecurrentCall:
    """A call of a function of `RECURRENT` on fake tensors.

    - `leaves`, `spec`: its arguments. `places`: where the distinct `tensors` are among them.
    - `packed`: whether the sequences are packed: then the second argument has the batch size of each step.
    - `time`: the dimension of time in the input, which each step makes longer by `unit`.
    - `draws`: the devices that it draws random numbers on. `tape` notes it: what the backward takes, as `kept`.
    """

    function: Any
    leaves: list[Any]
    spec: Any
    mode: Fakes
    places: list[int]
    tensors: list[Tensor]
    needs: tuple[bool, ...]
    packed: bool
    time: int
    unit: int
    draws: tuple[torch.device, ...] = ()
    kept: Any = None
    tape: NotesRecurrence | None = None

    @property
    def blank(self) -> list[Any]:
        """The arguments that are not fake tensors."""
        return [None if k in self.places else leaf for k, leaf in enumerate(self.leaves)]

    @property
    def input(self) -> Tensor:
        """The sequence."""
        return self.tensors[0]

    def measure(self, steps: int, present: Sequence[bool] | None) -> ShortRecurrence:
        """Return what the call makes for a sequence of this many steps, if these outputs have cotangents."""
        effects, kept, seen = Effects(), dict[int, Tensor](), list[Any]()
        with without_modes(), DisableTorchFunction(), self.mode, note_effects(self.mode, effects):
            effects.observer = lambda func, *_: seen.append(func)
            given = [self._shortened(k, one, steps) for k, one in enumerate(self.tensors)]
            leaves = self.blank
            if self.packed:
                with without_modes():
                    leaves[1] = torch.full((steps,), self.unit)

            def keep(tensor: Tensor) -> Tensor:
                kept[tensor.untyped_storage()._cdata] = tensor
                return tensor

            with torch.set_grad_enabled(any(self.needs)), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                outputs = _call(self.function, leaves, self.spec, self.places, given)
            count, grads = len(seen), list[Tensor | None]([None] * len(given))
            for one in given:
                kept.pop(one.untyped_storage()._cdata, None)
            roots = [one for k, one in enumerate(outputs) if present is not None and present[k] and one.requires_grad]
            wanted = [k for k, need in enumerate(self.needs) if need] if roots else []
            starts = [torch.empty_like(one) for one in roots]
            found = torch.autograd.grad(roots, [given[k] for k in wanted], starts, allow_unused=True) if wanted else ()
            for k, grad in zip(wanted, found, strict=True):
                grads[k] = grad
            outputs = tuple([one.detach() for one in outputs])
        nbytes = sum(one.untyped_storage().nbytes() for one in kept.values())
        return ShortRecurrence(outputs, grads, nbytes, count, tuple(effects.drawn))

    def _shortened(self, k: int, tensor: Tensor, steps: int) -> Tensor:
        """Return a new tensor like a tensor of the call; the sequence has this many steps, and the same layout."""
        shape, order = list(tensor.shape), sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        if k == 0:
            shape[self.time] = steps * self.unit
        made = torch.empty([shape[d] for d in order], dtype=tensor.dtype, device=tensor.device)
        made = made.permute([order.index(d) for d in range(tensor.dim())])
        return made.detach().requires_grad_(self.needs[k])

    def extrapolate(self, two: Tensor, three: Tensor) -> Tensor:
        """Return a tensor for the whole sequence like these for two and three steps."""
        shape = map(self._at, two.shape, three.shape)
        return torch.empty_strided(
            tuple(shape), tuple(map(self._at, two.stride(), three.stride())), dtype=two.dtype, device=two.device
        )

    def _at(self, two: int, three: int) -> int:
        beyond = self.input.shape[self.time] - 2 * self.unit
        return two + (three - two) * beyond // self.unit


def recurrent_call(function: Any, args: Any, kwargs: Any) -> RecurrentCall | None:
    """Return a call of a function of `RECURRENT` if it loops over a long sequence of fake tensors, else `None`."""
    mode = active_fake_mode()
    if function not in RECURRENT or kwargs or not isinstance(mode, Fakes) or current_casts():
        return None
    leaves: list[Any]
    leaves, spec = optree.tree_flatten((args, kwargs), none_is_leaf=True)  # type: ignore[arg-type]
    places, packed = [k for k, leaf in enumerate(leaves) if isinstance(leaf, FakeTensor)], _is_sizes(args[1])
    tensors = [leaves[k] for k in places]
    others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)]
    if len(others) != packed or len({id(one) for one in tensors}) < len(tensors) or places[:1] != [0]:
        return None
    time = 0 if packed or not args[-1] else 1
    sizes = to_list(args[1]) if packed else [1] * args[0].shape[time]
    if len(sizes) <= SHORT:
        return None
    needs = tuple([one.requires_grad and torch.is_grad_enabled() for one in tensors])
    call = RecurrentCall(function, leaves, spec, mode, places, tensors, needs, packed, time, sizes[0])
    two, three = (call.measure(steps, None) for steps in (2, 3))
    call.draws = two.drawn
    return call if three.operators > two.operators else None


def to_list(tensor: Tensor) -> list[int]:
    """Return the integers in a real tensor, unseen by modes."""
    with without_modes(), DisableTorchFunction():
        return [int(one) for one in tensor.tolist()]


def _is_sizes(argument: Any) -> bool:
    return isinstance(argument, Tensor) and not isinstance(argument, FakeTensor) and argument.dtype is torch.int64


class Recurrence(torch.autograd.Function):
    """A recurrent call on fake tensors."""

    @staticmethod
    def forward(ctx: Any, call: RecurrentCall, *tensors: Tensor) -> Tensors:
        """Return the outputs of a call."""
        two, three = (call.measure(steps, None) for steps in (2, 3))
        kept = max(0, call._at(two.nbytes, three.nbytes)) if any(call.needs) else 0
        ctx.call, ctx.kept = call, torch.empty(kept, dtype=torch.uint8, device=call.input.device)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        if call.mode.effects is not None:
            call.mode.effects.drawn.update(dict.fromkeys(call.draws))
        return tuple([call.extrapolate(*pair) for pair in zip(two.outputs, three.outputs, strict=True)])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Return the gradients of the tensors."""
        call: RecurrentCall = ctx.call
        assert len(ctx.saved_tensors) == len(call.tensors), "torch raises if one was modified since"
        present = [one is not None for one in cotangents]
        two, three = (call.measure(steps, present).grads for steps in (2, 3))
        grads = [None if a is None or b is None else call.extrapolate(a, b) for a, b in zip(two, three, strict=True)]
        if call.tape is not None:
            call.tape.note_recurrent_backward(call, cotangents, grads)
        ctx.kept = None
        return None, *grads


_apply: Any = Recurrence.apply


def call_function(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return the result of a torch call; a recurrent one on fake tensors does not loop, and a tape is told of it."""
    if function is PAD and isinstance(args[0], FakeTensor) and _is_sizes(args[1]):
        return _pad(*args)
    call = recurrent_call(function, args, kwargs) if function in RECURRENT else None
    if call is None:
        return function(*args, **kwargs)
    mode: Any = current_dispatch_mode()
    call.tape = mode if isinstance(mode, NotesRecurrence) else None
    outputs: Tensors = _apply(call, *call.tensors)
    if call.tape is not None:
        call.tape.note_recurrent(call, outputs)
    return outputs


class Rearranged(torch.autograd.Function):
    """A rearrangement of a fake tensor's elements: new ones of another shape, and back in the backward.

    The two first dimensions of the result, or of the gradient, may be swapped in memory.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shape: tuple[int, ...], swapped: bool, swapped_back: bool) -> Tensor:
        """Return a new tensor of this shape."""
        ctx.shape, ctx.swapped = tuple(tensor.shape), swapped_back
        return _empty(tensor, shape, swapped)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the tensor."""
        return _empty(grads[0], ctx.shape, ctx.swapped), None, None, None


def _empty(like: Tensor, shape: tuple[int, ...], swapped: bool) -> Tensor:
    return like.new_empty((shape[1], shape[0], *shape[2:])).transpose(0, 1) if swapped else like.new_empty(shape)


_rearrange: Any = Rearranged.apply


def pack(padded: Tensor, lengths: Sequence[int], batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return fake packed sequences of these lengths, and the batch size of each step, which are real.

    Torch reads them where no mode sees it.
    """
    sizes = [sum(length > step for length in lengths) for step in range(max(lengths, default=0))]
    with without_modes(), DisableTorchFunction():
        batch_sizes = torch.tensor(sizes, dtype=torch.int64)
    return _rearrange(padded, (sum(sizes), *padded.shape[2:]), False, batch_first), batch_sizes


def _pad(data: Tensor, sizes: Tensor, batch_first: bool, value: float, total: int = -1) -> tuple[Tensor, Tensor]:
    """Return fake padded sequences, and their lengths."""
    steps = to_list(sizes)
    shape = (max(total, len(steps)), steps[0])
    shape = shape[::-1] if batch_first else shape
    padded = _rearrange(data, (*shape, *data.shape[1:]), batch_first, False)
    return padded, torch.empty(steps[0], dtype=torch.int64)
