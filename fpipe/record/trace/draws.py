# SPDX-License-Identifier: Apache-2.0
"""Label the random draws of a recorded run: one label per torch call, or per module call that branches on data.

Problem. The label of a draw depends on its ordinal in its module. In a module that branches on data, another branch
draws differently: draws that were not recorded have no ordinal, and shift the ordinals of those after them.

Idea. All draws in one call of such a module form a *stream*, with one label. The stream is the outermost call that may
branch, or a checkpointed function around it, because its rerun starts from the generator state before the whole
function. Draws in streams do not advance ordinals.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.record.captured import Labels
from fpipe.record.trace.tape import Draw, Frame
from fpipe.tensors.random import label, stream_label


class RandomCall(NamedTuple):
    """A torch call that drew random numbers: its tick, function, module path, and the devices it drew on."""

    tick: int
    function: Callable[..., Any]
    path: str
    devices: tuple[torch.device, ...]


class Draws:
    """The draws of a run so far: `found`, the torch calls that drew; `streams`, the calls that form streams."""

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
            frame.stream = Labels(stream_label(frame.path, call), kinds)
            self.streams.append(frame)

    def stream_at(self, tick: int) -> Labels | None:
        """Return the stream that a call at `tick` draws from, if any."""
        return next((one.stream for one in self.streams if one.first_tick <= tick < one.last_tick), None)

    def labels(self) -> dict[int, Labels]:
        """Return the label and devices of each draw, by tick."""
        ordinals = Counter[str]()
        found: dict[int, Labels] = {}
        for tick, _, path, devices in self.found:
            stream = self.stream_at(tick)
            found[tick] = stream or Labels(label(path, ordinals[path]), devices)
            ordinals[path] += stream is None
        return found

    def outside_streams(self) -> tuple[Draw, ...]:
        """Return the draws outside of streams, each with its own label."""
        labels = self.labels()
        return tuple(
            [Draw(one.tick, one.function, *labels[one.tick]) for one in self.found if not self.stream_at(one.tick)]
        )

    def ticks_outside_streams(self, ticks: Sequence[int]) -> Sequence[int]:
        """Return those of `ticks` at which no stream was running."""
        return [tick for tick in ticks if self.stream_at(tick) is None]

    @property
    def stream_devices(self) -> tuple[torch.device, ...]:
        """The devices on which streams may draw."""
        return tuple(dict.fromkeys(device for one in self.streams if one.stream for device in one.stream.devices))
