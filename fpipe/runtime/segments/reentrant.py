# SPDX-License-Identifier: Apache-2.0
"""Reentrant checkpoints under a backward for chosen gradients.

Problem. `checkpoint(function, *args, use_reentrant=True)` reruns its function in the backward, and calls `backward()`
there: gradients of parameters go into their `.grad`, bypassing whoever asked for them.

Idea. Use the same autograd node, but with the parameters among its inputs: it returns their gradients. Everything else
is as in torch: the first run records no graph, the arguments are detached for the second, and the gradient of an
argument or parameter is summed inside before it is added to others. So the bits are those of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import CaptureError
from fpipe.ir.captured import Parameter, Source, Unit, Value
from fpipe.ir.modes import Contexts
from fpipe.ir.tape import Frame
from fpipe.tensors import random

REPAIR = "Pass use_reentrant=False to checkpoint() (gradient_checkpointing_kwargs of transformers has it)."


@dataclass(frozen=True)
class Reentrant:
    """The replacement for torch's reentrant checkpoint: called with a function and its arguments.

    - `modes`: the contexts of its first run, for the second.
    - `devices`: those it draws random numbers on.
    - `parameters`: returns those that it uses and that require a gradient, at the time of the call.
    """

    modes: Contexts = ()
    devices: tuple[torch.device, ...] = ()
    parameters: Callable[[], Sequence[Tensor]] = tuple

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`; as in torch, parameters get no gradient unless an argument requires one."""
        if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():
                return function(*args)
        apply: Any = Node.apply
        return apply(self, function, len(args), *args, *self.parameters())

    def again(self, states: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Return the context of the second run: the modes and the random numbers of the first."""
        stack = ExitStack()
        stack.enter_context(random.repeat_draws(self.devices, states))
        stack.enter_context(torch.enable_grad())
        for context in self.modes:
            stack.enter_context(context())
        return stack


class Node(torch.autograd.Function):
    """Runs a function without recording it, and again in the backward."""

    @staticmethod
    def forward(ctx: Any, how: Reentrant, function: Callable[..., Any], count: int, *given: Any) -> Any:
        """Run the function on the first `count` of `given`; the rest are parameters that it uses."""
        args = given[:count]
        ctx.how, ctx.function, ctx.count, ctx.total = how, function, count, len(given)
        ctx.states = random.states(how.devices)
        ctx.others = {k: arg for k, arg in enumerate(args) if not isinstance(arg, Tensor)}
        ctx.save_for_backward(*[arg for arg in args if isinstance(arg, Tensor)])
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Return the gradients of the arguments and of the parameters."""
        saved = iter(ctx.saved_tensors)
        args = [ctx.others[k] if k in ctx.others else _leaf(next(saved)) for k in range(ctx.count)]
        with ctx.how.again(ctx.states):
            out = ctx.function(*args)
        made = out if isinstance(out, tuple) else (out,)
        pairs = [(t, g) for t, g in zip(made, cotangents, strict=True) if isinstance(t, Tensor) and t.requires_grad]
        given = [*args, *ctx.how.parameters()]
        wanted = {k: one for k, one in enumerate(given) if isinstance(one, Tensor) and one.requires_grad}
        roots, grads = [root for root, _ in pairs], [grad for _, grad in pairs]
        found = torch.autograd.grad(roots, list(wanted.values()), grads, allow_unused=True) if pairs else ()
        by_place = dict(zip(wanted, found, strict=False))
        return None, None, None, *[by_place.get(k) for k in range(ctx.total)]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def require_arguments(frame: Frame, units: Sequence[Unit], wanting: Collection[Value], args: Sequence[Value]) -> None:
    """Raise `CaptureError` if the function reads an outside tensor that requires a gradient and is not an argument."""
    inside = units[frame.start : frame.stop]
    made = {value for unit in inside for value in unit.makes}
    hidden = [v for unit in inside for v in unit.reads if v not in made and v not in args and v in wanting]
    if hidden:
        raise CaptureError(
            f"module {frame.path or '(root)'}: got a reentrant checkpoint of a function that reads a tensor that wants "
            "a gradient from a closure, a keyword or a tuple, expected it among the arguments themselves: torch would "
            f"run its backward once for each use. {REPAIR}"
        )


def require_own_parameters(
    frames: Sequence[Frame], units: Sequence[Unit], sources: Mapping[Value, Source], wanting: Collection[Value]
) -> None:
    """Raise `CaptureError` if a trained parameter is used both inside and outside of reentrant checkpoints.

    One device accumulates the two gradients separately, and adds them in an order that depends on both.
    """
    found = [*_reentrant(frames)]
    inside = {k for frame in found for k in range(frame.start, frame.stop)}
    outside = {value for k, unit in enumerate(units) if k not in inside for value in unit.reads}
    for frame in found:
        for value in (v for unit in units[frame.start : frame.stop] for v in unit.reads):
            source = sources.get(value)
            if isinstance(source, Parameter) and value in outside and value in wanting:
                raise CaptureError(
                    f"module {frame.path or '(root)'}: got a reentrant checkpoint that uses the parameter "
                    f"{source.name!r}, which is used outside of it too, expected one or the other: the sum of its "
                    f"gradients would have other bits. {REPAIR}"
                )


def _reentrant(frames: Sequence[Frame]) -> Iterator[Frame]:
    for frame in frames:
        if frame.reentrant:
            yield frame
        yield from _reentrant(frame.inner)
