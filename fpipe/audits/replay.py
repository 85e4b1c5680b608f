# SPDX-License-Identifier: Apache-2.0
"""Run one action of an execution again, with the same arguments, and compare the bits.

Problem. A handler changes the execution that it runs in: it takes what a forward has saved, and adds to sums in place.
Neither can be done twice.

Idea. What the handlers of a chain of actions are passed is noted as they run: a forward, and for a drawn backward what
follows of its microbatch. To run them again, the same handlers get the same arguments in an execution of their own,
which begins with the same state. The first action of a chain needs nothing that was consumed. Sums are copied before
the drawn action adds to them.

Invariant: an execution that is audited computes what it would without; everything here happens beside it.

Runs in every step that is audited, around the handlers of drawn actions, and where they are run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Final, NamedTuple

from torch import Tensor

from fpipe.audits.audit import FORWARDS
from fpipe.audits.checksum import Checksums, sum_up
from fpipe.errors import CorruptionError
from fpipe.runtime.contract import StageLike
from fpipe.runtime.executor import ActionHandler, Execution, LinkedProgram
from fpipe.runtime.transport import Payload
from fpipe.stages.stage import ModelStage
from schedules import Action

SUMMING: Final = ("B", "W", "G")
"""The kinds of actions that change a sum of gradients."""
REPEATS: Final = 3
"""How often an action is run once more if its second run differs from the first."""


class NotedCall(NamedTuple):
    """A call of a handler: the handler, and its arguments but for the execution."""

    handler: ActionHandler
    action: Action
    stage: StageLike
    arrived: Payload


class Beginning(NamedTuple):
    """The state of a stage and a microbatch before the first action of a chain."""

    params: Any
    buffers: Any
    checkpoint: tuple[Any, Payload] | None

    @classmethod
    def of(cls, run: Execution) -> Beginning:
        """Return the state that an execution has before its current action."""
        s, i = run.unit
        return cls(run.inputs.params[i][s], run.buffers[i][s], run.checkpoints.get((s, i)))


class Replay:
    """A drawn action of one execution: what it takes to run it again, and the checksums of what it made.

    - `drawn`: the action. `calls`: those of its chain so far.
    - `sums`: a copy of the gradients to which it adds. `made`: the checksums of what it made, once it ran.
    - `seconds`: how long the chain took; `noting`: how long it took to note it.
    - `took`: how long it took to run it again; `None` if it was not. `paid`: how much of that was not free.
    """

    def __init__(self, drawn: Action) -> None:
        self.drawn = drawn
        self.calls: list[NotedCall] = []
        self.begin: Beginning | None = None
        self.sums: Any = ()
        self.made: dict[str, Checksums] | None = None
        self.seconds = self.noting = self.paid = 0.0
        self.took: float | None = None

    @property
    def is_ready(self) -> bool:
        """True if the action can be run again, and was not."""
        return self.made is not None and self.took is None

    def before(self, run: Execution, call: NotedCall) -> None:
        """Note a call of the chain, which is about to be made."""
        start = perf_counter()
        self.run, self.unit = run, run.unit  # that of the whole chain
        self.begin = Beginning.of(run) if self.begin is None else self.begin
        self.calls.append(call)
        if call.action == self.drawn and self.drawn.kind in SUMMING:
            self.sums = copy_tensors(run.grads[self.drawn.stage])
        self.noting += perf_counter() - start

    def after(self, run: Execution, action: Action, values: Payload, seconds: float) -> None:
        """Note what a call of the chain has made, and how long it took."""
        self.seconds += seconds
        if action == self.drawn:
            start = perf_counter()
            self.made = self._sum_up_made(run, values)
            self.noting += perf_counter() - start

    def compare(self, free: float) -> float:
        """Run the action again, with `free` seconds that cost nothing; return how many it took.

        Raise `CorruptionError` unless it makes the same bits.
        """
        start = perf_counter()
        again = self._make_again()
        if again != self.made:
            self._raise_difference(again)
        self.took = perf_counter() - start
        self.paid = max(0.0, self.took - max(0.0, free))
        self.drop()
        return self.took

    def drop(self) -> None:
        """Drop everything that is held to run the action again."""
        self.calls, self.begin, self.sums = [], None, ()
        vars(self).pop("run", None)

    def _make_again(self) -> dict[str, Checksums]:
        """Return the checksums of what the action makes when it is run again."""
        assert self.begin is not None, "the chain was noted"
        (s, i), (params, buffers, checkpoint) = self.unit, self.begin
        inputs = self.run.inputs._replace(
            params=[{s: params}] * (i + 1), buffers=[{s: buffers}] * (i + 1), deliver=_drop_results, onto={}
        )
        shadow = Execution(self.run.rank, LinkedProgram((s,), (), ()), self.run.transport, inputs)
        shadow.unit = self.unit
        shadow.grads[s] = copy_tensors(self.sums)
        if checkpoint is not None:
            shadow.checkpoints[s, i] = checkpoint
        values: Payload = ()
        for handler, action, stage, arrived in self.calls:
            values = handler(shadow, action, stage, arrived)
        return self._sum_up_made(shadow, values)

    def _sum_up_made(self, run: Execution, values: Payload) -> dict[str, Checksums]:
        """Return the checksums of what the drawn action has left in an execution, and of what it returned."""
        assert self.begin is not None, "the chain was noted"
        kind, (s, i) = self.drawn.kind, self.unit
        made = {"outgoing value": sum_up(values)}
        if kind in FORWARDS:
            # Buffers that it passes on as they are were not made by it.
            pairs = zip(run.buffers[i][s], self.begin.buffers, strict=True)
            made["buffer"] = sum_up([new for new, old in pairs if new is not old])
        elif kind in SUMMING:
            made["sum of gradients"] = sum_up(run.grads[s])
        else:
            made["tensor for the weight half"] = sum_up(run.deferred.get((s, i)))
        return made

    def _raise_difference(self, again: Mapping[str, Checksums]) -> None:
        """Raise `CorruptionError`: say which run was wrong, as far as more runs can tell."""
        assert self.made is not None, "the action ran"
        where = f"rank {self.run.rank}, {self.drawn}, stage {self.drawn.stage}, microbatch {self.drawn.microbatch}"
        others = [self._make_again() for _ in range(REPEATS)]
        what = ", ".join(self._name(*one) for one in find_differences(self.made, again))
        raise CorruptionError(
            self.run.rank,
            self.drawn,
            f"{where}: got other bits in {what} from a second run with the same arguments, expected the same. "
            f"{explain(self.made, again, others)} Discard the results of this step, and resume from a "
            "checkpoint before it.",
        )

    def _name(self, kind: str, k: int) -> str:
        """Return what differs as text: a gradient by the name of its parameter."""
        stage = self.calls[-1].stage
        if kind != "sum of gradients" or not isinstance(stage, ModelStage):
            return f"{kind} {k}"
        names = [name for name, one in zip(stage.grads, self.sums or stage.totals, strict=True) if one is not None]
        return f"the gradient of {names[k]!r}" if k < len(names) else f"{kind} {k}"


def explain(
    first: Mapping[str, Checksums], second: Mapping[str, Checksums], others: Sequence[Mapping[str, Checksums]]
) -> str:
    """Return which of two runs was wrong, given more of them.

    >>> right, wrong, other = {"sum": (1,)}, {"sum": (2,)}, {"sum": (3,)}
    >>> explain(wrong, right, [right] * 3)[:46]
    'All later runs agree, so the first was wrong: '
    >>> explain(right, wrong, [right] * 3)[:61]
    'All other runs agree with the first, so the second was wrong:'
    >>> explain(right, wrong, [other, right, wrong])[:38]
    'More runs differ from one another, too'
    """
    if all(one == first for one in others):
        return "All other runs agree with the first, so the second was wrong: a fault of this processor or its memory."
    if all(one == second for one in others):
        return (
            "All later runs agree, so the first was wrong: a fault of this processor, or of memory: in what the run "
            "made, in what its forward had saved, or since then in its arguments, weights included."
        )
    return (
        "More runs differ from one another, too: an operator of the stage is not deterministic, or this machine fails "
        "often. Call torch.use_deterministic_algorithms(True) to tell: it refuses operators that are not."
    )


def find_differences(a: Mapping[str, Checksums], b: Mapping[str, Checksums]) -> list[tuple[str, int]]:
    """Return where checksums differ: what kind of tensor, and its number.

    >>> find_differences({"buffer": (1, 2), "sum": ()}, {"buffer": (1, 3), "sum": (4,)})
    [('buffer', 1), ('sum', 0)]
    """
    found = []
    for kind, first in a.items():
        second = b[kind]
        pairs = range(max(len(first), len(second)))
        found += [(kind, k) for k in pairs if first[k : k + 1] != second[k : k + 1]]
    return found


def copy_tensors(value: Any) -> Any:
    """Return a tuple with copies of the tensors in it; other values are returned as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return tuple([copy_tensors(one) for one in value]) if isinstance(value, tuple) else value


def _drop_results(microbatch: int, values: Payload) -> None:
    """Drop what leaves the pipeline: it did so the first time."""
