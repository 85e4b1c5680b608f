# SPDX-License-Identifier: Apache-2.0
"""Run a program that comes in pieces and may never end: the executor of a step, with sums of gradients per batch.

Runs in every window of a stream.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fpipe.runtime.contract import StageLike
from fpipe.runtime.executor import ActionHandler, Execution, Inputs, LinkedProgram, Milestone, Outcome
from fpipe.runtime.handlers import HANDLERS, TAKERS
from fpipe.runtime.instructions import Linker, PostedCollectives
from fpipe.runtime.transport import Payload, Transport
from fpipe.streams.exchanges import forward
from schedules import Action, Placement


class EndlessExecution(Execution):
    """One rank's run of a program that comes in pieces, until there are no more; after each, it yields a `Milestone`.

    State, messages on their way among them, goes on from piece to piece. Every `each` microbatches have sums of
    gradients of their own.
    """

    def __init__(
        self,
        rank: int,
        pieces: Iterator[LinkedProgram],
        first: LinkedProgram,
        transport: Transport,
        inputs: Inputs,
        each: int,
    ) -> None:
        super().__init__(rank, first, transport, inputs)
        self.pieces, self.each = pieces, each
        self.sums: dict[tuple[int, int], Any] = {}

    def run(self) -> Generator[Any, None, Outcome]:
        """Interpret all pieces: yield what `Execution.run` yields, and milestones; return the outcome."""
        for piece in self.pieces:
            self.program = piece
            yield from super().run()
            yield Milestone()
        return Outcome(self.buffers, self.grads, self.shared, self.results, self.updates)


def _in_batch(handler: ActionHandler) -> ActionHandler:
    """Return the handler for an execution that never ends: it adds to, or uses, the sum of its own batch."""

    def handle(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
        assert isinstance(run, EndlessExecution), "a program without an end"
        s, batch = action.stage, action.microbatch // run.each
        run.grads[s] = run.sums.pop((s, batch), ())
        values = handler(run, action, stage, arrived)
        run.sums[s, batch] = run.grads[s]
        return values

    return handle


TAKE_REDUCED = _in_batch(TAKERS["REDUCE_GRAD"])
ENDLESS_HANDLERS: Mapping[str, ActionHandler] = MappingProxyType(
    {**HANDLERS, "F": forward} | {kind: _in_batch(HANDLERS[kind]) for kind in ("B", "W", "REDUCE_GRAD", "U")}
)
"""The handlers of a program without an end, in which backwards of a batch may come before the update of the last."""


class WindowLinker:
    """Links pieces of a program that never ends: the same message has the same number in all of them.

    - `stages`, `placement`, `uneven`: as in `fpipe.runtime.instructions.link`; `held`: the stages of the model among
      them; `phases`: the messages that a reduction takes. Whatever is reduced is used at once, by an update.
    """

    def __init__(
        self,
        stages: Mapping[int, StageLike],
        placement: Placement,
        uneven: Mapping[int, Mapping[int, StageLike]],
        held: Sequence[int],
        phases: int,
    ) -> None:
        self.stages = tuple(held)
        self.linker = Linker(stages, placement, uneven, PostedCollectives(phases), ENDLESS_HANDLERS)

    def link(self, actions: Iterable[Action]) -> LinkedProgram:
        """Return one piece, linked; its channels are all of those so far."""
        taker = TAKERS["REDUCE_GRAD"]
        program = [
            one._replace(handler=TAKE_REDUCED) if one.handler is taker else one for one in self.linker.program(actions)
        ]
        return LinkedProgram(self.stages, tuple(self.linker.channels), tuple(program))
