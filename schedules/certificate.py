# SPDX-License-Identifier: Apache-2.0
"""Check a certificate of a pipeline program, from its file alone: `python certificate.py plan.json`.

This file needs the standard library only, and none of the code that made the certificate: copy it anywhere. It reads
the programs of all ranks, and accepts a claim only if it follows, in time linear in their length:

- **Right.** Every stage runs every unit (a microbatch or a slice of one) once, forward before backward, with its inputs
  and weights there; every message of the stage graph is sent, received and waited for once, by the right ranks;
  every sum, reduction and update has the whole gradients that it names.
- **No wait for ever.** There is an order of all actions in which each rank follows its program, and each receive comes
  right after its send. So waits form no cycle, even if sends wait for their receives, and devices do one thing at a
  time. Copies of the pipeline run the same programs, so each collective has a place.
- **Sums, versions, memory, time.** The order in which gradients are added; the version that each microbatch uses; the
  most that each rank holds, and where; the exact makespan; and a lower bound: what one rank waits, works and leaves.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

LARGEST, MOST_ACTIONS, MOST_EDGES = 2**27, 10**8, 64
FORWARDS, BACKWARDS, PASSED, DONE = ("F", "OVERLAP_F", "C"), ("B", "I"), ("halved", "done"), ("B", "W")
NEEDS = {**dict.fromkeys(FORWARDS, ""), "R": "kept", **dict.fromkeys(("B", "I", "OFFLOAD"), "forward")}
NEEDS |= {"W": "halved", "RELOAD": "hosted"}
LEAVES = {**dict.fromkeys(("F", "OVERLAP_F", "R", "RELOAD"), "forward"), **dict.fromkeys(DONE, "done")}
LEAVES |= {"C": "kept", "I": "halved", "OFFLOAD": "hosted"}
CROSSES = {**dict.fromkeys(FORWARDS, "F"), **dict.fromkeys(BACKWARDS, "B")}
LANES = {"UNSHARD": "group", "RESHARD": "group", "REDUCE_GRAD": "group", "OFFLOAD": "out", "RELOAD": "back"}
AFTER = {**dict.fromkeys((*CROSSES, "R"), ("UNSHARD", "RELOAD")), "U": ("REDUCE_GRAD",)}  # whose end an action awaits
AFTER |= {"OFFLOAD": ("RELOAD",), "RELOAD": ("OFFLOAD",)}
COMPUTE = (*LEAVES, "G", "U", "UNSHARD", "RESHARD", "REDUCE_GRAD")
GROW = ("F", "OVERLAP_F", "RELOAD", "B", "OFFLOAD", "C", "R", "I", "W", "UNSHARD", "RESHARD")
SIZES, EDGES = ("activation", "inputs", "residual", "weight", "gathered"), ("values", "cotangents", "gradients")
CLAIMED = ("sums", "versions", "peaks", "makespan", "bound")
KEYED = {"costs": COMPUTE, "transfers": ("F", "B", "G"), "sizes": SIZES}
KEYS = {"certificate", "routes", "microbatches", "slices", "backward", "declared", "programs", "order", "slow"}
KEYS |= {"factors", *EDGES, *KEYED, *CLAIMED}
MARKS = {f"{a}_{b}": "<" if a == "RECV" else ">" for a in ("SEND", "RECV", "WAIT") for b in "FBG"}
MARKS |= dict.fromkeys(COMPUTE)  # type: ignore[arg-type]
WORD = re.compile(r"([0-9]{1,9})([A-Z_]+?)([0-9]{1,9})(?:\.([0-9]{1,9}))?(?:([<>])([0-9]{1,9}))?", re.ASCII)
NUMBER = re.compile(r"[0-9]{1,40}(/0*[1-9][0-9]{0,39})?", re.ASCII)


class RefusedError(Exception):
    """A certificate is wrong: where, what it got, what was expected."""


class Step(NamedTuple):
    """An action: its kind, stage, microbatch, slice; of a transfer, what it carries: kind, source, both, target."""

    kind: str
    stage: int
    microbatch: int
    part: int
    message: tuple[str, int, int, int, int] | None


class Job:
    """The programs and costs of a certificate, and what follows from them. Times and sizes are in exact units."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.routes = [_integers(route, "routes") for route in _list(document["routes"], "routes")]
        self.count, self.slices = _integers([document["microbatches"], document["slices"]], "microbatches and slices")
        self.backward, texts = document["backward"], _list(document["programs"], "programs")
        _require(isinstance(self.backward, bool), "backward", self.backward, "true or false")
        self.both, self.ranks, self.stages = len(self.routes), len(texts), len([*self.routes, []][0])
        fits = self.both in (1, 2) and all(len(route) == self.stages >= 1 for route in self.routes)
        fits = fits and self.ranks <= 2 * self.stages
        fits = fits and {rank for route in self.routes for rank in route} == {*range(self.ranks)}
        _require(fits, "routes", self.routes, "one or two lists of as many ranks, each with a program")
        self.declared = _integers(document["declared"], "declared")
        _require(self.count >= self.both and self.slices >= 1, "microbatches", self.count, "one for each route")
        _require(len(self.declared) in (0, self.count), "declared", len(self.declared), f"none, or {self.count}")
        edges = {what: self._edges(document[key], key) for what, key in zip("FBG", EDGES, strict=True)}
        words = sum(text.count(" ") + 1 for text in texts if isinstance(text, str) and text)
        units, number = self.count * self.slices, sum(map(len, edges.values()))
        fits = units * self.stages <= min(words, MOST_ACTIONS) and units * number <= MOST_EDGES * words
        _require(fits, "microbatches", units, "as many as the programs have actions for, on all stages and edges")
        self.holders = [[*dict.fromkeys(homes)] for homes in zip(*self.routes, strict=True)]
        self.here = [dict[int, None]() for _ in texts]
        for s, rank in [one for route in self.routes for one in enumerate(route)]:
            self.here[rank][s] = None
        self.programs = [[*self._read(rank, text)] for rank, text in enumerate(texts)]
        self.reduces = any("REDUCE_GRAD" in str(text) for text in texts)  # then it must on all stages
        self._read_costs(document)
        self._connect(edges)

    def _edges(self, edges: object, where: str) -> list[tuple[int, int]]:
        found = list[tuple[int, int]]()
        for edge in _list(edges, where):
            s, t = _integers(_list(edge, where, 2), where)
            fits = max(s, t) < self.stages and (s < t or (s > t and where == "gradients")) and found[-1:] < [(s, t)]
            _require(fits, where, edge, "stages s < t of the graph, each pair once, in ascending order")
            found.append((s, t))
        return found

    def _read(self, rank: int, text: object) -> Iterator[Step]:
        _require(isinstance(text, str), f"program of rank {rank}", type(text).__name__, "a text")
        for position, word in enumerate(str(text).split(" ") if text else ()):
            found = WORD.fullmatch(word)
            digits, kind, number, cut, mark, other = found.groups() if found else ("0", "", "0", None, None, None)
            s, i, part, end = int(digits), int(number), int(cut or 0), int(other or 0)
            whole = self.slices == 1 or not (kind in LEAVES or kind[-2:] in ("_F", "_B"))
            fits = MARKS.get(kind, "") == mark and (cut is None) == whole and part < self.slices
            if not (fits and max(s, end) < self.stages and (i < self.count or kind[-5:] == "SHARD")):
                _require(
                    False, f"rank {rank}, position {position}", word[:40], "an action such as 3F0, of known stages"
                )
            ends = (end, s) if mark == "<" else (s, end)
            yield Step(kind, s, i, part, (kind[-1], ends[0], i, part, ends[1]) if mark else None)

    def _read_costs(self, document: Mapping[str, Any]) -> None:
        """Read costs and sizes, as integers in one unit each; those of a unit's passes are for each slice."""
        rows = dict[tuple[str, str], list[Fraction]]()
        for what, keys in KEYED.items():
            found = document[what]
            fits = isinstance(found, dict) and found.keys() == {*keys}
            _require(fits, what, found, f"the keys {keys}")
            rows |= {(what, one): _numbers(found[one], f"{what} of {one}", self.stages) for one in keys}
        entries = [_list(one, "slow", 3) for one in _list(document["slow"], "slow")]
        self.slow = {(*_integers(one[:2], "slow"),): _numbers(one[2:], "slow")[0] for one in entries}
        self.factors = _numbers(document["factors"], "factors")
        _require(len(self.factors) in (0, self.count * self.slices), "factors", len(self.factors), "one for each unit")
        self.unit = _common([x for (what, _), row in rows.items() for x in row if what != "sizes"]) * self.slices
        self.unit *= _common([*self.slow.values(), *self.factors])
        self.byte = _common([x for (what, _), row in rows.items() for x in row if what == "sizes"]) * self.slices
        self.transfers, self.shortest = {what: rows["transfers", what] for what in "FBG"}, min(self.factors, default=1)
        units = {kind: self.unit // (self.slices if kind in LEAVES else 1) for kind in COMPUTE}
        self.costs = {kind: [int(x * unit) for x in rows["costs", kind]] for kind, unit in units.items()}
        full, inputs, left, self.weights, gathered = ([int(x * self.byte) for x in rows["sizes", key]] for key in SIZES)
        self.grows = {kind: [0] * self.stages for kind in COMPUTE}
        for s, row in enumerate(zip(full, inputs, left, gathered, strict=True)):
            a, b, c = (size // self.slices * self.backward for size in row[:3])
            grown = (a, a, a, -a, -a, b, a - b, c - a, -c, row[3], -row[3])
            for kind, size in zip(GROW, grown, strict=True):
                self.grows[kind][s] = size

    def _connect(self, edges: Mapping[str, list[tuple[int, int]]]) -> None:
        """Find what each action takes from other stages, and gives to them: to which rank, and how long it travels."""
        self.takes, self.gives = defaultdict[Any, list[Any]](list), defaultdict[Any, list[Any]](list)
        self.moved: dict[str, dict[tuple[int, int], int]] = {"F": {}, "B": {}}
        twice = [(s, s) for s, homes in enumerate(self.holders) if len(homes) > 1]
        back = [(t, s) for s, t in edges["B"]]
        for route, homes in enumerate(self.routes):
            for what, s, t in [(what, *edge) for what, row in (("F", edges["F"]), ("B", back)) for edge in row]:
                time = self._transfer(what, s, (homes[s], homes[t]))
                self.takes[what, t, route].append(s)
                self.gives[what, s, route].append((t, homes[t], time))
                self.moved[what][s, t] = min(time, self.moved[what].get((s, t), time))
            for s, t in twice + edges["G"] if self.backward else ():
                one = "G", s, self.count - 1 - (self.count - 1 - route) % self.both, 0, t
                if one[2] + 1 < self.count and {(homes[s], homes[t])} == {(a[s], a[t]) for a in self.routes}:
                    continue  # it is sent once, after the last microbatch of both routes
                there = sum(self.holders[t]) - homes[s] if s == t else homes[t]
                self.takes[s == t, t, there].append(one)
                self.gives[s == t, s, homes[s]].append((one, there, self._transfer("G", s, (homes[s], there))))
        self.tied = {s for edge in edges["G"] for s in edge}

    def _transfer(self, what: str, stage: int, ends: tuple[int, int]) -> int:
        time = self.transfers[what][stage]
        return 0 if ends[0] == ends[1] or not time else int(time * self.slow.get(ends, 1) * self.unit)

    def claims(self, runs: object) -> dict[str, Any]:
        """Return all that follows, given the order of the certificate; raise `RefusedError` if anything is wrong.

        - `sums`: per stage, for each rank that holds it in route order, for each update or else for the step: the units
          in the order of their gradients. Unit `i * slices + k` is slice `k` of microbatch `i`.
        - `versions`: per stage, for each such rank, if it updates weights: the most versions that it keeps, and the
          one, by its number of updates, that each of its microbatches uses.
        - `peaks`: per rank, the most memory, and the position of the action at which it is first held.
        - `bound`: the rank that proves it; the time before its first action, its work, and the time after its last.
        """
        ranks = [_Rank(self, rank) for rank in range(self.ranks)]
        stages = [[ranks[rank].stages[s] for rank in homes] for s, homes in enumerate(self.holders)]
        sender, sent = ranks[0], None
        for rank in self._order(runs):
            now = ranks[rank]
            now.position += 1
            step = now.program[now.position]
            kind, message = step.kind, step.message
            if now.opened and (kind not in BACKWARDS or step[1:3] == now.opened[0][1][1:3]):
                now.require(False, "it", "a B or I of another stage or microbatch, for the OVERLAP_F before it")
            if message is None and sent is None:
                now.run(step)
            elif kind[:4] == "SEND" and sent is None and message in now.made:
                sender, sent = now, message
                now.waits.add(message)
            elif kind[:4] == "WAIT" and sent is None and message in now.waits:
                now.waits.discard(message)
            elif kind[:4] == "RECV" and sent == message and sender.made[sent][0] == rank:
                now.arrived[sent], sent = sender.made.pop(sent)[1], None
            else:
                now.require(False, "it", "a message once: sent after it is made, received next, and waited for later")
        _require(sent is None, "order", "a send at its end", "its receive")
        for one in ranks:
            one.end()
        for kind in ("U", "REDUCE_GRAD"):
            some = {kind in one.once for row in stages for one in row}
            _require(len(some) == 1, kind, "some stages without", "one on all stages, or on none")
        versions = [[[one.most, [*one.began.values()]] for one in row if one.newest] for row in stages]
        peaks = [[str(Fraction(one.most[0], self.byte)), one.most[1]] for one in ranks]
        end = str(Fraction(max(max(one.free, *one.lanes.values()) for one in ranks), self.unit))
        values = [[one.sums for one in row] for row in stages], versions, peaks, end, self._bound(ranks)
        return dict(zip(CLAIMED, values, strict=True))

    def _order(self, runs: object) -> Iterator[int]:
        left = [*map(len, self.programs)]
        for run in _list(runs, "order"):
            rank, number = run if type(run) is list and len(run) == 2 else (-1, 0)
            fits = type(rank) is type(number) is int and 0 <= rank < self.ranks and 1 <= number <= left[rank]
            _require(fits, "order", run, "[rank, number of its next actions]")
            left[rank] -= number
            yield from [rank] * number
        _require(not any(left), "order", f"{sum(left)} actions left out", "all of them")

    def _bound(self, ranks: list[_Rank]) -> list[Any]:
        used = defaultdict[tuple[str, int], list[int]](list)
        for kind, s in {place for one in ranks for place in one.used}:
            used[CROSSES.get(kind, ""), s].append(int(self.costs[kind][s] * self.shortest))
        head, tail, what = [0] * self.stages, [0] * self.stages, "B" if self.backward else "F"
        for (s, t), time in sorted(self.moved["F"].items()):
            head[t] = max(head[t], head[s] + min(used["F", s]) + time)
        for (s, t), time in sorted(self.moved[what].items(), reverse=not self.backward):
            tail[s] = max(tail[s], time + min(used[what, t]) + tail[t])
        parts = list[tuple[int, int, int]]()
        for one in ranks:  # a sum, an update or a weight half may be the last
            before, after = (min(row[s] for _, s in one.used) for row in (head, tail))
            parts.append((before, one.work, after * {kind for kind, _ in one.used}.isdisjoint("GUW")))
        rank = max(range(self.ranks), key=lambda one: sum(parts[one]))
        return [rank, *(str(Fraction(part, self.unit)) for part in parts[rank])]


class _Stage:
    """A stage on a rank: the microbatches that are its `own`; how many units are `left`; which kinds ran `once`.

    - `began`: the version that each microbatch uses; `uses`: how many unfinished units use each; `newest`: the number
      of updates, with the first `applied` of its own microbatches; `kept`, `most`: the versions kept now, at most.
    - `partial`: the microbatches of which some slices have gone forward; `has_total`: whether replicas are summed.
    """

    def __init__(self, job: Job, rank: int, stage: int) -> None:
        first = [route[stage] for route in job.routes].index(rank)
        self.twice = len(job.holders[stage]) > 1
        self.own = range(first, job.count, job.both if self.twice else 1)
        self.began = {i: job.declared[i] for i in self.own} if job.declared else {}
        self.left, self.uses = len(self.own) * job.slices, Counter([*self.began.values()] * job.slices)
        self.gatherings = self.newest = self.partial = self.applied = 0
        self.kept, self.most, self.gathered, self.once = 1, 1, False, set[str]()
        self.terms, self.sums = dict[int, int](), list[list[int]]()
        self.has_total = not (self.twice and job.backward)


class _Rank:
    """A rank, as its program is played: the state of each unit, its time and memory; `lanes` go on beside.

    - `made`: the messages to send, each with its target and arrival; `arrived`: those that are here, with when.
    - `ended`: when the last action beside of a kind ends; `moves`: when which take or free how much memory.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.position, self.free, self.work = job, rank, -1, 0, 0
        self.program, self.states, self.opened = job.programs[rank], dict[Any, str](), list[tuple[int, Step]]()
        self.stages = {s: _Stage(job, rank, s) for s in job.here[rank]}
        self.made, self.arrived, self.waits = dict[Any, tuple[int, int]](), dict[Any, int](), set[Any]()
        self.lanes, self.ended, self.used = dict.fromkeys(LANES.values(), 0), dict[Any, int](), set[tuple[str, int]]()
        self.moves, self.held = list[tuple[int, int, int]](), sum(job.weights[s] for s in self.stages)
        self.most = self.held, 0

    def require(self, holds: bool, got: object, expected: object) -> None:
        """Raise `RefusedError` at the current action unless something holds."""
        if not holds:
            name = "".join(map(str, [*(step[1::-1] + step[2:4] for step in self.program), ("end",)][self.position]))
            _require(False, f"rank {self.rank}, position {self.position}, {name}", got, expected)

    def end(self) -> None:
        """Raise `RefusedError` if anything is missing, or left over."""
        self.position += 1
        for s, stage in self.stages.items():
            whole = not (stage.left or stage.gathered) and stage.applied in (0, len(stage.own)) and stage.has_total
            self.require(whole, f"stage {s}", "all actions, sums and updates of it, and freed weights")
            if not stage.newest:
                for one in self.job.takes.get((False, s, self.rank), ()):
                    self.arrived.pop(one, None)
                stage.sums.append([*stage.terms])
        left = [*self.opened, *self.made, *self.waits, *self.arrived][:1]
        self.require(not left, left, "every message sent, used and waited for")

    def run(self, step: Step) -> None:
        """Run an action, or a pair at its second: it begins when its inputs are there, and gives what it makes."""
        self.opened.append((self.position, step))
        if step.kind == "OVERLAP_F":
            return
        job, pair, self.opened = self.job, self.opened, []
        now = max([self.free, *(time for _, one in pair for time in self._take(one))])
        for at, one in pair:
            kind, s, i, part, _ = one
            start, grows, time = now, self._judge(one) + job.grows[kind][s], job.costs[kind][s]
            if job.factors and kind in LEAVES:
                time = int(time * job.factors[i * job.slices + part])
            if kind not in LANES:
                self.used.add((kind, s))
                self.free = now = start + time
                self.work += time
                while self.moves and self.moves[0][0] <= (start if grows > 0 else now):
                    self._grow(at, heappop(self.moves)[2])
            elif kind != "RESHARD":
                start = max(start, self.lanes[LANES[kind]])
                self.lanes[LANES[kind]] = self.ended[one[:4] if kind in LEAVES else one[:2]] = now = start + time
            if kind in LANES and kind in LEAVES:
                heappush(self.moves, (start if grows > 0 else now, at, grows))
            else:
                self._grow(at, grows)
        for _, one in pair:
            self._give(one, now)

    def _grow(self, position: int, grows: int) -> None:
        self.held += grows
        if self.held > self.most[0]:
            self.most = self.held, position

    def _take(self, step: Step) -> Iterator[int]:
        """Yield when each input of an action is there."""
        kind, s, i, part, _ = step
        what, job = CROSSES.get(kind, ""), self.job
        whole = kind in ("G", "U")
        for q in job.takes.get((kind == "G", s, self.rank) if whole else (what, s, i % job.both), ()):
            one = q if whole else (what, q, i, part, s)
            self.require(one in self.arrived, "no message before it", one)
            yield self.arrived.pop(one)
        for other in AFTER.get(kind, ()) if self.ended else ():
            yield self.ended.get((other, *step[1:4]) if other in LEAVES else (other, s), 0)

    def _give(self, step: Step, end: int) -> None:
        """Make what an action gives: to its own rank at once, else to be sent."""
        kind, s, i, part, _ = step
        what, job, stage = CROSSES.get(kind, ""), self.job, self.stages[s]
        gives = [((what, s, i, part, t), *rest) for t, *rest in job.gives.get((what, s, i % job.both), ())]
        if (job.tied or stage.twice) and not stage.left:
            last = ["REDUCE_GRAD"] if job.reduces else ["G"] if stage.twice else DONE
            gives += job.gives.get((True, s, self.rank), ()) if kind in DONE else ()
            gives += job.gives.get((False, s, self.rank), ()) if kind in last else ()
        for one, there, time in gives:
            if there == self.rank:
                self.arrived[one] = end
            else:
                self.made[one] = there, end + time

    def _judge(self, step: Step) -> int:
        """Raise `RefusedError` unless an action may run now; return by how much memory for weights grows."""
        kind, s, i, _, _ = step
        self.require(self.job.routes[i % self.job.both][s] == self.rank, "an action of another rank", "its own")
        stage = self.stages[s]
        if kind in LEAVES:
            return self._pass(step, stage)
        own, n, whole = stage.own, stage.gatherings, not stage.left and i == stage.own[-1] and self.job.backward
        if kind == "U":
            used, last = stage.applied, own.index(i) + 1
            terms = [j * self.job.slices + k for j in own[used:last] for k in range(self.job.slices)]
            fits = last == len(own) or not (stage.twice or s in self.job.tied or "REDUCE_GRAD" in stage.once)
            fits = fits and stage.has_total and not (stage.gathered or stage.partial)
            fits = fits and used < last and stage.terms.keys() >= {*terms}
            self.require(fits, "it", "one after the gradients that it names, of whole sums, between microbatches")
            stage.sums.append(sorted(terms, key=stage.terms.__getitem__))
            stage.newest, stage.applied = stage.newest + 1, last
        elif kind == "UNSHARD":
            fits = n > 0 or not any((one, s) in self.used for one in LEAVES)
            self.require(fits and not stage.gathered and i == own[0] + n * own.step, "it", "gatherings in order")
        elif kind == "RESHARD":
            self.require(stage.gathered and i == own[0] + (n - 1) * own.step, "it", "the end of a gathering")
        elif kind == "G":
            self.require(whole and not stage.has_total, "it", "one sum of the gradients of replicas")
        else:
            self.require(whole and stage.has_total and not stage.once & {kind, "U"}, "it", "one sum, before an update")
        stage.gathered = kind == "UNSHARD" or (stage.gathered and kind != "RESHARD")
        stage.gatherings, stage.has_total = n + (kind == "UNSHARD"), stage.has_total or kind == "G"
        stage.once.add(kind)
        kept = kind == "U" and stage.uses[stage.newest - 1] > 0
        stage.kept += kept
        stage.most = max(stage.most, stage.kept)
        return self.job.weights[s] * kept

    def _pass(self, step: Step, stage: _Stage) -> int:
        kind, s, i, part, _ = step
        job, states, what = self.job, self.states, CROSSES.get(kind, "")
        state, reads = states.get(step[1:4], ""), what != "" or kind == "R"
        fits = state == NEEDS[kind] and (job.backward or kind in ("F", "OVERLAP_F"))
        self.require(fits and (stage.gathered or not stage.gatherings or not reads), state or "new", "it in order")
        if job.slices > 1 and what:
            first, before = (0, part - 1) if what == "F" else (job.slices - 1, part + 1)
            found = states.get((s, i, before), "")
            self.require(part == first or (found != "" if what == "F" else found in PASSED), "no slice before it", "it")
            stage.partial += (what == "F") * ((part == 0) - (part == job.slices - 1))
        if what == "F":
            if not job.declared:
                stage.began[i] = stage.newest
                stage.uses[stage.newest] += 1
            self.require(stage.began[i] <= stage.newest, "a version of weights", "one that is made")
        states[step[1:4]] = LEAVES[kind]
        if job.backward and LEAVES[kind] != "done":
            return 0
        stage.left -= 1
        if job.backward:
            stage.terms[i * job.slices + part] = len(stage.terms)
        version = stage.began[i]
        stage.uses[version] -= 1
        freed = not stage.uses[version] and version < stage.newest
        stage.kept -= freed
        return -job.weights[s] * freed


def _require(holds: bool, where: str, got: object, expected: object) -> None:
    if not holds:
        shown = ascii(got if isinstance(got, str) else reprlib.repr(got))[1:-1][:120]
        raise RefusedError(f"{where}: got {shown}, expected {expected}.")


def _list(value: object, where: str, length: int | None = None) -> list[Any]:
    fits = isinstance(value, list) and length in (None, len(value))
    _require(fits, where, value, f"a list of {length or 'any length'}")
    return value  # type: ignore[return-value]


def _integers(values: object, where: str) -> list[int]:
    found = _list(values, where)
    _require(all(type(one) is int and 0 <= one <= MOST_ACTIONS for one in found), where, found, "integers above -1")
    return found


def _numbers(values: object, where: str, length: int | None = None) -> list[Fraction]:
    found = _list(values, where, length)
    fits = all(isinstance(one, str) and NUMBER.fullmatch(one) for one in found)
    _require(fits, where, found, 'numbers as texts, such as "3" or "7/2"')
    return [*map(Fraction, found)]


def _common(numbers: Iterable[Fraction]) -> int:
    found = 1
    for number in {one.denominator for one in numbers}:
        found = math.lcm(found, number)
        _require(found < 10**400, "costs", "denominators without a small common multiple", "numbers of one unit")
    return found


def _read(text: str) -> Any:
    if len(text) > 9 or not text.isdecimal():
        raise RefusedError(f"file: got the number {text[:40]}, expected integers, and other numbers as texts.")
    return int(text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    _require(len(found) == len(pairs), "file", "a key twice", "each once")
    return found


def verify(text: str) -> tuple[Job, dict[str, Any]]:
    """Return what a certificate is about, and what it claims, all of which holds; else raise `RefusedError`."""
    try:
        document = json.loads(text, parse_float=_read, parse_constant=_read, parse_int=_read, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"file: got {str(error)[:80]}, expected JSON.") from None
    fits = isinstance(document, dict) and document.keys() == KEYS and document["certificate"] == 2
    _require(fits, "file", document, f"certificate 2, with the keys {sorted(KEYS)}")
    found = (job := Job(document)).claims(document["order"])
    for what, expected in found.items():
        _require(json.dumps(document[what]) == json.dumps(expected), what, document[what], str(expected)[:120])
    return job, found


def main(arguments: list[str]) -> int:
    """Check one file; return the exit code: 0, accepted; 1, refused, as standard error says; 2, no file named."""
    if len(arguments) != 1:
        print("usage: python certificate.py FILE", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    try:
        fits = path.is_file() and path.stat().st_size <= LARGEST
        _require(fits, str(path), "none, or a larger one", f"a file of at most {LARGEST} bytes")
        job, found = verify(path.read_text("utf-8"))
        print(f"accepted: {job.ranks} ranks, {job.count} microbatches, time {found['makespan']}")
    except (RefusedError, OSError, UnicodeDecodeError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
