# SPDX-License-Identifier: Apache-2.0
"""Compare what a model does with what it did: the second of two runs with the first, and single calls with a record.

The first run of a model may do more: it may fill caches from constants. What depends on parameters, buffers, the batch
or random numbers must be the same in both runs (`require_same_run`), and in a capture made later (`compare_captures`).

Problem. Modules and hooks share Python state: a list that blocks fill, a counter, a dict, a context variable. On one
device, a module finds what all earlier modules left there; in a step, only whole calls run, and only those of the
stage. Tensors need not show it: the module may read a number, or the very tensor passed as its argument. Likewise, the
backward reruns checkpointed functions when the forward has moved on.

Idea. `Rehearsal` makes such calls again, in order, on fake tensors, and compares their torch calls with the record:
functions, arguments, modes, and results. Whole calls are rehearsed when a stage is built; functions that a backward
reruns, in the state before the forward and in the state after it (`require_same_reruns`).

Invariant: a rehearsal restores all Python state, and reports the changes that the calls made to it.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from optree import treespec_paths
from torch import Tensor

from fpipe.errors import CaptureError
from fpipe.record.captured import Buffer, Captured, Constant, Modes, Parameter, Unit, Value
from fpipe.record.model.snapshot import ContainerState, restore_attributes
from fpipe.record.model.walk import contents
from fpipe.record.questions import Answer, Sample
from fpipe.record.trace.fake_model import FakeModel
from fpipe.record.trace.frames import Frame, Invocation, outermost_checkpoints
from fpipe.record.trace.record import Record, for_real
from fpipe.record.trace.recorder import Recorder
from fpipe.record.trace.running_call import InnerCall, RunningCall
from fpipe.record.trace.whole import WholeCalls
from fpipe.tensors.torch_private import DisableTorchFunction, FakeTensor
from fpipe.tensors.tree import PLAIN, closure_contents, same_bits

CALLABLE = (BuiltinFunctionType, MethodDescriptorType, MethodType, MethodWrapperType, WrapperDescriptorType)
COMPARED_DATA = (*PLAIN, slice, range, type, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
COMPARED = (*CALLABLE, *COMPARED_DATA)
"""Classes compared by value. Functions are compared by code and what they close over; anything else by class."""
NESTING: Final = 4
"""How many levels of functions within functions to compare."""
CHARACTERS: Final = 200
"""The number of characters of a call that errors show."""


def first_difference(
    new: Iterable[Unit], old: Iterable[Unit], is_same: Callable[[Unit, Unit], bool]
) -> tuple[Unit | None, Unit | None] | None:
    """Return the first two calls, a new and an old one, that are not the same; `None` if all are."""
    for pair in zip_longest(new, old):
        if pair[0] is None or pair[1] is None or not is_same(*pair):
            return pair
    return None


def is_same_constant(new: Tensor, old: Tensor) -> bool:
    """Return whether two constants have the same bits; sparse ones, and those without values, are compared by shape."""
    if (new.shape, new.dtype, new.layout) != (old.shape, old.dtype, old.layout):
        return False
    if isinstance(new, FakeTensor) or isinstance(old, FakeTensor) or new.layout is not torch.strided:
        return True
    with DisableTorchFunction(), for_real():  # unseen by a recorder
        return same_bits(new, old)


# -------------------------------------------------------------------------------------------------------- whole runs


def require_same_run(first: Recorder, second: Recorder) -> None:
    """Raise `CaptureError` unless the second run did the same as the first.

    It may lack calls on constants, whose results the first run may have cached.
    """
    created = _creations(second.record) - _creations(first.record)
    assigned = first.reassignments.next_values.keys() != second.reassignments.next_values.keys()
    sources = second.values.sources.items()
    state = {value for value, source in sources if isinstance(source, Parameter | Buffer)}

    def is_same(new: Unit, old: Unit) -> bool:
        """Return whether two calls match; a module created in the first run has no path there yet."""
        is_inside = f"{new.path}.".startswith(f"{old.path}." if old.path else "")
        return is_inside and new.does == old.does and _only(new.reads, state) == _only(old.reads, state)

    new, old = _varying_units(second.record), _varying_units(first.record)
    if created or assigned or first_difference(new, old, is_same):
        where = next((f"module {path or '(root)'}" for path, _ in created), "model")
        raise CaptureError(
            f"{where}: got a forward that behaves differently when it is called again, expected one that keeps nothing "
            "between calls except in buffers. Move code that runs only once out of the forward."
        )


def _only(values: Iterable[Value], wanted: set[Value]) -> list[Value]:
    return [value for value in values if value in wanted]


def _creations(record: Record) -> Counter[tuple[str, str]]:
    """Count the calls that make tensors from numbers alone, by module path and description."""
    units = [unit for unit, facts in record.facts.items() if unit.makes and not unit.reads and facts.draw is None]
    return Counter((unit.path, unit.does) for unit in units)


def _varying_units(record: Record) -> list[Unit]:
    """Return the live torch calls, except those that compute with constants alone."""
    constant = set(record.constants().units)
    live = record.live_units({value for frame in record.frames for value in frame.returned.values()})
    return [unit for unit in live if unit not in constant or not unit.reads + unit.makes]


def compare_captures(old: Captured, new: Captured) -> str:
    """Return what differs between two captures of a model, as the beginning of a sentence; empty if nothing does."""

    def is_same(new: Unit, old: Unit) -> bool:
        return (new.path, new.does, new.reads, new.makes) == (old.path, old.does, old.reads, old.makes)

    def describe(unit: Unit | None) -> str:
        return "no call" if unit is None else unit.does[:CHARACTERS] or "a call"

    if pair := first_difference(new.units, old.units, is_same):
        path = next(unit.path for unit in pair if unit is not None)
        return f"module {path or '(root)'}: got {describe(pair[0])}, expected {describe(pair[1])}"
    for value, source in old.sources.items():
        other = new.sources.get(value)
        if not isinstance(source, Constant) or (
            isinstance(other, Constant) and is_same_constant(other.tensor, source.tensor)
        ):
            continue
        path = next((unit.path for unit in old.units if value in unit.reads), "")
        return f"module {path or '(root)'}: got another constant, expected the same"
    if old.outputs != new.outputs or old.structure != new.structure:
        return "the model: got other outputs, expected the same"
    if old.aux != new.aux or old.aux_structure != new.aux_structure:
        return "loss: got another aux, expected the same"
    return ""


# ------------------------------------------------------------------------------------------------------- single calls


class RepeatRecorder(Recorder):
    """A recorder that knows the values of an earlier record, and gives the answers there to questions again."""

    def __init__(self, model: FakeModel, record: Record) -> None:
        tensors = record.values.tensors
        known = {value: (source, tensors[value]) for value, source in record.values.sources.items()}
        super().__init__(model.skeleton, known, opaque=model.opaque, way=model.objective.way)
        self.values.know(tensors)
        self.answers: Mapping[tuple[Any, int], Answer | Sample] = {}
        self.earlier: Mapping[Any, int] = {}

    def begin_again(self, answers: Mapping[tuple[Any, int], Answer | Sample]) -> None:
        """Count calls of functions from here on, to look up `answers` by function and call number."""
        self.answers = answers
        self.earlier = {function: len(self.record.ticks[function]) for function, _ in answers}

    def _answer(self, invocation: Invocation, tick: int, args: Any, kwargs: Any, error: Exception) -> Any:
        return self._answer_again(invocation.function, tick, args, kwargs, error)

    def _answer_inside(self, running: RunningCall, asking: InnerCall, tick: int, error: Exception) -> Any:
        return self._answer_again(asking.function, tick, asking.args, asking.kwargs, error)

    def _answer_again(self, function: Any, tick: int, args: Any, kwargs: Any, error: Exception) -> Any:
        """Return the recorded answer to the call; if there is none, assume one, or raise `error`."""
        number = len(self.record.ticks[function]) - 1 - self.earlier.get(function, 0)
        answer = self.answers.get((function, number))
        if answer is not None:
            if isinstance(answer, Sample):
                self._note_branch()
            return self._reply(tick, function, args, answer)
        if not self.stack.is_opaque:
            raise error
        return self._assume(function, args, kwargs, error)


class Comparison:
    """Compares calls with those of a record; `old` maps new values to those of the record."""

    def __init__(self, record: Record, recorder: RepeatRecorder) -> None:
        self.record, self.recorder = record, recorder
        self.old: dict[Value, Value] = {}

    def difference(self, frame: Frame) -> str:
        """Make a call again, and describe the first difference; empty if there is none."""
        recorder, start = self.recorder, len(self.recorder.record.units)
        recorder.begin_again(self.record.answers_between(frame.first_tick, frame.last_tick))
        again = Frame(frame.path, frame.kind, frame.invocation, recorder.modes, start, recorder.record.tick)
        try:
            with ExitStack() as stack:
                stack.enter_context(restore_attributes(frame.touched))
                for context in frame.modes.contexts:
                    stack.enter_context(context())
                self._call(frame, again)
                return self._compare_units(frame, start) or self._compare_results(frame, again)
        except Exception as error:  # a forward that does not find the state it expects may raise anything
            return f"got {type(error).__name__}: {error}"

    def _call(self, frame: Frame, again: Frame) -> None:
        recorder = self.recorder
        with recorder.stack.enter(again):
            out = frame.invocation([recorder.values.tensors[value] for value in frame.invocation.reads])
            if again.branching or frame.reentrant:
                out = recorder.view_others(again, out)
        recorder.close_frame(again, out)

    def _compare_units(self, frame: Frame, start: int) -> str:
        """Compare torch calls recorded since unit `start` with those of the frame; describe the first difference."""
        pair = first_difference(self.recorder.record.units[start:], self.record.units_in(frame), self._is_same_call)
        if pair is None:
            return ""
        got, expected = (f"{x.does} in module {x.path or '(root)'}" if x else "no torch call" for x in pair)
        return f"got {got}, expected {expected}"

    def _is_same_call(self, new: Unit, old: Unit) -> bool:
        """Return whether two torch calls are the same; map the values made by the new one to those of the old one."""
        if (new.path, len(new.reads), len(new.makes)) != (old.path, len(old.reads), len(old.makes)):
            return False
        facts, expected = self.recorder.record.facts[new], self.record.facts[old]
        same = all(map(self._is_same_value, new.reads, old.reads))
        same = same and _has_same_arguments(facts.invocation, expected.invocation)
        self.old.update(zip(new.makes, old.makes, strict=True))
        return same and _are_same_modes(facts.modes, expected.modes)

    def _is_same_value(self, new: Value, old: Value) -> bool:
        if self.old.get(new, new) == old:
            return True
        source, tensor = self.recorder.values.sources.get(new), self.record.values.tensors[old]
        if not isinstance(source, Constant) or isinstance(tensor, FakeTensor):
            return False
        return is_same_constant(source.tensor, tensor)

    def _compare_results(self, frame: Frame, again: Frame) -> str:
        """Compare what the call and inner modules returned, and assigned attributes; describe the first difference."""
        if frame.constants != again.constants:
            return f"got {list(again.constants.values())} returned, expected {list(frame.constants.values())}"
        for old, new in _paired_frames(frame, again):
            if old.path != new.path or not self._are_same_tensors(new.returned, old.returned):
                return f"got other tensors returned by module {new.path or '(root)'}, expected the same"
        known = self.recorder.values.known
        for module, name, value in {(one.module, one.name): one for one in frame.assigned}.values():
            new_value = known.get(id(getattr(module, name, None)))
            if new_value is None or self.old.get(new_value, new_value) != value:
                return f"got another tensor in the attribute {name!r}, expected the same"
        return ""

    def _are_same_tensors(self, new: Mapping[int, Value], old: Mapping[int, Value]) -> bool:
        return new.keys() == old.keys() and all(self._is_same_value(new[k], old[k]) for k in old)


def _paired_frames(old: Frame, again: Frame) -> Iterator[tuple[Frame, Frame]]:
    """Yield a frame and the frames inside it, each with its counterpart in `again`, if it has one there."""
    alone = len(again.inner) == 1 and again.inner[0].kind is old.kind and not old.reentrant
    twin = again.inner[0] if alone else again
    stack = [(old, twin)]
    while stack:
        one, other = stack.pop()
        yield one, other
        stack += zip(one.inner, other.inner, strict=False)


def _has_same_arguments(new: Invocation, old: Invocation) -> bool:
    """Return whether functions and arguments are the same, tensors aside."""
    same = _is_same_leaf(new.function, old.function) and len(new.leaves) == len(old.leaves)
    same = same and (new.spec == old.spec or treespec_paths(new.spec) == treespec_paths(old.spec))  # closures are new
    return same and all(map(_is_same_leaf, new.leaves, old.leaves))


def _is_same_leaf(new: Any, old: Any, depth: int = NESTING) -> bool:
    if new is old or type(new) is not type(old):
        return new is old
    if isinstance(new, FunctionType | partial):
        return _is_same_function(new, old, depth)
    if hasattr(new, "__array_interface__") and not isinstance(new, Tensor):
        return bool(new.shape == old.shape and new.tobytes() == old.tobytes())
    return not isinstance(new, COMPARED) or new == old or new != new  # noqa: PLR0124  # NaN


def _is_same_function(new: Any, old: Any, depth: int) -> bool:
    """Return whether two functions, which a forward may create anew on every call, have the same code and closures."""
    if isinstance(new, FunctionType) and new.__code__ is not old.__code__:
        return False
    pairs = [*zip_longest(closure_contents(new), closure_contents(old))]
    return not depth or all(_is_same_leaf(a, b, depth - 1) for a, b in pairs)


def _are_same_modes(new: Modes, old: Modes) -> bool:
    return (new.grad, new.autocast) == (old.grad, old.autocast)


# ----------------------------------------------------------------------------------------------------------- rehearsal


class Rehearsed(NamedTuple):
    """The outcome of a rehearsal: the calls that differed and why, and the state that the calls changed."""

    differing: Mapping[Frame, str]
    changed: Sequence[ContainerState]


Rehearse: TypeAlias = Callable[[Sequence[Frame]], Rehearsed]


class Rehearsal:
    """Makes calls of a record again, without the others of the model; not reentrant.

    `state`: the containers that hold Python state. `empty_caches` clears function caches, such as
    `functools.lru_cache`.
    """

    def __init__(
        self, model: FakeModel, record: Record, state: Sequence[ContainerState], empty_caches: Callable[[], None]
    ) -> None:
        self.model, self.record, self.state, self.empty_caches = model, record, state, empty_caches

    def __call__(self, frames: Sequence[Frame]) -> Rehearsed:
        """Make these calls, restore all state, and return which calls differed.

        A call may differ only because an earlier one did. So stop at a differing call that cannot be opened, and report
        it only if no earlier call differed.
        """
        if not frames:
            return Rehearsed({}, ())
        with torch.inference_mode(False), torch.set_grad_enabled(frames[0].modes.ambient):
            comparison = Comparison(self.record, RepeatRecorder(self.model, self.record))
            try:
                with self.model.watch(comparison.recorder):
                    return copy_context().run(self._run_up_to_twice, comparison, frames)
            finally:
                self.empty_caches()

    def _run_up_to_twice(self, comparison: Comparison, frames: Sequence[Frame]) -> Rehearsed:
        """Make the calls, and again if none differs; then restore all state."""
        before = [one._replace(contents=contents(one.container)) for one in self.state]
        changed: dict[int, ContainerState] = {}
        found: dict[Frame, str] = {}
        try:
            for _ in range(2):  # the second run finds what is not restored between microbatches, such as class state
                found = found or self._find_differing(comparison, frames)
                changed.update({id(one.container): one for one in before if one.has_changed})
                for one in changed.values():
                    if not one.outside:
                        one.restore()
        except BaseException:
            changed = {id(one.container): one for one in before}
            raise
        finally:
            for one in changed.values():
                one.restore()
        return Rehearsed(found, tuple(changed.values()))

    def _find_differing(self, comparison: Comparison, frames: Sequence[Frame]) -> dict[Frame, str]:
        with DisableTorchFunction(), for_real():  # those of the record belong to its autograd graph
            tensors = {value: tensor for value, (_, tensor) in self.model.sources().items()}
        comparison.recorder.values.know(tensors)
        self.empty_caches()
        differing: dict[Frame, str] = {}
        with self.model.seat(tensors):
            for frame in frames:
                found = comparison.difference(frame)
                if found and not (frame.sealed and differing):
                    differing[frame] = found
                if found and frame.sealed:
                    break
        return differing


def require_same_reruns(record: Record, whole: WholeCalls, changes: bool, rehearse: Rehearse) -> None:
    """Raise `CaptureError` if a call that a backward runs again depends on Python state that the forward changes.

    `changes`: whether the forward changes any. If it does not, only Python code that a step reruns is rehearsed.

    On one device, the rerun sees the state after the forward, and the gradients are not those of the forward. A step
    reruns what was recorded, or, in a whole call, sees the state before the forward. If the calls do what was recorded
    in both states, it does not matter.
    """
    every = (one for one in outermost_checkpoints(record.frames) if record.is_rerun(one))
    again = [*(every if changes else _python_reruns(record, whole, record.frames))]
    calls = record.frames if changes else whole.outermost(record.frames)
    forward = [replace(frame, touched=[]) for frame in calls]  # keep what they assign
    for together in ([*forward, *reversed(again)], *([frame] for frame in again)) if again else ():
        for frame, found in rehearse(together).differing.items():
            raise CaptureError(
                f"module {frame.path or '(root)'}: got a checkpointed function that behaves differently when the "
                f"backward runs it again ({found}), expected the same. The forward has changed Python state that the "
                "function reads. Pass it as an argument, or let the schedule recompute the stage (schedules.recompute)."
            )


def _python_reruns(record: Record, whole: WholeCalls, frames: Sequence[Frame]) -> Iterator[Frame]:
    """Yield the calls that a backward runs again as Python: in whole calls, or as whole calls of a checkpoint."""
    for frame in frames:
        if whole.runs(frame):
            yield from filter(record.is_rerun, outermost_checkpoints([frame]))
        elif frame.checkpoint and record.is_rerun(frame):
            yield from whole.outermost(frame.inner)
        else:
            yield from _python_reruns(record, whole, frame.inner)
