# SPDX-License-Identifier: Apache-2.0
"""Prove a pipeline equal to one device for every input: compare what is computed, not the bits that come out.

`fpipe.verify` runs a step three ways and compares bits, which shows something about one batch. Here the same three run,
and beside every tensor its expression (`fpipe.verification.expressions`): which operators made it, of which inputs, in
which order. Equal expressions are equal bits for all parameters and batches of these shapes.

Runs when `prove` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import optree
import torch
from torch import Tensor, nn

from fpipe.errors import InputError
from fpipe.pipelines.handshake import call_together
from fpipe.pipelines.inputs import State
from fpipe.pipelines.modes import postpone_collection, suspend_autocast
from fpipe.pipelines.pipeline import Pipeline
from fpipe.record.front_ends.parts import as_module
from fpipe.tensors.placed import require_plain
from fpipe.tensors.torch_private import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from fpipe.verification.comparison import Results, list_pairs
from fpipe.verification.expressions import Expressions
from fpipe.verification.stand_ins import has_no_values, make_stand_ins
from fpipe.verification.verify import Trial, read_state, verify_steps
from schedules.proof.interpreter import prove as prove_program
from schedules.status import showing

NOISE: Final = 2.0**-10
ASSUMED: Final = (
    "operators are functions of their arguments, of torch's settings, and of the generator's state where they draw",
    "the batch decides nothing but through operators: shapes, numbers and branches are those of this batch",
    "equal parts of the batch, and equal integer buffers, are not told apart; parameters and other buffers are",
    "a message arrives as it was sent, and in every order of arrival the program's order of actions on a rank is kept",
)


@dataclass(frozen=True)
class Proof:
    """The results of a step of a pipeline that are proved, and those that could not be.

    - `reference`, `eager`: the leaves (loss, outputs, gradients, buffers) that are the same expression as in the loop
      on one device over the captured model, and over the user's own module; none there if random numbers are drawn.
    - `unproved`: per leaf, against which of them, and the operators at which the expressions differ. That is no proof
      that bits differ.
    - `operators`, `expressions`: how many ran in all three, and how many different ones there are.
    - `microbatches`: how many the batch had, and how many the pipeline's schedule has. If these are more, its program
      is shown to be whole on formulas of its stages, whose functions are those of the fewer ones.
    """

    reference: tuple[str, ...]
    eager: tuple[str, ...]
    unproved: tuple[tuple[str, str, str], ...]
    operators: int
    expressions: int
    microbatches: tuple[int, int]

    @property
    def is_complete(self) -> bool:
        """True if every leaf is proved."""
        return not self.unproved

    def __str__(self) -> str:
        """Return a page: claims, what could not be proved, and assumptions."""
        lines = [
            f"{len(self.reference)} results of a step are, for every input, those of the captured model on one device",
            f"{len(self.eager)} of them those of your module run eagerly"
            + ("" if self.eager or self.unproved else ": it draws random numbers, so it was not compared"),
            f"{self.operators} operators ran, of {self.expressions} expressions, in {self._describe_microbatches()}",
            *[f"not proved: {leaf}, against {other}: {why}" for leaf, other, why in self.unproved],
            "assumed:",
            *[f"- {one}" for one in ASSUMED],
        ]
        return "\n".join(lines)

    def _describe_microbatches(self) -> str:
        ran, scheduled = self.microbatches
        if ran == scheduled:
            return f"{ran} microbatches"
        return f"{ran} microbatches; the program of all {scheduled} is whole on formulas of the same stages"


@showing("prove")
def prove(
    pipe: Pipeline,
    model: nn.Module | Sequence[Callable[..., Any]],
    inputs: Any,
    targets: Any = None,
    *,
    seed: int | None = None,
) -> Proof:
    """Prove that a step of the pipeline computes what one device does, for every value of parameters and inputs.

    Loss, outputs, gradients and buffers are compared as expressions: the same operators, of the same operands, sums in
    the same order, random numbers from the same state of the generator. So biases that two stages exchange are found
    even where both are zero. The step runs with parameters and buffers close to the model's, all different.

    `print(proof)` is a page with what is proved, what could not be, and what is assumed. Takes a few times as long as
    `fpipe.verify`, which compares bits; run both.

    A model on the meta device, of any size, is proved without values: nothing is computed. A batch of a few rows is
    enough, since a step with fewer microbatches has the same stages; the schedule's own program is then shown to be
    whole on formulas.

    Raise `InputError` for a pipeline whose ranks are other processes, for one on an accelerator or with DTensors, for a
    model on meta that asks for values, and for what `verify` refuses.

    >>> import torch, fpipe
    >>> from schedules import zb_h1
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> x = torch.randn(6, 4)
    >>> pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=zb_h1(ranks=2, microbatches=3))
    >>> proof = fpipe.prove(pipe, model, (x,))
    >>> proof.is_complete, proof.eager
    (True, ('loss', 'outputs', 'gradient 0.weight', 'gradient 0.bias', 'gradient 2.weight', 'gradient 2.bias'))
    """
    with call_together(prove, locals()):
        _require_here(pipe)
        module = as_module(model)
        trial = Trial(pipe, module, (inputs, targets), 0)
        trial.agree(1, seed, True, True)
    trial, params, buffers, mode = _take_values(trial)
    ledger, claims = Expressions(mode), ProofLedger()
    leaves: list[Any] = optree.tree_leaves(cast("Any", (params, buffers, trial.batch)))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if mode is None:  # make all plans; on fakes, nothing of that is taken for a step
        verify_steps(trial._replace(compare=lambda *given: 0), params, buffers, seed, 1)
    with postpone_collection(), ledger, _refusing_questions():  # expressions are no cycles
        ledger.declare(given)
        verify_steps(trial._replace(compare=claims.compare(ledger)), params, buffers, seed, 1)
    proved, unproved = claims.proved, tuple(claims.unproved)
    return Proof(
        tuple(proved["the reference"]),
        tuple(proved.get("the model run eagerly", ())),
        unproved,
        ledger.operators,
        len(ledger.numbers),
        _prove_rest(trial),
    )


def _take_values(trial: Trial) -> tuple[Trial, State, State, FakeTensorMode | None]:
    """Return the trial with values, and parameters and buffers; without any, fakes, and their mode."""
    if not has_no_values(trial.module):
        params, buffers = (_tell_apart(state) for state in trial.pipe.init(trial.module))
        return trial, params, buffers, None
    mode, module, batch = make_stand_ins(trial.module, trial.batch)
    params, buffers = read_state(module)
    for mine, p in zip(params.values(), module.parameters(), strict=True):
        mine.requires_grad_(p.requires_grad)
    return trial._replace(module=module, batch=batch), params, buffers, mode


@contextmanager
def _refusing_questions() -> Iterator[None]:
    """Raise `InputError` for code that asks for values of fakes."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InputError(
            f"model: got one on meta that asks for the values of a tensor ({error}), expected one that does not, or "
            "one with values. Prove a smaller one of its kind, with values."
        ) from error


def _prove_rest(trial: Trial) -> tuple[int, int]:
    """Return how many microbatches the batch has, and how many the schedule; if more, prove its program on formulas."""
    pipe, schedule = trial.pipe, trial.pipe.schedule
    with suspend_autocast(trial.variant) as variant:
        signature = pipe.batch(variant, *trial.batch).signature
    if signature.microbatches < schedule.microbatches:
        prove_program(schedule, pipe.training.assembly.graph)
    return signature.microbatches, schedule.microbatches


class ProofLedger:
    """The leaves that were compared: those that are proved, by what they were compared with, and the others."""

    def __init__(self) -> None:
        self.proved: dict[str, list[str]] = {}
        self.unproved: list[tuple[str, str, str]] = []

    def compare(self, ledger: Expressions) -> Callable[[Results, Results, str, float], int]:
        """Return the comparison of results by their expressions."""

        def compare(got: Results, expected: Results, against: str, tolerance: float = 0) -> int:
            same = self.proved.setdefault(against, [])
            for leaf, mine, theirs in list_pairs(got, expected):
                if mine is None or theirs is None:
                    self.unproved.append((leaf, against, "one side has nothing"))
                elif (a := ledger.value(mine)) == (b := ledger.value(theirs)):
                    same.append(leaf)
                else:
                    self.unproved.append((leaf, against, ledger.difference(a, b)))
            return len(same)

        return compare


def _tell_apart(state: State) -> State:
    """Return tensors close to these, no two of which are equal; integers stay as they are."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, tensor in state.items():
        moved = tensor.detach().clone()
        if moved.is_floating_point() or moved.is_complex():
            moved += NOISE * torch.rand(moved.shape, generator=generator, dtype=torch.float64).to(moved.dtype)
        found[name] = moved.requires_grad_(tensor.requires_grad)
    return found


def _require_here(pipe: Pipeline) -> None:
    """Raise `InputError` unless all ranks are in this process, and compute on the CPU."""
    if pipe.ranks.processes:
        raise InputError(
            f"pipe: got one whose ranks are {len(pipe.ranks.processes)} processes, expected all of them in this one: "
            "what the others compute is not seen here. Build the pipeline again without torch.distributed, with the "
            "same arguments: it computes the same."
        )
    if pipe.schedule.slices > 1:
        raise InputError(
            f"pipe: got one of {pipe.schedule.slices} slices, expected whole microbatches: the loop over slices is not "
            "an expression of the model. Call fpipe.verify, which compares bits."
        )
    if pipe.device.type != "cpu":
        raise InputError(
            f"pipe: got one on {pipe.device}, expected one on the CPU: inputs are known by their bytes. Build it again "
            "with fpipe.Place(device='cpu'), and a model and an example there."
        )
    require_plain("prove", pipe.training.placed, "Build the pipeline of the model before it was split.")
