# SPDX-License-Identifier: Apache-2.0
"""Read and write schedules and programs as files: the CSV of `torch.distributed.pipelining`, in both its formats.

Problem. Other tools write schedules as tables. A table does not say how many stages there are or where they live, and
nothing in it can be trusted.

Idea. One line per rank, one cell per action, in the notation of `schedules.files.cells` (`0F0,0F1,,0B0`). An empty cell
is an idle slot and means nothing, because a schedule is an order, not a timetable. The rest is inferred: a stage lives
on the rank whose line it is in. Without transfers ("compute_only"), a table is a schedule; with them ("compute_comms"),
it is a program, whose stage graph is inferred from them.

Transfers do not show edges inside a rank. So for a stage graph other than a chain we write one more line, with the
edges in the notation of `schedules.transforms.connect`: `graph,0-1,0-2`.

Invariants. Reading what was written gives the same actions and the same stage graph. Text is only parsed: nothing in a
file is executed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Concatenate, Final, TextIO, TypeAlias

from schedules.arguments import MOST_MICROBATCHES, MOST_STAGES, require_types, without_rank
from schedules.errors import GraphError, TableError, printable, quote
from schedules.files.cells import Notation, ScheduleOrProgram, has_transfers, own, read_row
from schedules.files.whole import open_whole
from schedules.language.actions import GATHERINGS, KINDS, Action
from schedules.language.graph import Edge, Graph, chain
from schedules.language.placement import Placement
from schedules.language.schedule import Arguments, Factory, Schedule, Shape, graph_of
from schedules.lowering.program import Program
from schedules.transforms.connect import connect, format_graph, parse_graph

File: TypeAlias = str | os.PathLike[str] | TextIO
Homes: TypeAlias = dict[tuple[int, int], int]  # by stage, and microbatch or route


def _infer_shape(arguments: dict[str, Any]) -> Shape:
    rows, homes, microbatches, slices, backward = arguments["rows"], Homes(), 0, 1, False
    _require_texts(rows)
    for rank, row in enumerate(rows):
        for action in read_row(rank, row):
            home = homes.setdefault((action.stage, action.microbatch), rank)
            if home != rank:
                raise _two_lines(action.stage, action.microbatch, home, rank)
            if action.kind in GATHERINGS:
                continue
            if action.microbatch >= MOST_MICROBATCHES or (action.slice or 0) >= MOST_STAGES:
                expected = f"a microbatch below {MOST_MICROBATCHES}, and a slice below {MOST_STAGES}"
                raise TableError(f"line {rank + 1}: got {action}, expected {expected}. Number both from 0.")
            microbatches = max(microbatches, action.microbatch + 1)
            slices = max(slices, (action.slice or 0) + 1)
            backward = backward or KINDS[action.kind].crosses != "F"
    return Shape(len(rows), microbatches, _infer_placement(len(rows), homes), slices, backward)


def _require_texts(rows: object) -> None:
    if not isinstance(rows, tuple) or not rows or not all(isinstance(row, str) for row in rows):
        got = quote(rows)
        raise TableError(f"got rows={got}, expected a tuple with one string per rank. Write at least one line.")
    if len(rows) > MOST_STAGES:
        raise TableError(f"got {len(rows)} lines, expected at most {MOST_STAGES}. Write one line per rank.")


def _infer_placement(ranks: int, homes: Homes) -> Placement:
    busy = set(homes.values())
    for rank in range(ranks):
        if rank not in busy:
            raise TableError(
                f"line {rank + 1}: got no action, expected at least one: every rank holds a stage. Remove the line."
            )
    stages = sorted({stage for stage, _ in homes})
    for stage, found in enumerate(stages):
        if stage != found:
            raise TableError(
                f"stage {stage} is on no line, but stage {stages[-1]} is, expected every stage on one. Number them "
                "from 0 without gaps."
            )
    places, known = _infer_routes(ranks, homes), {s: rank for (s, _), rank in reversed(homes.items())}
    routes = range(1 + max(route for _, route in places))
    first, *mirrors = (tuple(places.get((s, route), known[s]) for s in stages) for route in routes)
    return Placement(ranks, first, tuple(mirrors))


def _infer_routes(ranks: int, homes: Homes) -> Homes:
    """Return the rank of each stage by route, for the fewest routes that microbatches can take in turn.

    There are at most as many as lines, or two. So a misplaced action is an error, rather than a route of its own.
    """
    error = None
    for count in range(1, 1 + max(2, ranks)):
        found = Homes()
        for (s, i), rank in homes.items():
            if (home := found.setdefault((s, i % count), rank)) != rank:
                error = error if count > 2 else _two_lines(s, i, home, rank)
                break
        else:
            return found
    assert error is not None, "some count was tried"
    raise error


def _two_lines(s: int, i: int, home: int, rank: int) -> TableError:
    """Return the error for a stage that is on two lines."""
    return TableError(
        f"stage {s} is on line {home + 1} and on line {rank + 1}, expected one line for each stage, or lines that its "
        f"microbatches take in turn. Move the stage's actions of microbatch {i}, or its others, to one of them."
    )


def _make_factory(generator: Callable[Concatenate[int, Arguments], Iterator[Action]]) -> Factory[Arguments]:
    return Factory(generator, without_rank("table", generator, "rows"), _infer_shape)


@_make_factory
def table(rank: int, rows: tuple[str, ...]) -> Iterator[Action]:
    """Schedule the actions that `rows` spell: one text per rank, with compute actions separated by commas.

    Raise `TableError` for a cell that is not a compute action, a stage on two lines or on none, and an idle rank. A
    stage may be on two lines if one has its even microbatches and the other its odd ones: a bidirectional schedule. A
    schedule with only forwards is for inference. `check` says whether the schedule is correct.

    >>> table(rows=("0F0,0B0", "1F0,,1B0"))
    table(rows=('0F0,0B0', '1F0,,1B0'))
    >>> list(table(rows=("0F0,0B0", "1F0,,1B0")).actions(1))
    [F(1, 0), B(1, 0)]
    >>> table(rows=("0F0,0B0", "1F0,2SEND_F0"))
    Traceback (most recent call last):
    schedules.errors.TableError: line 2, column 2: got '2SEND_F0', expected a compute action such as 3F0, 3B0, 3I0 or \
3W0, a pair such as (3F1;3B0)OVERLAP_F_B, or nothing. Leave transfers out: lower() inserts them.
    """
    yield from read_row(rank, rows[rank])


@dataclass(frozen=True)
class Listing:
    """A program lowered by someone else: its rows of compute actions and transfers, and its stage graph.

    Use it like a `schedules.lowering.program.Program`. Make it with `listing` or `read_csv`; if they cannot infer the
    graph, replace it with the right one: `dataclasses.replace(program, graph=...)`.
    """

    rows: tuple[str, ...]
    graph: Graph

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of its compute actions alone."""
        return _drop_transfers(self.rows)

    @property
    def channels(self) -> tuple[Edge, ...]:
        """Every directed pair of ranks between which a message should travel, in ascending order."""
        return Program(self.schedule, self.graph).channels

    def actions(self, rank: int) -> Iterator[Action]:
        """Return an iterator over the actions of `rank`, in order. Each call reads them anew."""
        return read_row(rank, self.rows[rank], transfers=True)


def listing(rows: tuple[str, ...]) -> Listing:
    """Return the program that `rows` spell: one text per rank, with compute actions and transfers separated by commas.

    If no transfer names its peer, the graph is the chain of the stages. If they do, edges inside a rank leave no trace:
    values flow along the chain if no transfer leaves it, otherwise along the edges named. The same goes for cotangents,
    but they flow along the chain only if all of its transfers are named, since they stop at frozen stages.

    Raise `TableError` as `table` does, and for a transfer to or from a stage that is on no line or in the wrong
    direction. `check` says whether the program is correct.

    >>> program = listing(rows=("0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0"))
    >>> program.schedule, program.channels
    (table(rows=('0F0,0B0', '1F0,1B0')), ((0, 1), (1, 0)))
    >>> [str(action) for action in program.actions(1)]
    ['1RECV_F0<0', '1F0', '1B0', '1SEND_B0>0']
    """
    schedule = _drop_transfers(rows)
    found, line = _collect_edges(rows, schedule.stages), chain(schedule.stages).values
    if not any(mark in row for row in rows for mark in "<>"):
        return Listing(rows, Graph(schedule.stages, line, line))
    across = {(s, t) for s, t in line for homes in schedule.placement.routes if homes[s] != homes[t]}
    values = line if found["F"] <= across else frozenset(found["F"])
    named = found["B"] == across or not schedule.backward
    cotangents = line if named else frozenset(found["B"])  # fewer if early stages are frozen
    return Listing(rows, Graph(schedule.stages, values, cotangents, frozenset(found["G"])))


def _drop_transfers(rows: tuple[str, ...]) -> Schedule:
    _require_texts(rows)
    each = (read_row(rank, row, transfers=True) for rank, row in enumerate(rows))
    return table(rows=tuple(",".join(str(action) for action in row if action.peer is None) for row in each))


def _collect_edges(rows: tuple[str, ...], stages: int) -> dict[str, set[Edge]]:
    """Return the edges between different stages that transfers name, by payload."""
    found: dict[str, set[Edge]] = {word: set() for word in "FBG"}
    for rank, row in enumerate(rows):
        for action in read_row(rank, row, transfers=True):
            kind, stage, _, peer, _ = action
            if peer is None or peer == stage:
                continue
            does, what = KINDS[kind].does, KINDS[kind].carries
            edge = (peer, stage) if (does == "RECV") != (what == "B") else (stage, peer)
            ordered = what == "G" or edge[0] < edge[1]
            if not ordered or max(edge) >= stages:
                raise TableError(
                    f"line {rank + 1}: got {action}, expected a transfer between two of the {stages} stages, "
                    f"{_WAYS[what]}. Correct its stage, its kind or its peer."
                )
            found[what].add(edge)
    return found


_WAYS = {"F": "from the earlier to the later", "B": "from the later to the earlier", "G": "either way"}


def read_csv(file: File) -> Schedule | Listing:
    """Return the schedule or program in a file of `torch.distributed.pipelining`, or in one of our own.

    A file without transfers ("compute_only") gives `table(rows=...)` of its lines, one with transfers ("compute_comms")
    gives `listing(rows=...)`; a last line `graph,0-1,0-2` names the edges of its stage graph. `file` is a path or an
    open text file. Raise `TableError` as they do, and for more than 2^28 characters. The whole text stays in memory.

    >>> import io
    >>> print(read_csv(io.StringIO("0F0,0F1,,,0B0,,0B1\\n1F0,1B0,,1F1,1B1\\n")))
    rank 0 |F0 F1 .  .  B0    .  B1    |
    rank 1 |.  F0 B0    F1 B1    .  .  |
    """
    require_types(read_csv, locals())
    with _open_text(file) as lines:
        text = lines.read(MOST_CHARACTERS + 1)
    if len(text) > MOST_CHARACTERS:
        raise TableError(f"got a file of more than {MOST_CHARACTERS} characters, expected a table. Check the path.")
    rows = tuple(line.rstrip("\r") for line in text.removesuffix("\n").split("\n")) if text else ()
    last = rows[-1] if rows else ""
    named = last == _GRAPH or last.startswith(f"{_GRAPH},")
    rows = rows[:-1] if named else rows
    plan = listing(rows) if any(map(has_transfers, rows)) else table(rows=rows)
    return _attach_graph(plan, last.removeprefix(_GRAPH), len(rows) + 1) if named else plan


def _attach_graph(plan: Schedule | Listing, text: str, line: int) -> Schedule | Listing:
    """Return the plan with the graph that the last line of its file spells."""
    schedule = plan if isinstance(plan, Schedule) else plan.schedule
    try:
        graph = parse_graph(text, schedule.stages)
    except GraphError as error:
        raise TableError(f"line {line}: {error}") from error
    return connect(plan, graph) if isinstance(plan, Schedule) else replace(plan, graph=graph)


_GRAPH = "graph"
MOST_CHARACTERS: Final = 2**28


def write_csv(plan: ScheduleOrProgram, file: File, words: Notation = own) -> None:
    """Write one line per rank: the actions of a schedule, or of a program with its transfers.

    In our `own` notation, reading the file gives back the same actions and the same stage graph. Of these files,
    `torch.distributed.pipelining` can read schedules of chains that contain only F, B, I, W and fused pairs. With
    `words=pipelining`, or as of torch 2.15 with `words=pipelining_2_15`, it can read programs too; anything it cannot
    express raises `TableError`. Only one rank's text is in memory at a time.

    >>> import sys
    >>> from schedules import gpipe, lower
    >>> from schedules.files import pipelining
    >>> write_csv(gpipe(ranks=2, microbatches=1), sys.stdout)
    0F0,0B0
    1F0,1B0
    >>> write_csv(lower(gpipe(ranks=2, microbatches=1)), sys.stdout)
    0F0,0SEND_F0>1,0RECV_B0<1,0B0,0WAIT_F0>1
    1RECV_F0<0,1F0,1B0,1SEND_B0>0,1WAIT_B0>0
    >>> write_csv(lower(gpipe(ranks=2, microbatches=1)), sys.stdout, words=pipelining)
    0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD
    1UNSHARD,1RECV_F0,1F0,1B0,1REDUCE_GRAD,1RESHARD,1SEND_B0
    """
    require_types(write_csv, locals())
    schedule, graph = (plan, graph_of(plan, None)) if isinstance(plan, Schedule) else (plan.schedule, plan.graph)
    with open_whole(file) if isinstance(file, str | os.PathLike) else nullcontext(file) as lines:
        for rank in range(schedule.ranks):
            lines.write(words(plan, rank) + "\n")
        if words is own and (graph != chain(schedule.stages) or not _shows_chain(plan)):
            lines.write(",".join(filter(None, (_GRAPH, format_graph(graph)))) + "\n")


def _shows_chain(plan: ScheduleOrProgram) -> bool:
    """Return whether a reader of the lines alone finds the chain: a program of others may lack transfers."""
    if not isinstance(plan, Listing):
        return True
    rows = tuple(own(plan, rank) for rank in range(plan.schedule.ranks))
    return not any(map(has_transfers, rows)) or listing(rows).graph == chain(plan.schedule.stages)


def _open_text(file: File) -> AbstractContextManager[TextIO]:
    if isinstance(file, str | os.PathLike):
        if not stat.S_ISREG(os.stat(file).st_mode) and not os.path.isdir(file):
            raise TableError(
                f"{printable(os.fspath(file))}: got something other than a regular file, expected one: a pipe may "
                "never end. Check the path, or pass an open file."
            )
        return open(file, encoding="ascii", errors="backslashreplace", newline="")
    return nullcontext(file)
