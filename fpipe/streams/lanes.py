# SPDX-License-Identifier: Apache-2.0
"""The work of one rank in a run that never drains: window after window, with the batches and weights that each needs.

Idea. Only so many microbatches are in flight at a time. Each has a slot of a ring, and its slot in place of its number
in actions and messages. So the instructions of a window are linked once, and used again when the ring has gone round.

Runs in every window of a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fpipe.pipelines.inputs import State
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.captured import Tensors
from fpipe.runtime.executor import Inputs, LinkedProgram
from fpipe.runtime.transport import Payload, Transport
from fpipe.streams.batches import BatchQueue
from fpipe.streams.exchanges import SharedGradients
from fpipe.streams.execution import EndlessExecution, WindowLinker
from fpipe.streams.updates import StageUpdates
from schedules.endless import EndlessProgram, Window


class Ring(NamedTuple):
    """Slots for microbatches: those of batch b are in the slots of b modulo `batches`, `each` per batch."""

    batches: int
    each: int

    @classmethod
    def of(cls, program: EndlessProgram) -> Ring:
        """Return a ring in which no two microbatches, or messages of theirs, are in one slot at a time."""
        each, size = program.schedule.microbatches, 1
        for rank in range(program.schedule.ranks):
            for k in range(program.known):
                touched = [action.microbatch // each for action in program.window(rank, k)]
                latest = max(k + program.reach[rank], *touched)  # batches begin as soon as they must be there
                size = max(size, latest - min(touched) + 1)
        return cls(size + -size % program.period, each)

    @property
    def slots(self) -> int:
        """The number of slots."""
        return self.batches * self.each

    def of_batch(self, b: int) -> range:
        """Return the slots of a batch."""
        first = b % self.batches * self.each
        return range(first, first + self.each)

    def place(self, window: Window) -> Window:
        """Return the actions with slots in place of microbatches."""
        return tuple([action._replace(microbatch=action.microbatch % self.slots) for action in window])


class Lane:
    """One rank of a stream, of the copy of the pipeline that the plan is for; `group` executes its collectives.

    - `at`: the window that it runs, or is to run next; `begun`: how many batches it has begun.
    - `batch_in`: the batch whose microbatch is in each slot; `keys`: the random key of each.
    - `losses`: per batch, the loss of each microbatch, and its aux, until somebody takes them.
    """

    def __init__(
        self,
        rank: int,
        plan: StepPlan,
        program: EndlessProgram,
        ring: Ring,
        arrivals: BatchQueue,
        updates: StageUpdates,
        group: Any,
    ) -> None:
        self.rank, self.plan, self.program, self.ring = rank, plan, program, ring
        self.arrivals, self.updates, self.group = arrivals, updates, group
        self.reach = program.reach[rank]
        self.at, self.begun = -1, 0
        self.batch_in = [0] * ring.slots
        self.keys: list[int] = [0] * ring.slots
        self.losses: dict[int, dict[int, Tensors]] = {}
        self.linked: dict[int, LinkedProgram] = {}
        cuts, homes, placement = plan.assemblies, plan.placement.stages_on(rank), program.program.schedule.placement
        self.shared = SharedGradients(plan, program, rank, updates)
        others = self.shared.make_stages(placement.stages_on(rank), self.batch_in.__getitem__)
        uneven = {
            slot: {s: cut.stages[s] for s in homes} | others
            for slot in range(ring.slots)
            if (cut := cuts[slot % ring.each]) is not plan.assembly
        }
        self.linker = WindowLinker(
            {s: plan.assembly.stages[s] for s in homes} | others, placement, uneven, homes, plan.copies.phases
        )
        for k in range(program.known):  # so that all channels have their numbers before any window runs
            last = self.linker.link(ring.place(program.window(rank, k)))
        self.first = last._replace(instructions=())

    @property
    def ahead(self) -> int:
        """The batch that must be there, or be known never to come, before the next window begins."""
        return self.at + 1 + self.reach

    def execute(self, transport: Transport, buffers: State) -> EndlessExecution:
        """Return the execution of this rank, whose stages begin with these buffers."""
        stages = {s: self.plan.assembly.stages[s] for s in self.first.stages}
        own = {s: tuple([buffers[name] for name in stage.buffers]) for s, stage in stages.items()}
        inputs = Inputs(
            params=self.updates.versions.slots(),
            buffers=[own] * self.ring.slots,
            batch=self._feed,
            keys=self.keys,
            deliver=self._deliver,
            update=self._update,
            group=self.group,
        )
        return EndlessExecution(self.rank, self._windows(), self.first, transport, inputs, self.ring.each)

    def has_loss(self, k: int) -> bool:
        """Return whether all microbatches of a batch have delivered."""
        return len(self.losses.get(k, ())) == self.ring.each

    def _windows(self) -> Iterator[LinkedProgram]:
        """Yield the windows, each with the batches it needs in their slots."""
        arrivals = self.arrivals
        while True:
            self.at += 1
            total = arrivals.total
            if total is not None and self.at >= total:
                return
            for b in range(
                self.begun, self.at + self.reach + 1 if total is None else min(total, self.at + self.reach + 1)
            ):
                self._begin(b)
            yield self._link(total)
            arrivals.release((self.plan.copy, self.rank), self.at)

    def _begin(self, b: int) -> None:
        self.begun = b + 1
        keys = self.arrivals.enter(b, self.plan.copy).keys
        for slot, key in zip(self.ring.of_batch(b), keys, strict=True):
            self.batch_in[slot], self.keys[slot] = b, key

    def _link(self, total: int | None) -> LinkedProgram:
        """Return the instructions of the window; those that repeat are linked once per place in the ring."""
        k, known = self.at, self.program.known
        if total is not None and k + self.reach >= total:
            return self.linker.link(self.ring.place(self.program.window(self.rank, k, total)))
        number = k if k < known else known + (k - known) % self.ring.batches
        if number not in self.linked:
            self.linked[number] = self.linker.link(self.ring.place(self.program.window(self.rank, k)))
        return self.linked[number]

    def _feed(self, s: int, slot: int) -> Payload:
        return self.arrivals.enter(self.batch_in[slot], self.plan.copy).rows[slot % self.ring.each][s](
            slot % self.ring.each
        )

    def _deliver(self, slot: int, values: Payload) -> None:
        captured = self.plan.assembly.captured
        kept: tuple[Tensor, ...] = values[: 1 + len(captured.aux)]
        self.losses.setdefault(self.batch_in[slot], {})[slot % self.ring.each] = kept

    def _update(self, s: int, slot: int, grads: dict[int, Any], shared: Mapping[Any, Payload]) -> None:
        """Make a new version of a stage's weights from the gradients of a batch, which are used up."""
        b = self.batch_in[slot]
        total, grads[s] = grads[s], ()
        self.shared.keep(s, b, total)
        self.updates.apply(s, b, total, self.ring.of_batch(b), (b + 1) * self.ring.each)
