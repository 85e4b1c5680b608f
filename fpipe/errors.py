# SPDX-License-Identifier: Apache-2.0
"""Every error that fpipe raises on purpose; the base class and the errors about schedules are those of `schedules`.

Each message says what was got, what was expected, where, and how to repair it.

Runs when an error is raised.
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
    """The model can't be captured without losing something.

    Raised by `pipeline`, before anything runs. The message names the module, what would be lost, and which front end or
    change keeps it.
    """


class CutError(PipelineError, ValueError):
    """The cuts don't cut the model into the schedule's stages.

    Raised by `pipeline` for a name that is unknown, repeated or out of order, or where the model can't be cut.
    """


class InputError(PipelineError, ValueError):
    """An argument is not what the pipeline was built for.

    Raised before anything is sent, by `pipeline` and by the functions that `value_and_grad`, `evaluate` and `reference`
    return. The message names the leaf by its path.
    """


class TransportError(PipelineError, RuntimeError):
    """Ranks differ, or a channel carried a message other than the expected one.

    Raised on every rank, before anything is computed, if ranks differ in what they are about to do or one of them
    refuses it. Also raised while a transport is set up; for an unexpected message; after a step that failed midway; and
    for a second thread, if ranks are processes.
    """


class DeadlockError(PipelineError, RuntimeError):
    """Every unfinished rank is waiting for a message that no rank will send.

    Raised by the in-process driver at once. The message lists each rank's position and action, and what it waits for.
    """


class MismatchError(PipelineError, AssertionError):
    """Two computations that should agree bit for bit do not.

    Raised by `verify`. The message names the first leaf that differs, and by how much.
    """
