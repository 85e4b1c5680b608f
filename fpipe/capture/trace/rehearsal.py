# SPDX-License-Identifier: Apache-2.0
"""Check whether a module does the same when it is called without the modules of other stages.

Problem. Modules and hooks share Python state: a list that blocks fill, a counter, a dict, a context variable. On one
device, a block finds there what all earlier blocks left; in a stage, only what that stage's own modules left. No tensor
need show it: the block may read a number, or the very tensor passed as its argument.

Idea. Before a stage is used, make its calls once more, in order, on the fake tensors of the recording, and record them
again. A call that differs from the tape in any way (a torch call, an argument, a mode, a result) must not be made as
is. Nearly all calls do the same, which `fpipe.capture.trace.replay` establishes without recording them; the others are
recorded and compared (`fpipe.capture.trace.comparison`).

Invariant: afterwards all Python state is as it was before, and the changes the calls made to it are known.

Runs when a pipeline is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fpipe.capture.trace.comparison import Comparison, RepeatRecorder
from fpipe.capture.trace.history import for_real
from fpipe.capture.trace.recorder import Recorder
from fpipe.capture.trace.replay import Replay
from fpipe.ir.captured import Value
from fpipe.ir.tape import Frame, Tape
from fpipe.model.snapshot import ContainerState, contents
from fpipe.torch_private import DisableTorchFunction


class Rehearsed(NamedTuple):
    """The outcome of a rehearsal: the calls that differed and why, and the state that the calls changed."""

    differing: Mapping[Frame, str]
    changed: Sequence[ContainerState]


Rehearse: TypeAlias = Callable[[Sequence[Frame]], Rehearsed]


class Rehearsal:
    """Makes calls of a tape again.

    - `replay` makes a `Replay`; `recorder` makes a recorder, which sees what calls do in the context `watch`.
    - `fresh` makes new tensors for the model's state and the batch, because those of the recording belong to its
      autograd graph; `seat` returns a context in which tensors are in their seats.
    - `state`: the containers that hold Python state. `empty` empties the caches of functions.
    """

    def __init__(
        self,
        tape: Tape,
        replay: Callable[[], Replay],
        recorder: Callable[[], RepeatRecorder],
        watch: Callable[[Recorder], AbstractContextManager[None]],
        fresh: Callable[[], Mapping[Value, Tensor]],
        seat: Callable[[Mapping[Value, Tensor]], AbstractContextManager[None]],
        state: Sequence[ContainerState],
        empty: Callable[[], None],
    ) -> None:
        self.tape, self.replay, self.recorder, self.watch, self.state = tape, replay, recorder, watch, state
        self.fresh, self.seat, self.empty = fresh, seat, empty

    @contextmanager
    def prepare(self) -> Iterator[Rehearse]:
        """Yield the function that makes calls again; do not enter this elsewhere meanwhile."""
        before = [one._replace(contents=contents(one.container)) for one in self.state]
        with torch.inference_mode(False), torch.enable_grad():
            yield partial(self._rehearse, self.replay(), before)

    def _rehearse(self, replay: Replay, before: Sequence[ContainerState], frames: Sequence[Frame]) -> Rehearsed:
        """Make these calls, and restore all state.

        A call may differ only because an earlier one did, so a differing call that must be made as is ends the
        rehearsal.
        """
        try:
            with replay.prepare():
                found = copy_context().run(_run_up_to_twice, before, lambda: self._replay_all(replay, frames))
            if found.differing:
                comparison = Comparison(self.tape, self.recorder())
                with self.watch(comparison.recorder):
                    found = copy_context().run(
                        _run_up_to_twice, before, lambda: self._find_differing(comparison, frames)
                    )
        finally:
            self.empty()
        return found

    def _replay_all(self, replay: Replay, frames: Sequence[Frame]) -> dict[Frame, str]:
        """Replay the calls; return the first that is not known to do the same, if there is one."""
        self.empty()
        with self.seat(self.tape.fakes):
            frame = replay.find_unproven(frames)
        return {} if frame is None else {frame: "is not known to do the same"}

    def _find_differing(self, comparison: Comparison, frames: Sequence[Frame]) -> dict[Frame, str]:
        with DisableTorchFunction(), for_real():
            tensors = self.fresh()
        comparison.recorder.values.know(tensors)
        self.empty()
        differing: dict[Frame, str] = {}
        with self.seat(tensors):
            for frame in frames:
                found = comparison.difference(frame)
                if found and not (frame.sealed and differing):
                    differing[frame] = found
                if found and frame.sealed:
                    break
        return differing


def _run_up_to_twice(before: Sequence[ContainerState], differing: Callable[[], dict[Frame, str]]) -> Rehearsed:
    """Run `differing`, which finds the calls that differ, up to twice, and restore all state as it was `before`."""
    changed: dict[int, ContainerState] = {}
    found: dict[Frame, str] = {}
    try:
        for _ in range(2):  # the second run finds what is not restored between microbatches, such as class state
            found = found or differing()
            changed.update({id(one.container): one for one in before if one.has_changed})
            for one in changed.values():
                if not one.outside:
                    one.restore()
    except BaseException:
        changed = {id(one.container): one for one in before}
        raise
    finally:
        for one in changed.values():
            one.restore()
    return Rehearsed(found, tuple(changed.values()))
