# SPDX-License-Identifier: Apache-2.0
"""Does a module do the same when it is called without those of other stages?

Problem. Modules and hooks share Python state: a list that blocks fill, a counter, a dict, a context variable. On one
device a block finds there what all earlier blocks have left; in a stage, only what that stage's own modules have left.
No tensor need tell: the block may read a number, or the very tensor that it gets as its argument.

Idea. Before a stage is used, its calls are made once more, one after the other, on the fake tensors of the recording,
and recorded again. A call that differs from the tape in anything (a torch call, an argument, a mode, what is returned)
must not be made as itself. Nearly all do the same, which `fpipe.capture.replay` finds without recording them.

Invariant: all Python state is afterwards as it was before, and what the calls have changed of it is known.
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
from torch._subclasses.fake_tensor import FakeTensor

from fpipe.capture.assumption import ASSUMED
from fpipe.capture.closures import held
from fpipe.capture.contract import Constant, Source, Unit, Value
from fpipe.capture.modes import Modes, contexts
from fpipe.capture.origins import for_real
from fpipe.capture.questions import Answer, Told
from fpipe.capture.recorder import Recorder
from fpipe.capture.replay import Replay
from fpipe.capture.selection import given
from fpipe.capture.snapshot import Held, attributes_restored, contents
from fpipe.capture.tape import Invocation, Span, Tape
from fpipe.tree import PLAIN

CALLABLE = (BuiltinFunctionType, MethodDescriptorType, MethodType, MethodWrapperType, WrapperDescriptorType)
DATA = (*PLAIN, slice, range, type, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
COMPARED = (*CALLABLE, *DATA)
"""Classes of what is compared by value. Of functions it is their code and what they close over; else, the class."""
DEPTH = 4  # of functions in functions


class Rehearsed(NamedTuple):
    """What calls did when they were made again: which of them differed and how, and the state that they changed."""

    differing: Mapping[Span, str]
    changed: Sequence[Held]


Rehearse: TypeAlias = Callable[[Sequence[Span]], Rehearsed]


class Again(Recorder):
    """A recorder that knows the values of a tape, and gives the answers of it again."""

    def __init__(self, model: nn.Module, tape: Tape, sources: Mapping[Value, Source], opaque: Collection[str]) -> None:
        super().__init__(model, {v: (source, tape.fakes[v]) for v, source in sources.items()}, opaque=opaque)
        self.values.know(tape.fakes)
        self.answers: Mapping[tuple[Any, int], Answer] = {}
        self.earlier: Mapping[Any, int] = {}

    def begin_again(self, answers: Mapping[tuple[Any, int], Answer]) -> None:
        """Count the calls of functions from here on, for `answers` by function and number."""
        self.answers, self.earlier = answers, {function: len(self.calls[function]) for function, _ in answers}

    def _unknown(self, invocation: Invocation, tick: int, args: Any, kwargs: Any, error: Exception) -> Any:
        """Return what the call gave in the recording."""
        function = invocation.function
        number = len(self.calls[function]) - 1 - self.earlier.get(function, 0)
        answer = self.answers.get((function, number))
        if answer is not None:
            self.told.append(Told(tick, function, answer))
            return given(function, args, answer)
        if not self.spans.opaque or function not in ASSUMED:
            raise error
        self._branches()
        return ASSUMED[function](*args, **kwargs)


class Rehearsal:
    """Makes calls of a tape again.

    - `replay` makes what replays calls; `recorder` makes a recorder, which sees what they do `inside` a context.
    - `fresh` makes new tensors of the model's state and of the batch, `seated` is a context in which they are in their
      places: those of the recording belong to its autograd graph.
    - `state` are the containers that hold Python state.
    """

    def __init__(
        self,
        tape: Tape,
        replay: Callable[[], Replay],
        recorder: Callable[[], Again],
        inside: Callable[[Recorder], AbstractContextManager[None]],
        fresh: Callable[[], Mapping[Value, Tensor]],
        seated: Callable[[Mapping[Value, Tensor]], AbstractContextManager[None]],
        state: Sequence[Held],
    ) -> None:
        self.tape, self.replay, self.recorder, self.inside, self.state = tape, replay, recorder, inside, state
        self.fresh, self.seated = fresh, seated

    @contextmanager
    def begun(self) -> Iterator[Rehearse]:
        """Yield the function that makes calls again; meanwhile this may not be done elsewhere."""
        before = [one._replace(contents=contents(one.container)) for one in self.state]
        with torch.inference_mode(False), torch.enable_grad():
            yield partial(self._rehearsed, self.replay(), before)

    def _rehearsed(self, replay: Replay, before: Sequence[Held], spans: Sequence[Span]) -> Rehearsed:
        """Make these calls, and put everything back.

        What differs before a call may be why that one differs; so one that must be made as itself ends the rehearsal.
        """
        with replay.begun():
            found = copy_context().run(_twice, before, lambda: self._replayed(replay, spans))
        if found.differing:
            take = _Take(self.tape, self.recorder())
            with self.inside(take.recorder):
                found = copy_context().run(_twice, before, lambda: self._differing(take, spans))
        return found

    def _replayed(self, replay: Replay, spans: Sequence[Span]) -> dict[Span, str]:
        """What a replay tells: the first of these calls of which it stays open whether it differs, if there is one."""
        with self.seated(self.tape.fakes):
            span = replay.first_open(spans)
        return {} if span is None else {span: "is not known to do the same"}

    def _differing(self, take: _Take, spans: Sequence[Span]) -> dict[Span, str]:
        with torch._C.DisableTorchFunction(), for_real():
            tensors = self.fresh()
        take.recorder.values.know(tensors)
        differing: dict[Span, str] = {}
        with self.seated(tensors):
            for span in spans:
                found = take.difference(span)
                if found and not (span.sealed and differing):
                    differing[span] = found
                if found and span.sealed:
                    break
        return differing


def _twice(before: Sequence[Held], differing: Callable[[], dict[Span, str]]) -> Rehearsed:
    """Do what tells which calls differ, and put back all state, which is as it was `before`."""
    changed: dict[int, Held] = {}
    found: dict[Span, str] = {}
    try:
        for _ in range(2):  # what is not put back between microbatches, in classes say, is found by the second one
            found = found or differing()
            changed.update({id(one.container): one for one in before if one.changed})
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
    """Compares calls with those of a tape; `old` says which of its values stand for those that were made again."""

    def __init__(self, tape: Tape, recorder: Again) -> None:
        self.tape, self.recorder = tape, recorder
        self.old: dict[Value, Value] = {}

    def difference(self, span: Span) -> str:
        """Make a call again, and say what is different; empty if nothing is."""
        recorder, start = self.recorder, len(self.recorder.units)
        recorder.begin_again(self.tape.answered(span.first_tick, span.last_tick))
        again = Span(span.path, span.kind, span.invocation, recorder.now(), start, recorder.tick)
        try:
            with ExitStack() as stack:
                stack.enter_context(attributes_restored(span.touched))
                for context in contexts(span.modes):
                    stack.enter_context(context())
                self._call(span, again)
                return self._units(span, start) or self._results(span, again)
        except Exception as error:  # whatever a forward raises that does not find what it expects
            return f"got {type(error).__name__}: {error}"

    def _call(self, span: Span, again: Span) -> None:
        recorder = self.recorder
        with recorder.spans.running(again):
            out = span.invocation([recorder.values.tensors[value] for value in span.invocation.reads])
            if again.branching or span.reentrant:
                out = recorder.own(again, out)
        recorder.ended(again, out)

    def _units(self, span: Span, start: int) -> str:
        """Compare the torch calls since unit `start` of the recorder with those of the span."""
        pairs = zip_longest(self.recorder.units[start:], self.tape.units[span.start : span.stop])
        return next((_said(new, old) for new, old in pairs if not self._same(new, old)), "")

    def _same(self, new: Unit | None, old: Unit | None) -> bool:
        """Compare two torch calls; if they are the same, so is what they make."""
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

    def _results(self, span: Span, again: Span) -> str:
        """Compare what was returned, by modules inside too, and what is in the attributes that were assigned."""
        if span.constants != again.constants:
            return f"got {list(again.constants.values())} returned, expected {list(span.constants.values())}"
        for old, new in _pairs(span, again):
            if old.path != new.path or not self._same_tensors(new.returned, old.returned):
                return f"got other tensors returned by module {new.path or '(root)'}, expected the same"
        known = self.recorder.values.known
        for module, name, value in {(one.module, one.name): one for one in span.assigned}.values():
            if self._mapped(known.get(id(getattr(module, name, None)))) != value:
                return f"got another tensor in the attribute {name!r}, expected the same"
        return ""

    def _same_tensors(self, new: Mapping[int, Value], old: Mapping[int, Value]) -> bool:
        return new.keys() == old.keys() and all(self._same_value(new[k], old[k]) for k in old)

    def _mapped(self, value: Value | None) -> Value | None:
        return value if value is None else self.old.get(value, value)


def _pairs(old: Span, again: Span) -> Iterator[tuple[Span, Span]]:
    """A span and those inside it, each with the one that stands for it; some have none inside `again`."""
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
    """Compare functions and arguments, but for tensors."""
    same = _same_leaf(new.function, old.function) and len(new.leaves) == len(old.leaves)
    same = same and (new.spec == old.spec or treespec_paths(new.spec) == treespec_paths(old.spec))  # closures are anew
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
    """Compare functions that a forward makes anew each time."""
    if isinstance(new, FunctionType) and new.__code__ is not old.__code__:
        return False
    pairs = [*zip_longest(held(new), held(old))]
    return not depth or all(_same_leaf(a, b, depth - 1) for a, b in pairs)


def _same_modes(new: Modes, old: Modes) -> bool:
    return (new.grad, new.autocast) == (old.grad, old.autocast)


def _same_constant(new: Tensor, old: Tensor) -> bool:
    """Compare the values of real tensors; what the recorder is not to see."""
    if isinstance(old, FakeTensor):
        return False
    with torch._C.DisableTorchFunction(), for_real():
        return new.shape == old.shape and new.dtype == old.dtype and torch.equal(new, old)
