# SPDX-License-Identifier: Apache-2.0
"""The audit that a user asks for, the reruns that it reports, and the draw of the actions.

Idea. An action is drawn by a key: (seed, number of the step, copy, rank). So what is drawn depends neither on time nor
on what other ranks do, and every rank draws by itself, without a message.

Invariant: each of a rank's actions that can be run again is drawn with the same probability.

Runs in every step that is audited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple

from fpipe.errors import InputError
from fpipe.runtime.executor import LinkedProgram
from fpipe.tensors.arguments import require_arguments
from schedules import Action

FORWARDS: Final = ("F", "OVERLAP_F", "C")
BACKWARDS: Final = ("B", "I", "W")
CHAINED: Final = ("F", "OVERLAP_F", "R", *BACKWARDS)
DRAWN_KINDS: Final = (*FORWARDS, *BACKWARDS, "G")
"""The kinds of actions that are drawn. What an `R` makes is seen by the backward that uses it."""


class Rerun(NamedTuple):
    """A drawn action, and whether it was run again.

    - `number`: the number of the step, from 0, among those of the function that `value_and_grad` returned.
    - `rank`, `action`: the action that was drawn.
    - `seconds`: how long it took to run it again; `None` if it was not, since there was no time.
    - `added`: by how many seconds this may have made the step longer: to note what it takes, and to run it again where
      the rank was not idle.
    """

    number: int
    rank: int
    action: Action
    seconds: float | None
    added: float


@dataclass(frozen=True)
class Audit:
    """Run drawn actions of each step again, with the same arguments, and compare the bits of what they made.

    - `draws`: how many actions each rank draws in a step. All of their arguments are held until they are run again.
    - `allowance`: the share of the time of all steps that this may add to them, for all ranks together. An action is
      run again where a rank would wait for at least as long, which is free. If there is no such place before the step
      ends, it is run again then, as far as the allowance goes; else it is dropped. With `float("inf")`, none is.
    - `seed`: draws other actions.
    - `report`: is called with a `Rerun` for each drawn action of this process, at the end of the step.

    >>> import torch, fpipe
    >>> from schedules import one_f_one_b
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    >>> x, y, told = torch.randn(6, 4), torch.randn(6, 1), []
    >>> pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=torch.nn.functional.mse_loss,
    ...                       schedule=one_f_one_b(ranks=2, microbatches=3))
    >>> step = fpipe.value_and_grad(pipe, audit=fpipe.Audit(allowance=float("inf"), report=told.append))
    >>> out, grads = step(*pipe.init(model), (x,), y)
    >>> [(one.rank, str(one.action), one.seconds is not None) for one in told]
    [(0, '0B0', True), (1, '1F2', True)]
    """

    draws: int = 1
    allowance: float = 0.01
    seed: int = 0
    report: Callable[[Rerun], None] | None = None

    def __post_init__(self) -> None:
        require_arguments(Audit.__init__, vars(self))
        if self.draws < 1:
            raise InputError(f"draws: got {self.draws!r}, expected an integer of at least 1. Pass Audit(draws=1).")
        if self.allowance <= 0:
            raise InputError(
                f"allowance: got {self.allowance!r}, expected a number above 0, the share of time that an audit may "
                "add. Pass Audit(allowance=0.01); to audit nothing, audit=None."
            )

    def draw(self, number: int, copy: int, rank: int, drawable: list[int]) -> list[int]:
        """Return the drawn ones among some positions, in order, in step `number` of a rank of a copy."""
        drawn = Random(f"{self.seed}/{number}/{copy}/{rank}").sample(drawable, min(self.draws, len(drawable)))
        return sorted(drawn)


def list_drawable(program: LinkedProgram) -> list[int]:
    """Return the positions of the instructions whose actions can be drawn."""
    return [k for k, one in enumerate(program.instructions) if one.action.kind in DRAWN_KINDS]


def find_chain(program: LinkedProgram, drawn: int) -> list[int]:
    """Return the positions of the instructions to run again, in order, for the drawn one, which is the last.

    A backward consumes what its forward saved, so the forward is run again, too, or the recomputation if there is one:
    then the forward saved nothing.
    """
    last = program.instructions[drawn].action
    if last.kind not in BACKWARDS:
        return [drawn]
    before = enumerate(program.instructions[: drawn + 1])
    return [k for k, (_, a, *_) in before if a.kind in CHAINED and a._replace(kind=last.kind) == last]
