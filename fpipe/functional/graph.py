# SPDX-License-Identifier: Apache-2.0
"""Stages that are pure functions, and the edges between them, as one value that the executor runs.

Problem. Pure functions take and return pytrees; a pipeline must know which of them feeds which.

Idea. A stage says by name what it reads: the batch, the output of an earlier stage, or a member of one. That determines
the stage graph. `fpipe.functional.node` puts the stages into the form that the executor runs.

Runs when stages are connected; `StageRead.select` runs in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple

from fpipe.errors import GraphError, InputError
from fpipe.functional.stage import Stage, specialize, stage
from schedules import Graph

INPUTS, TARGETS, CARRY = "inputs", "targets", "carry"


class StageRead(NamedTuple):
    """A value that a stage reads: the batch's inputs or targets, or an earlier stage's output; all of it, or a member.

    - `source`: the number of the stage, or `"inputs"`, `"targets"` or `"carry"`. `keys`: the way to the member.
    """

    source: int | str
    keys: tuple[str, ...]

    def select(self, tree: Any) -> Any:
        """Return what is read of a tree."""
        return reduce(_member, self.keys, tree)


WHOLE_INPUTS = StageRead(INPUTS, ())
"""The read of all inputs; a tuple of them is passed as several."""
READ_CARRY = StageRead(CARRY, ())
"""The read of what the slice before has left on the same stage."""


def _member(tree: Any, key: str) -> Any:
    if isinstance(tree, Mapping):
        return tree[key] if key in tree else tree[int(key)]
    return tree[int(key)] if isinstance(tree, Sequence) and not hasattr(tree, key) else getattr(tree, key)


@dataclass(frozen=True)
class Stages(Sequence[Stage]):
    """Pure stages and the edges between them, made by `fpipe.connect_stages`. The last one returns the loss.

    - `stages`: in an order in which one device could run them.
    - `names`: the names of the stages. `said`: per stage, what it reads, as written.
    - `reads`: per stage, what it reads, in the order of its inputs; what several read goes from each to the next.
    - `carried`: per stage, its result and its carry among what its function returns; no carry for most.
    - `plans`: what `execute` has computed for programs and shapes.
    """

    stages: tuple[Stage, ...]
    names: tuple[str, ...]
    reads: tuple[tuple[StageRead, ...], ...]
    said: tuple[tuple[str, ...], ...] = ()
    carried: tuple[tuple[StageRead, StageRead | None], ...] = ()
    plans: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def graph(self) -> Graph:
        """The stage graph, for `schedules.lower`: values travel along its edges, and cotangents back."""
        pairs = [(one.source, t) for t, reads in enumerate(self.reads) for one in reads]
        edges = frozenset((s, t) for s, t in pairs if isinstance(s, int))
        return Graph(len(self.stages), values=edges, cotangents=edges, gradients=frozenset())

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, s: Any) -> Any:
        return self.stages[s]

    def __str__(self) -> str:
        rows = zip(self.names, self.said, strict=True)
        return "\n".join(f"stage {s}, {name}: reads {', '.join(said)}" for s, (name, said) in enumerate(rows))


def connect_stages(stages: Sequence[Stage] | Mapping[str, tuple[Stage, Sequence[str]]], targets: bool = True) -> Stages:
    """Return stages with the edges between them.

    - `stages`: a sequence, in which each stage reads all outputs of the previous one; the first reads the inputs, and
      the last one also the targets, unless `targets` is false. Or a dict from names to pairs of a stage and what it
      reads: `"inputs"`, `"targets"`, the name of an earlier stage, or one of their members, such as `"encoder.skip"` or
      `"inputs.0"`. If a stage reads a whole tuple of inputs, it gets them separately.

    A function is made a stage by `fpipe.stage`. Raise `GraphError` for an unknown name.

    >>> import fpipe
    >>> def double(params, inputs):
    ...     return 2 * inputs[0]
    >>> def add(params, inputs):
    ...     left, right = inputs
    ...     return left + right
    >>> print(fpipe.connect_stages({"double": (double, ["inputs"]), "add": (add, ["double", "inputs"])}))
    stage 0, double: reads inputs
    stage 1, add: reads double, inputs
    """
    if not stages:
        raise GraphError("stages: got none, expected at least one. Pass a sequence of stages, or a dict.")
    if isinstance(stages, Mapping):
        rows = {name: (as_stage(one), tuple(reads)) for name, (one, reads) in stages.items()}
    else:
        count, rows = len(stages), {}
        for s, one in enumerate(stages):
            reads = (INPUTS if s == 0 else str(s - 1), *([TARGETS] if targets and s == count - 1 else []))
            rows[str(s)] = as_stage(one), reads
    known: dict[str, int | str] = {INPUTS: INPUTS, TARGETS: TARGETS}
    parsed = list[tuple[StageRead, ...]]()
    for s, (name, (_, reads)) in enumerate(rows.items()):
        found = [_parse(read, known, name) for read in reads]
        parsed.append(tuple([_within_pair(read, rows) for read in found] + [READ_CARRY] * rows[name][0].carries))
        known[name] = s
    *earlier, _ = rows
    used = {one.source for reads in parsed for one in reads}
    for name in earlier:
        if known[name] not in used:
            raise GraphError(
                f"stage {name!r}: got no later stage that reads it, expected one: only the last stage has a result. "
                "Name it in the reads of a later stage, or leave it out."
            )
    said = tuple([tuple(reads) for _, reads in rows.values()])
    return _chain_readers(Stages(tuple([one for one, _ in rows.values()]), tuple(rows), tuple(parsed), said))


def _within_pair(read: StageRead, rows: Mapping[str, tuple[Stage, Sequence[str]]]) -> StageRead:
    """Return where a read finds its value: a stage with a carry returns it as the first of a pair."""
    carries = isinstance(read.source, int) and [*rows.values()][read.source][0].carries
    return read._replace(keys=("0", *read.keys)) if carries else read


def _chain_readers(direct: Stages) -> Stages:
    """Return the same stages, with what several of them read travelling from each reader to the next.

    So what comes back for it is added in the order in which one device adds: a reader adds its own terms to the sum of
    those after it. Reads of a tree and of a member of it are two values, whose sums are added where they were made.
    """
    readers = dict[StageRead, list[int]]()
    for t, reads in enumerate(direct.reads):
        for read in dict.fromkeys(reads):
            readers.setdefault(read, []).extend([t] if isinstance(read.source, int) else [])
    passed = [[r for r in dict.fromkeys(reads) if t in readers[r][:-1]] for t, reads in enumerate(direct.reads)]
    rows, stages = list[tuple[StageRead, ...]](), list[Stage]()
    for t, reads in enumerate(direct.reads):
        rows.append(tuple([_reroute(r, t, readers[r], passed) for r in reads]))
    carried = [_reads_of_own(t, one, bool(passed[t])) for t, one in enumerate(direct.stages)]
    for t, (one, reads) in enumerate(zip(direct.stages, direct.reads, strict=True)):
        passes = tuple([_position(reads, read) for read in passed[t]])
        selects = tuple([read.select for row in (*rows, carried[t][1:]) for read in row if read and read.source == t])
        stages.append(specialize(one, passes, selects if t < len(rows) - 1 else None))
    return replace(direct, stages=tuple(stages), reads=tuple(rows), carried=tuple(carried))


def _reads_of_own(t: int, one: Stage, passes: bool) -> tuple[StageRead, StageRead | None]:
    """Return a stage's result and its carry, if it has one, among what its function returns."""
    keys = ("0",) * passes
    return StageRead(t, (*keys, "0") if one.carries else keys), StageRead(t, (*keys, "1")) if one.carries else None


def _position(reads: Sequence[StageRead], read: StageRead) -> int:
    """Return the position of a read among a stage's inputs, from the end if a tuple of inputs comes before it."""
    k = reads.index(read)
    return k - len(reads) if WHOLE_INPUTS in reads[:k] else k


def _reroute(read: StageRead, reader: int, readers: Sequence[int], passed: Sequence[Sequence[StageRead]]) -> StageRead:
    """Return where a stage reads a value: from the reader before it, or from where it is made."""
    if not isinstance(read.source, int):
        return read
    before = [t for t in readers if t < reader]
    if before:
        return StageRead(before[-1], ("1", str(passed[before[-1]].index(read))))
    return StageRead(read.source, ("0", *read.keys)) if passed[read.source] else read


def as_stage(one: Any) -> Stage:
    """Return a stage as it is, and the stage of a function; raise `InputError` for anything else."""
    if isinstance(one, Stage):
        return one
    if callable(one):
        return stage(one)
    raise InputError(f"stages: got {one!r}, expected a stage or a function. Pass fpipe.stage(forward).")


def _parse(read: str, known: Mapping[str, int | str], reader: str) -> StageRead:
    name, *keys = read.split(".")
    if name not in known:
        raise GraphError(
            f"stage {reader!r}: got a read of {read!r}, expected one of {', '.join(known)}, or a member of it such as "
            f"'{INPUTS}.0'. Name a stage that comes before this one."
        )
    return StageRead(known[name], tuple(keys))
