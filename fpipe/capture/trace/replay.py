# SPDX-License-Identifier: Apache-2.0
"""Replay calls from a tape to prove, without running operators, that they do what was recorded.

Problem. A rehearsal makes calls again to see what Python state they find. Running their torch calls on fake tensors and
recording them takes as long as the first recording.

Idea. Run only the Python code: compare each torch call with the next one on the tape, and return the recorded result.
The replay ends at the first difference, at a call that is not a plain torch function of plain arguments, and at
anything else that a recorder must see. It then proves nothing: the calls must be recorded again and compared.

Invariant: a replay that dispatches an operator, or makes any other torch call than the recorded one, never succeeds.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import (
    BuiltinFunctionType,
    EllipsisType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    NoneType,
    WrapperDescriptorType,
)
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpipe.capture.assumed_values import FINITE
from fpipe.capture.eager_types import hide_fakes
from fpipe.capture.fast_paths import allow_fast_paths
from fpipe.capture.trace.patches import LOCAL_READS, SEEDING, TRANSFORMS
from fpipe.capture.trace.recorder import SEALING
from fpipe.ir.modes import contexts, current_modes
from fpipe.ir.tape import CallResult, Frame, Tape, constants_at, tensors_at
from fpipe.model.snapshot import restore_attributes
from fpipe.patching import current, replace
from fpipe.tensors.attributes import MARKS
from fpipe.tensors.effects import Effects
from fpipe.tensors.fake import Fakes
from fpipe.tensors.tree import flatten_all
from fpipe.torch_private import (
    ARGUMENT_CHECK,
    CHECKPOINT,
    FUSED_ATTENTION,
    PARAMETER_MARK,
    TENSOR_CHECK,
    FakeTensor,
    count_dispatch_modes,
    set_grad_enabled,
)

BUILTIN = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
EXECUTED = frozenset({*SEALING, Tensor.__deepcopy__})
"""Torch functions that run user code, or modify their arguments."""
SETTING: Any = set_grad_enabled
"""Sets the grad mode. Other functions that take no tensors and return `None` may set a mode, too: they end a replay."""
TENSORS = frozenset({FakeTensor, Tensor, nn.Parameter})
NUMBERS = frozenset({bool, int, float, NoneType})
CLASSES = (complex, str, EllipsisType, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format)
DATA = NUMBERS.union(CLASSES)
"""Classes of arguments in which neither code nor state can hide; not their subclasses."""
CHECKED = ("__call__", "__setattr__", "register_buffer")
"""The methods of modules whose calls are compared with the recorded ones."""
ENDING = (
    *(*SEEDING, TENSOR_CHECK, ARGUMENT_CHECK, (torch.autograd.Function, "apply")),
    *(FUSED_ATTENTION, (torch.jit.ScriptFunction, "__call__")),
    (torch.autograd.graph.saved_tensors_hooks, "__enter__"),
    CHECKPOINT,
    *LOCAL_READS,
    *TRANSFORMS,
)
"""The other places that a recording patches; a call there ends a replay. Autocast is compared with each torch call."""


class DifferentError(Exception):
    """Raised to end a replay."""


class Replay(TorchFunctionMode):
    """Replays calls of a tape, inside `prepare`.

    - `tick`: the tick of the next torch call. `coming`: for each running call, innermost last, the recorded calls
      inside it that are still to come. `ended`: whether the replay ended; a forward may swallow the exception.
    - `expected`: the arguments of torch calls that can be compared, by tick.
    - `attributes`: the names of attributes that fake tensors have without the model's doing.
    - `active`: whether a call is running. Otherwise replacements, which user code may keep, call torch's own functions.
    - `depth`: the number of dispatch modes in force when the replay is prepared.
    """

    def __init__(self, model: nn.Module, tape: Tape, mode: Fakes) -> None:
        super().__init__()
        self.tape, self.mode = tape, mode
        self.attributes = {"fake_mode", PARAMETER_MARK, FINITE, MARKS}.union(*mode.states.values())
        self._unmark()
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.call, self.assign, self.register = (current(nn.Module, name) for name in CHECKED)
        self.effects = Effects()
        self.expected: dict[int, list[Any]] = {}
        self.coming: list[Iterator[Frame]] = []
        self.tick = self.depth = 0
        self.active = self.ended = False

    @contextmanager
    def prepare(self) -> Iterator[None]:
        """Patch torch for the duration, in the places that a recording patches."""
        with ExitStack() as stack:
            stack.enter_context(self.mode.note(self.effects, self._end_at_operator))
            for owner, name, function in self._replacements():
                stack.enter_context(replace(owner, name, function))
            stack.enter_context(hide_fakes())
            stack.enter_context(allow_fast_paths(self.end))
            stack.enter_context(self)
            self.depth = count_dispatch_modes()
            try:
                yield
            finally:
                self._unmark()

    def _tensors_with_marks(self) -> list[Tensor]:
        """Return the tensors of the tape that carry attributes set by the model."""
        fakes = [tensor for tensor in self.tape.fakes.values() if type(tensor) is FakeTensor]
        return [tensor for tensor in fakes if not vars(tensor).keys() <= self.attributes]

    def _unmark(self) -> None:
        """Remove attributes that the model set on tensors of the tape: the next replay would find them too early."""
        for tensor in self._tensors_with_marks():
            for name in vars(tensor).keys() - self.attributes:
                del vars(tensor)[name]

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield each patched owner, the name there, and the replacement."""
        yield nn.Module, "__call__", self._call_module
        yield nn.Module, "__setattr__", self._set_attribute
        yield nn.Module, "register_buffer", self._register_buffer
        for owner, name in ENDING:
            yield owner, name, self._end_at_call(current(owner, name))

    def _end_at_call(self, function: Callable[..., Any]) -> Any:
        def end_or_call(*args: Any, **kwargs: Any) -> Any:
            return self.end() if self.active else function(*args, **kwargs)

        return end_or_call

    def find_unproven(self, frames: Sequence[Frame]) -> Frame | None:
        """Replay calls in order; return the first that is not proven to do what was recorded, or `None`."""
        return next((frame for frame in frames if not self._is_again(frame)), None)

    def _is_again(self, frame: Frame) -> bool:
        """Replay a call, and return whether it does what was recorded."""
        function, fakes = frame.invocation.function, self.tape.fakes
        self.tick, self.ended = frame.first_tick, False
        self.coming = [iter([frame] if id(function) in self.paths else frame.inner)]
        try:
            with ExitStack() as stack:
                stack.enter_context(restore_attributes(frame.touched))
                stack.enter_context(torch.set_grad_enabled(frame.modes.ambient))  # restored however a forward exits
                for context in contexts(frame.modes):
                    stack.enter_context(context())
                out = self._run(frame)
                self._leave(frame, out)
                kept = {(one.module, one.name): one.value for one in frame.assigned}
                same: bool = all(getattr(module, name, None) is fakes[value] for (module, name), value in kept.items())
                return bool(same and constants_at(out) == frame.constants and not self.ended)
        except Exception:  # a forward that does not find the state it expects may raise anything
            return False

    def _run(self, frame: Frame) -> Any:
        self.active = True
        try:
            return frame.invocation([self.tape.fakes[value] for value in frame.invocation.reads])
        finally:
            self.active = False

    def end(self, *_: Any, **__: Any) -> NoReturn:
        """End the replay: a call differs, or cannot be compared."""
        self.ended = True
        raise DifferentError

    def _end_at_operator(self, *_: Any) -> None:
        if self.active:
            self.end()

    # --------------------------------------------------------------------------------------------------------- results

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        try:
            return self._recorded_result(func, args, kwargs)
        finally:
            if func is SETTING:  # even if the replay ended: contexts restore the previous mode
                func(*args, **kwargs)

    def _recorded_result(self, function: Any, args: Any, kwargs: Any) -> Any:
        one = self.tape.returned.get(self.tick)
        foreign = count_dispatch_modes() != self.depth  # a new mode, which would see operators
        if self.ended or foreign or one is None or not self._is_same_call(one, function, args, kwargs):
            self.end()
        self.tick = one.last
        return one.out

    def _is_same_call(self, old: CallResult, function: Any, args: Any, kwargs: Any) -> bool:
        """Return whether a torch call is the recorded one, under the same modes."""
        invocation = old.invocation
        if function is not invocation.function and function != invocation.function:
            return False
        expected = self._expected_arguments(old)
        leaves, spec = flatten_all((args, kwargs))
        same = old.modes == current_modes() and len(leaves) == len(expected) and spec == invocation.spec
        return bool(same and all(map(_is_same_argument, leaves, expected)))

    def _expected_arguments(self, old: CallResult) -> list[Any]:
        """Return the arguments of a recorded call, cached; end the replay if it cannot be compared."""
        if self.tick not in self.expected:
            arguments = self._arguments(old)
            setting = old.out is None and not old.invocation.reads and old.invocation.function is not SETTING
            if setting or not (
                _runs_only_torch(old.invocation.function) and all(map(_is_plain, (*arguments, old.out)))
            ):
                self.end()
            self.expected[self.tick] = arguments
        return self.expected[self.tick]

    def _arguments(self, old: CallResult) -> list[Any]:
        invocation, leaves = old.invocation, list(old.invocation.leaves)
        for leaf, read in invocation.holes:
            leaves[leaf] = self.tape.fakes[invocation.reads[read]]
        return leaves

    # ----------------------------------------------------------------------------------------------------------- frames

    def _call_module(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not self.active or id(module) not in self.paths:
            return self.call(module, *args, **kwargs)
        frame = next(self.coming[-1], None)
        if frame is None or frame.invocation.function is not module or frame.first_tick != self.tick:
            self.end()
        self.coming.append(iter(frame.inner))
        try:
            out = self.call(module, *args, **kwargs)
            self._leave(frame, out)
        finally:
            self.coming.pop()
        return out

    def _leave(self, frame: Frame, out: Any) -> None:
        """End the replay unless the call, which returned `out`, did what was recorded in `frame`."""
        expected, got = {k: self.tape.fakes[v] for k, v in frame.returned.items()}, tensors_at(out)
        same = len(got) == len(expected) and all(got.get(k) is tensor for k, tensor in expected.items())
        if not same or self.tick != frame.last_tick or frame.branching or next(self.coming[-1], None) is not None:
            self.end()

    def _set_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        if self.active and name in module._parameters and value is not module._parameters[name]:
            self.end()
        self.assign(module, name, value)

    def _register_buffer(self, module: nn.Module, name: str, tensor: Any, *args: Any, **kwargs: Any) -> None:
        if self.active and (name not in module._buffers or tensor is not module._buffers[name]):
            self.end()
        self.register(module, name, tensor, *args, **kwargs)


def _is_same_argument(new: Any, old: Any) -> bool:
    return new is old or (type(new) is type(old) and type(old) not in TENSORS and bool(new == old))


def _is_plain(leaf: Any) -> bool:
    """Return whether a leaf is a tensor, plain data, or a tuple of these."""
    kind = type(leaf)
    if isinstance(leaf, tuple):
        return all(map(_is_plain, leaf))
    if kind is slice:
        return {type(leaf.start), type(leaf.stop), type(leaf.step)} <= NUMBERS
    return kind in DATA or kind in TENSORS


def _runs_only_torch(function: Any) -> bool:
    """Return whether a function runs only torch's code."""
    if function in EXECUTED:
        return False
    if isinstance(function, FunctionType):
        return str(function.__globals__.get("__name__")).partition(".")[0] == "torch"
    return isinstance(function, BUILTIN)
