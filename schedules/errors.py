# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a schedule, as one hierarchy.

`PipelineError` is the root for both packages: `except PipelineError` catches every error that fpipe or schedules
raises on purpose. The evidence is in the exception's fields, never printed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedules.actions import Action


class PipelineError(Exception):
    """Root of everything that `schedules` and `fpipe` raise on purpose."""


class VocabularyError(PipelineError, ValueError):
    """A text is no action.

    Raised by `parse`. Write the action as `<stage><kind><microbatch>`, as in `3F0`.
    """


class TableError(PipelineError, ValueError):
    """Rows of text are no schedule.

    Raised by `interchange.read_csv` and `interchange.table`. The message names line and column, or the stage that
    stands on two lines or on none. Write one line per rank, with actions such as `3F0` between commas.
    """


class SizeError(PipelineError, ValueError):
    """A schedule was asked for sizes for which it means nothing, or simulated with costs that mean nothing.

    Raised by the factories, for example by `gpipe(ranks=4, microbatches=0)`, by `Costs`, `Link` and `Sizes`, and by
    `simulate` for costs of another number of stages. The message names the argument.
    """

    @classmethod
    def of(cls, factory: str, name: str, got: object, expected: str, repair: str) -> SizeError:
        """The error of one argument of a factory.

        >>> raise SizeError.of("dualpipe", "ranks", 3, "an even number", "Choose ranks 2 or 4.")
        Traceback (most recent call last):
        schedules.errors.SizeError: dualpipe: got ranks=3, expected an even number. Choose ranks 2 or 4.
        """
        return cls(f"{factory}: got {name}={got!r}, expected {expected}. {repair}")


class GraphError(PipelineError, ValueError):
    """A stage graph is not one: an edge runs backwards, leaves the graph, or its size is not the schedule's.

    Raised by `Graph` and by everything that takes a schedule together with a graph.
    """


class ProgramError(PipelineError, RuntimeError):
    """A program cannot run to its end, or computes something other than the whole model.

    Raised by `schedules.meaning`, which runs programs on formulas. After a `check` that passed it is a bug of ours.
    """


class TimelineError(PipelineError, ValueError):
    """A timeline has a span that ends before it starts, or that starts or ends at no time at all, or lacks a stage.

    Raised by `schedules.drawing` and `estimate`. The message names rank and action, or the stage.
    """


class UsageError(PipelineError, ValueError):
    """A question on the command line makes no sense.

    Raised inside `python -m schedules`, which prints it and exits with code 2.
    """


class ScheduleError(PipelineError, ValueError):
    """A schedule breaks a rule.

    Raised by `check`, and by `lower` and `simulate` when they meet the violation. `rank`, `position` (index in that
    rank's actions), `action`, `rule` (the name of the function in `schedules.rules`) and `repair` say where and what.
    """

    def __init__(self, rule: str, rank: int, position: int, action: Action | None, problem: str, repair: str) -> None:
        self.rule, self.rank, self.position, self.action = rule, rank, position, action
        self.problem, self.repair = problem, repair
        where = f"rank {rank}, position {position}" + (f", {action}" if action else ", end of its actions")
        super().__init__(f"{where}: {problem} [rule: {rule}]. {repair}")

    def __reduce__(self) -> tuple[type[ScheduleError], tuple[object, ...]]:
        return type(self), (self.rule, self.rank, self.position, self.action, self.problem, self.repair)
