# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: record the functions that the user checkpoints, and run them so in a step.

**Recording.** Each checkpointed function gets a frame inside that of the module that calls `torch.utils.checkpoint`. To
close the frame, the recorder needs what the function returned, which only `checkpoint` itself sees:

    def checkpoint(function, *args, ...):                      # in torch, for use_reentrant=False
        generator = _checkpoint_without_reentrant_generator(function, ...)
        next(generator)                                        # installs the saved-tensor hooks
        ret = function(*args)
        next(generator)                                        # removes them
        return ret

`CheckpointFrames.record` replaces the generator. It opens the frame before it yields; once `checkpoint` has resumed it,
it reads `ret` from the Python frame of `checkpoint`. A reentrant checkpoint is a custom autograd function;
`record_reentrant` replaces its `apply`.

**In a step**, the recorded calls of the function run under torch's own checkpoint. They take every tensor that they
read as an argument, so the rerun in the backward needs no Python of the user, and no tensors in modules.

**Buffers.** Functions with batch normalization change buffers, and so does their rerun. On one device, it comes before
the next microbatch; in a pipeline, forwards of later microbatches come in between, and buffers are threaded through
forwards alone. So the rerun works on copies of the buffers. What a normalization adds to its statistics depends only on
the microbatch, so the second change comes right after the stage's forward: rerun these functions, in reverse order as a
backward would, and discard everything they compute (`BufferCheckpoints`, `rerun_for_buffers`).

**Reentrant checkpoints** rerun their function in the backward and call `backward()` there, so parameters' gradients are
accumulated into `.grad` and not returned to the caller of the outer backward. `Reentrant` is the same autograd node,
but with the parameters among its inputs, so that it returns their gradients. The rest is as in torch: the first run
records no graph, the arguments are detached for the second, and the gradient of an argument or parameter is summed
within the rerun before it is added to others. So the result is bit for bit that of one device. Calls for which this
cannot work are refused (`fpipe.record.trace.checks`).

Runs when a plan is made; the operations that are returned here run in every step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from fpipe.errors import CaptureError
from fpipe.record.captured import Contexts, Operation, Tensors, Unit, Value
from fpipe.record.trace.checks import bound_variables, require_explicit_arguments
from fpipe.record.trace.frames import Frame, outermost_checkpoints
from fpipe.record.trace.record import Record
from fpipe.record.trace.recorder import Recorder
from fpipe.tensors import random
from fpipe.tensors.torch_private import begin_checkpoint, read_checkpoint

KIND = "activation checkpointing"
NORMS = frozenset({"batch_norm", "instance_norm"})
"""These update running statistics, and do not read them when they do."""


class CheckpointFrames:
    """Records checkpointed functions."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def record(self, generate: Callable[..., Iterator[None]], /, *given: Any, **named: Any) -> Iterator[None]:
        """Do what torch's generator, which `generate` returns, does around a function, and record its frame."""
        generator = generate(*given, **named)
        function, args, kwargs, how = read_checkpoint(*given, **named)

        def call_again(function: Any, *args: Any, **kwargs: Any) -> Any:
            return checkpoint.checkpoint(function, *args, use_reentrant=False, **how, **kwargs)

        begin_checkpoint(generator)
        frame = self._open_frame(call_again, (function, *args), kwargs)
        frame.how, frame.checkpointed = how, (function, bound_variables(function))
        with self.recorder.stack.enter(frame):
            yield
        self.recorder.close_frame(frame, _result_in_checkpoint())
        if frame.stream is not None or self.recorder.record.draws.has_from(frame.first_tick):
            how["preserve_rng_state"] = True  # else the rerun would draw from whatever state the schedule left
        yield from generator

    def record_reentrant(self, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """Run a reentrant checkpoint as a node that supports `torch.autograd.grad`, and record its frame."""
        recorder = self.recorder
        if not preserve_rng_state:
            raise CaptureError(
                f"{recorder.stack.here()}: got a reentrant checkpoint with preserve_rng_state=False, expected the same "
                "random numbers in both runs. Drop the argument."
            )
        recorder.record.hooked.append(len(recorder.record.units))
        frame = self._open_frame(Reentrant(), (function, *args), {})
        frame.reentrant, frame.checkpointed = True, (function, bound_variables(function))

        def run(*args: Any) -> Any:
            return recorder.view_others(frame, function(*args))

        with recorder.stack.enter(frame):
            out = Reentrant()(run, *args)
        recorder.close_frame(frame, out)
        values = recorder.values
        given = {*values.within(args), *values.sources}
        require_explicit_arguments(frame, recorder.record.units_in(frame), given, values)
        return out

    def _open_frame(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Frame:
        """Return the frame of a checkpointed function, as part of the module that calls it."""
        outer = self.recorder.stack.frames[-1]
        frame = self.recorder.open_frame(outer.path, outer.kind, function, args, kwargs, KIND)
        frame.checkpoint = True
        return frame


def _result_in_checkpoint() -> Any:
    """Return what the checkpointed function returned: the local variable `ret` of torch's `checkpoint`.

    The caller is a generator that `checkpoint` has resumed.
    """
    return sys._getframe(2).f_locals["ret"]


class BufferCheckpoints:
    """The checkpointed functions of a record that change buffers and are rerun by a backward.

    Raise `CaptureError` if one reads a buffer that one of them changes, other than to compute the buffer's next value:
    on one device the backward would not recompute what the forward did.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        frames = [*outermost_checkpoints(record.frames)]
        for frame in frames:
            if any(map(self.has_any_in, frame.inner)):
                raise CaptureError(
                    f"module {frame.path or '(root)'}: got a checkpoint in a checkpoint, with a function that changes "
                    "a buffer, expected one checkpoint around it. On one device, three runs would change the buffer. "
                    "Drop one of the two."
                )
        changed = {one for frame in frames if self.includes(frame) for one in self._written(frame)}
        for unit in (unit for frame in frames for unit in record.units_in(frame) if changed):
            self._require_unread(unit, changed)

    def includes(self, frame: Frame) -> bool:
        """Return whether a frame is a checkpointed function that changes buffers and is rerun by a backward."""
        return frame.checkpoint and self.record.is_rerun(frame) and bool(self._written(frame))

    def has_any_in(self, frame: Frame) -> bool:
        """Return whether a frame is such a function, or contains one."""
        return self.includes(frame) or any(map(self.has_any_in, frame.inner))

    def in_backward_order(self, frames: Sequence[Frame], present: Collection[int]) -> Iterator[Frame]:
        """Yield such functions whose units are present, in the order in which a backward reruns them."""
        for frame in reversed(frames):
            if self.includes(frame):
                yield from [frame] if frame.start in present else ()
            else:
                yield from self.in_backward_order(frame.inner, present)

    def _written(self, frame: Frame) -> frozenset[int]:
        """Return the memory of the buffers that units inside a frame change."""
        rewriters = self.record.rewriters
        return frozenset().union(*(rewriters.get(k, ()) for k in range(frame.start, frame.stop)))

    def _require_unread(self, unit: Unit, changed: Set[int]) -> None:
        storage, name = self.record.values.storage, unit.does.partition("[")[0]
        reads = any(storage[value] in changed for value in unit.reads)
        if reads and name not in NORMS and any(storage[value] not in changed for value in unit.makes):
            raise CaptureError(
                f"module {unit.path or '(root)'}, {name}: got a checkpointed function that reads a buffer that it or "
                "another checkpointed function changes, expected one that only updates it. On one device, the rerun in "
                "the backward would see another value than the forward did. Change the buffer before the checkpoint, "
                "or drop the checkpoint and let the schedule recompute the stage (schedules.recompute)."
            )


def checkpoint_calls(
    calls: Operation, settings: Mapping[str, Any], buffers: Collection[Value], changed: Collection[Value]
) -> Operation:
    """Return the operation that runs `calls` under a checkpoint with these `settings`.

    `buffers` are those among its inputs that anyone changes in place, `changed` those that the calls change.
    """
    copied = [k for k, value in enumerate(calls.reads) if value in changed]
    passed = [k for k, value in enumerate(calls.reads) if value not in buffers]

    def run(key: int, *tensors: Tensor) -> Tensors:
        has_run = False

        def function(*given: Tensor) -> Tensors:
            nonlocal has_run
            arguments = [*tensors]
            for k, tensor in zip(passed, given, strict=True):
                arguments[k] = tensor
            for k in copied if has_run else ():
                arguments[k] = arguments[k].clone()
            has_run = True
            return calls.call(key, *arguments)

        # As on one device, a rerun reads buffers as the forward left them. torch requires that nobody writes to the
        # arguments of a checkpoint, so buffers are not among them.
        made: Tensors = checkpoint.checkpoint(function, *[tensors[k] for k in passed], use_reentrant=False, **settings)
        return made

    return calls._replace(call=run)


def rerun_for_buffers(calls: Operation) -> Operation:
    """Return the operation that changes buffers as the rerun of `calls` in a backward does, and makes nothing."""

    def run(key: int, *tensors: Tensor) -> Tensors:
        with saved_tensors_hooks(_discard, _discard):
            calls.call(key, *tensors)
        return ()

    return Operation(calls.reads, (), run)


def _discard(saved: object) -> Any:
    """Return `None` in place of a tensor that autograd saves or reads back."""


@dataclass(frozen=True)
class Reentrant:
    """The replacement for torch's reentrant checkpoint: called with a function and its arguments.

    - `modes`: the contexts of the first run, which the second run enters too.
    - `devices`: the devices on which the function draws random numbers.
    - `parameters`: returns the parameters that the function uses and that require a gradient when it is called.
    """

    modes: Contexts = ()
    devices: tuple[torch.device, ...] = ()
    parameters: Callable[[], Sequence[Tensor]] = tuple

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`; as in torch, parameters get no gradient unless an argument requires one."""
        if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():
                return function(*args)
        apply: Any = CheckpointNode.apply
        return apply(self, function, len(args), *args, *self.parameters())

    def rerun_context(self, states: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Return the context of the second run: the modes and the random numbers of the first."""
        stack = ExitStack()
        stack.enter_context(random.repeat_draws(self.devices, states))
        stack.enter_context(torch.enable_grad())
        for context in self.modes:
            stack.enter_context(context())
        return stack


class CheckpointNode(torch.autograd.Function):
    """An autograd function that runs a function without recording it, and reruns it in the backward."""

    @staticmethod
    def forward(ctx: Any, how: Reentrant, function: Callable[..., Any], count: int, *given: Any) -> Any:
        """Return the function's result for the first `count` of `given`; the rest are parameters that it uses."""
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
        args = [ctx.others[k] if k in ctx.others else _detach(next(saved)) for k in range(ctx.count)]
        with ctx.how.rerun_context(ctx.states):
            out = ctx.function(*args)
        made = out if isinstance(out, tuple) else (out,)
        pairs = [(t, g) for t, g in zip(made, cotangents, strict=True) if isinstance(t, Tensor) and t.requires_grad]
        given = [*args, *ctx.how.parameters()]
        wanted = {k: one for k, one in enumerate(given) if isinstance(one, Tensor) and one.requires_grad}
        roots, grads = [root for root, _ in pairs], [grad for _, grad in pairs]
        found = torch.autograd.grad(roots, list(wanted.values()), grads, allow_unused=True) if pairs else ()
        by_place = dict(zip(wanted, found, strict=False))
        return None, None, None, *[by_place.get(k) for k in range(ctx.total)]


def _detach(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
