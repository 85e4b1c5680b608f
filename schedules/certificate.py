# SPDX-License-Identifier: Apache-2.0
"""Check a certificate of a pipeline program, from its file alone: `python certificate.py plan.json`.

This file needs the standard library only, and none of the code that made the certificate: copy it anywhere. It reads
the programs of all ranks, and accepts a claim only if it follows, in time linear in their length:

- **Right.** Every stage runs every microbatch once, forward before backward, with its inputs there; every message that
  the stage graph asks for is sent, received and waited for once, by the right ranks.
- **No wait for ever.** There is an order of all actions in which each rank follows its program, and both ends of each
  message are neighbors. So there is no cycle of waits, under any timing: not if sends wait for their receives, and not
  on devices that do one thing at a time, in the order in which it was posted.
- **Sums, memory, time.** The order in which each rank adds the gradients of each stage; the most that each rank holds,
  and where; the makespan for the costs in the file, computed exactly; and a lower bound: no order of these actions on
  these ranks is faster, since one rank has so much work, cannot begin earlier, and leaves so much to others.

Exit codes: 0, accepted; 1, refused, and standard error says what, where, got and expected; 2, no file named.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

LARGEST, MOST_ACTIONS = 2**31, 10**8
FORWARDS, BACKWARDS, PASSED = ("F", "OVERLAP_F", "C"), ("B", "I"), ("halved", "done")
COMPUTE = (*FORWARDS, "R", *BACKWARDS, "W", "G")
TIMED = ("F", "B", "I", "W", "C", "R", "OVERLAP_F", "G")
SIZES = ("activation", "inputs", "residual")
KEYS = {
    *("certificate", "routes", "microbatches", "backward", "values", "cotangents", "programs", "order", "costs"),
    *("transfers", "slow", "factors", "sizes", "sums", "peaks", "makespan", "bound"),
}
KEYED = {"costs": TIMED, "transfers": ("F", "B", "G"), "sizes": SIZES}
MARKS = {f"{a}_{b}": "<" if a == "RECV" else ">" for a in ("SEND", "RECV", "WAIT") for b in "FBG"}
MARKS |= dict.fromkeys(COMPUTE)  # type: ignore[arg-type]
WORD = re.compile(r"([0-9]{1,9})([A-Z_]+?)([0-9]{1,9})(?:([<>])([0-9]{1,9}))?")
NEEDS = {"F": "", "OVERLAP_F": "", "C": "", "R": "kept", "B": "forward", "I": "forward", "W": "halved"}
CROSSES = {**dict.fromkeys(FORWARDS, "F"), **dict.fromkeys(BACKWARDS, "B")}
LEAVES = {"F": "forward", "OVERLAP_F": "forward", "C": "kept", "R": "forward", "B": "done", "I": "halved", "W": "done"}


class RefusedError(Exception):
    """A certificate is wrong: where, what it got, what was expected."""


class Message(NamedTuple):
    """A message: what it carries (`F`, `B`, `G`), from which stage, of which microbatch, for which stage."""

    what: str
    source: int
    microbatch: int
    target: int


class Step(NamedTuple):
    """One action of a program: its kind, stage and microbatch; of a transfer, also the peer stage and the message."""

    kind: str
    stage: int
    microbatch: int
    peer: int | None
    message: Message | None


class Claims(NamedTuple):
    """The claims that follow from the programs and the costs of a certificate; times and sizes are exact.

    - `sums`: per stage, for each rank that holds it in route order, the microbatches in the order of their gradients.
    - `peaks`: per rank, the most memory, and the position of the action at which it is first held.
    - `bound`: the rank that proves it; the time before its first action, its work, and the time after its last.
    """

    sums: list[list[list[int]]]
    peaks: list[tuple[Fraction, int]]
    makespan: Fraction
    bound: tuple[int, Fraction, Fraction, Fraction]

    def write(self) -> dict[str, Any]:
        """Return the claims as a certificate has them."""
        peaks, bound = [[str(most), where] for most, where in self.peaks], [*map(str, self.bound[1:])]
        return {"sums": self.sums, "peaks": peaks, "makespan": str(self.makespan), "bound": [self.bound[0], *bound]}


class Job:
    """The programs and costs of a certificate, and what follows from them. Times and sizes are in exact units."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.routes = [_integers(route, "routes") for route in _list(document["routes"], "routes")]
        self.count = _integer(document["microbatches"], "microbatches", 1)
        self.backward = document["backward"]
        _require(isinstance(self.backward, bool), "backward", self.backward, "true or false")
        _require(len(self.routes) in (1, 2), "routes", len(self.routes), "one or two lists of ranks")
        self.stages, texts = len(self.routes[0]), _list(document["programs"], "programs")
        self.ranks, self.both = len(texts), len(self.routes)
        alike = all(len(route) == self.stages >= 1 for route in self.routes)
        _require(alike, "routes", "no stages, or several numbers of them", "one number")
        _require(max(map(max, self.routes)) < self.ranks, "routes", "a rank without a program", "a program for each")
        _require(self.count >= self.both, "microbatches", self.count, "one for each route")
        _require(self.count * self.stages <= MOST_ACTIONS, "microbatches", self.count, f"at most {MOST_ACTIONS} in all")
        self.values, self.feeds = self._edges(document["values"], "values")
        self.pulls, self.cotangents = self._edges(document["cotangents"], "cotangents")
        self.programs = [[*self._read(rank, text)] for rank, text in enumerate(texts)]
        rows = {
            (what, one): self._numbers(row, f"{what} of {one}")
            for what, keys in KEYED.items()
            for one, row in _dict(document, what, keys).items()
        }
        entries = [_list(one, "slow", 3) for one in _list(document["slow"], "slow")]
        self.slow = {(*_integers(one[:2], "slow"),): _number(one[2], "slow") for one in entries}
        self.factors = [_number(one, "factors") for one in _list(document["factors"], "factors")]
        _require(len(self.factors) in (0, self.count), "factors", len(self.factors), f"none, or {self.count}")
        times = [x for (where, _), row in rows.items() for x in row if where != "sizes"]
        self.unit = _common(times) * _common([*self.slow.values(), *self.factors])
        self.byte = _common([x for (where, _), row in rows.items() for x in row if where == "sizes"])
        least = self.unit * min(self.factors, default=Fraction(1))
        self.costs, self.least = (
            {kind: [int(x * unit) for x in rows["costs", kind]] for kind in TIMED} for unit in (self.unit, least)
        )
        self.transfers = {what: rows["transfers", what] for what in "FBG"}
        self.sizes = [[int(x * self.byte) for x in rows["sizes", name]] for name in SIZES]
        self.takes, self.gives = dict[tuple[str, int, int], list[int]](), dict[tuple[str, int, int], list[list[int]]]()
        for what, sources, targets in (("F", self.values, self.feeds), ("B", self.cotangents, self.pulls)):
            for route, homes in enumerate(self.routes):
                for s, here in enumerate(homes):
                    self.takes[what, s, route] = [q for q in sources.get(s, ()) if homes[q] != here]
                    others = [q for q in targets.get(s, ()) if homes[q] != here]
                    self.gives[what, s, route] = [[q, self._transfer(what, s, (here, homes[q]))] for q in others]

    def _edges(self, edges: object, where: str) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        earlier, later = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for edge in _list(edges, where):
            early, late = _integers(_list(edge, where, 2), where)
            _require(early < late < self.stages, where, edge, "stages s < t of the graph")
            earlier[late].append(early)
            later[early].append(late)
        return earlier, later

    def _read(self, rank: int, text: object) -> Iterator[Step]:
        _require(isinstance(text, str), f"program of rank {rank}", type(text).__name__, "a text")
        for position, word in enumerate(str(text).split(" ") if text else ()):
            found = WORD.fullmatch(word)
            if found is not None:
                digits, kind, number, mark, other = found.groups()
                s, i, peer = int(digits), int(number), None if other is None else int(other)
                if s < self.stages and i < self.count and (peer or 0) < self.stages and MARKS.get(kind, "") == mark:
                    ends = (s, i, peer) if mark == ">" else (peer, i, s)
                    yield Step(kind, s, i, peer, None if peer is None else Message(kind[-1], *ends))
                    continue
            where = f"rank {rank}, position {position}"
            most = f"stages below {self.stages} and microbatches below {self.count}"
            _require(False, where, word[:40], f"an action, such as 3F0 or 2SEND_F1>3, of {most}")

    def _numbers(self, values: object, where: str) -> list[Fraction]:
        return [_number(one, where) for one in _list(values, where, self.stages)]

    def _home(self, stage: int, microbatch: int) -> int:
        return self.routes[microbatch % self.both][stage]

    def _holders(self, stage: int) -> list[int]:
        return [*dict.fromkeys(route[stage] for route in self.routes)]

    def _last(self, route: int) -> int:
        return self.count - 1 - (self.count - 1 - route) % self.both

    def _time(self, step: Step) -> int:
        cost = self.costs[step.kind][step.stage]
        return int(cost * self.factors[step.microbatch]) if self.factors and step.kind != "G" else cost

    def _transfer(self, what: str, stage: int, ends: tuple[int, int]) -> int:
        time = self.transfers[what][stage]
        return 0 if ends[0] == ends[1] or not time else int(time * self.slow.get(ends, 1) * self.unit)

    def _ends(self, one: Message) -> tuple[int, int]:
        if one.what != "G":
            return self._home(one.source, one.microbatch), self._home(one.target, one.microbatch)
        here = self._home(one.source, one.microbatch)
        return here, next((rank for rank in self._holders(one.source) if rank != here), here)

    def _messages(self) -> Iterator[Message]:
        for stage in range(self.stages):
            for i in range(self.count):
                yield from [Message("F", early, i, stage) for early in self.values.get(stage, ())]
                if self.backward:
                    yield from [Message("B", late, i, stage) for late in self.cotangents.get(stage, ())]
            if self.backward:
                yield from [Message("G", stage, self._last(route), stage) for route in range(self.both)]

    def require_right(self) -> None:
        """Raise `RefusedError` unless every action and message is there once, on its rank, with its inputs."""
        left: list[tuple[set[Message], set[Message]]] = [(set(), set()) for _ in range(self.ranks)]
        for one in self._messages():
            source, target = self._ends(one)
            if source != target:
                left[source][0].add(one)
                left[target][1].add(one)
        mine: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        for route, homes in enumerate(self.routes):
            for stage, rank in enumerate(homes):
                mine[rank] += [(stage, i) for i in range(route, self.count, self.both)]
        for rank, program in enumerate(self.programs):
            _Walk(self, rank, {*mine[rank]}, left[rank]).walk(program)

    def require_order(self, runs: object) -> Iterator[tuple[int, int]]:
        """Yield `(rank, position)` of every action in the order of the certificate; raise if it proves nothing."""
        places, opened = [0] * self.ranks, None
        for run in _list(runs, "order"):
            fits = type(run) is list and len(run) == 2 and type(run[0]) is type(run[1]) is int
            fits = fits and 0 <= run[0] < self.ranks and run[1] >= 1
            if not fits:
                _require(False, "order", run, "[rank, number of its next actions]")
            rank, program = run[0], self.programs[run[0]]
            start, places[rank] = places[rank], places[rank] + run[1]
            if places[rank] > len(program):
                _require(False, f"order, rank {rank}", "more actions", "those of its program")
            for position in range(start, places[rank]):
                step = program[position]
                yield rank, position
                end = None if step.message is None or step.kind[0] == "W" else step
                if opened is not None and (end is None or end.message != opened.message or end.kind == opened.kind):
                    _require(False, f"order, rank {rank}, position {position}", _name(step), f"the end of {opened}")
                opened = end if opened is None else None
        left = [rank for rank in range(self.ranks) if places[rank] < len(self.programs[rank])]
        _require(not left and opened is None, "order", f"actions of ranks {left[:5]} left out", "all of them")

    def sums(self) -> list[list[list[int]]]:
        """Return the order of the gradients of each stage; see `Claims`."""
        found = defaultdict[tuple[int, int], list[int]](list)
        for rank, program in enumerate(self.programs):
            for step in program:
                if step.kind in ("B", "W"):
                    found[step.stage, rank].append(step.microbatch)
        return [[found[s, rank] for rank in self._holders(s)] for s in range(self.stages)]

    def peaks(self) -> list[tuple[Fraction, int]]:
        """Return the most memory of each rank, and where."""
        changes = {kind: [0] * self.stages for kind in MARKS}
        for s, (full, inputs, left) in enumerate(zip(*self.sizes, strict=True)):
            grows = {"F": full, "OVERLAP_F": full, "C": inputs, "R": full - inputs, "B": -full, "I": left - full}
            for kind, change in {**grows, "W": -left}.items():
                changes[kind][s] = change
        found = list[tuple[Fraction, int]]()
        for program in self.programs:
            held = most = where = 0
            for position, step in enumerate(program if self.backward else ()):
                held += changes[step.kind][step.stage]
                most, where = (held, position) if held > most else (most, where)
            found.append((Fraction(most, self.byte), where))
        return found

    def makespan(self, order: list[tuple[int, int]]) -> Fraction:
        """Return when the last action ends, if each begins as soon as its rank is free and its inputs have arrived."""
        free, made, opened = [0] * self.ranks, dict[Message, int](), dict[int, int]()
        for rank, position in order:
            step = self.programs[rank][position]
            if step.peer is not None:
                continue
            start = max([free[rank], *map(made.pop, self._inputs(step, rank))])
            if step.kind == "OVERLAP_F":  # a pair begins when both parts can, and what they make is there at its end
                opened[rank] = start
                continue
            fused = [self.programs[rank][position - 1]] if rank in opened else []
            start = max(start, opened.pop(rank, 0)) + sum(map(self._time, fused))
            free[rank] = start + self._time(step)
            for one in (*fused, step):
                made.update(self._outputs(one, free[rank]))
        return Fraction(max(free), self.unit)

    def _inputs(self, step: Step, rank: int) -> list[Message]:
        if step.kind == "G":
            others = [route for route in range(self.both) if self._home(step.stage, route) != rank]
            return [Message("G", step.stage, self._last(route), step.stage) for route in others]
        what, i, s = CROSSES.get(step.kind, ""), step.microbatch, step.stage
        return [Message(what, q, i, s) for q in self.takes.get((what, s, i % self.both), ())]

    def _outputs(self, step: Step, end: int) -> Iterator[tuple[Message, int]]:
        what, i, s = CROSSES.get(step.kind, ""), step.microbatch, step.stage
        for other, delay in self.gives.get((what, s, i % self.both), ()):
            yield Message(what, s, i, other), end + delay
        if self.both > 1 and step.kind in ("B", "W") and len(self._holders(step.stage)) > 1:
            one = Message("G", step.stage, self._last(step.microbatch % self.both), step.stage)
            yield one, end + self._transfer("G", step.stage, self._ends(one))  # the last one counts

    def bound(self) -> tuple[int, Fraction, Fraction, Fraction]:
        """Return the rank that proves the best bound, and its three parts; see `Claims`."""
        used, here = defaultdict[int, set[str]](set), [set[int]() for _ in range(self.ranks)]
        work, sums = [0] * self.ranks, [False] * self.ranks
        for rank, program in enumerate(self.programs):
            for step in program:
                if step.peer is None:
                    used[step.stage].add(step.kind)
                    here[rank].add(step.stage)
                    work[rank] += self._time(step)
                    sums[rank] |= step.kind == "G"
        head, tail = [0] * self.stages, [0] * self.stages
        for s in range(self.stages):
            head[s] = self._longest("F", head, used, [(q, q, s) for q in self.values.get(s, ())])
        for s in range(self.stages) if self.backward else reversed(range(self.stages)):
            what, after = ("B", self.pulls) if self.backward else ("F", self.feeds)
            tail[s] = self._longest(what, tail, used, [(q, s, q) for q in after.get(s, ())])
        least = [0 if "W" in used[s] else tail[s] for s in range(self.stages)]  # W may be the last
        before, after_it = ([min((row[s] for s in one), default=0) for one in here] for row in (head, least))
        parts = [(work[r], before[r], 0 if sums[r] else after_it[r]) for r in range(self.ranks)]
        rank = max(range(self.ranks), key=lambda one: sum(parts[one]))
        at_work, first, rest = (Fraction(part, self.unit) for part in parts[rank])
        return rank, first, at_work, rest

    def _longest(
        self, what: str, known: list[int], used: Mapping[int, set[str]], edges: list[tuple[int, int, int]]
    ) -> int:
        kinds, most = FORWARDS if what == "F" else BACKWARDS, 0
        for q, source, target in edges:
            own = min((self.least[kind][q] for kind in used[q] if kind in kinds), default=0)
            moved = min(self._transfer(what, source, (route[source], route[target])) for route in self.routes)
            most = max(most, known[q] + own + moved)
        return most

    def claims(self, runs: object) -> Claims:
        """Return all that follows, given the order of the certificate."""
        order = [*self.require_order(runs)]
        return Claims(self.sums(), self.peaks(), self.makespan(order), self.bound())


class _Walk:
    """The walk along one rank's program: `left`, `sends` and `receives` are what it must run, send and receive."""

    def __init__(
        self, job: Job, rank: int, left: set[tuple[int, int]], ends: tuple[set[Message], set[Message]]
    ) -> None:
        self.job, self.rank, self.left, (self.sends, self.receives) = job, rank, left, ends
        self.states, self.waits, self.arrived = dict[tuple[int, int], str](), set[Message](), set[Message]()
        shared = {s for s, _ in left if len(job._holders(s)) > 1} if job.backward else set()
        self.totals = {(s, job._last(job._holders(s).index(rank))) for s in shared}
        self.step, self.position = Step("F", 0, 0, None, None), 0

    def walk(self, program: list[Step]) -> None:
        """Raise `RefusedError` at the first action that is wrong, or if one is missing."""
        for self.position, self.step in enumerate(program):
            step = self.step
            if step.message is not None:
                self._pass(step.kind[:4], step.message)
            elif step.kind == "G":
                self._total(step)
            else:
                self._compute(step)
            if step.kind == "OVERLAP_F":
                after = program[self.position + 1] if self.position + 1 < len(program) else step
                fits = after.kind in BACKWARDS and after[1:3] != step[1:3]
                self._require(fits, _name(after), "a B or I of another stage or microbatch after it")
        done = "done" if self.job.backward else "forward"
        undone = {one for one in self.left if self.states.get(one) != done}
        for rest in (undone, self.sends, self.receives, self.waits, self.totals):
            self._require(not rest, f"an end without {min(rest, default='')}", "every action, message, wait and sum")

    def _require(self, holds: bool, got: str, expected: str) -> None:
        if not holds:
            _require(False, f"rank {self.rank}, position {self.position}, {_name(self.step)}", got, expected)

    def _compute(self, step: Step) -> None:
        job, place = self.job, (step.stage, step.microbatch)
        self._require(place in self.left, "an action of another rank", "its own")
        state, needed = self.states.get(place, ""), NEEDS[step.kind]
        fits = state == needed and (job.backward or step.kind in ("F", "OVERLAP_F"))
        self._require(fits, state or "new", needed or "new")
        self._take(step)
        forward = step.kind in FORWARDS
        edges = job.values if forward else job.cotangents if step.kind in BACKWARDS else {}
        for other in edges.get(step.stage, ()):
            if job._home(other, step.microbatch) == self.rank:
                found = self.states.get((other, step.microbatch), "")
                self._require(found in PASSED or (forward and found != ""), f"stage {other} still to run", "it before")
        self.states[place] = LEAVES[step.kind]

    def _take(self, step: Step) -> None:
        for one in self.job._inputs(step, self.rank):
            if one not in self.arrived:
                self._require(False, f"no {one} before it", "its input")
            self.arrived.discard(one)

    def _is_summed(self, stage: int) -> bool:
        return all(self.states.get(one) == "done" for one in self.left if one[0] == stage)

    def _total(self, step: Step) -> None:
        fits = step[1:3] in self.totals and self._is_summed(step.stage)
        self._require(fits, "a sum", "one for each stage with replicas, after its last microbatch")
        self._take(step)
        self.totals.discard(step[1:3])

    def _pass(self, does: str, one: Message) -> None:
        left = self.sends if does == "SEND" else self.receives if does == "RECV" else self.waits
        self._require(one in left, "a transfer", "each message once, at its ends, and one wait after each send")
        left.discard(one)
        if does == "SEND":
            state = self.states.get((one.source, one.microbatch), "")
            made = (
                state != "" if one.what == "F" else state in PASSED if one.what == "B" else self._is_summed(one.source)
            )
            self._require(made, "a send before its message is made", "one after it")
            self.waits.add(one)
        elif does == "RECV":
            self.arrived.add(one)


def _require(holds: bool, where: str, got: object, expected: str) -> None:
    if not holds:
        raise RefusedError(f"{where}: got {ascii(str(got))[1:-1][:120]}, expected {expected}.")


def _list(value: object, where: str, length: int | None = None) -> list[Any]:
    fits = isinstance(value, list) and length in (None, len(value))
    _require(fits, where, value, "a list" if length is None else f"a list of {length}")
    return value  # type: ignore[return-value]


def _integer(value: object, where: str, least: int = 0) -> int:
    fits = isinstance(value, int) and type(value) is int and least <= value <= MOST_ACTIONS
    _require(fits, where, value, f"an integer of at least {least}")
    return value  # type: ignore[return-value]


def _integers(values: object, where: str) -> list[int]:
    return [_integer(one, where) for one in _list(values, where)]


def _dict(document: Mapping[str, Any], where: str, keys: tuple[str, ...]) -> dict[str, Any]:
    found = document[where]
    _require(isinstance(found, dict) and found.keys() == {*keys}, where, found, f"the keys {keys}")
    return dict(found)


def _common(numbers: list[Fraction]) -> int:
    found = math.lcm(*{number.denominator for number in numbers})
    _require(found < 10**400, "costs", "denominators without a small common multiple", "numbers of one unit")
    return found


def _number(value: object, where: str) -> Fraction:
    fits = isinstance(value, str) and re.fullmatch(r"[0-9]{1,40}(/[0-9]{1,40})?", value) is not None
    _require(fits, where, value, 'a number as a text, such as "3" or "7/2"')
    try:
        return Fraction(str(value))
    except ZeroDivisionError:
        raise RefusedError(f"{where}: got {value}, expected a number.") from None


def _name(step: Step) -> str:
    mark = "" if step.peer is None else f"{'<' if step.kind.startswith('RECV') else '>'}{step.peer}"
    return f"{step.stage}{step.kind}{step.microbatch}{mark}"


def _read(text: str, digits: int = 9) -> Any:
    if len(text) > digits:
        raise RefusedError(f"file: got the number {text[:40]}, expected integers, and other numbers as texts.")
    return int(text)


def verify(text: str) -> tuple[Job, Claims]:
    """Return what a certificate is about, and what it claims, all of which holds; else raise `RefusedError`."""
    refuse = partial(_read, digits=0)
    try:
        document = json.loads(text, parse_float=refuse, parse_constant=refuse, parse_int=_read)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"file: got {str(error)[:80]}, expected JSON.") from None
    fits = isinstance(document, dict) and document.keys() == KEYS and document["certificate"] == 1
    _require(fits, "file", document, f"certificate 1, with the keys {sorted(KEYS)}")
    job = Job(document)
    job.require_right()
    found = job.claims(document["order"])
    for what, expected in found.write().items():
        _require(document[what] == expected, what, document[what], str(expected)[:120])
    return job, found


def main(arguments: list[str]) -> int:
    """Check one file; return the exit code."""
    if len(arguments) != 1:
        print("usage: python certificate.py FILE", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    try:
        size = path.stat().st_size if path.is_file() else math.inf
        _require(size <= LARGEST, str(path), f"{size} bytes", f"a file of at most {LARGEST}")
        job, found = verify(path.read_text("utf-8"))
        print(f"accepted: {job.ranks} ranks, {job.count} microbatches, time {found.makespan} of {sum(found.bound[1:])}")
    except (RefusedError, OSError, UnicodeDecodeError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
