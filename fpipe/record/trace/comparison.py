# SPDX-License-Identifier: Apache-2.0
"""Make calls of a tape again, record them, and compare the recording with the tape.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
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
from typing import Any

import torch
from optree import treespec_paths
from torch import Tensor, nn

from fpipe.record.captured import Constant, Source, Unit, Value
from fpipe.record.model.snapshot import restore_attributes
from fpipe.record.modes import Modes, contexts
from fpipe.record.questions import Answer
from fpipe.record.steps.selection import result_on_fakes
from fpipe.record.tape import Frame, Invocation, Tape
from fpipe.record.trace.history import for_real
from fpipe.record.trace.recorder import Recorder
from fpipe.tensors.closures import closure_contents
from fpipe.tensors.torch_private import DisableTorchFunction, FakeTensor
from fpipe.tensors.tree import PLAIN

CALLABLE = (BuiltinFunctionType, MethodDescriptorType, MethodType, MethodWrapperType, WrapperDescriptorType)
COMPARED_DATA = (*PLAIN, slice, range, type, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
COMPARED = (*CALLABLE, *COMPARED_DATA)
"""Classes compared by value. Functions are compared by code and what they close over; anything else by class."""
NESTING = 4  # how many levels of functions within functions to compare


class RepeatRecorder(Recorder):
    """A recorder that knows the values of a tape, and gives the tape's answers to questions again."""

    def __init__(
        self, model: nn.Module, tape: Tape, sources: Mapping[Value, Source], opaque: Collection[str], plain: bool
    ) -> None:
        known = {v: (source, tape.fakes[v]) for v, source in sources.items()}
        super().__init__(model, known, opaque=opaque, plain=plain)
        self.values.know(tape.fakes)
        self.answers: Mapping[tuple[Any, int], Answer] = {}
        self.earlier: Mapping[Any, int] = {}

    def begin_again(self, answers: Mapping[tuple[Any, int], Answer]) -> None:
        """Count calls of functions from here on, to look up `answers` by function and call number."""
        self.answers, self.earlier = (
            answers,
            {function: len(self.torch_calls.by_function[function]) for function, _ in answers},
        )

    def _answer(self, invocation: Invocation, tick: int, args: Any, kwargs: Any, error: Exception) -> Any:
        """Return the recorded answer to the call; if there is none, assume one, or raise `error`."""
        function = invocation.function
        number = len(self.torch_calls.by_function[function]) - 1 - self.earlier.get(function, 0)
        answer = self.answers.get((function, number))
        if answer is not None:
            self.questions.note_reply(tick, function, answer)
            return result_on_fakes(function, args, answer)
        if not self.stack.is_opaque:
            raise error
        return self._assume(function, args, kwargs, error)


class Comparison:
    """Compares calls with those of a tape; `old` maps new values to those of the tape."""

    def __init__(self, tape: Tape, recorder: RepeatRecorder) -> None:
        self.tape, self.recorder = tape, recorder
        self.old: dict[Value, Value] = {}

    def difference(self, frame: Frame) -> str:
        """Make a call again, and describe the first difference; empty if there is none."""
        recorder, start = self.recorder, len(self.recorder.history.units)
        recorder.begin_again(self.tape.answers_between(frame.first_tick, frame.last_tick))
        again = Frame(frame.path, frame.kind, frame.invocation, recorder.modes, start, recorder.torch_calls.tick)
        try:
            with ExitStack() as stack:
                stack.enter_context(restore_attributes(frame.touched))
                for context in contexts(frame.modes):
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
        pairs = zip_longest(self.recorder.history.units[start:], self.tape.units[frame.start : frame.stop])
        return next((_describe_difference(new, old) for new, old in pairs if not self._is_same_call(new, old)), "")

    def _is_same_call(self, new: Unit | None, old: Unit | None) -> bool:
        """Return whether two torch calls are the same; map the values made by the new one to those of the old one."""
        if new is None or old is None or new.path != old.path or len(new.makes) != len(old.makes):
            return False
        facts = self.recorder.history.facts[new]
        same = len(new.reads) == len(old.reads) and all(map(self._is_same_value, new.reads, old.reads))
        same = same and _has_same_arguments(facts.invocation, self.tape.invocations[old])
        self.old.update(zip(new.makes, old.makes, strict=True))
        return same and _are_same_modes(facts.modes, self.tape.modes[old])

    def _is_same_value(self, new: Value, old: Value) -> bool:
        if self.old.get(new, new) == old:
            return True
        source, tensor = self.recorder.values.sources.get(new), self.tape.fakes[old]
        return isinstance(source, Constant) and _is_same_constant(source.tensor, tensor)

    def _compare_results(self, frame: Frame, again: Frame) -> str:
        """Compare what the call and inner modules returned, and assigned attributes; describe the first difference."""
        if frame.constants != again.constants:
            return f"got {list(again.constants.values())} returned, expected {list(frame.constants.values())}"
        for old, new in _paired_frames(frame, again):
            if old.path != new.path or not self._are_same_tensors(new.returned, old.returned):
                return f"got other tensors returned by module {new.path or '(root)'}, expected the same"
        known = self.recorder.values.known
        for module, name, value in {(one.module, one.name): one for one in frame.assigned}.values():
            if self._old_value(known.get(id(getattr(module, name, None)))) != value:
                return f"got another tensor in the attribute {name!r}, expected the same"
        return ""

    def _are_same_tensors(self, new: Mapping[int, Value], old: Mapping[int, Value]) -> bool:
        return new.keys() == old.keys() and all(self._is_same_value(new[k], old[k]) for k in old)

    def _old_value(self, value: Value | None) -> Value | None:
        return value if value is None else self.old.get(value, value)


def _paired_frames(old: Frame, again: Frame) -> Iterator[tuple[Frame, Frame]]:
    """Yield a frame and the frames inside it, each with its counterpart in `again`, if it has one there."""
    alone = len(again.inner) == 1 and again.inner[0].kind is old.kind and not old.reentrant
    twin = again.inner[0] if alone else again
    stack = [(old, twin)]
    while stack:
        one, other = stack.pop()
        yield one, other
        stack += zip(one.inner, other.inner, strict=False)


def _describe_difference(new: Unit | None, old: Unit | None) -> str:
    return f"got {_describe_unit(new)}, expected {_describe_unit(old)}"


def _describe_unit(unit: Unit | None) -> str:
    return "no torch call" if unit is None else f"{unit.does} in module {unit.path or '(root)'}"


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


def _is_same_constant(new: Tensor, old: Tensor) -> bool:
    """Return whether two real tensors have the same values, unseen by the recorder."""
    if isinstance(old, FakeTensor):
        return False
    with DisableTorchFunction(), for_real():
        return new.shape == old.shape and new.dtype == old.dtype and torch.equal(new, old)
