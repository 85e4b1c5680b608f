# SPDX-License-Identifier: Apache-2.0
"""Every error that fpipe raises on purpose; the base class and the errors about schedules are those of `schedules`.

Each message says what was got, what was expected, where, and how to repair it.

Runs when an error is raised.
"""

from __future__ import annotations

from typing import NamedTuple

from schedules.errors import GraphError, PipelineError, ScheduleError, SizeError, VocabularyError
from schedules.language.actions import Action

__all__ = [
    "CaptureError",
    "Cause",
    "CorruptionError",
    "CutError",
    "DeadlockError",
    "GraphError",
    "InputError",
    "MismatchError",
    "PipelineError",
    "RankError",
    "ScheduleError",
    "SizeError",
    "TransportError",
    "VocabularyError",
]


class CaptureError(PipelineError):
    """The model can't be captured without losing something.

    Raised by `pipeline`, before anything runs. The message names the module, what would be lost, and the repair.
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

    Raised on every rank, before anything is computed, if the ranks' calls differ or one of them rejects its arguments.
    Also raised while a transport is set up; for an unexpected message; after a step that failed midway; and for a
    second thread, if ranks are processes.
    """


class Cause(NamedTuple):
    """The first failure of a call that ranks make together.

    - `rank`: the rank that failed; `None` if it was the process that holds the store of the process group.
    - `place`: the call, and the position and action, if they are known. If the rank died, it is what the others did not
      get from it.
    - `problem`: the exception, or how the rank stopped answering.

    >>> print(Cause(3, "a step (call 2), position 4, 3F1", "ValueError: got a negative loss"))
    rank 3, a step (call 2), position 4, 3F1: ValueError: got a negative loss
    """

    rank: int | None
    place: str
    problem: str

    def __str__(self) -> str:
        return f"{'a process' if self.rank is None else f'rank {self.rank}'}, {self.place}: {self.problem}"


class RankError(TransportError):
    """Another rank failed, died or stopped answering, so this one can't continue.

    Raised on every remaining rank, instead of the transport's error. The rank that failed raises its own error. `rank`
    and `place` are those of the rank that raises this, `awaited` is what it waited for and from which rank, and `cause`
    is the first failure, on which all ranks agree.

    >>> cause = Cause(3, "a step (call 2), position 4, 3F1", "ValueError: got a negative loss")
    >>> raise RankError(0, "a step (call 2), position 5, 0B0", "1SEND_B0>0 from rank 1", cause)
    Traceback (most recent call last):
    fpipe.errors.RankError: rank 0, a step (call 2), position 5, 0B0: got no 1SEND_B0>0 from rank 1, expected it. The
    first failure: rank 3, a step (call 2), position 4, 3F1: ValueError: got a negative loss. ...
    """

    def __init__(self, rank: int, place: str, awaited: str, cause: Cause) -> None:
        self.rank, self.place, self.awaited, self.cause = rank, place, awaited, cause
        super().__init__(
            f"rank {rank}, {place}: got no {awaited}, expected it. The first failure: {cause}. Repair it, and restart "
            "all processes from a checkpoint. If all are alive, they may also build their pipelines again."
        )

    def __reduce__(self) -> tuple[type[RankError], tuple[object, ...]]:
        return type(self), (self.rank, self.place, self.awaited, self.cause)


class DeadlockError(PipelineError, RuntimeError):
    """Every unfinished rank is waiting for a message that no rank will send.

    Raised by the in-process driver at once. The message lists each rank's position and action, and what it waits for.
    """


class MismatchError(PipelineError, AssertionError):
    """Two computations that should agree bit for bit do not.

    Raised by `verify`. The message names the first leaf that differs, and by how much.
    """


class CorruptionError(PipelineError, RuntimeError):
    """An action that was run again with the same arguments made other bits.

    Raised by steps that are audited (`fpipe.Audit`), on the rank of the `action`; all other ranks raise a `RankError`
    with it as the cause. Memory or a processor failed, or an operator is not deterministic: the message says which, as
    far as more runs can tell. The results of the step must not be used.
    """

    def __init__(self, rank: int, action: Action, message: str) -> None:
        self.rank, self.action = rank, action
        super().__init__(message)

    def __reduce__(self) -> tuple[type[CorruptionError], tuple[object, ...]]:
        return type(self), (self.rank, self.action, str(self))
