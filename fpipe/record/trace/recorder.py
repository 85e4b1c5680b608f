# SPDX-License-Identifier: Apache-2.0
"""Record a model's run on fake tensors: its torch calls in order, and the module calls around them.

A `TorchFunctionMode` sees every call of torch's API as the user wrote it, in any module, and the autocast and grad
modes in force. `fpipe.record.trace.patches` reports what the mode cannot see. The fake mode underneath reports which
memory each call writes, and on which devices it draws random numbers.

Whatever runs inside a torch call belongs to that call. Anything that changes how other calls run, such as saved-tensor
hooks, seals the module whose forward contains it: that module runs as a whole or not at all.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from types import MappingProxyType, MethodType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpipe.errors import PipelineError
from fpipe.record.captured import Modes, Source, Unit, Value, current_casts
from fpipe.record.exchanges import require_joined
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
from fpipe.record.fakes.recurrent import call_function
from fpipe.record.fakes.sizes import SIZED, read_sizes
from fpipe.record.model.places import current_line
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
from fpipe.record.objective import USUAL, Way
from fpipe.record.questions import Answer, Ask, Reply, Sample, refuse_questions
from fpipe.record.trace.answers import deciding_masks, reader_of, result_on_fakes
from fpipe.record.trace.call_stack import CallStack
from fpipe.record.trace.checks import (
    find_fake_error,
    require_allowed,
    require_answerable,
    require_kept,
    require_no_barrier,
    require_own_gradients,
)
from fpipe.record.trace.frames import Frame, Invocation, constants_at, pick, tensors_at
from fpipe.record.trace.reassignment import Reassignments
from fpipe.record.trace.record import ATTACHING, Facts, Record, Values, for_real
from fpipe.record.trace.running_call import InnerCall, RunningCall, replay_calls
from fpipe.tensors.effects import Effects, has_handle, is_collective, operator_name, written_memory
from fpipe.tensors.fake import Fakes
from fpipe.tensors.torch_private import PACK, TENSOR_METHODS, active_fake_mode, process_groups
from fpipe.tensors.tree import COMMON_TYPES, closure_contents, flatten
from schedules.status import say

GRAD_FN: Any = TENSOR_METHODS["grad_fn"].__get__
"""The function that torch calls to get a tensor's `grad_fn`."""
EFFECTS = (check_all, check_valid, *ATTACHING)
"""Torch functions that are recorded even if they return no new tensor."""
SEALING: Mapping[Any, str] = MappingProxyType(
    dict.fromkeys((torch.autograd.grad, torch.autograd.backward, Tensor.backward), "a backward inside its forward")
    | {Tensor.data.__set__: "an assignment to .data"}  # type: ignore[attr-defined]
)
"""Torch functions that seal the module that calls them, and why."""
FACTS: Final = frozenset(
    {Tensor.dim, *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim"))}
)
"""Torch functions that only tell what a tensor is; they leave nothing in a record."""

WITH_PROCESSES: Final = ("broadcast", "reduce", "gather", "scatter", "send", "recv", "isend", "irecv")
"""The functions of torch.distributed that are passed the number of a process in the job."""


class Recorder(TorchFunctionMode):
    """Records the run made while it is entered, inside a fake mode.

    - `record`: what it records, of the tensors in `values`. `reassignments`: the buffers that the run reassigns.
    - `stack`: the calls of modules in progress; `running`: the outermost torch call in progress, if any.
    - `ambient`: whether gradients are enabled around the run.
    - `autocasts`, `region`: how many autocast contexts the run is in, and how many outermost ones it has entered.
    - `ranks_of`: as in `Captured`.
    - `effects`: the side effects of operators. `ask`: answers questions about the batch. `way`: how to record.
    - `numbers`: the values that are numbers (`fpipe.record.numbers`). `has_assumed`: whether code in opaque modules has
      read values.
    - `fake_errors`: errors for calls that failed only because tensors are fake, in case the forward swallows them.
    """

    def __init__(
        self,
        model: nn.Module,
        sources: Mapping[Value, tuple[Source, Tensor]],
        ask: Ask = refuse_questions,
        opaque: Collection[str] = (),
        generators: Generators | None = None,
        way: Way = USUAL,
    ) -> None:
        super().__init__()
        self.way, self.numbers, self.has_assumed = way, set[Value](), False
        self.ranks_of: Mapping[int, int] = {}
        self.stack = CallStack(model, opaque, generators)
        self.values = Values(sources, self.stack.here)
        self.record = Record(self.values, self.stack.roots)
        self.reassignments = Reassignments(self.values, self.stack.here)
        self.running: RunningCall | None = None
        self.autocasts = self.region = 0
        self.effects, self.ask = Effects(), ask
        self.fake_errors: list[PipelineError] = []
        self.ambient = torch.is_grad_enabled()

    # ----------------------------------------------------------------------------------------------------- torch calls

    @property
    def is_in_torch_call(self) -> bool:
        """True while a torch call runs; whatever happens then belongs to that call."""
        return self.running is not None

    @property
    def modes(self) -> Modes:
        """The modes in force."""
        return Modes(torch.is_grad_enabled(), self.ambient, current_casts(), self.region if self.autocasts else 0)

    def enter_autocast(self) -> None:
        """Enter an autocast context: the casts that it caches are kept until the outermost one exits."""
        self.region += not self.autocasts
        self.autocasts += 1

    def exit_autocast(self) -> None:
        """Exit the innermost autocast context."""
        self.autocasts -= 1

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
        if func in SIZED:
            with self:
                args, kwargs = read_sizes(func, args, kwargs)
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
        tick, running = self.record.count_call(function), self.running
        if running is None:
            if function in FACTS and id(args[0]) in self.values.known:
                return function(*args, **kwargs)
            return self._call_outermost(function, args, kwargs, tick)
        running.use(self.values.within((args, kwargs)))
        try:
            out = self._note_draws(function, tick, lambda: call_function(function, args, kwargs))
        except UNKNOWN as error:
            if function is Tensor.__bool__ and running.guarded:
                return False
            return self._answer_inside(running, InnerCall(function, args, kwargs, None), tick, error)
        running.inner.append(InnerCall(function, args, kwargs, out))
        return out

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
        self.running = running = RunningCall()
        try:
            out = self._note_draws(function, tick, lambda: call_or_raise(function, args, kwargs))
        except UNKNOWN as error:
            out = self._answer(invocation, tick, args, kwargs, error)
        finally:
            self.running = None
        if function in SEALING:
            require_own_gradients(self.values, self.stack.here)
        if function == GRAD_FN and out is not None and self.stack.path:
            self.stack.seal("a look at autograd's graph")  # it may hook the node, which no torch call shows
        if invocation.numbers:
            forget_constants((args, kwargs, out))
        self._record(invocation, running, out, tick)
        return out

    def _note_number(self, tensor: Tensor) -> Any:
        """Return the number in a tensor."""
        self.numbers.add(self.values.known[id(tensor)])
        return number_of(tensor)

    def _can_extract(self, tensor: Tensor) -> bool:
        """Return whether `.item()` of a tensor need not be answered: it follows from the batch, and is a number."""
        if self.way.plain or self.is_in_torch_call or self.stack.is_opaque or tensor.numel() != 1:
            return False
        if tensor.dtype is torch.bool or tensor.is_complex() or getattr(tensor, "constant", None) is not None:
            return False
        provenance = self.record.provenance((self.values.read(tensor),))
        return bool(provenance.leaves) and not provenance.obstacle

    def _note_draws(self, function: Any, tick: int, run: Callable[[], Any]) -> Any:
        """Run a torch call; note it if it draws random numbers and no call inside it does."""
        drawn, self.effects.drawn = self.effects.drawn, {}
        out = run()
        if self.effects.drawn and not self.record.draws.has_from(tick + 1):
            self.record.draws.note(tick, function, self.stack.path, self.effects.drawn)
        self.effects.drawn |= drawn
        return out

    # -------------------------------------------------------------------------------------------------------- questions

    def _answer(self, invocation: Invocation, tick: int, args: Any, kwargs: Any, error: Exception) -> Any:
        """Return what eager mode would return for a call that reads values of constants or of the batch.

        Raise `CaptureError` if other values decide. In an opaque module, which reads the values itself in every step,
        assume a result instead if more than constants decide.
        """
        function, masks = invocation.function, deciding_masks(invocation.function, args)
        asking = Invocation(reader_of(function), (masks,), {}, self.values.read) if masks else invocation
        provenance = self.record.provenance(asking.reads)
        is_guard = is_torch_function(function) and function not in (*VALUE_READS, *ASSUMPTIONS, PACK)
        if is_guard and (provenance.obstacle or (self.stack.is_opaque and provenance.leaves)):
            return self._pass_guards(lambda: function(*args, **kwargs))
        is_asked = function in READERS.values() or (function is PACK and not provenance.obstacle)
        if self.stack.is_opaque and (provenance.obstacle or provenance.leaves) and not is_asked:
            sample = self._sample(asking.reads, asking) if self.way.sampled or function not in ASSUMPTIONS else None
            self.has_assumed = True
            if sample is None:
                return self._assume(function, args, kwargs, error)
            self._note_branch()
            return self._reply(tick, function, args, sample)
        question = provenance.question(asking, f"{self.stack.here()}{current_line()}")
        with for_real():
            answer = self.ask(question) if provenance.leaves else question.compute(())
        return self._reply(tick, function, args, answer)

    def _answer_inside(self, running: RunningCall, asking: InnerCall, tick: int, error: Exception) -> Any:
        """Return what eager mode would return for a call that reads values inside another, such as a custom function.

        Raise `error` if it does not only read values, `CaptureError` if others than constants and the batch decide.
        """
        function = asking.function
        if function not in VALUE_READS:
            raise error
        calls, given = running.history(asking, self.values)
        provenance = self.record.provenance(given.values())

        def replay(tensors: Sequence[Tensor]) -> Any:
            return replay_calls([*calls, asking], dict(zip(given, tensors, strict=True)))

        if self.stack.is_opaque and provenance.obstacle:
            self.has_assumed = True
            sample = self._sample(tuple(given.values()), replay)
            if sample is None:
                raise error
            self._note_branch()
            return self._reply(tick, function, asking.args, sample)
        question = provenance.ask(tuple(given.values()), replay, function, f"{self.stack.here()}{current_line()}")
        with for_real():
            answer = self.ask(question) if provenance.leaves else question.compute(())
        return self._reply(tick, function, asking.args, answer)

    def _sample(self, values: Sequence[Value], call: Callable[[Sequence[Tensor]], Any]) -> Sample | None:
        """Return what a call in an opaque module returns for made-up values of what enters the module.

        Return `None` if it can't be computed.
        """
        start = self.stack.outermost_branching.start
        with suppress(Exception), for_real(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            tensors = self.record.sample(values, start)
            return None if tensors is None else Sample.of(call(tensors))
        return None

    def _reply(self, tick: int, function: Any, args: Any, answer: Answer | Sample) -> Any:
        """Return the result of a call that gets this answer."""
        self.record.replies.append(Reply(tick, function, answer))
        out = result_on_fakes(function, args, answer)
        if function is PACK:
            self.values.read(out[1])  # follows from the answer: a constant
        return out

    def _pass_guards(self, run: Callable[[], Any]) -> Any:
        """Run a function of torch's own that checks its arguments, as if no check of values found anything.

        The call is one unit, so in a step the function checks real values.
        """
        mode, running = active_fake_mode(), self.running
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
        assert self.running is not None, "a torch call reads values"
        self.stack.seal("control flow on data")
        for frame in self.stack.frames:
            frame.branching = True
        self.record.draws.begin_stream(self.stack.outermost_branching, self.values.tensors.values())
        module = self.stack.module
        parameters, buffers = ([], []) if module is None else ([*module.parameters()], [*module.buffers()])
        self.running.use(self.values.within([*parameters, *buffers]))
        self.running.use(v for frame in self.stack.innermost for v in frame.invocation.reads)
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
        facts = self._facts(invocation, used, tuple(picks), tick)
        was_answered = self.record.was_answered(tick)
        acts = facts.written or facts.draw is not None or running.communicates or invocation.function in EFFECTS
        if not (makes or used or was_answered or acts):
            return
        if used and invocation.function not in ASSUMPTIONS:
            self.stack.seal("a function of functions, such as vmap, over one that uses tensors from outside")
        self.record.add(self._unit(invocation, used, makes, facts.picks), facts)

    def _new_tensors(self, out: Any) -> dict[int, Tensor]:
        """Return the new tensors among those that a call returned, each once, by leaf number."""
        if isinstance(out, Tensor):  # nearly always
            return {} if id(out) in self.values.known else {0: out}
        returned, leaves = tensors_at(out), dict[int, int]()
        for leaf, tensor in returned.items():
            if id(tensor) not in self.values.known:
                leaves.setdefault(id(tensor), leaf)
        return {leaf: returned[leaf] for leaf in leaves.values()}

    def _facts(self, invocation: Invocation, used: Collection[Value], picks: tuple[int, ...], tick: int) -> Facts:
        storage, cast = self.values.storage, self.effects.cast
        return Facts(
            invocation,
            self.modes,
            picks,
            ticks=(tick, self.record.tick),
            written=frozenset(self.effects.written & self.values.memories),
            casts=frozenset([value for value in (*invocation.reads, *used) if storage[value] in cast] if cast else ()),
            draw=self.record.draws.found[-1].tick if self.record.draws.has_from(tick) else None,
            communicates=self.effects.communicates,
        )

    def _unit(
        self, invocation: Invocation, used: list[Value], makes: tuple[Value, ...], picks: tuple[int, ...]
    ) -> Unit:
        name = getattr(invocation.function, "__name__", None) or str(invocation.function)
        where = f"{self.stack.where}, {name}"
        leaves = [leaf for leaf in invocation.leaves if leaf is not None and _is_data(leaf)]
        data = [*map(_describe_data, hide_group_names(invocation.function, leaves))]
        reads = (*invocation.reads, *used)
        return Unit(
            self.stack.path, reads, makes, lambda *tensors: pick(invocation(tensors), picks, where), f"{name}{data}"
        )

    def check_operator(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check an operator call; seal the module if it is a collective outside of any torch call."""
        require_joined(self.ranks_of, self.stack.here, func, args, kwargs)
        if not is_collective(func):
            return
        name = operator_name(func)
        require_no_barrier(name, self.stack.here)
        if self.running is not None:
            self.running.communicates = True
            return
        self.stack.seal(f"a collective of torch.distributed ({name})")
        earlier = self.record.existing_at(self.stack.frames[-1].start if self.stack.frames else 0)
        is_lost = written_memory(func, args, kwargs) & {self.values.storage[value] for value in earlier}
        require_kept(bool(is_lost), name, self.stack.here)

    # ---------------------------------------------------------------------------------------------------------- frames

    def open_frame(
        self, path: str, kind: type, function: Callable[..., Any], args: Any, kwargs: Any, sealed: str = ""
    ) -> Frame:
        """Return a frame for a call of `function` that begins now."""
        say(f"recording {path or 'the model'}")
        invocation, start = Invocation(function, args, kwargs, self.values.read), len(self.record.units)
        return Frame(path, kind, invocation, self.modes, start, first_tick=self.record.tick, sealed=sealed)

    def close_frame(self, frame: Frame, out: Any) -> None:
        """Complete the frame of a call that returned `out`."""
        frame.stop, frame.last_tick = len(self.record.units), self.record.tick
        frame.constants = constants_at(out)
        known = self.values.known
        frame.returned = {k: known[id(tensor)] for k, tensor in tensors_at(out).items() if id(tensor) in known}
        if frame.branching:
            frame.shapes = {one: self.values.tensors[one].shape for one in self.record.made_since(frame.start)}

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
        made, known = self.record.made_since(frame.start), self.values.known
        return structure.unflatten([t if known.get(id(t)) in made else t.view_as(t) for t in tensors])


def _holds_module(leaf: object) -> bool:
    """Return whether an argument is a module, a method of one, or a function that closes over one."""
    if leaf is None or type(leaf) in COMMON_TYPES:  # nearly always
        return False
    inner = (leaf.__self__,) if isinstance(leaf, MethodType) else closure_contents(leaf)
    return any(isinstance(one, nn.Module) for one in (leaf, *inner))


def hide_group_names(function: Any, arguments: Iterable[Any]) -> list[Any]:
    """Return the arguments of a call that a description shows: for process groups of collectives, their sizes.

    Each group has its own processes, so leave out their numbers.
    """
    module = str(getattr(function, "__module__", ""))
    if module == dist.__name__ + ".distributed_c10d" and function.__name__ in WITH_PROCESSES:
        return [one for one in arguments if isinstance(one, bool) or not isinstance(one, int)]
    if not dist.is_available() or "c10d_functional" not in module:
        return [*arguments]
    sizes = {group.group_name: group.size() for group in process_groups()}
    return [f"group of {sizes[one]}" if isinstance(one, str) and one in sizes else one for one in arguments]


def _is_data(leaf: object) -> bool:
    return isinstance(leaf, bool | int | float | str) or hasattr(leaf, "__array_interface__")


def _describe_data(leaf: Any) -> Any:
    """Return a number or string itself, or a digest of an array's elements."""
    return leaf if isinstance(leaf, bool | int | float | str) else blake2b(leaf.tobytes(), digest_size=8).hexdigest()
