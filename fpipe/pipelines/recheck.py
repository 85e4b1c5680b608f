# SPDX-License-Identifier: Apache-2.0
"""Record a model again from time to time, and compare the record with the one that steps run.

Problem. Steps run a record, and a change of what the model's Python read must be an error. The watch compares all that
it can see (`fpipe.record.reads`), but no comparison sees everything: a counter in an iterator or a C extension, an
attribute found by a computed name, the elements of an array.

Idea. Whatever changed matters only if the model records otherwise. So record it again, and compare call by call. A
change that slipped through is an error some steps later, rather than silent forever.

Invariants. Recording again takes at most `SHARE` of the time of steps. It neither communicates nor changes
anything; on a rank that finds a difference, the step fails as it does for bad arguments, on all ranks.

Runs now and then in a step, before a save, when a pipeline is closed, and on request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Final
from weakref import WeakMethod

from torch import nn

from fpipe.errors import InputError
from fpipe.pipelines.captures import Captures
from fpipe.pipelines.modes import isolate
from fpipe.record.model.skeleton import skeleton
from fpipe.record.questions import Answer, Question, refuse_questions
from fpipe.record.trace.comparison import compare_captures
from fpipe.record.variant import TRAINING
from fpipe.tensors.fake import fake, fake_mode

SHARE: Final = 0.005
"""How much of the time of steps recording again may take."""
FIRST: Final = 1.0
"""Seconds that recording is assumed to take before it has been measured."""


@dataclass
class Recheck:
    """Decides when to record again: `spent` are the seconds of steps since then, `cost` are those that it takes.

    `source`: a weak method, which returns a copy of what is recorded besides the model: the module that a script
    changes in its place.
    """

    spent: float = 0.0
    cost: float = FIRST
    source: WeakMethod[Callable[[], nn.Module]] | None = None

    @property
    def is_due(self) -> bool:
        """True if recording again is paid for by the steps since then."""
        return self.spent * SHARE >= self.cost

    @property
    def is_worth_it(self) -> bool:
        """True if the steps since then have taken longer than recording does: before a save, or at the end."""
        return self.spent >= self.cost

    @contextmanager
    def time_step(self) -> Iterator[None]:
        """Count the time of a step."""
        start = perf_counter()
        yield
        self.spent += perf_counter() - start

    def run(self, captures: Captures) -> None:
        """Record every kind of microbatch again; raise `InputError` for the first call that differs."""
        start = perf_counter()
        copied = None if self.source is None else self.source()
        models = [captures.watching.origin.model, None if copied is None else copied()]
        for model in models:
            if model is not None:  # else nothing is left to compare
                require_same_records(captures, model)
        self.spent, self.cost = 0.0, perf_counter() - start


def require_same_records(captures: Captures, model: nn.Module) -> None:
    """Raise `InputError`, naming module and call, if the model or its loss now records otherwise than it did."""
    for (variant, microbatch), known in captures.memo.recordings.items():
        again, left = replace(captures, model=_copy(model, captures)), list(microbatch.answers)
        with isolate(TRAINING):
            new, _ = again.record(variant, microbatch, partial(_answer_again, left), known.way)
        difference = "other questions" if left else compare_captures(known.captured, new)
        if difference:
            raise InputError(
                f"{difference}, as when the model was recorded: its Python code, or that of its loss, now behaves "
                "differently, because of a change that was not detected. Steps run the recorded calls. Pass values "
                "that change with the batch, name the module in whole, or make a new pipeline with pipe.rebuilt(model)."
            )


def _answer_again(left: list[Answer], question: Question) -> Answer:
    """Return the answer to the model's next question, as when it was recorded."""
    return left.pop(0) if left else refuse_questions(question)


def _copy(model: nn.Module, captures: Captures) -> nn.Module:
    """Return a copy without tensors of the user's model, in the modes in which it was recorded."""
    mode, home = fake_mode(), captures.batchings[True].home
    again = skeleton(model, lambda tensor: fake(mode, tensor, home))
    recorded = {name: module.training for name, module in captures.model.named_modules()}
    for name, module in again.named_modules():
        module.training = recorded.get(name, module.training)
    return again
