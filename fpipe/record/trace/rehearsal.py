# SPDX-License-Identifier: Apache-2.0
"""Check that whole calls do the same without the calls of the model that do not run as Python.

Problem. Modules and hooks share Python state: a list that blocks fill, a counter, a dict, a context variable. On one
device, a module finds what all earlier modules left there; in a step, only whole calls run, and only those of the
stage. Tensors need not show it: the module may read a number, or the very tensor passed as its argument.

Idea. When a stage is built, make its whole calls again, in order, on fake tensors, and compare each with the tape
(`fpipe.record.trace.comparison`): its torch calls, their arguments, modes, and results.

Invariant: a rehearsal restores all Python state, and reports the changes that the calls made to it.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fpipe.record.captured import Value
from fpipe.record.model.snapshot import ContainerState
from fpipe.record.model.walk import contents
from fpipe.record.trace.comparison import Comparison, RepeatRecorder
from fpipe.record.trace.history import for_real
from fpipe.record.trace.recorder import Recorder
from fpipe.record.trace.tape import Frame, Tape
from fpipe.tensors.torch_private import DisableTorchFunction


class Rehearsed(NamedTuple):
    """The outcome of a rehearsal: the calls that differed and why, and the state that the calls changed."""

    differing: Mapping[Frame, str]
    changed: Sequence[ContainerState]


Rehearse: TypeAlias = Callable[[Sequence[Frame]], Rehearsed]


class Rehearsal:
    """Makes calls of a tape again.

    - `recorder` makes a recorder, which sees what calls do in the context `watch`.
    - `fresh` makes new fake tensors for the model's state and the batch, because those of the recording belong to its
      autograd graph; `seat` returns a context in which tensors are in their seats.
    - `state`: the containers that hold Python state. `empty` clears function caches, such as `functools.lru_cache`.
    """

    def __init__(
        self,
        tape: Tape,
        recorder: Callable[[], RepeatRecorder],
        watch: Callable[[Recorder], AbstractContextManager[None]],
        fresh: Callable[[], Mapping[Value, Tensor]],
        seat: Callable[[Mapping[Value, Tensor]], AbstractContextManager[None]],
        state: Sequence[ContainerState],
        empty: Callable[[], None],
    ) -> None:
        self.tape, self.recorder, self.watch, self.state = tape, recorder, watch, state
        self.fresh, self.seat, self.empty = fresh, seat, empty

    @contextmanager
    def prepare(self) -> Iterator[Rehearse]:
        """Yield the function that makes calls again; not reentrant."""
        before = [one._replace(contents=contents(one.container)) for one in self.state]
        with torch.inference_mode(False):
            yield partial(self._rehearse, before)

    def _rehearse(self, before: Sequence[ContainerState], frames: Sequence[Frame]) -> Rehearsed:
        """Make these calls, restore all state, and return which calls differed.

        A call may differ only because an earlier one did. So stop at a differing call that cannot be opened, and report
        it only if no earlier call differed.
        """
        if not frames:
            return Rehearsed({}, ())
        comparison = Comparison(self.tape, self.recorder())
        try:
            with torch.set_grad_enabled(frames[0].modes.ambient), self.watch(comparison.recorder):
                return copy_context().run(_run_up_to_twice, before, lambda: self._find_differing(comparison, frames))
        finally:
            self.empty()

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
    """Run `differing`, which finds calls that differ, again if it finds none; then restore all state to `before`."""
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
