# SPDX-License-Identifier: Apache-2.0
"""Everything that fpipe raises on purpose. The root, and the errors about schedules, are those of `schedules`.

Each message says what was got, what was expected, where, and how to repair it.
"""

from __future__ import annotations

from schedules.errors import GraphError, PipelineError, ScheduleError, SizeError, VocabularyError

__all__ = [
    "CaptureError",
    "CutError",
    "DeadlockError",
    "GraphError",
    "InputError",
    "MismatchError",
    "PipelineError",
    "ScheduleError",
    "SizeError",
    "TransportError",
    "VocabularyError",
]


class CaptureError(PipelineError):
    """The model cannot be captured without losing something.

    Raised by `pipeline`, before anything runs; the message names the module, what would be lost, and which front end
    or change keeps it.
    """


class CutError(PipelineError, ValueError):
    """The cuts do not cut the model into the schedule's stages.

    Raised by `pipeline` for a name that is unknown, repeated, out of order, or at which nothing can be cut.
    """


class InputError(PipelineError, ValueError):
    """An argument is not what the pipeline was built for.

    Raised before anything is sent, by `pipeline` and by the functions that `value_and_grad`, `evaluate` and `reference`
    return; the message names the leaf by its path.
    """


class TransportError(PipelineError, RuntimeError):
    """Ranks do not fit together, or a channel carried another message than the one expected.

    Raised on every rank before anything is computed where ranks differ in what they are about to do, and where one of
    them has refused it; while a transport is set up; for a message that is not what it was waited for; after a step
    that broke off; and for a second thread, where ranks are processes.
    """


class DeadlockError(PipelineError, RuntimeError):
    """Every unfinished rank waits for a message that nobody will send.

    Raised by the in-process driver at once; the message lists each rank's position, action, and what it waits for.
    """


class MismatchError(PipelineError, AssertionError):
    """Two computations that should agree bit for bit do not.

    Raised by `verify`; the message names the first leaf that differs and by how much.
    """
