# SPDX-License-Identifier: Apache-2.0
"""Key the random numbers that a segment draws.

`DrawKeys` seeds the generator before each torch call that drew at capture, as if the call ran alone. That works as long
as the calls are the same as at capture. A call that branches on data draws from a *stream*: it is seeded once, at its
start, and everything in it draws in sequence from there, whichever branches it takes; `DrawKeys` neither counts nor
seeds the calls in it.

A checkpointed function is also seeded once, before it runs: its rerun starts from the generator's state before the
first run.

Runs when a pipeline is built; the operations that it returns run in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpipe.errors import InputError
from fpipe.record.captured import Labels, Operation, Tensors
from fpipe.record.trace.tape import Draw, Frame
from fpipe.tensors import random

DrawsByCall: TypeAlias = Mapping[tuple[Any, int], Draw]
"""Torch calls that draw, by function and call number."""


class DrawKeys(TorchFunctionMode):
    """A torch function mode that seeds the generator before each call in `draws`, unless one of `streams` runs."""

    def __init__(self, key: int, draws: DrawsByCall, streams: StreamKeys) -> None:
        super().__init__()
        self.key, self.draws, self.streams, self.calls = key, draws, streams, Counter[Any]()

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if self.streams.current is None:
            draw = self.draws.get((func, self.calls[func]))
            self.calls[func] += 1
            if draw is not None:
                seed(self.key, draw)
        return func(*args, **(kwargs or {}))

    def require_as_many(self, counts: Mapping[Any, int], where: str) -> None:
        """Raise `InputError` unless each function that draws was called as often as at capture."""
        for function, expected in counts.items():
            if self.calls[function] != expected:
                raise InputError(
                    f"{where}: got {self.calls[function]} calls of {getattr(function, '__name__', function)} outside "
                    f"of the modules named in unsplittable, expected {expected} as at capture: these modules return "
                    "something other than tensors that decides what is drawn after them. Name this module in "
                    "unsplittable too."
                )


class ModuleFrames(NamedTuple):
    """A module's calls in a frame, in order: the frame of each call that draws from a stream, `None` for others."""

    module: nn.Module
    frames: Sequence[Frame | None]


class StreamKeys:
    """A context in which modules that branch on data seed the generator when called; `current` is the running call."""

    def __init__(self, key: int, calls: Sequence[ModuleFrames]) -> None:
        self.key, self.calls = key, calls
        self.waiting = {id(module): iter(frames) for module, frames in calls}
        self.running: list[Frame | None] = []
        self.current: Frame | None = None

    def __enter__(self) -> StreamKeys:
        self.hooks = [module.register_forward_pre_hook(self._begin, prepend=True) for module, _ in self.calls]
        self.hooks += [module.register_forward_hook(self._end, always_call=True) for module, _ in self.calls]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _begin(self, module: nn.Module, args: object) -> None:
        frame = next(self.waiting[id(module)], None) if self.current is None else None
        self.running.append(frame)
        if frame is not None:
            self.current = frame
            begin_stream(self.key, frame)

    def _end(self, module: nn.Module, args: object, out: object) -> None:
        frame = self.running.pop()
        if frame is not None:
            self.current = None
            end_stream(self.key, frame)


def begin_stream(key: int, frame: Frame) -> None:
    """Seed the generators that a stream draws from."""
    assert frame.stream is not None, "the call draws from a stream"
    seed(key, frame.stream)


def end_stream(key: int, frame: Frame) -> None:
    """Raise `InputError` if a stream drew in a step without a seed."""
    assert frame.stream is not None, "the call draws from a stream"
    if isinstance(key, random.Unseeded) and not all(map(random.is_fresh, frame.stream.devices)):
        raise InputError(
            f"seed: got none, expected an integer, because module {frame.path or '(root)'} draws random numbers for "
            "these data. Pass seed=step, a new one each step."
        )


def seed(key: int, draw: Draw | Labels) -> None:
    """Make subsequent draws depend on `key` and the label of `draw`."""
    for device in draw.devices:
        random.reseed(key, draw.label, device)


def seed_once(operation: Operation, draw: Labels | None) -> Operation:
    """Return the operation, seeded before it runs if `draw` is given."""

    def run(key: int, *tensors: Tensor) -> Tensors:
        if draw is not None:
            seed(key, draw)
        return operation.call(key, *tensors)

    return operation._replace(call=run)


def key_draws(
    operation: Operation, draws: DrawsByCall, inner: Sequence[ModuleFrames], counts: Mapping[Any, int], where: str
) -> Operation:
    """Return the operation with each of `draws` seeded separately, and each stream of the `inner` calls once.

    `counts` are the calls that each drawing function must make.
    """

    def run(key: int, *tensors: Tensor) -> Tensors:
        with StreamKeys(key, inner) as streams, DrawKeys(key, draws, streams) as mode:
            made = operation.call(key, *tensors)
        mode.require_as_many(counts if inner else {}, where)
        return made

    def run_streams(key: int, *tensors: Tensor) -> Tensors:
        with StreamKeys(key, inner):  # no mode: under one, torch's modules would not take their fast path
            return operation.call(key, *tensors)

    return operation._replace(call=run if draws else run_streams)


def key_stream(operation: Operation, frame: Frame) -> Operation:
    """Return the operation, seeded as one stream; it must make the whole call of `frame`."""
    first, last = stream_ends(frame)

    def run(key: int, *tensors: Tensor) -> Tensors:
        first.call(key)
        made = operation.call(key, *tensors)
        last.call(key)
        return made

    return operation._replace(call=run)


def stream_ends(frame: Frame) -> tuple[Operation, Operation]:
    """Return the operations to run before and after the parts of a call that draws from a stream."""

    def begin(key: int) -> Tensors:
        begin_stream(key, frame)
        return ()

    def end(key: int) -> Tensors:
        end_stream(key, frame)
        return ()

    return Operation((), (), begin), Operation((), (), end)
