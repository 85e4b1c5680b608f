# SPDX-License-Identifier: Apache-2.0
"""A pipeline as text: stages, their modules and parameters, what crosses each cut or is computed instead, and ties.

The text stays readable for big models: consecutive numbered modules are one entry (`blocks.0-11`), and long lists are
truncated with a count.

Runs when a pipeline is printed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from textwrap import wrap

from torch import nn

from fpipe.cutting.calls import Calls, call_name, outermost
from fpipe.record.captured import Call
from fpipe.runtime.contract import StageCrossing
from fpipe.runtime.transport import Route
from fpipe.stages.assembly import Assembly
from fpipe.stages.backends import AS_GRAPH_REMARK, splits
from fpipe.stages.stage import ModelStage
from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import first_names
from schedules import Schedule, Sizes
from schedules.errors import printable
from schedules.playing.costs import of_stage

COLUMNS = 98
MOST_LINES = 12
LONGEST = 200
"""Characters of a schedule that are shown."""
PER_END = 90  # MiB of device memory that NCCL holds on a rank for each channel, as measured
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def describe(
    assembly: Assembly,
    model: nn.Module,
    schedule: Schedule,
    sizes: Sizes,
    leaf_name: Callable[[int], str],
    channels: Collection[Route],
) -> str:
    """Return a description of the stages of `model`, their ranks, and how the schedule splits their backwards.

    `sizes` has the bytes that a microbatch holds on each stage; `leaf_name` returns the name of a leaf of the batch;
    `channels` are those of the program.
    """
    split = splits(schedule)
    held = _describe_leaves(assembly.parameters, assembly.parameters, assembly.captured.trainable, "parameter")
    shown = _StageText(assembly, Calls.of(assembly.captured, model), leaf_name)
    lines = [f"{_count(len(assembly.stages), 'stage')}, {held}", *filter(None, [describe_channels(channels)])]
    for stage in assembly.stages:
        ranks = schedule.placement.replicas(stage.index)
        lines += ["", f"stage {stage.index} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"]
        lines += [
            f"  {line}"
            for line in (*shown.stage(stage), _describe_memory(stage, sizes, split), *_describe_backward(stage, split))
        ]
    tied = _shorten(list(_tied_lines(assembly.stages, model)), "... {} more")
    lines += ["", "tied parameters"] if tied else []
    return "\n".join(map(printable, [*lines, *[line for one in tied for line in _wrap_lines(one, "  ", "    ")]]))


class _StageText:
    """The text about each stage of an assembly, with the module calls that are entirely within it."""

    def __init__(self, assembly: Assembly, calls: Calls, leaf_name: Callable[[int], str]) -> None:
        self.assembly, self.leaf_name = assembly, leaf_name
        bounds = pairwise([0, *assembly.partition, len(assembly.captured.units)])
        self.whole = [outermost(c for c in calls.listed if a <= c.start and c.stop <= b) for a, b in bounds]
        self.present = [frozenset(section.units) for section in assembly.sections]
        self.label = {call: call_name(call.path, ordinal) for call, ordinal in calls.ordinals()}
        self.makers = {value: k for k, unit in enumerate(assembly.captured.units) for value in unit.makes}

    def stage(self, stage: ModelStage) -> Iterator[str]:
        """Yield lines about what one stage runs, holds, outputs and receives."""
        assembly, names = self.assembly, (*stage.parameters, *stage.unused)
        yield from _wrap("modules     ", [*self._modules(stage.index), *self._others(stage.index)])
        yield f"parameters  {_describe_leaves(names, assembly.parameters, assembly.captured.trainable, '')}"
        yield from _shorten(list(self._python(stage.index)), "              ... {} more")
        buffers = [name for name in (*stage.buffers, *stage.unused) if name in assembly.buffers]
        if buffers:
            yield f"buffers     {len(buffers)} ({_size(assembly.buffers[name] for name in buffers)})"
        yield from _wrap("reads       ", list(map(self.leaf_name, stage.batch))) if stage.batch else []
        yield from _computed_lines(stage, self.leaf_name)
        for given in stage.gives:
            back = [spec for other in stage.pulled_by if other.source == given.target for spec in other.specs]
            cotangents = f"{_size(back)} of cotangents back" if back else "no cotangents back"
            # Of slices, the first one is described; what it passes to its own stage is the carry.
            to = "the next slice" if given.target == stage.index else f"stage {given.target}"
            yield f"outputs     to {to}: {_size(given.specs)} per microbatch, {cotangents}"
            yield from _shorten(list(self._values(given)), "              ... {} more")
        targets = {given.target for given in stage.gives}
        for pulled in stage.pulled_by:
            if pulled.source not in targets:
                yield f"receives    from stage {pulled.source}: {_size(pulled.specs)} of cotangents per microbatch"

    def _modules(self, s: int) -> list[str]:
        """Return the names of a stage's modules, with consecutive numbers merged."""
        runs: list[tuple[str, str, str]] = []
        for call in self._calls(s):
            path, _, last = self.label[call].rpartition(".")
            if runs and runs[-1][0] == path and last.isdecimal() and runs[-1][2] == str(int(last) - 1):
                runs[-1] = (path, runs[-1][1], last)
            else:
                runs.append((path, last, last))
        ends = [(path, first if first == last else f"{first}-{last}") for path, first, last in runs]
        found = [f"{path}.{end}" if path else end or "the whole model" for path, end in ends]
        return _shorten(found, "... {} more")

    def _python(self, s: int) -> Iterator[str]:
        """Yield lines about the calls that a step makes as Python, each with the reason."""
        calls = [call for call in self.assembly.captured.calls if call.python]
        units = self.assembly.captured.units
        for call in outermost(call for call in calls if self.present[s].issuperset(units[call.start : call.stop])):
            yield f"as Python   {call.path or 'the whole model'} ({call.kind.__name__}): {call.python}"

    def _others(self, s: int) -> list[str]:
        """Return the number of operations that a stage runs outside these modules, as text."""
        others = len(self.present[s]) - sum(call.stop - call.start for call in self._calls(s))
        return [_count(others, "other operation")] if others else []

    def _calls(self, s: int) -> list[Call]:
        """Return the calls within a stage that run for each microbatch."""
        units = self.assembly.captured.units
        return [call for call in self.whole[s] if self.present[s].issuperset(units[call.start : call.stop])]

    def _values(self, given: StageCrossing) -> Iterator[str]:
        wide = max(len(str(spec)) for spec in given.specs)
        for spec, value in zip(given.specs, given.values, strict=True):
            yield f"              {spec!s:{wide}}  from {self._origin(self.makers[value])}"

    def _origin(self, k: int) -> str:
        """Return the module in which unit `k` runs, as shown in the unit's stage."""
        inside = [call for calls in self.whole for call in calls if call.start <= k < call.stop]
        path = self.label[inside[0]] if inside else self.assembly.captured.units[k].path
        return path or "the model itself"


def _computed_lines(stage: ModelStage, leaf_name: Callable[[int], str]) -> Iterator[str]:
    """Yield lines about what a stage computes before its forwards, where from, and how often."""
    prologue = stage.prologue
    often = ["once a step" if k in prologue.kept else "per microbatch" for k in range(len(prologue.specs))]
    sizes = [
        f"{_size(spec for spec, one in zip(prologue.specs, often, strict=True) if one == how)} {how}"
        for how in dict.fromkeys(sorted(often))
    ]
    read = [leaf_name(stage.batch[k]) for k in prologue.reads]
    source = f", from {', '.join(read)}" if read else ""
    yield from [f"computes    {', '.join(sizes)}{source}"] if sizes else []
    wide = max((len(str(spec)) for spec in prologue.specs), default=0)
    found = [
        f"              {spec!s:{wide}}  as in {place}, {how}"
        for spec, place, how in zip(prologue.specs, prologue.places, often, strict=True)
    ]
    yield from _shorten(found, "              ... {} more")


def name_schedule(schedule: Schedule) -> str:
    """Return the call that makes a schedule, or for an order without a short name, its sizes.

    >>> from schedules import gpipe
    >>> name_schedule(gpipe(2, 4))
    'gpipe(ranks=2, microbatches=4)'
    """
    text = repr(schedule)
    if len(text) <= LONGEST:
        return text
    return f"a custom order ({schedule.stages} stages, {schedule.microbatches} microbatches)"


def describe_channels(channels: Collection[Route]) -> str:
    """Return how many channels there are between ranks, and on the rank that has most; empty if there are none."""
    if not channels:
        return ""
    most = max(Counter(rank for route in channels for rank in route).values())
    held = f"at most {most} on one rank, each a process group, with NCCL some {PER_END * most} MiB there"
    return f"{_count(len(channels), 'channel')} between ranks, {held}"


def _describe_memory(stage: ModelStage, sizes: Sizes, split: bool) -> str:
    """Return the line about the memory held after a forward, and between the halves of a backward."""
    activation, residual = of_stage(sizes.activation, stage.index), of_stage(sizes.residual or 0, stage.index)
    halved = f", {format_bytes(residual)} for the weight half of its backward" if split else ""
    return f"keeps       {format_bytes(activation)} per microbatch{halved}"


def _describe_backward(stage: ModelStage, split: bool) -> Iterator[str]:
    """Yield the remark on how the stage is differentiated, if any, and the gradients that can't be deferred."""
    if stage.functions.remark not in ("", AS_GRAPH_REMARK):
        yield from _wrap_lines(stage.functions.remark, "backward    ", " " * 12)
    if not split:
        return
    for why in dict.fromkeys(stage.undeferred.values()):
        names = [name for name, reason in stage.undeferred.items() if reason == why]
        yield from _wrap_lines(f"{', '.join(_shorten(names, '{} more', 3))}: {why}", "undeferred  ", " " * 12)


def _describe_leaves(names: Iterable[str], specs: Mapping[str, Spec], trainable: frozenset[str], noun: str) -> str:
    """Return the number of elements of the leaves in `specs`, their size, and whether they are trained."""
    held = {name: specs[name] for name in names if name in specs}
    total = sum(prod(spec.shape) for spec in held.values())
    trained = sum(prod(spec.shape) for name, spec in held.items() if name in trainable)
    which = "all trainable" if trained == total else f"{trained:,} trainable" if trained else "all frozen"
    number = _count(total, noun) if noun else f"{total:,}"
    return f"{number} ({_size(held.values())}), {which}" if total else f"no {noun}s" if noun else "none"


def _tied_lines(stages: Sequence[ModelStage], model: nn.Module) -> Iterator[str]:
    """Yield a line for each parameter with several names or stages: these, and the owner of its gradient."""
    known: dict[str, list[str]] = {}
    for name, first in first_names(model, "parameters").items():
        known.setdefault(first, []).append(name)
    for first, all_names in known.items():
        users = [stage.index for stage in stages if first in stage.parameters]
        owners = [stage.index for stage in stages if first in stage.grads]
        if len(all_names) > 1 or len(users) > 1:
            yield f"{' = '.join(_shorten(all_names, '{} more names', 3))}: {_describe_users(users, owners)}"


def _describe_users(users: Sequence[int], owners: Sequence[int]) -> str:
    if len(users) < 2:
        return f"stage {users[0]}" if users else "read by no stage"
    stages = f"stages {', '.join(map(str, users))}"
    if len(owners) > 1:
        return f"{stages}, gradients summed once a step"
    return f"{stages}, owned by stage {owners[0]}" if owners else stages


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _size(specs: Iterable[Spec]) -> str:
    """Return the size of tensors as stored or sent, as text; an expanded dimension counts once."""
    return format_bytes(sum(spec.dtype.itemsize * prod(_stored_sizes(spec)) for spec in specs))


def format_bytes(size: float) -> str:
    """Return a number of bytes as text.

    >>> format_bytes(512), format_bytes(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    power = next(k for k in range(5) if size < 1024 ** (k + 1) or k == 4)
    return f"{size / 1024**power:,.1f} {BYTE_UNITS[power]}" if power else f"{size} B"


def _stored_sizes(spec: Spec) -> Iterator[int]:
    return (size if stride else min(1, size) for size, stride in zip(spec.shape, spec.stride, strict=True))


def _shorten(lines: Sequence[str], rest: str, most: int = MOST_LINES) -> list[str]:
    """Return the first `most` lines, and a last one that counts the rest."""
    return list(lines) if len(lines) <= most + 1 else [*lines[:most], rest.format(len(lines) - most)]


def _wrap(title: str, entries: Sequence[str]) -> list[str]:
    """Return the entries, separated by commas, in as many lines as they need."""
    words = ", ".join(entry.replace(" ", "\0") for entry in entries)
    return [line.replace("\0", " ") for line in _wrap_lines(words, title, " " * len(title))]


def _wrap_lines(text: str, first: str, rest: str) -> list[str]:
    """Return `text` in lines that begin with `first`, then `rest`, broken at spaces only."""
    return wrap(
        text, COLUMNS, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
