# SPDX-License-Identifier: Apache-2.0
"""Certify a program: write down what holds of it, so that a stranger can check it with one file and no other code.

Problem. What the checker, the bounds and a plan promise rests on the code that computes it.

Idea. A certificate has the programs of all ranks and their costs, and claims about them; `schedules/certificate.py` is
one file on its own that computes every claim again. What it can't find in linear time, it is given: an order of all
actions in which both ends of every message are neighbors, which shows that no rank waits for ever.

Runs on request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Any

from schedules import certificate
from schedules.arguments import require_types
from schedules.errors import ProgramError, TableError
from schedules.language.actions import KINDS, Action, is_own, message_of
from schedules.language.schedule import Schedule
from schedules.lowering.program import Program, lower
from schedules.playing.costs import UNITS, Cost, Costs, Link, Sizes, of_stage, require_stages


@dataclass(frozen=True)
class Certificate:
    """The claims that hold of a program, checked; `text` is the file. Made by `certify`, or read by `read`.

    `python certificate.py FILE` checks it anywhere, with a copy of `schedules/certificate.py` alone.

    - `makespan`, `bound`: the time of the program, and the least that any order of its actions on these ranks takes.
    - `peaks`: per rank, the most that it holds, in the unit of the sizes: by default, what one stage keeps for one
      microbatch, where `simulate` counts what one rank keeps for one.
    """

    text: str
    makespan: Fraction
    bound: Fraction
    peaks: tuple[Fraction, ...]
    page: str

    @property
    def gap(self) -> float:
        """The time by which the program is above the bound, as a fraction of the bound."""
        return float(self.makespan / self.bound - 1) if self.bound else 0.0

    def __str__(self) -> str:
        return self.page

    @classmethod
    def parse(cls, text: str, where: str = "certificate") -> Certificate:
        """Return the certificate in a text; raise `TableError`, with what is wrong, if a claim does not hold."""
        with _refusals(where):
            return cls.of(text, *certificate.verify(text))

    @classmethod
    def of(cls, text: str, job: certificate.Job, claims: Mapping[str, Any]) -> Certificate:
        """Return the certificate of a job, given the claims that hold of it."""
        peaks, bound = tuple(Fraction(peak) for peak, _ in claims["peaks"]), sum(map(Fraction, claims["bound"][1:]))
        return cls(text, Fraction(claims["makespan"]), Fraction(bound), peaks, _describe(job, claims))

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Certificate:
        """Return the certificate in a file; see `parse`."""
        return cls.parse(Path(path).read_text("utf-8"), str(path))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the file."""
        Path(path).write_text(self.text, "utf-8")

    def programs(self) -> list[str]:
        """Return the program of each rank, as text."""
        found: list[str] = json.loads(self.text)["programs"]
        return found


def certify(program: Program | Schedule, costs: Costs = Costs(), sizes: Sizes = UNITS) -> Certificate:
    """Return a certificate of a program, or of a schedule's program for a chain of stages, for these costs and sizes.

    A program may be of any stage graph, so that values skip stages and stages share parameters, and of all kinds of
    actions: slices, updates in flight, collectives and moves of memory too. Raise `ProgramError` for more than two
    routes, for kinds of your own, for costs that are drawn, and for a program in which ranks wait for each other if
    sends wait for their receives. Raise `TableError` for a program that is wrong.

    >>> from schedules import Costs, certify, zb_h1
    >>> found = certify(zb_h1(ranks=4, microbatches=8), Costs(F=1, B=2))
    >>> print(found)
    4 ranks, 4 stages, 8 microbatches, 240 actions: all claims are true
      right     every action and message once, on its rank, after its inputs
      ends      no cycle of waits, even if sends wait for receives and devices do one thing at a time
      sums      in ascending order of microbatches
      memory    at most 4, on rank 0 at position 6
      time      27
      bound     27, so it is 0.00 % above it: rank 3 waits 3, works 24, and leaves 0
    """
    require_types(certify, locals())
    program = lower(program) if isinstance(program, Schedule) else program
    schedule, graph = program.schedule, program.graph
    require_stages(costs, schedule.stages)
    require_stages(sizes, schedule.stages)
    programs = [[*stream] for stream in program.streams(range(schedule.ranks))]
    if costs.jitter:
        raise ProgramError(
            f"certify: got costs with jitter={costs.jitter}, expected costs that are not random: a certificate states "
            "one makespan. Certify it with jitter=0."
        )
    own = sorted({str(action.kind) for actions in programs for action in actions if is_own(action.kind)})
    if own:
        raise ProgramError(
            f"certify: got actions of your own kinds {own}, expected those of schedules.KINDS: a file can't state what "
            "yours do. Certify the schedule without them."
        )
    if len(schedule.placement.routes) > 2:
        raise ProgramError(
            f"certify: got a placement with {len(schedule.placement.routes)} routes, expected one or two, which "
            "certificates cover. Certify it with two."
        )
    exact = [costs.comm] if not isinstance(costs.comm, Link) else []
    document: dict[str, Any] = {
        "certificate": 2,
        "routes": [list(route) for route in schedule.placement.routes],
        "microbatches": schedule.microbatches,
        "slices": schedule.slices,
        "backward": schedule.backward,
        "declared": [] if schedule.version is None else [*map(schedule.version, range(schedule.microbatches))],
        **{name: sorted(map(list, getattr(graph, name))) for name in certificate.EDGES},
        "programs": [" ".join(map(str, actions)) for actions in programs],
        "order": [*_runs(_order(program, programs))],
        "costs": {
            kind: [str(Fraction(costs.time(kind, stage))) for stage in range(schedule.stages)]
            for kind in certificate.COMPUTE
        },
        "transfers": {what: _transfers(costs, what, schedule.stages, exact) for what in "FBG"},
        "slow": [] if exact else [[*ends, str(Fraction(factor))] for ends, factor in costs.comm.slow],  # type: ignore[union-attr]
        "factors": [str(Fraction(one)) for one in costs.factors(schedule.microbatches, schedule.slices)],
        "sizes": {name: _sizes(sizes, name, schedule.stages) for name in certificate.SIZES},
    }
    with _refusals("certificate"):
        job = certificate.Job(document)
        claims = job.claims(document["order"])
    return Certificate.of(json.dumps(document | claims), job, claims)


@contextmanager
def _refusals(where: str) -> Iterator[None]:
    """Raise `TableError` for a claim that does not hold."""
    try:
        yield
    except certificate.RefusedError as error:
        raise TableError(f"{where}: {error} Certify the program again.") from None


def _order(program: Program, programs: Sequence[Sequence[Action]]) -> Iterator[int]:
    """Yield the rank of every action in an order in which each receive comes right after its send."""
    places, waiting = [0] * len(programs), [*range(len(programs))]
    left = sum(map(len, programs))
    open_ends = dict[Action, int]()  # messages of which one end comes next on a rank
    while waiting:
        rank = waiting.pop()
        while places[rank] < len(programs[rank]):
            action = programs[rank][places[rank]]
            if KINDS[action.kind].does in ("", "WAIT"):
                yield rank
                places[rank], left = places[rank] + 1, left - 1
                continue
            other = open_ends.pop(message_of(action), None)
            if other is None:
                open_ends[message_of(action)] = rank
                break
            yield from (rank, other) if KINDS[action.kind].does == "SEND" else (other, rank)
            places[rank], places[other], left = places[rank] + 1, places[other] + 1, left - 2
            waiting.append(other)
    if left:
        stuck = next(rank for rank, place in enumerate(places) if place < len(programs[rank]))
        raise ProgramError(
            f"rank {stuck}, position {places[stuck]}: got {programs[stuck][places[stuck]]}, which waits forever if "
            "sends wait for their receives, expected an order that ends on any network. Lower the schedule "
            "(schedules.lower), or post it later."
        )


def _runs(ranks: Iterator[int]) -> Iterator[list[int]]:
    """Yield `[rank, count]` for each run of equal numbers."""
    run: list[int] = []
    for rank in ranks:
        if run and run[0] == rank:
            run[1] += 1
        else:
            if run:
                yield run
            run = [rank, 1]
    if run:
        yield run


def _transfers(costs: Costs, what: str, stages: int, exact: Sequence[float]) -> list[str]:
    if exact:
        return [str(Fraction(exact[0]))] * stages
    plain = Link(**{**vars(costs.comm), "slow": ()})
    return [str(Fraction(plain.time(stage, (0, 1), what))) for stage in range(stages)]


def _sizes(sizes: Sizes, name: str, stages: int) -> list[str]:
    value: Cost | None = getattr(sizes, name)
    return [str(Fraction(of_stage(sizes.activation if value is None else value, stage))) for stage in range(stages)]


def _describe(job: certificate.Job, claims: Mapping[str, Any]) -> str:
    """Return a page about what holds."""
    rank, *parts = claims["bound"]
    before, work, after = map(Fraction, parts)
    makespan, least = Fraction(claims["makespan"]), before + work + after
    gap = f"{100 * float(makespan / least - 1):.2f} % above it" if least else "no work"
    peak, where, most = max((Fraction(peak), -where, -one) for one, (peak, where) in enumerate(claims["peaks"]))
    sums = [one for stage in claims["sums"] for row in stage for one in row]
    ascends = all(one == sorted(one, key=lambda unit: (unit // job.slices, -unit)) for one in sums)
    order = f"in {'ascending order' if ascends else 'other orders'} of microbatches"
    order += ", of each the last slice first" * (ascends and job.slices > 1)
    updates = [(kept, len(row)) for stage in claims["versions"] for kept, row in stage]
    actions = sum(map(len, job.programs))
    lines = [
        f"{job.ranks} ranks, {job.stages} stages, {job.count} microbatches, {actions} actions: all claims are true",
        "  right     every action and message once, on its rank, after its inputs",
        "  ends      no cycle of waits, even if sends wait for receives and devices do one thing at a time",
        f"  sums      {order}",
        f"  memory    at most {_plain(peak)}, on rank {-most} at position {-where}",
        f"  time      {_plain(makespan)}",
        f"  bound     {_plain(least)}, so it is {gap}: rank {rank} waits {_plain(before)}, works {_plain(work)}, "
        f"and leaves {_plain(after)}",
    ]
    if updates:
        lines[4:4] = [f"  updates   {len(sums)}, and at most {max(updates)[0]} versions of weights on a rank"]
    return "\n".join(lines)


def _plain(number: Fraction) -> str:
    return str(number.numerator) if number.denominator == 1 else f"{float(number):.6g}"
