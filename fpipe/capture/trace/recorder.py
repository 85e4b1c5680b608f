# SPDX-License-Identifier: Apache-2.0
"""Record a model's run on fake tensors as a tape: its torch calls in order, and the module calls around them.

A `TorchFunctionMode` sees every call of torch's API as the user wrote it, from any module, under the autocast and
gradient modes in force; what the mode cannot see is brought to it (`fpipe.capture.trace.patches`). The fake mode below
reports what each call writes and where it draws random numbers.

Whatever runs inside a torch call belongs to that call. Anything that changes how other calls run, such as saved-tensor
hooks, seals the module whose forward contains it: that module is played back as a whole or not at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpipe.capture.assumed_values import ASSUMPTIONS, UNKNOWN, call_or_raise, check_all, check_valid
from fpipe.capture.fast_paths import FUSED
from fpipe.capture.generators import Generators
from fpipe.capture.guards import current_line
from fpipe.capture.trace.call_stack import CallStack
from fpipe.capture.trace.draws import Drawn, Draws
from fpipe.capture.trace.liveness import live
from fpipe.capture.trace.origins import History, Origin, for_real
from fpipe.capture.trace.reassignment import Reassignments
from fpipe.capture.trace.replaced import ASKING, refusal, require_answerable
from fpipe.capture.trace.values import Values
from fpipe.errors import CaptureError, PipelineError
from fpipe.ir.captured import Buffer, Constant, Observed, Parameter, Source, Unit, Value
from fpipe.ir.modes import Modes, current_modes
from fpipe.ir.questions import Ask, Reply, refuse_questions
from fpipe.ir.tape import CallResult, Frame, Invocation, Tape, constants_at, pick, tensors_at
from fpipe.runtime.segments.selection import count_selected, deciding_masks, result_on_fakes
from fpipe.tensors.collectives import has_handle, written_memory
from fpipe.tensors.effects import Effects, is_collective
from fpipe.tensors.tree import flatten

EFFECTS = (
    *(check_all, check_valid, Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_),
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
)
SEALING: Mapping[Any, str] = MappingProxyType(
    dict.fromkeys((torch.autograd.grad, torch.autograd.backward, Tensor.backward), "a backward inside its forward")
    | {Tensor.data.__set__: "an assignment to .data"}  # type: ignore[attr-defined]
)


class Constants(NamedTuple):
    """The values of a run that depend on constants alone, and the units that make or change them, in order."""

    values: set[Value]
    units: list[Unit]


class Recorder(TorchFunctionMode):
    """Records while entered, inside a fake mode.

    - `frames`, `values`: the run's calls and tensors. `units`: its torch calls; `invocations`, `modes`, `ticks`,
      `written`, `casts`: facts about each unit; `random`: the tick at which a unit draws. `returned`: results of torch
      calls, by tick.
    - `draws`: torch calls that draw random numbers. `told`: calls that read values and were answered. `calls`: the
      ticks of each function's calls. `hooked`: positions of units before which saved-tensor hooks were installed.
    - `raised`: errors to raise for calls that failed because tensors are fake, in case the forward swallows them.
    - `ask`: answers questions about the batch. `reassigned`: buffers that were assigned anew.
    - `tick`: the number of torch calls so far. `inside`: whether one is running; `used`: known values passed to calls
      inside it; `communicating`: whether it calls a collective.
    - `depth`: the nesting depth of autocast; `regions`: the number of outermost autocast regions so far.
    """

    def __init__(
        self,
        model: nn.Module,
        sources: Mapping[Value, tuple[Source, Tensor]],
        ask: Ask = refuse_questions,
        opaque: Collection[str] = (),
        generators: Generators | None = None,
    ) -> None:
        super().__init__()
        self.ask = ask
        self.stack = CallStack(model, opaque, generators)
        self.values = Values(sources, self.stack.here)
        self.reassigned = Reassignments(self.values, self.stack.here)
        self.effects = Effects()
        self.effects.observer = self._communicate
        self.units: list[Unit] = []
        self.invocations: dict[Unit, Invocation] = {}
        self.modes: dict[Unit, Modes] = {}
        self.ticks: dict[Unit, tuple[int, int]] = {}
        self.written: dict[Unit, frozenset[int]] = {}
        self.casts: dict[Unit, frozenset[Value]] = {}
        self.random: dict[Unit, int] = {}
        self.returned: dict[int, CallResult] = {}
        self.draws = Draws()
        self.replies: list[Reply] = []
        self.calls = defaultdict[Any, list[int]](list)
        self.hooked: list[int] = []
        self.raised: list[PipelineError | None] = []
        self.used: dict[Value, None] = {}
        self.tick = self.depth = self.regions = 0
        self.inside = self.communicating = False

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        require_answerable(func, args, self.values.parameter, self.stack.here)
        try:
            return self.call(func, args, kwargs or {})
        except Exception as error:
            self.raised += [] if self.inside else [refusal(func, error, self.stack.here)]
            raise

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch call, and record it unless it runs inside another."""
        tick, self.tick = self.tick, self.tick + 1
        self.calls[function].append(tick)
        if self.inside:
            self.used.update(dict.fromkeys(self.values.within((args, kwargs))))
            return self._drawing(function, tick, lambda: function(*args, **kwargs))
        if function in SEALING:
            self.stack.seal(SEALING[function])
        self.stack.check_settings()
        invocation = Invocation(function, args, kwargs, self.values.read)
        self.effects.written.clear()
        self.effects.cast.clear()
        self.used.clear()
        self.communicating = False
        self.inside, modes = True, current_modes()
        try:
            out = self._drawing(function, tick, lambda: call_or_raise(function, args, kwargs))
        except UNKNOWN as error:
            out = self._unknown(invocation, tick, args, kwargs, error)
        finally:
            self.inside = False
        self._record(function, invocation, out, tick)
        self.returned[tick] = CallResult(invocation, modes, out, self.tick)
        return out

    def _unknown(self, invocation: Invocation, tick: int, args: Any, kwargs: Any, error: Exception) -> Any:
        """Return the result of a call that reads values: what eager would return if constants or the batch decide.

        In an opaque module, do not ask about the batch: the module runs as is and reads the values itself.
        """
        function, masks = invocation.function, deciding_masks(invocation.function, args)
        asking = Invocation(count_selected, (masks,), {}, self.values.read) if masks else invocation
        origin = self._origin(asking.reads)
        if self.stack.opaque and (origin.obstacle or origin.leaves):
            if function not in ASSUMPTIONS:
                raise error
            self._branches()
            return ASSUMPTIONS[function](*args, **kwargs)
        question = origin.question(asking, f"{self.stack.here()}{current_line()}")
        with for_real():
            answer = self.ask(question) if origin.leaves else question.compute(())
        self.replies.append(Reply(tick, function, answer))
        return result_on_fakes(function, args, answer)

    def real(self, value: Value) -> Tensor:
        """Return the real tensor of a constant value."""
        compute = self._origin((value,)).computed((value,))
        with for_real():
            return compute(())[0]

    def _origin(self, values: Sequence[Value]) -> Origin:
        known = self.values
        history = History(self.units, self.modes, self.written, self.random, known.sources, known.storage)
        return history.origin(values)

    def _branches(self) -> None:
        """Note that the innermost module branches on data.

        It may use everything that it holds and receives, and write to any of its buffers.
        """
        self.stack.seal("control flow on data")
        for frame in self.stack.frames:
            frame.branching = True
        self.draws.begin_stream(self.stack.outermost_branching, self.values.tensors.values())
        module = self.stack.module
        parameters, buffers = ([], []) if module is None else ([*module.parameters()], [*module.buffers()])
        self.used.update(dict.fromkeys(self.values.within([*parameters, *buffers])))
        self.used.update(dict.fromkeys(v for frame in self.stack.innermost for v in frame.invocation.reads))
        self.effects.written |= {self.values.storage[value] for value in self.values.within(buffers)}

    def _drawing(self, function: Any, tick: int, run: Callable[[], Any]) -> Any:
        """Run a torch call; label it if it draws random numbers."""
        drawn, self.effects.drawn = self.effects.drawn, {}
        out = run()
        if self.effects.drawn and not self.draws.has_from(tick + 1):  # and no call inside did
            self.draws.found.append(Drawn(tick, function, self.stack.path, tuple(self.effects.drawn)))
        self.effects.drawn |= drawn
        return out

    def _record(self, function: Any, invocation: Invocation, out: Any, tick: int) -> None:
        self._require_allowed()
        if has_handle(out):
            self.stack.seal("a collective of torch.distributed that is waited for later")
        picks = self._new(tensors_at(out))
        makes = tuple(self.values.made(tensor) for tensor in picks.values())
        written = frozenset(self.effects.written & self.values.memories)
        drawn = self.draws.has_from(tick)
        used = [value for value in self.used if value not in invocation.reads]
        asked = bool(self.replies) and self.replies[-1].tick == tick
        if not (makes or written or drawn or used or asked or self.communicating or function in EFFECTS):
            return
        if used and function not in ASSUMPTIONS:
            self.stack.seal("a function of functions, such as vmap, over one that uses tensors from outside")
        unit = self._unit(function, invocation, used, makes, tuple(picks))
        self.units.append(unit)
        self.invocations[unit] = invocation
        self.modes[unit], self.ticks[unit], self.written[unit] = self.now(), (tick, self.tick), written
        self.casts[unit] = frozenset(v for v in unit.reads if self.values.storage[v] in self.effects.cast)
        if drawn:
            self.random[unit] = self.draws.found[-1].tick

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check an operator call; seal the module if it is a collective that no torch call shows."""
        if not is_collective(func):
            return
        name = func._schema.name.partition("::")[2].rstrip("_")
        if name == "barrier":
            raise CaptureError(
                f"{self.stack.here()}: got a barrier of torch.distributed, expected a forward that waits for nothing "
                "but data: each stage runs on some of the processes alone. Call it outside of the model."
            )
        self.communicating = True
        if self.inside:
            return
        self.stack.seal(f"a collective of torch.distributed ({name})")
        start = self.stack.frames[-1].start if self.stack.frames else 0
        earlier = {*self.values.sources, *(value for unit in self.units[:start] for value in unit.makes)}
        if written_memory(func, args, kwargs) & {self.values.storage[value] for value in earlier}:
            raise CaptureError(
                f"{self.stack.here()}: got a collective ({name}) that writes to a parameter, a buffer or a tensor from "
                "outside of the module, expected one that writes to a tensor made there: nobody would see the change. "
                "Give it a clone, and use that, or copy it back with copy_()."
            )

    def _new(self, returned: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the returned tensors that did not exist before, by leaf, each once."""
        leaves: dict[int, int] = {}
        for leaf, tensor in returned.items():
            if id(tensor) not in self.values.known:
                leaves.setdefault(id(tensor), leaf)
        return {leaf: returned[leaf] for leaf in leaves.values()}

    def _unit(
        self, function: Any, invocation: Invocation, used: list[Value], makes: tuple[Value, ...], picks: tuple[int, ...]
    ) -> Unit:
        name = getattr(function, "__name__", str(function))
        where = f"{self.stack.where}, {name}"
        return Unit(
            self.stack.path,
            (*invocation.reads, *used),
            makes,
            lambda *tensors: pick(invocation(tensors), picks, where),
            does=f"{name}{[*map(_digest, filter(_is_data, invocation.leaves))]}",
        )

    def _require_allowed(self) -> None:
        if self.effects.unregistered:
            raise CaptureError(
                f"{self.stack.here()}: got an in-place change of a tensor that is neither parameter nor buffer, "
                "expected registered buffers: nobody would carry the change on. Use register_buffer."
            )
        if self.effects.foreign:
            raise CaptureError(
                f"{self.stack.here()}: got a random operation with a generator of its own, expected the default "
                "generator, which is seeded from the step's seed. Drop the generator argument."
            )

    def now(self) -> Modes:
        """Return the modes in force."""
        return Modes(*current_modes(), self.regions if self.depth else 0)

    # ----------------------------------------------------------------------------------------------------------- frames

    def frame(
        self, path: str, kind: type, function: Callable[..., Any], args: Any, kwargs: Any, sealed: str = ""
    ) -> Frame:
        """Return the frame of a call of `function` that begins now."""
        invocation = Invocation(function, args, kwargs, self.values.read)
        return Frame(path, kind, invocation, self.now(), start=len(self.units), first_tick=self.tick, sealed=sealed)

    def ended(self, frame: Frame, out: Any) -> None:
        """Complete `frame`, whose call has returned `out`."""
        frame.stop, frame.last_tick = len(self.units), self.tick
        frame.constants = constants_at(out)
        known = self.values.known
        frame.returned = {k: known[id(tensor)] for k, tensor in tensors_at(out).items() if id(tensor) in known}

    def called(self, frame: Frame, run: Callable[[], Any]) -> Any:
        """Run a call, and record it as a frame."""
        with self.stack.enter(frame):
            out = run()
            if frame.branching:
                out = self.own(frame, out)
        self.ended(frame, out)
        return out

    def own(self, frame: Frame, out: Any) -> Any:
        """Return `out` with views in place of tensors that the call did not make; another branch may return others."""
        tensors, structure = flatten(out, opaque=True)
        made = {value for unit in self.units[frame.start :] for value in unit.makes}
        known = self.values.known
        return structure.unflatten([t if known.get(id(t)) in made else t.view_as(t) for t in tensors])

    def begin(self, path: str, kind: type) -> None:
        """Begin a call about which nothing else is known; it is never played as a whole."""
        self.stack.begin(self.frame(path, kind, kind, (), {})).invocation.opaque = kind.__name__

    def end(self) -> None:
        """End the innermost call."""
        self.ended(self.stack.frames.pop(), None)

    # --------------------------------------------------------------------------------------------------------- results

    def observed(self) -> Observed:
        """Return what the units were seen to do."""
        values, asking = self.values, any(self.calls[function] for function in ASKING)
        labels = self.draws.labels()
        random = {unit: labels[tick] for unit, tick in self.random.items()}
        return Observed(values.storage, self.written, random, values.views(), asking, self.draws.undecided)

    def require_carried(self) -> None:
        """Raise `CaptureError` unless tensors assigned to buffers can be carried on, or made again."""
        self.reassigned.require_carried(frozenset().union(*self.written.values()), self._origin)
        self.reassigned.require_not_repeated(self.stack.roots, self.units)

    def constants(self) -> Constants:
        """Return what depends on neither parameters, buffers nor the batch, and is not random."""
        found = {value for value, source in self.values.sources.items() if isinstance(source, Constant)}
        units: list[Unit] = []
        for unit in self.units:
            if unit not in self.random and found.issuperset(unit.reads):
                found.update(unit.makes)
                units.append(unit)
            elif self.written[unit]:  # this memory is no longer constant
                found -= {value for value in found if self.values.storage[value] in self.written[unit]}
        return Constants(found, units)

    def created(self) -> Counter[tuple[str, str]]:
        """Return how often each call, by module path and description, made tensors from numbers alone."""
        units = [unit for unit in self.units if unit.makes and not unit.reads and unit not in self.random]
        return Counter((unit.path, unit.does) for unit in units)

    def varying(self) -> list[tuple[str, str, tuple[Value, ...]]]:
        """Return the live torch calls by module, description and state read, without those on constants alone."""
        constant, storage = set(self.constants().units), self.values.storage
        returned = {value for frame in self.stack.roots for value in frame.returned.values()}
        units = live(self.units, self.written, storage, returned, self.values.sources)
        state = {v for v, source in self.values.sources.items() if isinstance(source, Parameter | Buffer)}
        varying = [unit for unit in units if unit not in constant or not unit.reads + unit.makes]
        return [(unit.path, unit.does, tuple(v for v in unit.reads if v in state)) for unit in varying]

    def tape(self) -> Tape:
        """Return the recording."""
        held = self.values
        buffers = {held.storage[value] for value, source in held.sources.items() if isinstance(source, Buffer)}
        return Tape(
            tuple(self.units),
            self.invocations,
            self.modes,
            self.ticks,
            self.returned,
            self.casts,
            tuple(self.stack.roots),
            tuple(self.draws.streams),
            self.draws.named(),
            tuple(self.replies),
            {told.function: self.calls[told.function] for told in self.replies},
            {draw.function: self.draws.outside(self.calls[draw.function]) for draw in self.draws.found},
            tuple(self.hooked),
            tuple(tick for function in FUSED for tick in self.calls[function]),
            {k: changed for k, unit in enumerate(self.units) if (changed := self.written[unit] & buffers)},
            self.values.tensors,
        )


def _is_data(leaf: object) -> bool:
    return isinstance(leaf, bool | int | float | str) or hasattr(leaf, "__array_interface__")


def _digest(leaf: Any) -> Any:
    """Return a number or string itself, or a digest of an array's elements."""
    return leaf if isinstance(leaf, bool | int | float | str) else blake2b(leaf.tobytes(), digest_size=8).hexdigest()
