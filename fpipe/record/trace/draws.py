# SPDX-License-Identifier: Apache-2.0
"""Random draws: label those of a recorded run, and seed the generator by these labels in a step.

Problem. The label of a draw depends on its ordinal in its module. In a module that branches on data, another branch
draws differently: draws that were not recorded have no ordinal, and shift the ordinals of those after them.

Idea. Each torch call that draws has a label of its own, and a step seeds the generator before it, as if the call ran
alone. But all draws in one call that branches on data form a *stream*, with one label: the generator is seeded once, at
the start of the call, and everything in it draws in sequence from there, whichever branches it takes. The stream is the
outermost call that may branch, or a checkpointed function around it. Draws in streams do not advance ordinals.

A checkpointed function is also seeded once, before it runs: its rerun starts from the generator's state before the
first run.

Runs when a plan is made; the operations that are returned here run in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpipe.errors import InputError
from fpipe.record.captured import Labels, Operation, Tensors
from fpipe.record.trace.frames import Frame
from fpipe.tensors import random


class RandomCall(NamedTuple):
    """A torch call that drew random numbers: its tick, function, module path, and the devices it drew on."""

    tick: int
    function: Callable[..., Any]
    path: str
    devices: tuple[torch.device, ...]


class Draw(NamedTuple):
    """A torch call that draws random numbers: its tick, its function, its label, and the devices it draws on."""

    tick: int
    function: Any
    labels: Labels


DrawsByCall: TypeAlias = Mapping[tuple[Any, int], Draw]
"""Torch calls that draw, by function and call number."""


class Draws:
    """The draws of a run: `found`, the torch calls that drew; `streams`, the calls that form streams."""

    def __init__(self) -> None:
        self.found: list[RandomCall] = []
        self.streams: list[Frame] = []

    def note(self, tick: int, function: Callable[..., Any], path: str, devices: Iterable[torch.device]) -> None:
        """Record that a torch call in the module at `path` drew on these devices."""
        self.found.append(RandomCall(tick, function, path, tuple(devices)))

    def has_from(self, tick: int) -> bool:
        """Return whether a torch call at `tick` or later drew."""
        return bool(self.found) and self.found[-1].tick >= tick

    def begin_stream(self, frame: Frame, tensors: Iterable[Tensor]) -> None:
        """Make a call a stream, unless it is one; it may draw on the CPU and on the CUDA devices of `tensors`."""
        if frame.stream is None:
            devices = dict.fromkeys([torch.device("cpu"), *(tensor.device for tensor in tensors)])
            call = sum(one.path == frame.path for one in self.streams)
            kinds = tuple([device for device in devices if device.type in ("cpu", "cuda")])
            frame.stream = Labels(random.stream_label(frame.path, call), kinds)
            self.streams.append(frame)

    def stream_at(self, tick: int) -> Labels | None:
        """Return the stream that a call at `tick` draws from, if any."""
        return next((one.stream for one in self.streams if one.first_tick <= tick < one.last_tick), None)

    @cached_property
    def labels(self) -> Mapping[int, Labels]:
        """The label and devices of each draw, by tick, once the run is over."""
        ordinals = Counter[str]()
        found: dict[int, Labels] = {}
        for tick, _, path, devices in self.found:
            stream = self.stream_at(tick)
            found[tick] = stream or Labels(random.label(path, ordinals[path]), devices)
            ordinals[path] += stream is None
        return found

    @cached_property
    def outside_streams(self) -> Sequence[Draw]:
        """The draws outside of streams, each with its own label, once the run is over."""
        alone = [one for one in self.found if self.stream_at(one.tick) is None]
        return [Draw(one.tick, one.function, self.labels[one.tick]) for one in alone]

    @property
    def stream_devices(self) -> tuple[torch.device, ...]:
        """The devices on which streams may draw."""
        return tuple(dict.fromkeys(device for one in self.streams if one.stream for device in one.stream.devices))


# ---------------------------------------------------------------------------------------------------------- in a step


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
                draw.labels.seed(self.key)
        return func(*args, **(kwargs or {}))

    def require_as_many(self, counts: Mapping[Any, int], where: str) -> None:
        """Raise `InputError` unless each function that draws was called as often as at capture."""
        for function, expected in counts.items():
            if self.calls[function] != expected:
                raise InputError(
                    f"{where}: got {self.calls[function]} calls of {getattr(function, '__name__', function)} outside "
                    f"the modules named in unsplittable, expected {expected} as at capture: these modules return "
                    "values other than tensors that decide which random numbers are drawn later. Name this module in "
                    "unsplittable, too."
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
            begin_stream(frame, self.key)

    def _end(self, module: nn.Module, args: object, out: object) -> None:
        frame = self.running.pop()
        if frame is not None:
            self.current = None
            end_stream(frame, self.key)


def begin_stream(frame: Frame, key: int) -> Tensors:
    """Seed the generators that a stream draws from."""
    assert frame.stream is not None, "the call draws from a stream"
    frame.stream.seed(key)
    return ()


def end_stream(frame: Frame, key: int) -> Tensors:
    """Raise `InputError` if a stream drew in a step without a seed."""
    assert frame.stream is not None, "the call draws from a stream"
    if isinstance(key, random.Unseeded) and not all(map(random.is_fresh, frame.stream.devices)):
        raise InputError(
            f"seed: got none, expected an integer, because module {frame.path or '(root)'} draws random numbers for "
            "these data. Pass seed=step, a new one each step."
        )
    return ()


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
