# SPDX-License-Identifier: Apache-2.0
"""Check whether a module does the same when it is called without the modules of other stages.

Problem. Modules and hooks share Python state: a list that blocks fill, a counter, a dict, a context variable. On one
device, a block finds there what all earlier blocks left; in a stage, only what that stage's own modules left. No tensor
need show it: the block may read a number, or the very tensor passed as its argument.

Idea. Before a stage is used, make its calls once more, in order, on the fake tensors of the recording, and record them
again. A call that differs from the tape in any way (a torch call, an argument, a mode, a result) must not be made as
is. Nearly all calls do the same, which `fpipe.capture.trace.replay` establishes without recording them.

Invariant: afterwards all Python state is as it was before, and the changes the calls made to it are known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
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
from typing import Any, NamedTuple, TypeAlias

import torch
from optree import treespec_paths
from torch import Tensor, nn

from fpipe.capture.assumed_values import ASSUMPTIONS
from fpipe.capture.trace.origins import for_real
from fpipe.capture.trace.recorder import Recorder
from fpipe.capture.trace.replay import Replay
from fpipe.ir.captured import Constant, Source, Unit, Value
from fpipe.ir.modes import Modes, contexts
from fpipe.ir.questions import Answer, Reply
from fpipe.ir.tape import Frame, Invocation, Tape
from fpipe.model.snapshot import ContainerState, contents, restore_attributes
from fpipe.runtime.segments.selection import result_on_fakes
from fpipe.tensors.closures import closure_contents
from fpipe.tensors.tree import PLAIN
from fpipe.torch_private import DisableTorchFunction, FakeTensor

CALLABLE = (BuiltinFunctionType, MethodDescriptorType, MethodType, MethodWrapperType, WrapperDescriptorType)
DATA = (*PLAIN, slice, range, type, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
COMPARED = (*CALLABLE, *DATA)
"""Classes compared by value. Functions are compared by code and what they close over; anything else by class."""
DEPTH = 4  # how far to follow functions within functions


class Rehearsed(NamedTuple):
    """The outcome of a rehearsal: the calls that differed and why, and the state that the calls changed."""

    differing: Mapping[Frame, str]
    changed: Sequence[ContainerState]


Rehearse: TypeAlias = Callable[[Sequence[Frame]], Rehearsed]


class Again(Recorder):
    """A recorder that knows the values of a tape, and repeats its answers."""

    def __init__(self, model: nn.Module, tape: Tape, sources: Mapping[Value, Source], opaque: Collection[str]) -> None:
        super().__init__(model, {v: (source, tape.fakes[v]) for v, source in sources.items()}, opaque=opaque)
        self.values.know(tape.fakes)
        self.answers: Mapping[tuple[Any, int], Answer] = {}
        self.earlier: Mapping[Any, int] = {}

    def begin_again(self, answers: Mapping[tuple[Any, int], Answer]) -> None:
        """Count calls of functions from here on, to look up `answers` by function and call number."""
        self.answers, self.earlier = answers, {function: len(self.calls[function]) for function, _ in answers}

    def _unknown(self, invocation: Invocation, tick: int, args: Any, kwargs: Any, error: Exception) -> Any:
        """Return what the call returned in the recording."""
        function = invocation.function
        number = len(self.calls[function]) - 1 - self.earlier.get(function, 0)
        answer = self.answers.get((function, number))
        if answer is not None:
            self.replies.append(Reply(tick, function, answer))
            return result_on_fakes(function, args, answer)
        if not self.stack.opaque or function not in ASSUMPTIONS:
            raise error
        self._branches()
        return ASSUMPTIONS[function](*args, **kwargs)


class Rehearsal:
    """Makes calls of a tape again.

    - `replay` makes a `Replay`; `recorder` makes a recorder, which sees what calls do `inside` a context.
    - `fresh` makes new tensors for the model's state and the batch, and `seated` is a context in which they are in
      place: those of the recording belong to its autograd graph.
    - `state`: the containers that hold Python state. `empty` empties the caches of functions.
    """

    def __init__(
        self,
        tape: Tape,
        replay: Callable[[], Replay],
        recorder: Callable[[], Again],
        inside: Callable[[Recorder], AbstractContextManager[None]],
        fresh: Callable[[], Mapping[Value, Tensor]],
        seated: Callable[[Mapping[Value, Tensor]], AbstractContextManager[None]],
        state: Sequence[ContainerState],
        empty: Callable[[], None],
    ) -> None:
        self.tape, self.replay, self.recorder, self.inside, self.state = tape, replay, recorder, inside, state
        self.fresh, self.seated, self.empty = fresh, seated, empty

    @contextmanager
    def begun(self) -> Iterator[Rehearse]:
        """Yield the function that makes calls again; do not enter this elsewhere meanwhile."""
        before = [one._replace(contents=contents(one.container)) for one in self.state]
        with torch.inference_mode(False), torch.enable_grad():
            yield partial(self._rehearsed, self.replay(), before)

    def _rehearsed(self, replay: Replay, before: Sequence[ContainerState], frames: Sequence[Frame]) -> Rehearsed:
        """Make these calls, and restore all state.

        A call may differ only because an earlier one did, so a differing call that must be made as is ends the
        rehearsal.
        """
        try:
            with replay.begun():
                found = copy_context().run(_twice, before, lambda: self._replayed(replay, frames))
            if found.differing:
                take = _Take(self.tape, self.recorder())
                with self.inside(take.recorder):
                    found = copy_context().run(_twice, before, lambda: self._differing(take, frames))
        finally:
            self.empty()
        return found

    def _replayed(self, replay: Replay, frames: Sequence[Frame]) -> dict[Frame, str]:
        """Replay the calls; return the first that is not known to do the same, if there is one."""
        self.empty()
        with self.seated(self.tape.fakes):
            frame = replay.first_open(frames)
        return {} if frame is None else {frame: "is not known to do the same"}

    def _differing(self, take: _Take, frames: Sequence[Frame]) -> dict[Frame, str]:
        with DisableTorchFunction(), for_real():
            tensors = self.fresh()
        take.recorder.values.know(tensors)
        self.empty()
        differing: dict[Frame, str] = {}
        with self.seated(tensors):
            for frame in frames:
                found = take.difference(frame)
                if found and not (frame.sealed and differing):
                    differing[frame] = found
                if found and frame.sealed:
                    break
        return differing


def _twice(before: Sequence[ContainerState], differing: Callable[[], dict[Frame, str]]) -> Rehearsed:
    """Run `differing`, which finds the calls that differ, up to twice, and restore all state as it was `before`."""
    changed: dict[int, ContainerState] = {}
    found: dict[Frame, str] = {}
    try:
        for _ in range(2):  # the second run finds what is not restored between microbatches, such as class state
            found = found or differing()
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


class _Take:
    """Compares calls with those of a tape; `old` maps values made again to the tape's values."""

    def __init__(self, tape: Tape, recorder: Again) -> None:
        self.tape, self.recorder = tape, recorder
        self.old: dict[Value, Value] = {}

    def difference(self, frame: Frame) -> str:
        """Make a call again, and describe the first difference; empty if there is none."""
        recorder, start = self.recorder, len(self.recorder.units)
        recorder.begin_again(self.tape.answers_between(frame.first_tick, frame.last_tick))
        again = Frame(frame.path, frame.kind, frame.invocation, recorder.now(), start, recorder.tick)
        try:
            with ExitStack() as stack:
                stack.enter_context(restore_attributes(frame.touched))
                for context in contexts(frame.modes):
                    stack.enter_context(context())
                self._call(frame, again)
                return self._units(frame, start) or self._results(frame, again)
        except Exception as error:  # whatever a forward raises that misses the state it expects
            return f"got {type(error).__name__}: {error}"

    def _call(self, frame: Frame, again: Frame) -> None:
        recorder = self.recorder
        with recorder.stack.enter(again):
            out = frame.invocation([recorder.values.tensors[value] for value in frame.invocation.reads])
            if again.branching or frame.reentrant:
                out = recorder.own(again, out)
        recorder.ended(again, out)

    def _units(self, frame: Frame, start: int) -> str:
        """Compare the recorder's torch calls since unit `start` with those of the frame."""
        pairs = zip_longest(self.recorder.units[start:], self.tape.units[frame.start : frame.stop])
        return next((_said(new, old) for new, old in pairs if not self._same(new, old)), "")

    def _same(self, new: Unit | None, old: Unit | None) -> bool:
        """Compare two torch calls; map the values that the new one makes to those of the old one."""
        if new is None or old is None or new.path != old.path or len(new.makes) != len(old.makes):
            return False
        same = len(new.reads) == len(old.reads) and all(map(self._same_value, new.reads, old.reads))
        same = same and _alike(self.recorder.invocations[new], self.tape.invocations[old])
        self.old.update(zip(new.makes, old.makes, strict=True))
        return same and _same_modes(self.recorder.modes[new], self.tape.modes[old])

    def _same_value(self, new: Value, old: Value) -> bool:
        if self.old.get(new, new) == old:
            return True
        source, tensor = self.recorder.values.sources.get(new), self.tape.fakes[old]
        return isinstance(source, Constant) and _same_constant(source.tensor, tensor)

    def _results(self, frame: Frame, again: Frame) -> str:
        """Compare what was returned, inner modules included, and the contents of assigned attributes."""
        if frame.constants != again.constants:
            return f"got {list(again.constants.values())} returned, expected {list(frame.constants.values())}"
        for old, new in _pairs(frame, again):
            if old.path != new.path or not self._same_tensors(new.returned, old.returned):
                return f"got other tensors returned by module {new.path or '(root)'}, expected the same"
        known = self.recorder.values.known
        for module, name, value in {(one.module, one.name): one for one in frame.assigned}.values():
            if self._mapped(known.get(id(getattr(module, name, None)))) != value:
                return f"got another tensor in the attribute {name!r}, expected the same"
        return ""

    def _same_tensors(self, new: Mapping[int, Value], old: Mapping[int, Value]) -> bool:
        return new.keys() == old.keys() and all(self._same_value(new[k], old[k]) for k in old)

    def _mapped(self, value: Value | None) -> Value | None:
        return value if value is None else self.old.get(value, value)


def _pairs(old: Frame, again: Frame) -> Iterator[tuple[Frame, Frame]]:
    """Yield a frame and those inside it, each with its counterpart; some have none inside `again`."""
    alone = len(again.inner) == 1 and again.inner[0].kind is old.kind and not old.reentrant
    twin = again.inner[0] if alone else again
    stack = [(old, twin)]
    while stack:
        one, other = stack.pop()
        yield one, other
        stack += zip(one.inner, other.inner, strict=False)


def _said(new: Unit | None, old: Unit | None) -> str:
    return f"got {_name(new)}, expected {_name(old)}"


def _name(unit: Unit | None) -> str:
    return "no torch call" if unit is None else f"{unit.does} in module {unit.path or '(root)'}"


def _alike(new: Invocation, old: Invocation) -> bool:
    """Compare functions and arguments, except tensors."""
    same = _same_leaf(new.function, old.function) and len(new.leaves) == len(old.leaves)
    same = same and (new.spec == old.spec or treespec_paths(new.spec) == treespec_paths(old.spec))  # closures are new
    return same and all(map(_same_leaf, new.leaves, old.leaves))


def _same_leaf(new: Any, old: Any, depth: int = DEPTH) -> bool:
    if new is old or type(new) is not type(old):
        return new is old
    if isinstance(new, FunctionType | partial):
        return _same_function(new, old, depth)
    if hasattr(new, "__array_interface__") and not isinstance(new, Tensor):
        return bool(new.shape == old.shape and new.tobytes() == old.tobytes())
    return not isinstance(new, COMPARED) or new == old or new != new  # noqa: PLR0124  # NaN


def _same_function(new: Any, old: Any, depth: int) -> bool:
    """Compare functions that a forward creates anew each time."""
    if isinstance(new, FunctionType) and new.__code__ is not old.__code__:
        return False
    pairs = [*zip_longest(closure_contents(new), closure_contents(old))]
    return not depth or all(_same_leaf(a, b, depth - 1) for a, b in pairs)


def _same_modes(new: Modes, old: Modes) -> bool:
    return (new.grad, new.autocast) == (old.grad, old.autocast)


def _same_constant(new: Tensor, old: Tensor) -> bool:
    """Compare the values of real tensors, unseen by the recorder."""
    if isinstance(old, FakeTensor):
        return False
    with DisableTorchFunction(), for_real():
        return new.shape == old.shape and new.dtype == old.dtype and torch.equal(new, old)
