# SPDX-License-Identifier: Apache-2.0
"""Check that a model does the same when it runs again.

The first run may do more: it may fill caches from constants. Calls that depend on parameters, buffers, the batch or
random numbers must be the same in both runs.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

from fpipe.errors import CaptureError
from fpipe.record.captured import Buffer, Parameter, Value
from fpipe.record.questions import Answer, Ask, Question, refuse_questions
from fpipe.record.trace.liveness import live_units
from fpipe.record.trace.recorder import Recorder


class VaryingCall(NamedTuple):
    """A torch call that does not depend on constants alone: its module, its description, and the state it reads."""

    path: str
    does: str
    state: tuple[Value, ...]


NO_CALL = VaryingCall("", "", ())


def require_same_run(first: Recorder, second: Recorder) -> None:
    """Raise `CaptureError` unless the second run did the same as the first.

    It may lack calls on constants, whose results the first run may have cached.
    """
    created = _creations(second) - _creations(first)
    assigned = first.reassignments.next_values.keys() != second.reassignments.next_values.keys()
    calls = zip_longest(_varying_calls(first), _varying_calls(second), fillvalue=NO_CALL)
    if created or assigned or not all(_is_same_call(*pair) for pair in calls):
        where = next((f"module {path or '(root)'}" for path, _ in created), "model")
        raise CaptureError(
            f"{where}: got a forward that does something else when it is called again, expected one that keeps "
            "nothing from one call to the next except in buffers. Move what it does only once out of the forward."
        )


def _creations(recorder: Recorder) -> Counter[tuple[str, str]]:
    """Count the calls that make tensors from numbers alone, by module path and description."""
    facts = recorder.history.facts
    units = [unit for unit in facts if unit.makes and not unit.reads and facts[unit].draw is None]
    return Counter((unit.path, unit.does) for unit in units)


def _varying_calls(recorder: Recorder) -> list[VaryingCall]:
    """Return the live torch calls, except those that compute with constants alone."""
    history, sources = recorder.history, recorder.values.sources
    constant = set(history.constants().units)
    live = live_units(history, {value for frame in recorder.stack.roots for value in frame.returned.values()})
    state = {value for value, source in sources.items() if isinstance(source, Parameter | Buffer)}
    varying = [unit for unit in live if unit not in constant or not unit.reads + unit.makes]
    return [VaryingCall(unit.path, unit.does, tuple(v for v in unit.reads if v in state)) for unit in varying]


def _is_same_call(first: VaryingCall, second: VaryingCall) -> bool:
    """Return whether two torch calls match; a module created in the first run has no path there yet."""
    is_inside = f"{second.path}.".startswith(f"{first.path}." if first.path else "")
    return (first.does, first.state) == (second.does, second.state) and is_inside


def remember_answers(ask: Ask, answers: list[Answer]) -> Ask:
    """Return `ask`, also appending each of its answers to `answers`."""

    def ask_and_remember(question: Question) -> Answer:
        answers.append(ask(question))
        return answers[-1]

    return ask_and_remember


def repeat_answers(answers: Iterable[Answer]) -> Ask:
    """Return a function that gives the same answers again, in order."""
    remaining = iter(answers)
    return lambda question: next(remaining, None) or refuse_questions(question)
