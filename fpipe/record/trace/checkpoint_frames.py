# SPDX-License-Identifier: Apache-2.0
"""Record checkpointed functions: each gets a frame inside that of the module that calls `torch.utils.checkpoint`.

To close the frame, the recorder needs what the function returned, which only `checkpoint` itself sees:

    def checkpoint(function, *args, ...):                      # in torch, for use_reentrant=False
        generator = _checkpoint_without_reentrant_generator(function, ...)
        next(generator)                                        # installs the saved-tensor hooks
        ret = function(*args)
        next(generator)                                        # removes them
        return ret

`record` replaces the generator. It opens the frame before it yields; once `checkpoint` has resumed it, it reads `ret`
from the Python frame of `checkpoint`. A reentrant checkpoint is a custom autograd function; `record_reentrant` replaces
its `apply`.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint

from fpipe.errors import CaptureError
from fpipe.record.trace.backward_checks import bound_variables
from fpipe.record.trace.recorder import Recorder
from fpipe.record.trace.reentrant import Reentrant
from fpipe.record.trace.reentrant_checks import require_explicit_arguments
from fpipe.record.trace.tape import Frame
from fpipe.tensors.torch_private import read_checkpoint, unseen_by_modes

KIND = "activation checkpointing"


class CheckpointFrames:
    """Records checkpointed functions; `generate` returns torch's own generator for one."""

    def __init__(self, recorder: Recorder, generate: Callable[..., Iterator[None]]) -> None:
        self.recorder, self.generate = recorder, generate

    def record(self, *given: Any, **named: Any) -> Iterator[None]:
        """Do what torch's generator does around a checkpointed function, and record the function's frame."""
        generator = self.generate(*given, **named)
        function, args, kwargs, how = read_checkpoint(*given, **named)

        def call_again(function: Any, *args: Any, **kwargs: Any) -> Any:
            return checkpoint.checkpoint(function, *args, use_reentrant=False, **how, **kwargs)

        with unseen_by_modes():
            next(generator)
        frame = self._open_frame(call_again, (function, *args), kwargs)
        frame.how, frame.checkpointed = how, (function, bound_variables(function))
        with self.recorder.stack.enter(frame):
            yield
        self.recorder.close_frame(frame, _result_in_checkpoint())
        if frame.stream is not None or self.recorder.draws.has_from(frame.first_tick):
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
        recorder.hooked.append(len(recorder.history.units))
        frame = self._open_frame(Reentrant(), (function, *args), {})
        frame.reentrant, frame.checkpointed = True, (function, bound_variables(function))

        def run(*args: Any) -> Any:
            return recorder.view_others(frame, function(*args))

        with recorder.stack.enter(frame):
            out = Reentrant()(run, *args)
        recorder.close_frame(frame, out)
        tensors, given = recorder.values.tensors, recorder.values.within(args)
        wanting = frozenset(value for value, tensor in tensors.items() if tensor.requires_grad)
        require_explicit_arguments(frame, recorder.history.units, wanting, [*given, *recorder.values.sources])
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
