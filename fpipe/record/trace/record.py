# SPDX-License-Identifier: Apache-2.0
"""The record of a run: the torch calls that it made, and how to compute their values on real tensors.

Torch calls are counted in *ticks*, in the order in which they begin. Those that are inside no other and have an effect
are the *units* of the record. `Facts` says what else is known about a unit.

Problem. A model that runs on fake tensors reads a value, and fake tensors have none.

Idea. The record contains every call that led to the value: its *provenance*. If these read constants alone, run them on
real tensors at once; if they also read the batch, run them on each batch at the start of its step. A value that depends
on parameters, buffers or random numbers cannot be known before the step runs.

Invariant: the same calls run as in the model, in the same order and modes.

Runs when a plan is made; the questions about the batch that it returns are answered at the start of every step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.errors import CaptureError
from fpipe.record.captured import (
    BatchLeaf,
    Buffer,
    Constant,
    Modes,
    Observed,
    Parameter,
    Source,
    Unit,
    Value,
    compose,
    operation_of,
)
from fpipe.record.model.places import advise_on_values
from fpipe.record.questions import GUESSES, Answer, Question, Reply, Sample
from fpipe.record.refusals import foreign_parameter_error
from fpipe.record.trace.draws import Draw, Draws
from fpipe.record.trace.frames import Frame, Invocation, tensors_at
from fpipe.tensors.effects import storage_id
from fpipe.tensors.torch_private import TENSOR_METHODS, DisableTorchFunction, FakeTensor, without_modes

ASKING: tuple[Any, ...] = tuple(TENSOR_METHODS[name].__get__ for name in ("grad_fn", "is_leaf"))
"""The functions that torch calls when a tensor is asked whether it was computed."""
ATTACHING = (
    *(Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_),
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
)
"""Torch functions that change a tensor's place in autograd, and return no new tensor."""


LARGEST_SAMPLE = 2**22
"""The largest number of elements that are computed to answer one question with made-up values."""
GOLDEN = 0.6180339887498949
"""Multiples of this, modulo 1, are spread evenly, and no two of the first ones are equal."""


class KeptError(CaptureError):
    """Raised if a run uses a fake tensor that an earlier run left behind."""


class Values:
    """The tensors of a run, numbered as they appear.

    `sources` are the tensors known before the run; constants are added when the run uses them. `here` returns the
    running module, for errors. Tensors are looked up by `id`; all of them are kept alive, so that ids stay unique.
    """

    def __init__(self, sources: Mapping[Value, tuple[Source, Tensor]], here: Callable[[], str]) -> None:
        self.here = here
        self.sources = {value: source for value, (source, _) in sources.items()}
        self.tensors = {value: tensor for value, (_, tensor) in sources.items()}
        self.known = {id(tensor): value for value, tensor in self.tensors.items()}
        self.storage = {value: storage_id(tensor) for value, tensor in self.tensors.items()}
        self.memories = set(self.storage.values())
        self.earlier: list[Tensor] = []

    def add(self, tensor: Tensor) -> Value:
        """Return the value for a new tensor."""
        value = Value(len(self.tensors))
        with DisableTorchFunction():  # not a call of the model
            storage = storage_id(tensor)
        self.tensors[value], self.storage[value], self.known[id(tensor)] = tensor, storage, value
        self.memories.add(storage)
        return value

    def know(self, tensors: Mapping[Value, Tensor]) -> None:
        """Set the tensors of these values; previous ones still map to the same values."""
        self.earlier += [self.tensors[value] for value in tensors if value in self.tensors]
        with DisableTorchFunction():  # not a call of the model
            storage = {value: storage_id(tensor) for value, tensor in tensors.items()}
        self.tensors.update(tensors)
        self.storage.update(storage)
        self.known.update({id(tensor): value for value, tensor in tensors.items()})
        self.memories.update(storage.values())

    def within(self, tree: Any) -> list[Value]:
        """Return the values of the tensors in a tree, skipping unknown ones."""
        return [self.known[id(tensor)] for tensor in tensors_at(tree).values() if id(tensor) in self.known]

    def read(self, tensor: Tensor) -> Value:
        """Return the value of a tensor that the run uses; add an unknown one as a constant.

        Raise `CaptureError` if it cannot be one.
        """
        if id(tensor) in self.known:
            return self.known[id(tensor)]
        self._require_constant(tensor)
        value = self.add(tensor)
        self.sources[value] = Constant(tensor)
        return value

    def _require_constant(self, tensor: Tensor) -> None:
        if tensor.layout not in (torch.strided, torch.sparse_coo):
            raise CaptureError(
                f"{self.here()}: got a constant of layout {tensor.layout}, expected layout torch.strided or "
                f"{torch.sparse_coo}. Other layouts have no fake tensors. Store what to_sparse_coo() returns."
            )
        if tensor.requires_grad or tensor.device.type == "meta":
            raise foreign_parameter_error(self.here(), tensor.shape)
        if isinstance(tensor, FakeTensor):
            raise KeptError(
                f"{self.here()}: got a tensor of shape {list(tensor.shape)} that an earlier call created and kept "
                "in an attribute or a cache, expected a forward that keeps tensors in buffers only. Make it a buffer, "
                "or fill the cache by calling the model once before the pipeline is built."
            )

    def parameter(self, tensor: Any) -> str:
        """Return the name of the parameter that `tensor` is; empty if it is not one."""
        source = self.sources.get(self.known.get(id(tensor), Value(-1)))
        return source.name if isinstance(source, Parameter) else ""

    def requires_grad(self, values: Iterable[Value]) -> bool:
        """Return whether one of these tensors requires a gradient."""
        return any(self.tensors[value].requires_grad for value in values)


class Facts(NamedTuple):
    """Facts about a unit.

    - `invocation`, `modes`: its function and arguments, and the modes it ran under.
    - `picks`: the leaves of its result that are the values it makes.
    - `ticks`: the range of torch calls that it consists of.
    - `written`: the memory that it modifies in place. `casts`: the values read that it casts to another dtype.
    - `draw`: the tick at which it last draws random numbers; `None` if it does not.
    - `communicates`: whether it exchanges something with other processes.
    """

    invocation: Invocation
    modes: Modes
    picks: tuple[int, ...]
    ticks: tuple[int, int]
    written: frozenset[int]
    casts: frozenset[Value]
    draw: int | None
    communicates: bool


class Constants(NamedTuple):
    """The values of a run that depend on constants alone, and the units that make or change them, in order."""

    values: set[Value]
    units: list[Unit]


class Record:
    """The record of a run, to which a recorder adds until the run is over.

    - `values`: the tensors that its units read and make.
    - `units`: the torch calls, in order; `facts`: what is known about each.
    - `frames`: the outermost frames.
    - `tick`: the number of torch calls so far; `ticks`: the ticks of each function's calls.
    - `draws`: the torch calls that draw random numbers. `replies`: those that read values and were answered, in order.
    - `hooked`: positions of the units before which hooks on saved tensors were installed, as checkpoints do. Not ticks:
      calls between the hooks and the first unit may have left no unit.
    """

    def __init__(self, values: Values, frames: list[Frame]) -> None:
        self.values, self.frames = values, frames
        self.units: list[Unit] = []
        self.facts: dict[Unit, Facts] = {}
        self.tick = 0
        self.ticks = defaultdict[Any, list[int]](list)
        self.draws = Draws()
        self.replies: list[Reply] = []
        self.hooked: list[int] = []

    def add(self, unit: Unit, facts: Facts) -> None:
        """Append a unit and its facts."""
        self.units.append(unit)
        self.facts[unit] = facts

    def count_call(self, function: Any) -> int:
        """Count a call of `function` that begins, and return its tick."""
        tick, self.tick = self.tick, self.tick + 1
        self.ticks[function].append(tick)
        return tick

    def was_answered(self, tick: int) -> bool:
        """Return whether the torch call at `tick` was the last to get an answer."""
        return bool(self.replies) and self.replies[-1].tick == tick

    def units_in(self, frame: Frame) -> list[Unit]:
        """Return the units inside a frame."""
        return self.units[frame.start : frame.stop]

    def is_rerun(self, frame: Frame) -> bool:
        """Return whether a backward reruns the checkpointed function of a frame."""
        return self.values.requires_grad(frame.returned.values())

    def made_since(self, start: int) -> set[Value]:
        """Return the values that units make, from position `start` on."""
        return {value for unit in self.units[start:] for value in unit.makes}

    def existing_at(self, position: int) -> set[Value]:
        """Return the values of the sources and those made before a position."""
        return {*self.values.sources, *(value for unit in self.units[:position] for value in unit.makes)}

    @property
    def written(self) -> frozenset[int]:
        """All memory that units modify in place."""
        return frozenset().union(*(facts.written for facts in self.facts.values()))

    # ------------------------------------------------------------------------------------------- where values come from

    def provenance(self, values: Iterable[Value]) -> Provenance:
        """Return the units and sources that `values` were computed from."""
        storage, sources = self.values.storage, self.values.sources
        needed, used = set(values), list[Unit]()
        memories = {storage[value] for value in needed}
        for unit in reversed(self.units):
            if needed.isdisjoint(unit.makes) and memories.isdisjoint(self.facts[unit].written):
                continue
            used.append(unit)
            needed.update(unit.reads)
            memories.update(storage[value] for value in unit.reads)
        found = {value: sources[value] for value in sorted(needed) if value in sources}
        return Provenance(self, tuple(reversed(used)), found)

    def sample(self, values: Sequence[Value], start: int) -> list[Tensor] | None:
        """Return real tensors for `values`, computed from made-up ones by the units from position `start` on.

        Return `None` if that would take more than `LARGEST_SAMPLE` elements.
        """
        storage, units = self.values.storage, list[Unit]()
        needed, memories = set(values), {self.values.storage[value] for value in values}
        for unit in reversed(self.units[start:]):
            if not (needed.isdisjoint(unit.makes) and memories.isdisjoint(self.facts[unit].written)):
                units.insert(0, unit)
                needed.update(unit.reads)
                memories.update(storage[value] for value in unit.reads)
        made = {value for unit in units for value in unit.makes}
        if sum(self.values.tensors[value].numel() for value in (*needed, *made)) > LARGEST_SAMPLE:
            return None
        inputs = tuple(sorted(needed - made))
        operations = [operation_of(unit)._replace(modes=self.facts[unit].modes) for unit in units]
        run = compose(operations, inputs, tuple(values))
        return [*run(0, *map(self._make_up, inputs))]

    def _make_up(self, value: Value) -> Tensor:
        """Return a real tensor with the metadata of a value: a constant's values, or fractions, or zeros."""
        tensor, source = self.values.tensors[value], self.values.sources.get(value)
        if isinstance(source, Constant):
            return source.tensor.clone()
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        if tensor.dtype is torch.bool:
            return made.fill_(True)
        if not tensor.is_floating_point():
            return made.zero_()
        return made.copy_((torch.arange(1, made.numel() + 1, dtype=torch.float64) * GOLDEN % 1).reshape(made.shape))

    def constants(self) -> Constants:
        """Return the values and units that depend on neither parameters, buffers, the batch nor random numbers."""
        storage = self.values.storage
        constant = {value for value, source in self.values.sources.items() if isinstance(source, Constant)}
        units: list[Unit] = []
        for unit, facts in self.facts.items():
            if facts.draw is None and constant.issuperset(unit.reads):
                constant.update(unit.makes)
                units.append(unit)
            elif facts.written:  # this memory is no longer constant
                constant -= {value for value in constant if storage[value] in facts.written}
        return Constants(constant, units)

    def compute_constant(self, value: Value) -> Tensor:
        """Return the real tensor of a constant value."""
        compute = self.provenance((value,)).function((value,))
        with for_real():
            return compute(())[0]

    def live_units(self, returned: Iterable[Value]) -> list[Unit]:
        """Return, in order, the units on which `returned` values, or the memory of the run's sources, depend.

        Not all are live: a module created in a forward draws its initial weights, which may be overwritten at once. A
        unit that neither makes nor changes anything, such as a check, counts as live because it may raise.
        """
        storage, values = self.values.storage, set(returned)
        memories = {storage[value] for value in (*values, *self.values.sources)}
        found: list[Unit] = []
        for unit in reversed(self.units):
            written = self.facts[unit].written
            if (unit.makes or written) and values.isdisjoint(unit.makes) and memories.isdisjoint(written):
                continue
            found.append(unit)
            values.update(unit.reads)
            memories.update(storage[value] for value in (*unit.reads, *unit.makes))
        return found[::-1]

    # ------------------------------------------------------------------------------------------- once the run is over

    @cached_property
    def rewriters(self) -> Mapping[int, frozenset[int]]:
        """The positions of the units that change buffers, and the memory of those buffers."""
        storage, sources = self.values.storage, self.values.sources
        buffers = {storage[value] for value, source in sources.items() if isinstance(source, Buffer)}
        changed = [self.facts[unit].written & buffers for unit in self.units]
        return {k: memories for k, memories in enumerate(changed) if memories}

    def draws_between(self, first: int, last: int) -> dict[tuple[Any, int], Draw]:
        """Return the draws from tick `first` to `last` (exclusive), by function and its call number in that range.

        Leave out draws from a stream; do not count calls made there.
        """
        return {
            (draw.function, _count_between(self._ticks_outside_streams(draw.function), first, draw.tick)): draw
            for draw in self.draws.outside_streams
            if first <= draw.tick < last
        }

    def draw_counts(self, first: int, last: int) -> dict[Any, int]:
        """Return how often each function that draws there is called from tick `first` to `last`, outside of streams."""
        functions = {draw.function for draw in self.draws_between(first, last).values()}
        return {function: _count_between(self._ticks_outside_streams(function), first, last) for function in functions}

    def _ticks_outside_streams(self, function: Any) -> Sequence[int]:
        ticks = self.ticks[function]
        return [tick for tick in ticks if self.draws.stream_at(tick) is None] if self.draws.streams else ticks

    def answers_between(self, first: int, last: int) -> dict[tuple[Any, int], Answer | Sample]:
        """Return the answers from tick `first` to `last` (exclusive), by function and its call number in that range."""
        return {
            (reply.function, _count_between(self.ticks[reply.function], first, reply.tick)): reply.answer
            for reply in self.replies
            if first <= reply.tick < last
        }

    def observed(self) -> Observed:
        """Return what a capture reports about the units and values of the run."""
        facts, values, labels = self.facts, self.values, self.draws.labels
        return Observed(
            storage=values.storage,
            written={unit: known.written for unit, known in facts.items()},
            random={unit: labels[known.draw] for unit, known in facts.items() if known.draw is not None},
            views=frozenset(value for value, tensor in values.tensors.items() if tensor._is_view()),
            asking=any(self.ticks[function] for function in ASKING),
            undecided=self.draws.stream_devices,
            collective=frozenset(unit for unit, known in facts.items() if known.communicates),
            attached=frozenset(
                v for known in facts.values() if known.invocation.function in ATTACHING for v in known.invocation.reads
            ),
        )


def _count_between(ticks: Sequence[int], first: int, last: int) -> int:
    """Return how many of `ticks` are at least `first` and below `last`."""
    return bisect_left(ticks, last) - bisect_left(ticks, first)


@dataclass(frozen=True)
class Provenance:
    """The units that computed some values, in order, and the sources that they read."""

    record: Record
    units: tuple[Unit, ...]
    sources: Mapping[Value, Source]

    @property
    def leaves(self) -> dict[Value, int]:
        """The batch leaves among the sources: their numbers, by value."""
        return {value: source.leaf for value, source in self.sources.items() if isinstance(source, BatchLeaf)}

    @property
    def obstacle(self) -> str:
        """The name of a dependency that is unknown before the step runs; empty if there is none."""
        for source in self.sources.values():
            if not isinstance(source, BatchLeaf | Constant):
                return f"the {type(source).__name__.lower()} {source.name!r}"
        return "random numbers" if self.is_random else ""

    @property
    def is_random(self) -> bool:
        """True if one of the units draws random numbers."""
        return any(self.record.facts[unit].draw is not None for unit in self.units)

    def function(self, outputs: tuple[Value, ...]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        """Return a function that computes `outputs` from the batch's leaves without modifying them."""
        facts = self.record.facts
        constants = {v: source.tensor for v, source in self.sources.items() if isinstance(source, Constant)}
        inputs = (*self.leaves, *constants)
        run = compose([operation_of(u)._replace(modes=facts[u].modes) for u in self.units], inputs, outputs)
        changed = frozenset().union(*(facts[unit].written for unit in self.units))
        copied = [self.record.values.storage[value] in changed for value in inputs]

        def compute(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
            given = [t.clone() if copy else t for t, copy in zip((*leaves, *constants.values()), copied, strict=True)]
            return run(0, *given)

        return compute

    def question(self, invocation: Invocation, where: str) -> Question:
        """Return the question that a call asks by reading values with this provenance.

        Raise `CaptureError` if it depends on more than constants and the batch.
        """
        return self.ask(invocation.reads, invocation, invocation.function, where)

    def ask(
        self, reads: tuple[Value, ...], call: Callable[[Sequence[Tensor]], Any], function: Any, where: str
    ) -> Question:
        """Return the question that `call`, given the tensors of `reads`, answers; see `question`."""
        asks = f"{where}, {getattr(function, '__name__', function)}"
        if self.obstacle:
            raise CaptureError(
                f"{asks}: got a question about values that depend on {self.obstacle}, expected one that depends only "
                f"on constants or the batch. Other values are not known before the step runs. {advise_on_values(where)}"
            )
        compute_reads = self.function(reads)

        def compute(leaves: Sequence[Tensor]) -> Answer:
            with for_real():
                return Answer.of(call(compute_reads(leaves)))

        return Question(asks, tuple(self.leaves.values()), compute, GUESSES.get(function))


@contextmanager
def for_real() -> Iterator[None]:
    """Run eagerly inside: without recording, gradients or autocast."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        with without_modes(), torch.no_grad():
            yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
