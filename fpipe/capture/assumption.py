# SPDX-License-Identifier: Apache-2.0
"""What is assumed of values that fake tensors do not have: false, zero, and that nothing is found; but that all are.

So `if not torch.isfinite(x).all()` goes the usual way, whose gradients are laid out in memory as on most batches.

Only for modules that never run but as themselves: which way they take on fake tensors tells the shapes of what they
return, and nothing else; on real ones they go the right way. And of torch's own checks of all elements it is assumed
that they pass; they are part of what is played, and then made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from fpipe.capture.disguise import disguised, tolist
from fpipe.capture.fake import Fakes
from fpipe.capture.fast_paths import as_in_eager

UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)


OF_ALL = "_fpipe_of_all"
"""The attribute of a fake tensor that says whether something is so for all elements of another."""


def _none(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """The indices of what is not zero: there is nothing."""
    return tensor.new_empty((0, tensor.dim()), dtype=torch.int64)


def _nowhere(condition: Tensor) -> tuple[Tensor, ...]:
    return tuple(_none(condition).unbind(1))


def _selected(tensor: Tensor, index: Any) -> Tensor:
    """What a mask selects, or an index in which there are some: nothing."""
    items = index if isinstance(index, tuple) else (index,)
    return tensor[tuple(one for item in items for one in _indices(item))]


def _indices(item: Any) -> list[Any]:
    """An item of an index; of a mask, an empty list of indices for each of its dimensions."""
    if not isinstance(item, Tensor) or item.dtype not in (torch.bool, torch.uint8):
        return [item]
    return [item.new_empty((0,), dtype=torch.int64)] * item.dim()


def _masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """What `masked_select` finds: nothing."""
    return tensor.new_empty((0,))


def _zeros(shape: Sequence[int]) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


ASSUMED: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        Tensor.__bool__: lambda tensor: hasattr(tensor, OF_ALL),
        Tensor.item: lambda _: 0,
        Tensor.__int__: lambda _: 0,
        Tensor.__float__: lambda _: 0.0,
        tolist: lambda tensor: _zeros(tensor.shape),
        Tensor.nonzero: _none,
        torch.nonzero: _none,
        Tensor.argwhere: _none,
        torch.argwhere: _none,
        torch.where: _nowhere,
        Tensor.__getitem__: _selected,
        torch.masked_select: _masked,
        Tensor.masked_select: _masked,
    }
)


def computed(function: Any, args: Any, kwargs: Any) -> Any:
    """Call a torch function; raise the same for all that read values, those that hand them to numpy included."""
    if function in (Tensor.numpy, Tensor.__array__) and isinstance(args[0], FakeTensor):
        raise DataDependentOutputException(function)
    return marked(function, function(*args, **kwargs))


def marked(function: Any, out: Any) -> Any:
    """Return what a torch call returned; `all` of a tensor is known by it."""
    if function in (Tensor.all, torch.all) and isinstance(out, FakeTensor):
        setattr(out, OF_ALL, True)
    return out


def reading(tensor: Tensor) -> None:
    """Note, for whoever watches torch calls, that what happens from here on depends on the values of `tensor`."""
    if has_torch_function_unary(tensor):
        handle_torch_function(reading, (tensor,), tensor)


READING = frozenset(
    {reading, tolist}
    | {Tensor.__bool__, Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.tolist}
    | {Tensor.nonzero, torch.nonzero}
)
"""Calls after which what happens may depend on the values of tensors, also where a fake tensor has its value."""


class Attached(torch.autograd.Function):
    """Connect a fake output of a module that branches on data to everything it may depend on.

    Nodes of this class mark where gradients may or may not pass; see `surely_reached`.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        """Return a tensor in the same layout, in memory of its own, so that it may be changed in place."""
        ctx.save_for_backward(*others)
        return tensor.new_empty_strided(tensor.shape, tensor.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the own gradient, and zeros for the others, which leave its layout to what is added to them."""
        return *grads, *[tensor.new_zeros(()).expand_as(tensor) for tensor in ctx.saved_tensors]


def attached(made: tuple[Tensor, ...], others: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs of a module that branches on data, connected to all of `others` that want a gradient.

    But only while shapes are inferred: in a step the branch that was taken decides, as it does on one device.
    """
    if active_fake_mode() is None or not torch.is_grad_enabled():
        return made
    wanting = [tensor for tensor in others if tensor.requires_grad]
    apply: Any = Attached.apply
    return tuple([apply(t, *wanting) if wanting and (t.is_floating_point() or t.is_complex()) else t for t in made])


def surely_reached(roots: Iterable[Tensor]) -> frozenset[int]:
    """Return the identities of the leaves that gradients reach from `roots` whichever way modules branch."""
    queue = [get_gradient_edge(root).node for root in roots]
    seen = dict.fromkeys(queue)
    for node in queue:
        if node.name() != f"{Attached.__name__}Backward":
            after = [one for one, _ in node.next_functions if one is not None and one not in seen]
            seen.update(dict.fromkeys(after))
            queue += dict.fromkeys(after)
    return frozenset(id(node.variable) for node in seen if hasattr(node, "variable"))


check: Any = torch._check_tensor_all_with


def checked(error_type: Any, cond: Tensor, message: Any = None) -> None:
    """torch's check that all elements are true; a fake tensor passes."""
    if not isinstance(cond, FakeTensor):
        check(error_type, cond, message)


is_all_true: Any = torch._is_all_true


def all_true(valid: Tensor) -> bool:
    """torch's check of what distributions are given: a fake tensor passes, and values are looked at in every step."""
    if isinstance(valid, FakeTensor):
        reading(valid)
    elif not is_all_true(valid):
        raise ValueError(
            "got arguments or samples that a distribution does not allow, expected such as its constraints say. Run "
            "the module eagerly to see which, or pass validate_args=False."
        )
    return True


@contextmanager
def assuming(mode: FakeTensorMode) -> Iterator[Answers]:
    """Answer, inside, what fake tensors of `mode` are asked for their values; yields whether any were."""
    answers = Answers()
    with (
        patch.object(torch, "_check_tensor_all_with", checked),
        patch.object(torch, "_is_all_true", all_true),
        disguised(),
        as_in_eager(answers.note_nested),
        _finding_nothing(mode, answers),
        answers,
    ):
        yield answers


class Answers(TorchFunctionMode):
    """Answers from `ASSUMED`.

    - `given`: whether it has answered: another value may lead elsewhere.
    - `nested`: whether torch makes nested tensors of real ones here, which fake ones cannot be.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given = self.nested = False

    def note_nested(self) -> None:
        """Note that real tensors are nested here."""
        self.nested = True

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return marked(func, func(*args, **(kwargs or {})))
        except UNKNOWN:
            if func not in ASSUMED:
                raise
            self.given = True
            return ASSUMED[func](*args, **(kwargs or {}))

    def nothing(self, tensor: Tensor) -> Tensor:
        """Answer `nonzero`, which a backward asks where no torch call can be seen."""
        self.given = True
        return _none(tensor)


@contextmanager
def _finding_nothing(mode: FakeTensorMode, answers: Answers) -> Iterator[None]:
    """Let the mode itself answer `nonzero`, if it can be told to."""
    if not isinstance(mode, Fakes):
        yield
        return
    before, mode.nothing = mode.nothing, answers.nothing
    try:
        yield
    finally:
        mode.nothing = before
