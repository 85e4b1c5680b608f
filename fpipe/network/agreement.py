# SPDX-License-Identifier: Apache-2.0
"""Make all ranks agree on what they are about to do before any of them does it.

Problem. A message of the wrong length aborts the process that receives it, one of the right length but from another
step is silently used, and a rank that raises alone leaves the others hanging.

Idea. Everything that ranks do together begins with one comparison: every rank sends a `row` of three numbers, one of
them a digest of the call with all fields that must be the same, and hears whether all rows are equal. Then nothing more
is sent. If not, everybody gets all rows; if calls differ, all exchange a digest per field, then the texts that were
digested, and raise the same error. A rank that refuses its arguments also says so in its row, so that the others are
not left waiting.

The row is posted first, and the answer is awaited later, so that a rank may begin to compute meanwhile.

Invariant: whichever calls two ranks are in, the next message that each sends over the control group is a row of three.

Runs when a pipeline is built and in every step, if ranks are separate processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor

from fpipe.errors import TransportError
from fpipe.network.fingerprint import digest
from schedules.errors import describe_error

AgreementRow: TypeAlias = tuple[int, int, int]
"""Whether a rank refuses its arguments, the digest of its call, and a note."""
Gather: TypeAlias = Callable[[Tensor], Sequence[Tensor]]
"""Returns the tensors of all ranks; every rank passes one, of the same shape and dtype."""


class RowExchange(Protocol):
    """A way to exchange tensors with all ranks; each passes one, of the same shape and dtype."""

    def gather(self, mine: Tensor) -> Sequence[Tensor]:
        """Return the tensors of all ranks."""
        ...

    def post(self, mine: AgreementRow) -> Callable[[], Sequence[Tensor] | int]:
        """Post a comparison with the rows of all ranks; return the function that waits for its answer.

        That is the number of ranks if all have passed the same, else the rows of all.
        """
        ...


MOST_FIELDS, MOST_BYTES, MOST_SHOWN, WIDTH = 20, 2**18, 4, 160
REFUSED, CALL, NOTE = range(3)
BREAK: Final = "\x1e"


class Field(NamedTuple):
    """Something that must be the same on every rank: its digest, and a function that returns its lines for an error.

    `repair`: what to do about a difference; by default, to pass the same arguments.
    """

    name: str
    digest: int
    lines: Callable[[], Sequence[str]]
    repair: str = "Pass the same arguments, in the same order of calls, on every rank."

    @classmethod
    def of(cls, name: str, lines: Sequence[str], *repair: str) -> Field:
        """Return the field of these lines."""
        return cls(name, digest(lines), lambda: lines, *repair)


def agree(rank: int, exchange: RowExchange, call: str, fields: Sequence[Field], note: int = 0) -> list[int]:
    """Exchange a row with all ranks; return every rank's note.

    Raise `TransportError` unless all ranks make the same call with the same fields.
    """
    return post_agreement(rank, exchange, call, fields, note)()


def post_agreement(
    rank: int, exchange: RowExchange, call: str, fields: Sequence[Field], note: int = 0
) -> Callable[[], list[int]]:
    """Post what `agree` exchanges; return the function that does the rest of it."""
    assert len(fields) <= MOST_FIELDS, "there is room for the digests of all fields"
    mine = 0, digest([call, *[f"{field.name} {field.digest}" for field in fields]]), note
    answer = exchange.post(mine)

    def finish() -> list[int]:
        found = answer()
        if isinstance(found, int):
            return [note] * found
        rows = [row.tolist() for row in found]
        if any(row[:NOTE] != [*mine[:NOTE]] for row in rows):
            _raise_difference(rank, exchange.gather, call, fields, rows)
        return [row[NOTE] for row in rows]

    return finish


def announce_refusal(exchange: RowExchange, call: str, error: BaseException) -> None:
    """Tell the other ranks, which wait for this one's row, that the call failed here."""
    if not isinstance(exchange.post((1, digest([call]), 0))(), int):  # else all of them refuse
        exchange_texts(exchange.gather, describe_error(error))


def exchange_texts(gather: Gather, mine: str) -> list[str]:
    """Exchange texts of any length; return those of all ranks."""
    data = mine.encode()[: MOST_BYTES * MOST_SHOWN]
    lengths = [int(one.item()) for one in gather(torch.tensor([len(data)]))]
    padded = torch.zeros(max([*lengths, 1]), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    found = gather(padded)
    return [bytes(one[:n].tolist()).decode(errors="replace") for one, n in zip(found, lengths, strict=True)]


def _exchange_digests(gather: Gather, call: str, fields: Sequence[Field]) -> list[list[int]]:
    """Return, for each rank, the digest of its call and those of its fields."""
    names = [field.name for field in fields]
    mine = [digest((f"{call}: {names}",)), *[field.digest for field in fields], *[0] * (MOST_FIELDS - len(fields))]
    return [other.tolist() for other in gather(torch.tensor(mine))]


def _raise_difference(rank: int, gather: Gather, call: str, fields: Sequence[Field], rows: list[list[int]]) -> NoReturn:
    """Raise a `TransportError` that shows what differs; every rank must call this."""
    if any(row[REFUSED] for row in rows):
        told = exchange_texts(gather, "")
        said = [f"- rank {r}: {told[r][: 3 * WIDTH]}" for r, row in enumerate(rows) if row[REFUSED]]
        raise TransportError(
            f"rank {rank}, {call}: got errors on some ranks, expected a call that works on every "
            "rank. Nothing was sent or changed on any rank. Fix these errors and call it again:\n" + "\n".join(said)
        )
    digests = _exchange_digests(gather, call, fields)
    if len({row[0] for row in digests}) > 1:
        texts = exchange_texts(gather, "\n".join([call, *(f"{call}, {field.name}" for field in fields)]))
        lines = _compare("call", [text.split("\n") for text in texts])
        repair = "Call the same functions in the same order on every rank."
    else:
        apart = [k for k in range(len(fields)) if len({row[1 + k] for row in digests}) > 1]
        shown = apart[:MOST_SHOWN]
        told = exchange_texts(gather, BREAK.join("\n".join(fields[k].lines())[:MOST_BYTES] for k in shown))
        columns = [text.split(BREAK) for text in told]
        names = [fields[k].name for k in shown]
        lines = [line for n, name in enumerate(names) for line in _compare(name, [c[n].split("\n") for c in columns])]
        lines = lines or [f"- {', '.join(names)}: differ beyond the first {MOST_BYTES} characters"]
        lines += [f"- and also: {', '.join(fields[k].name for k in apart[MOST_SHOWN:])}"] * (len(apart) > MOST_SHOWN)
        repair = " ".join(dict.fromkeys(fields[k].repair for k in shown))
    raise TransportError(
        f"rank {rank}, {call}: got ranks that differ, expected the same on every rank. {repair} Nothing was sent or "
        "changed on any rank:\n" + "\n".join(lines)
    )


def _compare(name: str, ranks: Sequence[Sequence[str]]) -> list[str]:
    """Return one line that shows, by rank, where descriptions first differ; no line if they don't."""
    longest = max(map(len, ranks))
    columns = [[*lines, *["nothing"] * (longest - len(lines))] for lines in ranks]
    first = next((row for row in zip(*columns, strict=True) if len(set(row)) > 1), None)
    if first is None:
        return []
    start = _find_start(first)
    found: dict[str, list[int]] = {}
    for rank, line in enumerate(first):
        found.setdefault(line, []).append(rank)
    seen = [f"{_ranks(at)}: {_excerpt(line, start) or 'nothing'}" for line, at in found.items()]
    return [f"- {name}: got {'; '.join(seen)}"]


def _find_start(lines: Sequence[str]) -> int:
    """Return the column from which to show lines that differ only near their ends."""
    if max(map(len, lines)) <= WIDTH:
        return 0
    columns = zip(*lines, strict=False)
    common = next((k for k, column in enumerate(columns) if len(set(column)) > 1), min(map(len, lines)))
    return max(0, common - WIDTH // 4)


def _excerpt(text: str, start: int) -> str:
    shown = text[start : start + WIDTH]
    return f"{'...' if start else ''}{shown}{'...' if start + WIDTH < len(text) else ''}"


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, with runs as ranges.

    >>> _ranks([0]), _ranks([0, 1, 2, 5])
    ('on rank 0', 'on ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    ends = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"on rank{'s' if len(ranks) > 1 else ''} {', '.join(ends)}"
