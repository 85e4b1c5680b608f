# SPDX-License-Identifier: Apache-2.0
"""Read and write the cells of a table, in our notation and in that of `torch.distributed.pipelining`.

Problem. That package's tables say less than a program does, and partly in a different notation.

Idea. A cell holds the text of an action; other notation is translated into ours when it is read.

- `2SEND_F1` names no peer. In that package stages form a chain, so it means `2SEND_F1>3`.
- `(5F3;2B1)OVERLAP_F_B` is a fused pair: `5OVERLAP_F3` directly followed by `2B1`.
- `3UNSHARD`, `3RESHARD`, `3REDUCE_GRAD`, `3WAIT_REDUCE_GRAD` without a number are in every table of a program, whether
  or not its stages are sharded, so they are dropped. Ours have numbers: `3UNSHARD0`.
- Before torch 2.15 there is no `WAIT`: sends are waited for at the end of a step. Since then every send has one,
  written `2WAIT_SEND_F1`, which means `2WAIT_F1>3`.

A notation is a function that writes the line of one rank: `own`, which can be read back without loss, `pipelining_2_15`
for that package as of torch 2.15, or `pipelining` for the versions before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

from schedules.checking.channels import LoweredProgram
from schedules.errors import TableError, VocabularyError, quote
from schedules.language.actions import COLLECTIVES, KINDS, Action, parse, wait_of
from schedules.language.schedule import Schedule

NEIGHBOR: Mapping[str, int] = MappingProxyType(
    {"SEND_F": 1, "WAIT_F": 1, "RECV_F": -1, "SEND_B": -1, "WAIT_B": -1, "RECV_B": 1}
)
_PAIR = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
_PEERLESS = re.compile(r"([0-9]{1,18})((?:SEND|WAIT_SEND|RECV)_[FB])([0-9]+)")
_SHARDING = re.compile(r"[0-9]+(?:UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD)")
_TRANSFER = re.compile("|".join(kind for kind, word in KINDS.items() if word.does))


def has_transfers(row: str) -> bool:
    """Return whether a rank's line has a transfer, which makes its table a program."""
    return _TRANSFER.search(row) is not None


def read_row(rank: int, row: str, transfers: bool = False) -> Iterator[Action]:
    """Yield the actions in the line of `rank`: compute actions, and transfers too if `transfers` is true.

    Empty cells are idle slots and are skipped. Raise `TableError` for any other text.

    >>> row = "0UNSHARD,0F0,0SEND_F0,,(0F1;0B0)OVERLAP_F_B"
    >>> " ".join(map(str, read_row(0, row, transfers=True)))
    '0F0 0SEND_F0>1 0OVERLAP_F1 0B0'
    """
    for column, cell in enumerate(row.split(","), 1):
        try:
            actions = _parse_cell(cell.strip())
        except VocabularyError:
            actions = None
        if actions is None or (not transfers and any(action.peer is not None for action in actions)):
            expected = _EXPECTED[transfers]
            raise TableError(f"line {rank + 1}, column {column}: got {quote(cell.strip())}, expected {expected}")
        yield from actions


_EXPECTED = (
    "a compute action such as 3F0, 3B0, 3I0 or 3W0, a pair such as (3F1;3B0)OVERLAP_F_B, or nothing. "
    "Leave transfers out: lower() inserts them.",
    "an action such as 3F0, a transfer such as 2SEND_F1>5, or 2SEND_F1 if it goes to the next stage, a pair such as "
    "(3F1;3B0)OVERLAP_F_B, or nothing. Correct the cell, or leave it empty.",
)


def _parse_cell(text: str) -> tuple[Action, ...]:
    if pair := _PAIR.fullmatch(text):
        front, back = (parse(part.strip()) for part in pair.groups())
        if front.kind != "F" or back.kind not in {"B", "I"}:
            raise VocabularyError(f"got {quote(text)}, expected a forward and a backward, as in (5F3;2B1)OVERLAP_F_B.")
        return front._replace(kind="OVERLAP_F"), back
    if found := _PEERLESS.fullmatch(text):
        stage, word, microbatch = found.groups()
        kind = word.replace("WAIT_SEND", "WAIT")
        return (parse(f"{stage}{kind}{microbatch}{KINDS[kind].mark}{int(stage) + NEIGHBOR[kind]}"),)
    return () if not text or _SHARDING.fullmatch(text) else (parse(text),)


ScheduleOrProgram: TypeAlias = Schedule | LoweredProgram
Notation: TypeAlias = Callable[[ScheduleOrProgram, int], str]


def own(plan: ScheduleOrProgram, rank: int) -> str:
    """Return the line of `rank` in our notation: every action in its text form, a fused pair in one cell."""
    return _join_pairs(",".join(map(str, plan.actions(rank))))


def _join_pairs(line: str) -> str:
    return re.sub(r"([0-9]+)OVERLAP_(F[0-9.]+),([0-9]+[BI][0-9.]+)", r"(\1\2;\3)OVERLAP_F_B", line)


def pipelining(plan: ScheduleOrProgram, rank: int) -> str:
    """Return the line of `rank` for `torch.distributed.pipelining` before torch 2.15.

    A schedule gives a line of its format "compute_only", without collectives, a program one of "compute_comms". In a
    program, `WAIT` is dropped. Collectives are written where the program has them. If it has none, every stage gathers
    its weights before its first action, and sums and scales its gradients after its last backward. `lower` assumes a
    queue per direction, but over NCCL that package has a single queue for each pair of ranks: in that case, write the
    schedule and let the package lower it.

    Raise `TableError` for what that package cannot read: replicas, slices, recomputation, updates, schedules without
    backwards, and transfers between stages that are not neighbors.

    >>> from schedules import gpipe, lower
    >>> pipelining(lower(gpipe(ranks=2, microbatches=1)), 1)
    '1UNSHARD,1RECV_F0,1F0,1B0,1REDUCE_GRAD,1RESHARD,1SEND_B0'
    """
    return _write_line(plan, rank, ("REDUCE_GRAD", "RESHARD"), _drop_waits)


def pipelining_2_15(plan: ScheduleOrProgram, rank: int) -> str:
    """Return the line of `rank` for `torch.distributed.pipelining` as of torch 2.15, which wants one wait per send.

    Like `pipelining` otherwise. A send that the program does not wait for is waited for at the end of the line.

    >>> from schedules import gpipe, lower
    >>> pipelining_2_15(lower(gpipe(ranks=2, microbatches=1)), 0)
    '0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD,0WAIT_SEND_F0'
    """
    return _write_line(plan, rank, ("REDUCE_GRAD", "WAIT_REDUCE_GRAD", "RESHARD"), _complete_waits)


_Filter: TypeAlias = Callable[[Iterator[Action]], Iterator[Action]]


def _write_line(plan: ScheduleOrProgram, rank: int, reduction: tuple[str, ...], waits: _Filter) -> str:
    """Return the line of `rank`: in a program, `reduction` ends each stage and `waits` edits the waits for sends."""
    schedule = plan if isinstance(plan, Schedule) else plan.schedule
    if schedule.placement.mirrors or not schedule.backward:
        got = "stages on two ranks each" if schedule.placement.mirrors else "no backward"
        raise TableError(f"got a schedule with {got}, expected stages on one rank each, and backwards. {_NO_WORD}")
    actions = plan.actions(rank)
    words = (
        (_write_cell(rank, action) for action in actions if action.kind not in COLLECTIVES)
        if plan is schedule
        else _add_sharding(rank, schedule, waits(actions), reduction)
    )
    line = _join_pairs(",".join(words))
    if lone := _LONE.search(line):
        raise TableError(f"rank {rank}: got {lone[0]}, expected 3B0 or 3I0 right after it. Add one.")
    return line


def _drop_waits(actions: Iterator[Action]) -> Iterator[Action]:
    return (action for action in actions if KINDS[action.kind].does != "WAIT")


def _complete_waits(actions: Iterator[Action]) -> Iterator[Action]:
    """Yield the actions, and then a wait for each send that has none."""
    pending: dict[Action, None] = {}
    for action in actions:
        yield action
        if KINDS[action.kind].does == "SEND":
            pending[wait_of(action)] = None
        pending.pop(action, None)
    yield from pending


def _add_sharding(
    rank: int, schedule: Schedule, actions: Iterator[Action], reduction: tuple[str, ...]
) -> Iterator[str]:
    left: dict[int, int] = {}
    own = {(action.stage, action.kind) for action in schedule.actions(rank) if action.kind in COLLECTIVES}
    for action in actions:
        kind, stage = action.kind, action.stage
        if stage not in left:
            left[stage] = schedule.microbatches
            yield from [f"{stage}UNSHARD"] * ((stage, "UNSHARD") not in own)
        if kind != "REDUCE_GRAD":
            yield f"{stage}{kind}" if kind in COLLECTIVES else _write_cell(rank, action)
        completes = KINDS[kind].after == "done"
        left[stage] -= completes
        is_last = completes and not left[stage] and (stage, "REDUCE_GRAD") not in own
        if kind == "REDUCE_GRAD" or is_last:
            words = reduction[:-1] if (stage, "UNSHARD") in own else reduction
            yield from (f"{stage}{word}" for word in words)


def _write_cell(rank: int, action: Action) -> str:
    kind, stage, microbatch, peer, part = action
    plain = peer is None and kind in {"F", "B", "I", "W", "OVERLAP_F"}
    if part is not None or not (plain or (kind in NEIGHBOR and peer == stage + NEIGHBOR[kind])):
        expected = "F, B, I or W on a whole microbatch, or a transfer between neighboring stages"
        raise TableError(f"rank {rank}: got {action}, expected {expected}. {_NO_WORD}")
    return f"{stage}{kind.replace('WAIT', 'WAIT_SEND')}{microbatch}"


_NO_WORD = "torch.distributed.pipelining cannot read it. Write it in the notation `own`."
_LONE = re.compile(r"[0-9]+OVERLAP_F[0-9]+")
