# SPDX-License-Identifier: Apache-2.0
"""Record a model's run on fake tensors: its torch calls in order, and the module calls around them.

A `TorchFunctionMode` sees every call of torch's API as the user wrote it, in any module, and the autocast and grad
modes in force. `fpipe.record.trace.patches` reports what the mode cannot see. The fake mode underneath reports which
memory each call writes, and on which devices it draws random numbers.

Whatever runs inside a torch call belongs to that call. Anything that changes how other calls run, such as saved-tensor
hooks, seals the module whose forward contains it: that module runs as a whole or not at all.

Runs when a plan is made; `fpipe.record.trace.recording` then turns the recording into a tape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpipe.errors import PipelineError
from fpipe.record.captured import Source, Unit, Value
from fpipe.record.fakes.assumed_values import (
    ASSUMPTIONS,
    UNKNOWN,
    VALUE_READS,
    answer_guard,
    call_or_raise,
    check_all,
    check_valid,
    is_torch_function,
)
from fpipe.record.fakes.generators import Generators
from fpipe.record.model.places import current_line
from fpipe.record.modes import Modes, current_casts, current_modes
from fpipe.record.numbers import (
    READERS,
    compute,
    creates_tensor,
    extract,
    forget_constants,
    has_numbers,
    learn_all,
    number_of,
    probe_all,
    sets_number,
    takes_numbers,
    to_python,
    to_tensor,
)
from fpipe.record.questions import Ask, refuse_questions
from fpipe.record.steps.selection import count_selected, deciding_masks, result_on_fakes
from fpipe.record.tape import CallResult, Frame, Invocation, constants_at, pick, tensors_at
from fpipe.record.trace.call_stack import CallStack
from fpipe.record.trace.draws import Draws
from fpipe.record.trace.effect_checks import (
    ATTACHING,
    require_allowed,
    require_kept,
    require_no_barrier,
    require_own_gradients,
)
from fpipe.record.trace.history import Facts, History, for_real
from fpipe.record.trace.reassignment import Reassignments
from fpipe.record.trace.replaced import find_fake_error, require_answerable
from fpipe.record.trace.torch_calls import AutocastRegions, Questions, RunningCall, TorchCalls, hide_group_names
from fpipe.record.trace.values import Values
from fpipe.tensors.closures import closure_contents
from fpipe.tensors.collectives import has_handle, written_memory
from fpipe.tensors.effects import Effects, is_collective
from fpipe.tensors.fake import Fakes
from fpipe.tensors.torch_private import TENSOR_METHODS, active_fake_mode
from fpipe.tensors.tree import flatten

GRAD_FN: Any = TENSOR_METHODS["grad_fn"].__get__
"""The function that torch calls to get a tensor's `grad_fn`."""
EFFECTS = (check_all, check_valid, *ATTACHING)
"""Torch functions that are recorded even if they return no new tensor."""
SEALING: Mapping[Any, str] = MappingProxyType(
    dict.fromkeys((torch.autograd.grad, torch.autograd.backward, Tensor.backward), "a backward inside its forward")
    | {Tensor.data.__set__: "an assignment to .data"}  # type: ignore[attr-defined]
)
"""Torch functions that seal the module that calls them, and why."""


class Recorder(TorchFunctionMode):
    """Records the run made while it is entered, inside a fake mode.

    - `values`: the run's tensors. `reassignments`: the buffers that it reassigns.
    - `stack`: its module calls. `autocast`: the autocast region that it is in. `ambient`: whether gradients are enabled
      around it.
    - `torch_calls`: all of its torch calls. `history`: those recorded as units. `hooked`: positions of the units before
      which saved-tensor hooks were installed.
    - `effects`: the side effects of operators. `draws`: the torch calls that draw random numbers.
    - `questions`: what the run asks about the batch. `plain`: whether `.item()` asks, too. `numbers`: the values that
      are numbers (`fpipe.record.numbers`).
    - `fake_errors`: errors for calls that failed only because tensors are fake, in case the forward swallows them.
    """

    def __init__(
        self,
        model: nn.Module,
        sources: Mapping[Value, tuple[Source, Tensor]],
        ask: Ask = refuse_questions,
        opaque: Collection[str] = (),
        generators: Generators | None = None,
        plain: bool = False,
    ) -> None:
        super().__init__()
        self.plain, self.numbers = plain, set[Value]()
        self.stack = CallStack(model, opaque, generators)
        self.values = Values(sources, self.stack.here)
        self.reassignments = Reassignments(self.values, self.stack.here)
        self.history = History(self.values)
        self.hooked: list[int] = []
        self.torch_calls, self.autocast = TorchCalls(), AutocastRegions()
        self.effects, self.draws = Effects(), Draws()
        self.questions = Questions(ask)
        self.fake_errors: list[PipelineError] = []
        self.ambient = torch.is_grad_enabled()

    # ----------------------------------------------------------------------------------------------------- torch calls

    @property
    def is_in_torch_call(self) -> bool:
        """True while a torch call runs; whatever happens then belongs to that call."""
        return self.torch_calls.running is not None

    @property
    def modes(self) -> Modes:
        """The modes in force."""
        return Modes(torch.is_grad_enabled(), self.ambient, current_casts(), self.autocast.current)

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is to_python:
            return self._note_number(args[0])
        kwargs = kwargs or {}
        if has_numbers(args, kwargs):
            if creates_tensor(func, args, kwargs) and not self.is_in_torch_call:
                return self.call(to_tensor, (args[0].tensor, kwargs.get("dtype"), kwargs.get("device")), {})
            if sets_number(func, args) and not self.is_in_torch_call:
                value = self.call(to_tensor, (args[2].tensor, args[0].dtype, args[0].device), {})
                args = (*args[:2], value)
            if self.is_in_torch_call or not takes_numbers(func, args, kwargs):
                with self:
                    args, kwargs = learn_all((args, kwargs))
        require_answerable(func, args, self.values.parameter, self.stack.here)
        try:
            if func is Tensor.item and self._can_extract(args[0]):
                return self._note_number(self.call(extract, args, {}))
            out = self.call(func, args, kwargs)
            self.numbers |= {self.values.known[id(out)]} if func is compute else set()
            return out
        except Exception as error:
            to_raise = None if self.is_in_torch_call else find_fake_error(func, error, self.stack.here)
            self.fake_errors += [] if to_raise is None else [to_raise]
            raise

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch call, and record it unless it runs inside another."""
        tick, running = self.torch_calls.begin(function), self.torch_calls.running
        if running is None:
            return self._call_outermost(function, args, kwargs, tick)
        running.use(self.values.within((args, kwargs)))
        try:
            return self._note_draws(function, tick, lambda: function(*args, **kwargs))
        except UNKNOWN:
            if function is Tensor.__bool__ and running.guarded:
                return False
            raise

    def _call_outermost(self, function: Any, args: Any, kwargs: Any, tick: int) -> Any:
        if function in SEALING:
            self.stack.seal(SEALING[function])
        self.stack.check_settings()
        self.stack.check_modes()
        invocation = Invocation(function, args, kwargs, self.values.read)
        if self.stack.path and any(map(_holds_module, invocation.leaves)):
            name = getattr(function, "__name__", str(function))
            self.stack.seal(f"a call of {name} with a module")  # whose weights must be in their places
        self.effects.written.clear()
        self.effects.cast.clear()
        self.effects.communicates = False
        args, kwargs = probe_all((args, kwargs)) if invocation.numbers else (args, kwargs)
        modes, running = current_modes(), RunningCall()
        self.torch_calls.running = running
        try:
            out = self._note_draws(function, tick, lambda: call_or_raise(function, args, kwargs))
        except UNKNOWN as error:
            out = self._answer(invocation, tick, args, kwargs, error)
        finally:
            self.torch_calls.running = None
        if function in SEALING:
            require_own_gradients(self.values, self.stack.here)
        if function == GRAD_FN and out is not None and self.stack.path:
            self.stack.seal("a look at autograd's graph")  # it may hook the node, which no torch call shows
        if invocation.numbers:
            forget_constants((args, kwargs, out))
        self._record(invocation, running, out, tick)
        self.torch_calls.results[tick] = CallResult(invocation, modes, out, self.torch_calls.tick)
        return out

    def _note_number(self, tensor: Tensor) -> Any:
        """Return the number in a tensor."""
        self.numbers.add(self.values.known[id(tensor)])
        return number_of(tensor)

    def _can_extract(self, tensor: Tensor) -> bool:
        """Return whether `.item()` of a tensor need not be answered: it follows from the batch, and is a number."""
        if self.plain or self.is_in_torch_call or self.stack.is_opaque or tensor.numel() != 1:
            return False
        if tensor.dtype is torch.bool or tensor.is_complex() or getattr(tensor, "constant", None) is not None:
            return False
        provenance = self.history.provenance((self.values.read(tensor),))
        return bool(provenance.leaves) and not provenance.obstacle

    def _note_draws(self, function: Any, tick: int, run: Callable[[], Any]) -> Any:
        """Run a torch call; note it if it draws random numbers and no call inside it does."""
        drawn, self.effects.drawn = self.effects.drawn, {}
        out = run()
        if self.effects.drawn and not self.draws.has_from(tick + 1):
            self.draws.note(tick, function, self.stack.path, self.effects.drawn)
        self.effects.drawn |= drawn
        return out

    # -------------------------------------------------------------------------------------------------------- questions

    def _answer(self, invocation: Invocation, tick: int, args: Any, kwargs: Any, error: Exception) -> Any:
        """Return what eager mode would return for a call that reads values of constants or of the batch.

        Raise `CaptureError` if other values decide. In an opaque module, which reads the values itself in every step,
        assume a result instead if more than constants decide.
        """
        function, masks = invocation.function, deciding_masks(invocation.function, args)
        asking = Invocation(count_selected, (masks,), {}, self.values.read) if masks else invocation
        provenance = self.history.provenance(asking.reads)
        is_guard = is_torch_function(function) and function not in (*VALUE_READS, *ASSUMPTIONS)
        if is_guard and (provenance.obstacle or (self.stack.is_opaque and provenance.leaves)):
            return self._pass_guards(lambda: function(*args, **kwargs))
        if self.stack.is_opaque and (provenance.obstacle or provenance.leaves) and function not in READERS.values():
            return self._assume(function, args, kwargs, error)
        question = provenance.question(asking, f"{self.stack.here()}{current_line()}")
        with for_real():
            answer = self.questions.ask(question) if provenance.leaves else question.compute(())
        self.questions.note_reply(tick, function, answer)
        return result_on_fakes(function, args, answer)

    def _pass_guards(self, run: Callable[[], Any]) -> Any:
        """Run a function of torch's own that checks its arguments, as if no check of values found anything.

        The call is one unit, so in a step the function checks real values.
        """
        mode, running = active_fake_mode(), self.torch_calls.running
        assert isinstance(mode, Fakes), "models run on fake tensors"
        assert running is not None, "a torch call reads values"
        before, mode.answer_read, running.guarded = mode.answer_read, answer_guard, True
        try:
            return run()
        finally:
            mode.answer_read = before

    def _assume(self, function: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """Return the assumed result of a call that reads values; raise `error` if there is none."""
        if function not in ASSUMPTIONS:
            raise error
        self._note_branch()
        return ASSUMPTIONS[function](*args, **kwargs)

    def _note_branch(self) -> None:
        """Note that the innermost module, and with it every call around it, branches on data.

        Another branch may use everything that the module holds and receives, and write to any of its buffers.
        """
        assert self.torch_calls.running is not None, "a torch call reads values"
        self.stack.seal("control flow on data")
        for frame in self.stack.frames:
            frame.branching = True
        self.draws.begin_stream(self.stack.outermost_branching, self.values.tensors.values())
        module = self.stack.module
        parameters, buffers = ([], []) if module is None else ([*module.parameters()], [*module.buffers()])
        self.torch_calls.running.use(self.values.within([*parameters, *buffers]))
        self.torch_calls.running.use(v for frame in self.stack.innermost for v in frame.invocation.reads)
        self.effects.written |= {self.values.storage[value] for value in self.values.within(buffers)}

    # ----------------------------------------------------------------------------------------------------------- units

    def _record(self, invocation: Invocation, running: RunningCall, out: Any, tick: int) -> None:
        """Record a call that returned `out` as a unit, unless it had no effect."""
        require_allowed(self.effects, self.stack.here)
        if has_handle(out):
            self.stack.seal("a collective of torch.distributed that is waited for later")
        picks = self._new_tensors(out)
        makes = tuple(self.values.add(tensor) for tensor in picks.values())
        used = [value for value in running.used if value not in invocation.reads]
        facts = self._facts(invocation, used, tick)
        was_answered = self.questions.has_reply(tick)
        acts = facts.written or facts.draw is not None or running.communicates or invocation.function in EFFECTS
        if not (makes or used or was_answered or acts):
            return
        if used and invocation.function not in ASSUMPTIONS:
            self.stack.seal("a function of functions, such as vmap, over one that uses tensors from outside")
        self.history.add(self._unit(invocation, used, makes, tuple(picks)), facts)

    def _new_tensors(self, out: Any) -> dict[int, Tensor]:
        """Return the new tensors among those that a call returned, each once, by leaf number."""
        returned, leaves = tensors_at(out), dict[int, int]()
        for leaf, tensor in returned.items():
            if id(tensor) not in self.values.known:
                leaves.setdefault(id(tensor), leaf)
        return {leaf: returned[leaf] for leaf in leaves.values()}

    def _facts(self, invocation: Invocation, used: Collection[Value], tick: int) -> Facts:
        storage, cast = self.values.storage, self.effects.cast
        return Facts(
            invocation,
            self.modes,
            ticks=(tick, self.torch_calls.tick),
            written=frozenset(self.effects.written & self.values.memories),
            casts=frozenset(value for value in (*invocation.reads, *used) if storage[value] in cast),
            draw=self.draws.found[-1].tick if self.draws.has_from(tick) else None,
            communicates=self.effects.communicates,
        )

    def _unit(
        self, invocation: Invocation, used: list[Value], makes: tuple[Value, ...], picks: tuple[int, ...]
    ) -> Unit:
        name = getattr(invocation.function, "__name__", str(invocation.function))
        where = f"{self.stack.where}, {name}"
        data = [*map(_describe_data, hide_group_names(invocation.function, filter(_is_data, invocation.leaves)))]
        reads = (*invocation.reads, *used)
        return Unit(
            self.stack.path, reads, makes, lambda *tensors: pick(invocation(tensors), picks, where), f"{name}{data}"
        )

    def check_operator(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check an operator call; seal the module if it is a collective outside of any torch call."""
        if not is_collective(func):
            return
        name = func._schema.name.partition("::")[2].rstrip("_")
        require_no_barrier(name, self.stack.here)
        if self.torch_calls.running is not None:
            self.torch_calls.running.communicates = True
            return
        self.stack.seal(f"a collective of torch.distributed ({name})")
        earlier = self.history.existing_at(self.stack.frames[-1].start if self.stack.frames else 0)
        is_lost = written_memory(func, args, kwargs) & {self.values.storage[value] for value in earlier}
        require_kept(bool(is_lost), name, self.stack.here)

    # ---------------------------------------------------------------------------------------------------------- frames

    def open_frame(
        self, path: str, kind: type, function: Callable[..., Any], args: Any, kwargs: Any, sealed: str = ""
    ) -> Frame:
        """Return a frame for a call of `function` that begins now."""
        invocation, start = Invocation(function, args, kwargs, self.values.read), len(self.history.units)
        return Frame(path, kind, invocation, self.modes, start, first_tick=self.torch_calls.tick, sealed=sealed)

    def close_frame(self, frame: Frame, out: Any) -> None:
        """Complete the frame of a call that returned `out`."""
        frame.stop, frame.last_tick = len(self.history.units), self.torch_calls.tick
        frame.constants = constants_at(out)
        known = self.values.known
        frame.returned = {k: known[id(tensor)] for k, tensor in tensors_at(out).items() if id(tensor) in known}

    def call_in_frame(self, frame: Frame, run: Callable[[], Any]) -> Any:
        """Run `run` as the call of a frame, and return its result."""
        with self.stack.enter(frame):
            out = run()
            if frame.branching:
                out = self.view_others(frame, out)
        self.close_frame(frame, out)
        return out

    def view_others(self, frame: Frame, out: Any) -> Any:
        """Return `out` with views in place of tensors that the call did not make: another branch may make new ones."""
        tensors, structure = flatten(out, opaque=True)
        made, known = self.history.made_since(frame.start), self.values.known
        return structure.unflatten([t if known.get(id(t)) in made else t.view_as(t) for t in tensors])


def _holds_module(leaf: object) -> bool:
    """Return whether an argument is a module, a method of one, or a function that closes over one."""
    inner = (leaf.__self__,) if isinstance(leaf, MethodType) else closure_contents(leaf)
    return any(isinstance(one, nn.Module) for one in (leaf, *inner))


def _is_data(leaf: object) -> bool:
    return isinstance(leaf, bool | int | float | str) or hasattr(leaf, "__array_interface__")


def _describe_data(leaf: Any) -> Any:
    """Return a number or string itself, or a digest of an array's elements."""
    return leaf if isinstance(leaf, bool | int | float | str) else blake2b(leaf.tobytes(), digest_size=8).hexdigest()
