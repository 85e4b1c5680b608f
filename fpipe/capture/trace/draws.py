# SPDX-License-Identifier: Apache-2.0
"""Name a recorded run's random draws: each torch call alone, or all calls together where data decide what is drawn.

Problem. A random call is identified by its ordinal in its module. In a module that branches on data, another branch
makes other calls: those that the recording has not seen have no ordinal, and those after them would get another.

Idea. All draws in one call of such a module form a *stream*, with one name. The call is the outermost one that may
branch, or the outermost checkpointed function around it, because that is rerun from the generator's state before it.
Calls in streams do not advance ordinals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.ir.captured import Labels
from fpipe.ir.tape import Draw, Frame
from fpipe.tensors.random import label, stream_label


class RandomCall(NamedTuple):
    """A torch call that drew random numbers: its tick, function, module path, and the devices that it drew on."""

    tick: int
    function: Callable[..., Any]
    path: str
    devices: tuple[torch.device, ...]


class Draws:
    """A run's draws so far: `found`, in order; `streams` are the calls whose draws are named together."""

    def __init__(self) -> None:
        self.found: list[RandomCall] = []
        self.streams: list[Frame] = []

    def note(self, tick: int, function: Callable[..., Any], path: str, devices: Iterable[torch.device]) -> None:
        """Note that a torch call in the module at `path` has drawn on these devices."""
        self.found.append(RandomCall(tick, function, path, tuple(devices)))

    def has_from(self, tick: int) -> bool:
        """Return whether anything was drawn from `tick` on."""
        return bool(self.found) and self.found[-1].tick >= tick

    def begin_stream(self, frame: Frame, tensors: Iterable[Tensor]) -> None:
        """Make all draws in a call one stream; it may draw on the CPU and on the devices of `tensors`."""
        if frame.stream is None:
            devices = dict.fromkeys([torch.device("cpu"), *(tensor.device for tensor in tensors)])
            call = sum(one.path == frame.path for one in self.streams)
            kinds = tuple([device for device in devices if device.type in ("cpu", "cuda")])
            frame.stream = Labels(stream_label(frame.path, call), kinds)
            self.streams.append(frame)

    def stream_at(self, tick: int) -> Labels | None:
        """Return the stream that a call at `tick` draws from, if any."""
        return next((one.stream for one in self.streams if one.first_tick <= tick < one.last_tick), None)

    def labels(self) -> dict[int, Labels]:
        """Return how each draw is keyed, by its tick."""
        ordinals = Counter[str]()
        found: dict[int, Labels] = {}
        for tick, _, path, devices in self.found:
            stream = self.stream_at(tick)
            found[tick] = stream or Labels(label(path, ordinals[path]), devices)
            ordinals[path] += stream is None
        return found

    def outside_streams(self) -> tuple[Draw, ...]:
        """Return the draws that are keyed one by one."""
        labels = self.labels()
        return tuple(
            [Draw(one.tick, one.function, *labels[one.tick]) for one in self.found if not self.stream_at(one.tick)]
        )

    def ticks_outside_streams(self, ticks: Sequence[int]) -> Sequence[int]:
        """Return the ticks at which no stream was running."""
        return [tick for tick in ticks if self.stream_at(tick) is None]

    @property
    def stream_devices(self) -> tuple[torch.device, ...]:
        """The devices on which streams may draw."""
        return tuple(dict.fromkeys(device for one in self.streams if one.stream for device in one.stream.devices))
