# SPDX-License-Identifier: Apache-2.0
"""The errors of schedules, in one hierarchy.

`PipelineError` is the root for both packages: `except PipelineError` catches every error that fpipe or schedules
raises on purpose. Evidence is kept in the exception's fields, never printed.
"""

from __future__ import annotations

from reprlib import Repr
from typing import Final

LONGEST_QUOTE: Final = 160
LONGEST_ERROR: Final = 2000


def quote(value: object) -> str:
    """Return the `repr` of a value as errors show it: cut off if it is long, and never an error of its own.

    >>> quote("gpipe"), quote(tuple(range(100)))
    ("'gpipe'", '(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...)')
    """
    short = Repr()
    short.maxtuple = short.maxlist = short.maxset = short.maxfrozenset = short.maxdeque = short.maxdict = 12
    short.maxstring = short.maxother = LONGEST_QUOTE
    try:
        text = short.repr(value)
    except Exception:  # such as an integer of too many digits, or a `repr` of the user's that fails
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."


def printable(text: str) -> str:
    r"""Return a text as it may be shown: characters that could move a terminal's cursor are escaped.

    >>> print(printable("name \x1b[2J\n"))
    name \x1b[2J\n
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def describe_error(error: BaseException) -> str:
    r"""Return the type and the text of an error, as other processes show it: cut off, printable, and never an error.

    >>> print(describe_error(ValueError("red \x1b[31m")), describe_error(KeyboardInterrupt()))
    ValueError: red \x1b[31m KeyboardInterrupt
    """
    kind = type(error).__name__
    try:
        text = str(error)[:LONGEST_ERROR]
    except Exception:
        text = "its text can't be made"
    lines = "\n".join(map(printable, text.split("\n")))
    return f"{kind}: {lines}" if text else kind


class PipelineError(Exception):
    """The base class of every error that `schedules` and `fpipe` raise on purpose."""


class ArgumentError(PipelineError, TypeError):
    """An argument has a type that the function does not take.

    Raised by the public functions of `schedules`, before they do anything. The message names function and argument.
    """


class VocabularyError(PipelineError, ValueError):
    """A text is not an action.

    Raised by `parse`. Write the action as `<stage><kind><microbatch>`, as in `3F0`.
    """


class TableError(PipelineError, ValueError):
    """Rows of text are not a schedule.

    Raised by `schedules.files.read_csv` and `write_csv`. The message names the line and column, or the stage that is on
    two lines or none. Write one line per rank, with actions such as `3F0` separated by commas.
    """


class SizeError(PipelineError, ValueError):
    """A schedule got sizes it does not support, or was simulated with meaningless costs.

    Raised by the factories, for example by `gpipe(ranks=4, microbatches=0)`, by `Costs`, `Link` and `Sizes`, and by
    `simulate` for costs of a different number of stages. The message names the argument.
    """

    @classmethod
    def of(cls, factory: str, name: str, got: object, expected: str, repair: str) -> SizeError:
        """Return the error for one argument of a factory.

        >>> raise SizeError.of("dualpipe", "ranks", 3, "an even number", "Choose ranks 2 or 4.")
        Traceback (most recent call last):
        schedules.errors.SizeError: dualpipe: got ranks=3, expected an even number. Choose ranks 2 or 4.
        """
        return cls(f"{factory}: got {name}={quote(got)}, expected {expected}. {repair}")


class GraphError(PipelineError, ValueError):
    """A stage graph is invalid: an edge runs backward or leaves the graph, or its size differs from the schedule's.

    Raised by `Graph` and by everything that takes a schedule together with a graph.
    """


class ProgramError(PipelineError, RuntimeError):
    """A program cannot run to its end, or computes something other than the whole model.

    Raised by `schedules.proof.interpreter`, which runs programs on formulas. If the program passes `check`, this is a
    bug in `schedules`: please report it.
    """


class SolverError(PipelineError, ImportError):
    """A search was given a solver that is not installed. Raised by `cp_sat`."""


class TimelineError(PipelineError, ValueError):
    """A timeline lacks a stage, or has a span that ends before it starts or whose start or end is not finite.

    Raised by `schedules.drawing` and `estimate`. The message names the rank and action, or the stage.
    """


class UsageError(PipelineError, ValueError):
    """A command line makes no sense.

    Raised inside `python -m schedules`, which prints it and exits with code 2.
    """


class ScheduleError(PipelineError, ValueError):
    """A schedule breaks a rule.

    Raised by `check`, and by `lower` and `simulate` when they run into the violation. `rank`, `position` (index in that
    rank's actions), `action` (an `Action`), `rule` (the name of the broken rule), `problem` and `repair` say what is
    wrong, and where.
    """

    def __init__(self, rule: str, rank: int, position: int, action: object | None, problem: str, repair: str) -> None:
        self.rule, self.rank, self.position, self.action = rule, rank, position, action
        self.problem, self.repair = problem, repair
        where = f"rank {rank}, position {position}" + (", end of its actions" if action is None else f", {action}")
        super().__init__(f"{where}: {problem} [rule: {rule}]. {repair}")

    def __reduce__(self) -> tuple[type[ScheduleError], tuple[object, ...]]:
        return type(self), (self.rule, self.rank, self.position, self.action, self.problem, self.repair)
