# SPDX-License-Identifier: Apache-2.0
"""Key the random numbers of what is played back.

`Keyed` seeds the generator before each torch call that drew at capture, as if the call were played alone. That works
where the calls are those of the capture. A call that branches on data is seeded once, at its start, and whatever runs
in it draws in sequence from there, whichever branches it takes; `Keyed` neither counts nor seeds the calls in it.

A checkpointed function, too, is seeded once, before it runs: its rerun starts from the generator's state before the
first run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpipe.errors import InputError
from fpipe.ir.captured import Labels, Operation, Tensors
from fpipe.ir.tape import Draw, Frame
from fpipe.tensors import random

Draws: TypeAlias = Mapping[tuple[Any, int], Draw]
"""Torch calls that draw, by function and call number."""


class Keyed(TorchFunctionMode):
    """Seeds the generator before each torch call of `draws`, unless one of `streams` is running."""

    def __init__(self, key: int, draws: Draws, streams: Streams) -> None:
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
                    f"of the modules named in unsplittable, expected {expected} as at capture: what these return "
                    "besides tensors decides what is drawn after them. Name this module in unsplittable too."
                )


class Calls(NamedTuple):
    """A module's calls inside a frame, in order: each one that draws from a stream, and `None` for each other."""

    module: nn.Module
    frames: Sequence[Frame | None]


class Streams:
    """A context in which modules that branch on data seed the generator when called; `current` is the running call."""

    def __init__(self, key: int, calls: Sequence[Calls]) -> None:
        self.key, self.calls = key, calls
        self.waiting = {id(module): iter(frames) for module, frames in calls}
        self.running: list[Frame | None] = []
        self.current: Frame | None = None

    def __enter__(self) -> Streams:
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
            begin(self.key, frame)

    def _end(self, module: nn.Module, args: object, out: object) -> None:
        frame = self.running.pop()
        if frame is not None:
            self.current = None
            end(self.key, frame)


def calls(frames: Sequence[Frame]) -> list[Calls]:
    """Return the calls inside `frames` of each module for which any call draws from a stream."""
    found = defaultdict[nn.Module, list[Frame | None]](list)

    def follow(frames: Sequence[Frame]) -> None:
        for frame in frames:
            function = frame.invocation.function
            if isinstance(function, nn.Module):
                found[function].append(None if frame.stream is None else frame)
            if frame.stream is None:
                follow(frame.inner)

    follow(frames)
    return [Calls(module, calls) for module, calls in found.items() if any(calls)]


def begin(key: int, frame: Frame) -> None:
    """Seed the generators that a stream draws from."""
    assert frame.stream is not None, "the call draws from a stream"
    seed(key, frame.stream)


def end(key: int, frame: Frame) -> None:
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


def seeded(operation: Operation, draw: Labels | None) -> Operation:
    """Return the step, seeded once if `draw` is given."""

    def call(key: int, *tensors: Tensor) -> Tensors:
        if draw is not None:
            seed(key, draw)
        return operation.call(key, *tensors)

    return operation._replace(call=call)


def keyed(
    operation: Operation, draws: Draws, inner: Sequence[Calls], counts: Mapping[Any, int], where: str
) -> Operation:
    """Return the step with each of `draws` seeded separately, and each stream of the calls `inner` once."""

    def call(key: int, *tensors: Tensor) -> Tensors:
        with Streams(key, inner) as streams, Keyed(key, draws, streams) as mode:
            made = operation.call(key, *tensors)
        mode.require_as_many(counts if inner else {}, where)
        return made

    def simply(key: int, *tensors: Tensor) -> Tensors:
        with Streams(key, inner):  # no mode: under one, torch's modules would not take their fast path
            return operation.call(key, *tensors)

    return operation._replace(call=call if draws else simply)


def streaming(operation: Operation, frame: Frame) -> Operation:
    """Return the step, seeded as one stream, which must play `frame`."""
    first, last = bounds(frame)

    def call(key: int, *tensors: Tensor) -> Tensors:
        first.call(key)
        made = operation.call(key, *tensors)
        last.call(key)
        return made

    return operation._replace(call=call)


def bounds(frame: Frame) -> tuple[Operation, Operation]:
    """Return the steps to play before and after the parts of a call that draws from a stream."""

    def first(key: int) -> Tensors:
        begin(key, frame)
        return ()

    def last(key: int) -> Tensors:
        end(key, frame)
        return ()

    return Operation((), (), first), Operation((), (), last)
