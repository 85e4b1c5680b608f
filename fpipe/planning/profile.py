# SPDX-License-Identifier: Apache-2.0
"""A profile: what every block of a model costs, and from that what any stages made of them cost.

Problem. A plan compares thousands of ways to cut a model. Each can't be built and measured.

Idea. Measure the blocks between all places where the model may be cut, once. An action of a stage costs a fixed time,
plus the sum over its blocks. What the stage keeps, holds and sends follows from which blocks use which memory
(`fpipe.planning.ranges`).

Invariant: the numbers are finite and not negative, and all blocks that are referred to exist; checked
whenever a profile is made.

Runs on request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.pipelines.description import format_bytes
from fpipe.pipelines.pipeline import Pipeline
from fpipe.planning.blocks import ModelBlock, require_blocks_of, require_same_blocks
from fpipe.planning.documents import Format
from fpipe.planning.ranges import (
    TIMED,
    ActionTimes,
    Arrival,
    Hop,
    Spread,
    count_once,
    sum_blocks,
    sum_crossing,
    sum_entering,
)
from fpipe.tensors.arguments import require_arguments
from fpipe.weights.files import AnyPath
from schedules import Costs, Link, Placement, Sizes, linear
from schedules.errors import printable

INSTANT: Final = Link()
PROFILE_FORMAT: Final = Format("profile", 1, "Profile the model again.")
MOST_BLOCKS: Final = 10_000
"""More blocks than any model has; tables of all their runs would still fit into memory."""
SEPARATOR: Final = "; "
BY_DEVICE: Final = ("device", "times", "fixed", "step", "slices", "link")
"""The fields in which profiles of one model may differ."""
CutPlaces: TypeAlias = Iterable[str | int]
"""Where stages after the first begin: names of module calls, or numbers of blocks, ascending."""


@dataclass(frozen=True, eq=False)
class Ranges:
    """The costs of every contiguous run of blocks as one stage, for searches; tables as in `fpipe.planning.ranges`.

    Each is computed at its first use.
    """

    profile: Profile

    @cached_property
    def sums(self) -> dict[str, Tensor]:
        """Vectors, by kind of action: the time of the first k blocks, without what is fixed."""
        rows = torch.tensor([(0.0,) * len(TIMED), *self.profile.times], dtype=torch.float64)
        return dict(zip(TIMED, rows.cumsum(0).T, strict=True))

    def seconds(self, kind: str) -> Tensor:
        """Return the table of times of an action of this kind."""
        fixed: float = getattr(self.profile.fixed, kind)
        return (self.sums[kind][None, :] - self.sums[kind][:, None] + fixed).triu(1)

    @cached_property
    def activation(self) -> Tensor:
        """The table of bytes that a microbatch holds after a forward."""
        count = len(self.profile.blocks)
        unsaved = sum_entering(self.profile.arrivals, count, unsaved=True)
        return count_once(self.profile.activation, count) + unsaved

    @cached_property
    def residual(self) -> Tensor:
        """The table of bytes that a microbatch holds after the input half of a backward."""
        return count_once(self.profile.residual, len(self.profile.blocks))

    @cached_property
    def inputs(self) -> Tensor:
        """The table of bytes that a microbatch holds after a checkpointed forward."""
        return sum_entering(self.profile.arrivals, len(self.profile.blocks)) + sum_blocks(self.profile.versions)

    @cached_property
    def parameters(self) -> Tensor:
        """The table of bytes of parameters."""
        return count_once(self.profile.parameters, len(self.profile.blocks))

    @cached_property
    def crossing(self) -> tuple[Tensor, Tensor]:
        """Vectors: the bytes of values, and of cotangents, that cross a cut before each block, per microbatch."""
        return sum_crossing(self.profile.hops, len(self.profile.blocks))


@dataclass(frozen=True)
class Profile:
    """The costs of every block of a model, for one microbatch, in seconds and bytes. Made by `fpipe.profile`.

    - `model`, `microbatch`: what was measured, as text; `backward`: how stages are differentiated.
    - `device`: where it was measured, or how it was estimated.
    - `blocks`: the pieces between places where the model may be cut; `times`: those of each block.
    - `fixed`: the time that an action takes in any stage, besides that of its blocks.
    - `step`: the time of a step in one process outside of its actions; 0 if it was not measured.
    - `hops`: what passes between blocks; `arrivals`: what a stage holds of it.
    - `activation`, `residual`: the memory that blocks save in a forward, and keep after the input half of a backward.
    - `versions`: per block, the bytes of the buffers that it modifies; `parameters`: the memory of parameters.
    - `slices`: the seconds that each slice of a microbatch takes in the uncut model; empty for whole microbatches.
    - `link`: the time of transfers between ranks.
    """

    model: str
    microbatch: str
    backward: str
    device: str
    blocks: tuple[ModelBlock, ...]
    times: tuple[ActionTimes, ...]
    fixed: ActionTimes
    step: float
    hops: tuple[Hop, ...]
    activation: tuple[Spread, ...]
    residual: tuple[Spread, ...]
    arrivals: tuple[Arrival, ...]
    versions: tuple[int, ...]
    parameters: tuple[Spread, ...]
    slices: tuple[float, ...] = ()
    link: Link = INSTANT

    def __post_init__(self) -> None:
        PROFILE_FORMAT.require(self)
        _require_existing_blocks(self)

    @cached_property
    def ranges(self) -> Ranges:
        """The costs of every contiguous run of blocks, for searches."""
        return Ranges(self)

    def stages(self, cuts: CutPlaces) -> tuple[tuple[int, int], ...]:
        """Return the blocks of each stage, as numbers of the first and of the one after the last.

        `cuts` are names of module calls at which stages begin, or numbers of blocks. Raise `InputError` for a name that
        is unknown, for places out of order, and for a place where no stage can begin.
        """
        require_arguments(Profile.stages, locals())
        places = [self._block_at(k, cut) for k, cut in enumerate(cuts)]
        ends = [0, *places, len(self.blocks)]
        for k, (start, stop) in enumerate(pairwise(ends)):
            if start >= stop:
                raise InputError(
                    f"cuts[{min(k, len(places) - 1)}]: got block {stop} after block {start}, expected at least one of "
                    f"the {len(self.blocks)} blocks in each stage. Give the cuts in the order of execution."
                )
        return tuple(pairwise(ends))

    def _block_at(self, k: int, cut: str | int) -> int:
        if isinstance(cut, int) and not isinstance(cut, bool):
            if 0 < cut < len(self.blocks):
                return cut
            raise InputError(
                f"cuts[{k}]: got {cut}, expected the number of a block from 1 to {len(self.blocks) - 1}, or the name "
                "of a module at which one begins. print(profile) lists them."
            )
        known = self._names
        if cut not in known:
            raise InputError(
                f"cuts[{k}]: got {cut!r}, expected the number of a block, or the name of a module at which one begins, "
                f"like {list(known)[:8]}. print(profile) lists them."
            )
        return known[cut]

    @cached_property
    def _names(self) -> dict[str | int, int]:
        """The block that begins with each module call, by the name of the call."""
        return {str(mark)[1:-1]: k for k, block in enumerate(self.blocks) for mark in block.marks if not mark.end and k}

    def costs(self, cuts: CutPlaces) -> Costs:
        """Return the costs of the stages that these cuts make, in seconds, for `schedules.simulate`.

        A recomputation costs what a forward does. `comm` is the profile's link with the bytes that each stage sends, or
        0 if the link takes no time.
        """
        stages, link = self.stages(cuts), self.stage_link(cuts)
        found: dict[str, Any] = {
            kind: tuple([float(sums[stop] - sums[start]) + fixed for start, stop in stages])
            for (kind, sums), fixed in zip(self.ranges.sums.items(), self.fixed, strict=True)
        }
        return Costs(**found, comm=0 if self.link == INSTANT else link, slices=self.slices if any(self.slices) else ())

    @property
    def parts(self) -> tuple[float, ...]:
        """The part of the time of a microbatch that each slice takes; 1 for a whole one."""
        whole = sum(self.slices)
        return tuple([one / whole if whole else 1 / len(self.slices) for one in self.slices]) or (1.0,)

    def stage_link(self, cuts: CutPlaces) -> Link:
        """Return the link with the bytes that each stage sends another in one message; of several, the largest."""
        stages = self.stages(cuts)
        starts = [start for start, _ in stages]
        forward, back = defaultdict[tuple[int, int], int](int), defaultdict[tuple[int, int], int](int)
        for hop in self.hops:
            ends = bisect_right(starts, hop.source) - 1, bisect_right(starts, hop.target) - 1
            if ends[0] != ends[1]:
                forward[ends] += hop.forward
                back[ends[::-1]] += hop.back
        largest = [[0] * len(stages), [0] * len(stages)]
        for sizes, sent in zip(largest, (forward, back), strict=True):
            for (sender, _), size in sent.items():
                sizes[sender] = max(sizes[sender], size)
        return replace(self.link, bytes=tuple(largest[0]), back=tuple(largest[1]))

    def sizes(self, cuts: CutPlaces, placement: Placement | None = None) -> Sizes:
        """Return the sizes of the stages that these cuts make, in bytes, for `schedules.simulate`.

        A parameter of several stages on one rank of the `placement` counts once; by default each stage has a rank.
        """
        stages, tables = self.stages(cuts), self.ranges
        activation, inputs, residual = (
            tuple([int(table[stage]) for stage in stages])
            for table in (tables.activation, tables.inputs, tables.residual)
        )
        weight = self._weights(stages, linear(len(stages)) if placement is None else placement)
        return Sizes(activation=activation, inputs=inputs, residual=residual, weight=weight)

    def _weights(self, stages: Sequence[tuple[int, int]], placement: Placement) -> tuple[int, ...]:
        """Return the bytes of each stage's parameters that no earlier stage places on all of its ranks."""
        if not isinstance(placement, Placement) or placement.stages != len(stages):
            got = f"one of {placement.stages} stages" if isinstance(placement, Placement) else type(placement).__name__
            raise InputError(
                f"placement: got {got}, expected {len(stages)}, as the cuts make. Change the cuts, or the schedule."
            )
        weights = [int(self.ranges.parameters[stage]) for stage in stages]
        ranks = [set(placement.replicas(s)) for s in range(len(stages))]
        for size, blocks in (spread for spread in self.parameters if len(spread.blocks) > 1):
            users = [s for s, (start, stop) in enumerate(stages) if any(start <= block < stop for block in blocks)]
            for k, s in enumerate(users):
                if any(ranks[s] <= ranks[earlier] for earlier in users[:k]):
                    weights[s] -= size
        return tuple(weights)

    def require(self, pipe: Pipeline) -> None:
        """Raise `InputError`, naming what differs first, unless this is a profile of the model of `pipe`.

        The example's first microbatch must be like the one that was profiled, too.
        """
        batching = pipe.captures.batchings[True]
        expected = str(batching.split(batching.example)[0])
        if self.microbatch != expected:
            raise InputError(
                f"microbatch: got a profile for {self.microbatch}, expected one for {expected}, as the pipeline cuts "
                "its example. Profile the model for this batch and number of microbatches."
            )
        if len(self.parts) != pipe.captures.slices:
            raise _other_slices("slices", self.parts, range(pipe.captures.slices))
        require_blocks_of(pipe, self.blocks)

    def merge(self, *others: Profile) -> Profile:
        """Return the profile in which each time is the largest of these profiles, and so that of the slowest device.

        A schedule is as fast as its slowest rank, so a plan made for the slowest device is valid for all of them. The
        profiles must be of the same model, cut at the same places. Raise `InputError`, naming what differs first.
        """
        for k, other in enumerate(others):
            _require_same_model(other, self, f"others[{k}]")
            if len(other.slices) != len(self.slices):
                raise _other_slices(f"others[{k}].slices", other.parts, self.parts)
        every = (self, *others)
        return replace(
            self,
            device=SEPARATOR.join(sorted({part for one in every for part in one.device.split(SEPARATOR)})),
            times=tuple(_slowest(rows) for rows in zip(*[one.times for one in every], strict=True)),
            fixed=_slowest([one.fixed for one in every]),
            step=max(one.step for one in every),
            slices=tuple(map(max, zip(*[one.slices for one in every], strict=True))),
            link=_slowest_link([one.link for one in every]),
        )

    def save(self, path: AnyPath) -> None:
        """Write the profile as JSON."""
        PROFILE_FORMAT.save(path, self)

    @classmethod
    def read(cls, path: AnyPath) -> Profile:
        """Return the profile in a file that `save` wrote.

        Raise `InputError`, naming the file and the field, for anything else, such as a block that does not exist.
        """
        found: Profile = PROFILE_FORMAT.load(path, cls)
        return found

    @classmethod
    def parse(cls, text: str) -> Profile:
        """Return the profile in a JSON text."""
        found: Profile = PROFILE_FORMAT.read(text, cls)
        return found

    def __str__(self) -> str:
        return _describe(self)


def _other_slices(where: str, got: Sequence[object], expected: Sequence[object]) -> InputError:
    return InputError(
        f"{where}: got a profile for {len(got)} slices of a microbatch, expected {len(expected)}. Profile the model "
        f"with slices={len(expected)}."
    )


def _require_existing_blocks(profile: Profile) -> None:
    """Raise `InputError` for a number of times other than that of blocks, and for blocks that do not exist."""
    count = len(profile.blocks)
    if not 0 < count <= MOST_BLOCKS:
        raise PROFILE_FORMAT.wrong("blocks", f"{count} of them", f"1 to {MOST_BLOCKS}")
    for name in ("times", "versions"):
        if len(getattr(profile, name)) != count:
            raise PROFILE_FORMAT.wrong(name, f"{len(getattr(profile, name))} entries", f"{count}, one for each block")
    runs = [(f"{name}[{k}]", one[:2]) for name in ("hops", "arrivals") for k, one in enumerate(getattr(profile, name))]
    for name in ("activation", "residual", "parameters"):
        runs += [(f"{name}[{k}].blocks", blocks) for k, (_, blocks) in enumerate(getattr(profile, name))]
    for where, blocks in runs:
        if not blocks or blocks[-1] >= count or any(a >= b for a, b in pairwise(blocks)):
            raise PROFILE_FORMAT.wrong(where, [*blocks], f"ascending numbers of blocks below {count}")
    for k, one in enumerate(profile.arrivals):
        if not one.target <= one.saved <= count:
            raise PROFILE_FORMAT.wrong(
                f"arrivals[{k}].saved", one.saved, f"a number of blocks from {one.target} to {count}"
            )


def _require_same_model(got: Profile, expected: Profile, what: str) -> None:
    """Raise `InputError` unless two profiles are equal in what does not depend on devices."""
    for field in (one.name for one in fields(Profile) if one.name not in BY_DEVICE):
        mine, other = getattr(expected, field), getattr(got, field)
        if field == "blocks":
            require_same_blocks(other, mine, what)
        elif mine != other:
            pair = (other, mine) if isinstance(mine, str) else _first_difference(other, mine)
            raise InputError(
                f"{what}.{field}: got {pair[0]}, expected {pair[1]}, as in the profile that it is merged with. Profile "
                "the same model for the same microbatch on all devices."
            )


def _first_difference(got: Sequence[Any], expected: Sequence[Any]) -> tuple[Any, Any]:
    pairs = (pair for pair in zip(got, expected, strict=False) if pair[0] != pair[1])
    return next(pairs, (f"{len(got)} entries", f"{len(expected)} entries"))


def _slowest(rows: Iterable[ActionTimes]) -> ActionTimes:
    return ActionTimes(*map(max, zip(*rows, strict=True)))


def _slowest_link(links: Sequence[Link]) -> Link:
    """Return a link that is no faster than any of these, between any two ranks."""
    ends = sorted({ends for one in links for ends, _ in one.slow})
    factors = {pair: max(dict(one.slow).get(pair, 1) for one in links) for pair in ends}
    return Link(
        latency=max(one.latency for one in links),
        bandwidth=min(one.bandwidth for one in links),
        slow=tuple((pair, factor) for pair, factor in factors.items() if factor != 1),
    )


HEADER: Final = (
    *("", "block", "operations", *[f"{kind} ms" for kind in TIMED], "keeps", "after I", "parameters"),
    *("crosses", "back"),
)
FIRST, LAST, WIDEST = 30, 5, 44  # rows shown of a long table, and characters of a name


def _describe(profile: Profile) -> str:
    """Return the table of a profile; a long one is cut short in the middle."""
    rows = _rows(profile)
    hidden = len(rows) - FIRST - LAST
    shown = rows if hidden <= 1 else [*rows[:FIRST], ("", f"... {hidden} more"), *rows[-LAST:]]
    fixed = ", ".join(f"{kind} {_ms(time)}" for kind, time in zip(TIMED, profile.fixed, strict=True))
    lines = [
        f"Profile of {profile.model}: {len(profile.blocks)} blocks, differentiated {profile.backward}",
        f"microbatch  {_shorten(profile.microbatch, 84)}",
        f"device      {_shorten(profile.device, 84)}",
        *(
            [f"slices      take {', '.join(f'{part:.0%}' for part in profile.parts)} of the time"]
            if profile.slices
            else []
        ),
        f"an action   takes {fixed} ms, and the sum over the blocks of its stage",
        *([f"a step      takes {_ms(profile.step)} ms besides its actions"] if profile.step else []),
        *([f"a transfer  takes {_describe_link(profile.link)}"] if profile.link != INSTANT else []),
        "",
    ]
    return "\n".join(map(printable, [*lines, *_align([HEADER, *shown, _total(profile)])]))


def _rows(profile: Profile) -> list[tuple[str, ...]]:
    ranges, count = profile.ranges, len(profile.blocks)
    values, cotangents = ranges.crossing
    tables = ranges.activation, ranges.residual, ranges.parameters
    columns = [[table[k, k + 1] for k in range(count)] for table in tables] + [values, cotangents]
    return [
        (
            str(k),
            _shorten(block.name, WIDEST),
            str(block.units),
            *map(_ms, profile.times[k]),
            *[format_bytes(int(column[k])) for column in columns],
        )
        for k, block in enumerate(profile.blocks)
    ]


def _total(profile: Profile) -> tuple[str, ...]:
    """Return the row of the uncut model."""
    ranges, count = profile.ranges, len(profile.blocks)
    times = [_ms(float(ranges.sums[kind][-1])) for kind in TIMED]
    sizes = [int(table[0, count]) for table in (ranges.activation, ranges.residual, ranges.parameters)]
    return ("", "all", str(sum(block.units for block in profile.blocks)), *times, *map(format_bytes, sizes))


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, numbers to the right; a short row lacks its last columns."""
    full = [[*row, *[""] * (len(HEADER) - len(row))] for row in rows]
    wide = [max(map(len, column)) for column in zip(*full, strict=True)]
    return [
        "  ".join(
            f"{cell:<{w}}" if k == 1 else f"{cell:>{w}}" for k, (cell, w) in enumerate(zip(row, wide, strict=True))
        ).rstrip()
        for row in full
    ]


def _describe_link(link: Link) -> str:
    rate = f" and {format_bytes(link.bandwidth)} per second" if link.bandwidth < float("inf") else ""
    slow = (
        f"; {len(link.slow)} pairs of ranks take up to {max(f for _, f in link.slow):.2g} times as long"
        if link.slow
        else ""
    )
    return f"{_ms(link.latency)} ms{rate}{slow}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
