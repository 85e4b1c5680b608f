# SPDX-License-Identifier: Apache-2.0
"""Reentrant checkpoints, for a backward that asks for chosen gradients.

Problem. `checkpoint(function, *args, use_reentrant=True)` runs its function again in the backward, and calls
`backward()` there: gradients of parameters go into their `.grad`, past whoever asked for them.

Idea. The same node of the autograd graph, but parameters are among its inputs: it returns their gradients. All else is
as in torch: the first run records nothing, the arguments are detached for the second, and the gradient of an argument
or of a parameter is summed inside before it is added to others. So the bits are those of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe import random
from fpipe.capture.contract import Parameter, Source, Unit, Value
from fpipe.capture.modes import Contexts
from fpipe.capture.tape import Span
from fpipe.errors import CaptureError

REPAIR = "Pass use_reentrant=False to checkpoint() (gradient_checkpointing_kwargs of transformers has it)."


@dataclass(frozen=True)
class Reentrant:
    """What a checkpointed function is called with in the place of torch's.

    - `modes`: the contexts of its first run, for the second.
    - `devices`: those on which it draws random numbers.
    - `parameters`: those that it uses and that want a gradient, at the time of the call.
    """

    modes: Contexts = ()
    devices: tuple[torch.device, ...] = ()
    parameters: Callable[[], Sequence[Tensor]] = tuple

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`; parameters get no gradient unless an argument wants one, as with torch's."""
        if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():
                return function(*args)
        apply: Any = Node.apply
        return apply(self, function, len(args), *args, *self.parameters())

    def again(self, states: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """The context of the second run: the modes and the random numbers of the first."""
        stack = ExitStack()
        stack.enter_context(random.repeated(self.devices, states))
        stack.enter_context(torch.enable_grad())
        for context in self.modes:
            stack.enter_context(context())
        return stack


class Node(torch.autograd.Function):
    """Runs a function without recording it, and again in the backward."""

    @staticmethod
    def forward(ctx: Any, how: Reentrant, function: Callable[..., Any], count: int, *given: Any) -> Any:
        """Run the function on the first `count` of `given`; the others are parameters that it uses."""
        args = given[:count]
        ctx.how, ctx.function, ctx.count, ctx.total = how, function, count, len(given)
        ctx.states = random.states(how.devices)
        ctx.others = {k: arg for k, arg in enumerate(args) if not isinstance(arg, Tensor)}
        ctx.save_for_backward(*[arg for arg in args if isinstance(arg, Tensor)])
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The gradients of the arguments and of the parameters."""
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


def require_arguments(span: Span, units: Sequence[Unit], wanting: Collection[Value], args: Sequence[Value]) -> None:
    """Raise `CaptureError` if the function reads a tensor from outside that wants a gradient and is no argument."""
    inside = units[span.start : span.stop]
    made = {value for unit in inside for value in unit.makes}
    hidden = [v for unit in inside for v in unit.reads if v not in made and v not in args and v in wanting]
    if hidden:
        raise CaptureError(
            f"module {span.path or '(root)'}: got a reentrant checkpoint of a function that reads a tensor that wants "
            "a gradient from a closure, a keyword or a tuple, expected it among the arguments themselves: torch would "
            f"run its backward once for each use. {REPAIR}"
        )


def require_own_parameters(
    spans: Sequence[Span], units: Sequence[Unit], sources: Mapping[Value, Source], wanting: Collection[Value]
) -> None:
    """Raise `CaptureError` if a parameter that is trained is used in a reentrant checkpoint and outside of all of them.

    One device adds the gradients of the two apart, and their sums in an order that depends on both.
    """
    found = [*_reentrant(spans)]
    inside = {k for span in found for k in range(span.start, span.stop)}
    outside = {value for k, unit in enumerate(units) if k not in inside for value in unit.reads}
    for span in found:
        for value in (v for unit in units[span.start : span.stop] for v in unit.reads):
            source = sources.get(value)
            if isinstance(source, Parameter) and value in outside and value in wanting:
                raise CaptureError(
                    f"module {span.path or '(root)'}: got a reentrant checkpoint that uses the parameter "
                    f"{source.name!r}, which is used outside of it too, expected one or the other: the sum of its "
                    f"gradients would have other bits. {REPAIR}"
                )


def _reentrant(spans: Sequence[Span]) -> Iterator[Span]:
    for span in spans:
        if span.reentrant:
            yield span
        yield from _reentrant(span.inner)
