# SPDX-License-Identifier: Apache-2.0
"""Schedules as files: the CSV of `torch.distributed.pipelining`.

Problem. Other tools write schedules as tables; a table says neither how many stages there are nor where they live, and
nothing in it can be trusted.

Idea. One line per rank, one cell per action, in our own text form (`0F0,0F1,,0B0`), which is the "compute_only" format
of `torch.distributed.pipelining`; an empty cell is an idle slot and means nothing, for a schedule is an order and not a
timetable. What the table leaves unsaid is read off it: a stage lives on the rank on whose line it stands.

Invariants. Reading what was written gives the same actions. Text is only ever parsed: nothing in a file is executed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Concatenate, ParamSpec, TextIO, TypeAlias

from schedules.actions import Action, parse
from schedules.authoring import Factory, Schedule, Shape, without_rank
from schedules.errors import TableError, VocabularyError
from schedules.lowering import Program
from schedules.placement import Placement

File: TypeAlias = str | os.PathLike[str] | TextIO
Rows = ParamSpec("Rows")


def _line(rank: int, row: str) -> Iterator[Action]:
    for column, cell in enumerate(row.split(","), 1):
        if cell.strip():
            yield _action(cell.strip(), f"line {rank + 1}, column {column}")


def _action(cell: str, where: str) -> Action:
    try:
        action = parse(cell)
    except VocabularyError:
        action = None
    if action is None or action.kind not in {"F", "B", "I", "W"}:
        raise TableError(
            f"{where}: got {cell!r}, expected a compute action such as 3F0, 3B0, 3I0 or 3W0, or nothing. "
            "Leave transfers out: lower() inserts them."
        )
    return action


def _shape(arguments: dict[str, Any]) -> Shape:
    rows = arguments["rows"]
    if not isinstance(rows, tuple) or not rows or not all(isinstance(row, str) for row in rows):
        raise TableError(f"got rows={rows!r}, expected a tuple with one text per rank. Write at least one line.")
    homes, microbatches = dict[int, int](), 0
    for rank, row in enumerate(rows):
        for action in _line(rank, row):
            home = homes.setdefault(action.stage, rank)
            if home != rank:
                raise TableError(
                    f"stage {action.stage} stands on line {home + 1} and on line {rank + 1}, expected one line for "
                    f"each stage. Move {action} and the stage's other actions to one of them."
                )
            microbatches = max(microbatches, action.microbatch + 1)
    return Shape(len(rows), microbatches, _placement(len(rows), homes))


def _placement(ranks: int, homes: dict[int, int]) -> Placement:
    for rank in range(ranks):
        if rank not in homes.values():
            raise TableError(f"line {rank + 1}: got no action, expected some. Drop the line: a rank holds a stage.")
    for stage in range(len(homes)):
        if stage not in homes:
            raise TableError(
                f"stage {stage} stands on no line, but stage {max(homes)} does. Number the stages from 0 without gaps."
            )
    return Placement(ranks, tuple(homes[stage] for stage in range(len(homes))))


def _from_rows(generator: Callable[Concatenate[int, Rows], Iterator[Action]]) -> Factory[Rows]:
    return Factory(generator, without_rank(generator, "rows"), _shape)


@_from_rows
def table(rank: int, rows: tuple[str, ...]) -> Iterator[Action]:
    """The schedule that `rows` spell out: one text per rank, of compute actions between commas.

    Raises `TableError` for a cell that is no compute action, a stage on two lines or on none, and an idle rank. Whether
    the schedule is correct is for `check` to say.

    >>> table(rows=("0F0,0B0", "1F0,,1B0"))
    table(rows=('0F0,0B0', '1F0,,1B0'))
    >>> list(table(rows=("0F0,0B0", "1F0,,1B0")).actions(1))
    [F(1, 0), B(1, 0)]
    >>> table(rows=("0F0,0B0", "1F0,2SEND_F0"))
    Traceback (most recent call last):
    schedules.errors.TableError: line 2, column 2: got '2SEND_F0', expected a compute action such as 3F0, 3B0, 3I0 or \
3W0, or nothing. Leave transfers out: lower() inserts them.
    """
    yield from _line(rank, rows[rank])


def read_csv(file: File) -> Schedule:
    """The schedule in a "compute_only" file of `torch.distributed.pipelining`: `table(rows=...)` of its lines.

    `file` is a path or an open text file. Raises `TableError` as `table` does. All of the text is kept.

    >>> import io
    >>> print(read_csv(io.StringIO("0F0,0F1,,,0B0,,0B1\\n1F0,1B0,,1F1,1B1\\n")))
    rank 0 |F0 F1 .  .  B0    .  B1    |
    rank 1 |.  F0 B0    F1 B1    .  .  |
    """
    with _opened(file, "r") as lines:
        return table(rows=tuple(line.rstrip("\r\n") for line in lines))


def write_csv(plan: Schedule | Program, file: File) -> None:
    """Write one line per rank: the actions of a schedule, or of a lowered program with its transfers.

    A schedule's file is read back by `read_csv`, and by `torch.distributed.pipelining` as "compute_only". A transfer of
    a program names its peer stage (`2SEND_F1>5`), which that package does not know. One rank's text is kept at a time.

    >>> import sys
    >>> from schedules import gpipe, lower
    >>> write_csv(gpipe(ranks=2, microbatches=1), sys.stdout)
    0F0,0B0
    1F0,1B0
    >>> write_csv(lower(gpipe(ranks=2, microbatches=1)), sys.stdout)
    0RECV_B0<1,0F0,0SEND_F0>1,0B0,0WAIT_F0>1
    1RECV_F0<0,1F0,1B0,1SEND_B0>0,1WAIT_B0>0
    """
    ranks = (plan.schedule if isinstance(plan, Program) else plan).ranks
    with _opened(file, "w") as lines:
        for rank in range(ranks):
            lines.write(",".join(map(str, plan.actions(rank))) + "\n")


def _opened(file: File, mode: str) -> AbstractContextManager[TextIO]:
    if isinstance(file, str | os.PathLike):
        return open(file, mode, encoding="ascii", errors="backslashreplace", newline="")  # type: ignore[return-value]
    return nullcontext(file)
