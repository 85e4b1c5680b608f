# SPDX-License-Identifier: Apache-2.0
"""Records a model's run on fake tensors as a tape: its torch calls in order, and the module calls around them.

A `TorchFunctionMode` sees every call of torch's API as the user wrote it, from any module, with autocast and gradient
modes as they are; custom autograd functions, which it does not see, are watched beside it. A dispatch mode below tells
what each call writes and where it draws random numbers. Tensors are known by identity; all that were seen are kept
alive, so that identities are unique.

What runs inside a torch call belongs to it. What changes how others run, such as saved-tensor hooks, seals the module
in whose forward it stands: that module is then played as a whole or not at all.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._functorch import apis, eager_transforms
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from fpipe.capture.contract import Constant, Labels, Source, Unit, Value
from fpipe.capture.guards import here
from fpipe.capture.observation import Watch, memory
from fpipe.capture.tape import Attribute, Draw, Invocation, Modes, Span, Tape, constants_at, pick, tensors_at
from fpipe.errors import CaptureError
from fpipe.random import label

EFFECTS = (Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
BACKWARDS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
apply: Any = torch.autograd.Function.apply


class Recorder(TorchFunctionMode):
    """Records while it is entered, inside a fake mode.

    `sources` are tensors whose value is known beforehand; constants that the run meets join them. The modules `whole`
    are sealed. `kept` are the identities of tensors that an earlier run has left behind, and that may be read.
    """

    def __init__(
        self,
        model: nn.Module,
        sources: Mapping[Value, tuple[Source, Tensor]],
        whole: Collection[str] = (),
        kept: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.whole, self.kept = whole, kept
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.where = {id(m): f"module {path or '(root)'} ({type(m).__name__})" for path, m in model.named_modules()}
        self.sources = {value: source for value, (source, _) in sources.items()}
        self.tensors = {value: tensor for value, (_, tensor) in sources.items()}
        self.known = {id(tensor): value for value, tensor in self.tensors.items()}
        self.units: list[Unit] = []
        self.modes: dict[Unit, Modes] = {}
        self.ticks: dict[Unit, tuple[int, int]] = {}
        self.written: dict[Unit, frozenset[int]] = {}
        self.random: dict[Unit, Labels] = {}
        self.outermost: list[Span] = []
        self.stack: list[Span] = []
        self.draws: list[Draw] = []
        self.calls = defaultdict[Any, list[int]](list)
        self.ordinals = defaultdict[str, int](int)
        self.hooked: list[int] = []
        self.tick = 0
        self.inside = False
        self.captured: dict[Value, None] = {}
        self.depth = self.regions = 0

    # ------------------------------------------------------------------------------------------------ what is recorded

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Everything inside is recorded."""

        def custom(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
            if cls is checkpoint.CheckpointFunction:
                raise CaptureError(
                    f"{self.here()}: got a reentrant checkpoint, expected a non-reentrant one: it does not work with "
                    "autograd.grad. Pass use_reentrant=False to checkpoint()."
                )
            function = apply.__func__.__get__(cls)
            return self._call(function, args, kwargs) if not self.inside else function(*args, **kwargs)

        def called(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            path = self.paths.get(id(module))
            if path is None or self.inside or not self.active:
                return call(module, *args, **kwargs)
            sealed = "parts, which are never cut," if path in self.whole else "hooks" if _hooks(module) else ""
            return self.span(path, type(module), module, args, kwargs, sealed, run=call)

        def saved(hooks: Any) -> None:
            self.hooked.append(self.tick)
            if not isinstance(hooks, checkpoint._checkpoint_hook):
                self.seal("saved-tensor hooks around what it calls")
            enter(hooks)

        def kernels(*args: Any, **kwargs: Any) -> Any:
            self.seal("sdpa_kernel, which chooses attention kernels for what it calls")
            return choose(*args, **kwargs)

        def transformed(function: Any) -> Any:
            def recorded(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if self.inside else self._call(function, args, kwargs)

            return recorded

        def entered(context: Any) -> Any:
            self.regions += not self.depth
            self.depth += 1
            return begin(context)

        def left(context: Any, *error: Any) -> Any:
            self.depth -= 1
            return end(context, *error)

        def seeded(*_: object) -> None:
            raise CaptureError(
                f"{self.here()}: got a forward that seeds the generator itself, expected random numbers that follow "
                "from the step's seed. Drop torch.manual_seed."
            )

        call: Any = nn.Module.__call__
        begin: Any = torch.autocast.__enter__
        end: Any = torch.autocast.__exit__
        enter = torch.autograd.graph.saved_tensors_hooks.__enter__
        choose: Any = torch.nn.attention._sdpa_kernel
        self.active = True
        with ExitStack() as stack:
            self.watch = stack.enter_context(Watch())
            stack.enter_context(patch.object(torch.autograd.Function, "apply", classmethod(custom)))
            stack.enter_context(patch.object(nn.Module, "__call__", called))
            stack.enter_context(patch.object(torch.autograd.graph.saved_tensors_hooks, "__enter__", saved))
            stack.enter_context(patch.object(torch.nn.attention, "_sdpa_kernel", kernels))
            for module, name in TRANSFORMS:
                stack.enter_context(patch.object(module, name, transformed(getattr(module, name))))
            stack.enter_context(patch.object(torch.autocast, "__enter__", entered))
            stack.enter_context(patch.object(torch.autocast, "__exit__", left))
            stack.enter_context(patch.object(torch, "manual_seed", seeded))
            stack.enter_context(patch.object(checkpoint, "_checkpoint_without_reentrant_generator", self._checkpointed))
            stack.enter_context(self)
            try:
                yield
            finally:
                self.active = False

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return self._call(func, args, kwargs or {})

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch call, and record it unless it runs inside another."""
        tick, self.tick = self.tick, self.tick + 1
        self.calls[function].append(tick)
        if self.inside:
            self.captured.update(dict.fromkeys(self._known(args, kwargs)))
            return self._drawing(function, tick, lambda: function(*args, **kwargs))
        if function in BACKWARDS:
            self.seal("a backward inside its forward")
        invocation = Invocation(function, args, kwargs, self._read)
        self.watch.written.clear()
        self.captured.clear()
        self.inside = True
        try:
            out = self._drawing(function, tick, lambda: function(*args, **kwargs))
        finally:
            self.inside = False
        self._record(function, invocation, out, tick)
        return out

    def _drawing(self, function: Any, tick: int, run: Callable[[], Any]) -> Any:
        """Run a torch call; if it draws random numbers, give it a label."""
        drawn, self.watch.drawn = self.watch.drawn, {}
        out = run()
        if self.watch.drawn and not (self.draws and self.draws[-1].tick > tick):  # not by a call inside
            path = self.path
            self.draws.append(Draw(tick, function, label(path, self.ordinals[path]), tuple(self.watch.drawn)))
            self.ordinals[path] += 1
        self.watch.drawn |= drawn
        return out

    def _record(self, function: Any, invocation: Invocation, out: Any, tick: int) -> None:
        self._require_allowed()
        returned = tensors_at(out)
        picks = [k for k, tensor in returned.items() if id(tensor) not in self.known]
        picks = [k for k in picks if k == min(j for j in returned if returned[j] is returned[k])]
        makes = tuple(self._made(returned[k]) for k in picks)
        drawn = [draw for draw in self.draws[-1:] if draw.tick >= tick]
        if not (makes or self.watch.written or drawn or function in EFFECTS):
            return
        captured = [value for value in self.captured if value not in invocation.reads]
        if captured:
            self.seal("a function of functions, such as vmap, over one that uses tensors from outside")
        where, name = self.where_now, getattr(function, "__name__", str(function))
        unit = Unit(
            self.path,
            (*invocation.reads, *captured),
            makes,
            lambda *tensors: pick(invocation(tensors), picks, f"{where}, {name}"),
            does=f"{name}{[x for x in invocation.leaves if isinstance(x, bool | int | float | str)]}",
        )
        self.units.append(unit)
        self.modes[unit], self.ticks[unit] = self._modes(), (tick, self.tick)
        self.written[unit] = frozenset(self.watch.written)
        if drawn:
            self.random[unit] = Labels(drawn[0].label, drawn[0].devices)

    def _known(self, args: Any, kwargs: Any) -> list[Value]:
        """The values, as far as they are known, of tensors that a call inside another one gets."""
        return [self.known[id(t)] for t in tensors_at((args, kwargs)).values() if id(t) in self.known]

    def _require_allowed(self) -> None:
        if self.watch.unregistered:
            raise CaptureError(
                f"{self.here()}: got an in-place change of a tensor that is neither parameter nor buffer, expected "
                "registered buffers: nobody would carry the change on. Use register_buffer."
            )
        if self.watch.foreign:
            raise CaptureError(
                f"{self.here()}: got a random operation with a generator of its own, expected the default generator, "
                "which is seeded from the step's seed. Drop the generator argument."
            )

    def _made(self, tensor: Tensor) -> Value:
        value = len(self.tensors)
        self.tensors[value] = tensor
        self.known[id(tensor)] = value
        return value

    def _read(self, tensor: Tensor) -> Value:
        """The value of a tensor among the arguments of a call."""
        if id(tensor) in self.known:
            return self.known[id(tensor)]
        if id(tensor) in self.kept:
            return self._met(tensor)
        if tensor.requires_grad or tensor.device.type == "meta":
            raise CaptureError(
                f"{self.here()}: got a tensor of shape {list(tensor.shape)} that requires a gradient and is no "
                "parameter of the model (reached through a closure, a global or an attribute), expected none: it would "
                "get no gradient. Register it as a parameter of the model, or detach it."
            )
        if isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"{self.here()}: got a tensor of shape {list(tensor.shape)} that an earlier call made and kept (in an "
                "attribute or a cache), expected a forward without state of its own but buffers. Make it a buffer, or "
                "fill the cache before the pipeline is built, by calling the model once."
            )
        return self._met(tensor)

    def _met(self, tensor: Tensor) -> Value:
        """The value of a constant, which wants no gradient."""
        value = self._made(tensor)
        self.sources[value] = Constant(tensor)
        return value

    # ----------------------------------------------------------------------------------------------------------- spans

    def span(
        self,
        path: str,
        kind: type,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        sealed: str = "",
        run: Any = None,
    ) -> Any:
        """Run a call and record it as a span; `run`, if given, is called with the function before its arguments."""
        span = self._span(path, kind, function, args, kwargs)
        span.sealed = sealed
        try:
            out = function(*args, **kwargs) if run is None else run(function, *args, **kwargs)
        finally:
            self.stack.pop()
        self._close(span, out)
        return out

    def begin(self, path: str, kind: type) -> None:
        """A call begins of which nothing else is known; it is never played as a whole."""
        self._span(path, kind, kind, (), {}).invocation.opaque = True

    def end(self) -> None:
        """The innermost call ends."""
        self._close(self.stack.pop(), None)

    def _span(self, path: str, kind: type, function: Callable[..., Any], args: Any, kwargs: Any) -> Span:
        """A span that begins now."""
        invocation = Invocation(function, args, kwargs, self._read)
        span = Span(path, kind, invocation, self._modes(), start=len(self.units), first_tick=self.tick)
        (self.stack[-1].inner if self.stack else self.outermost).append(span)
        self.stack.append(span)
        return span

    def _close(self, span: Span, out: Any) -> None:
        span.stop, span.last_tick = len(self.units), self.tick
        span.constants = constants_at(out)
        span.returned = {k: self.known[id(tensor)] for k, tensor in tensors_at(out).items() if id(tensor) in self.known}

    def _checkpointed(self, function: Any, *settings: Any, **kwargs: Any) -> Iterator[None]:
        """In the place of torch's generator around a checkpointed function: the same, and a span.

        What the function returned is a local variable of `checkpoint`, which drives the generator.
        """
        generator = checkpointing(function, *settings, **kwargs)
        if self.inside or not self.active:
            yield from generator
            return
        how, args = dict(zip(SETTINGS, settings, strict=False)), settings[len(SETTINGS) :]

        def again(*args: Any, **kwargs: Any) -> Any:
            return checkpoint.checkpoint(function, *args, use_reentrant=False, **how, **kwargs)

        outer = self.stack[-1]
        next(generator)
        span = self._span(outer.path, outer.kind, again, args, kwargs)
        span.checkpoint, span.sealed = True, "activation checkpointing"
        yield
        self.stack.pop()
        self._close(span, sys._getframe(1).f_locals["ret"])
        yield from generator

    def seal(self, reason: str) -> None:
        """The innermost module that runs cannot be opened."""
        for span in reversed(self.stack):
            if not span.checkpoint:
                span.sealed = reason
                return

    def assigned(self, module: nn.Module, name: str, value: object) -> None:
        """Note that an attribute was assigned to."""
        for span in self.stack:
            if (module, name) not in span.touched:
                span.touched.append((module, name))
            if isinstance(value, Tensor) and id(value) in self.known:
                span.assigned.append(Attribute(module, name, self.known[id(value)]))

    def constants(self) -> set[Value]:
        """The values that depend on neither parameters, buffers nor the batch, and are not random."""
        found = {value for value, source in self.sources.items() if isinstance(source, Constant)}
        for unit in self.units:
            if unit not in self.random and found.issuperset(unit.reads):
                found.update(unit.makes)
        return found

    def varying(self) -> list[tuple[str, str]]:
        """What was called, but for what is the same in every run."""
        constants = self.constants()
        return [(u.path, u.does) for u in self.units if not u.makes or not constants.issuperset(u.makes)]

    # ----------------------------------------------------------------------------------------------------------- where

    @property
    def path(self) -> str:
        """The innermost module that runs."""
        return self.stack[-1].path if self.stack else ""

    def _modes(self) -> Modes:
        kinds = ("cpu", "cuda")
        enabled = tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))
        return Modes(torch.is_grad_enabled(), enabled, self.regions if self.depth else 0)

    @property
    def where_now(self) -> str:
        """The same, for messages."""
        return f"module {self.path or '(root)'}"

    def here(self) -> str:
        """The innermost module in whose method the caller runs."""
        return here(self.where, self.where_now)

    def tape(self) -> Tape:
        """What was recorded."""
        return Tape(
            tuple(self.units),
            self.modes,
            self.ticks,
            tuple(self.outermost),
            tuple(self.draws),
            {draw.function: self.calls[draw.function] for draw in self.draws},
            tuple(self.hooked),
            self.tensors,
        )

    def views(self) -> frozenset[Value]:
        """The values that are views of others."""
        return frozenset(value for value, tensor in self.tensors.items() if tensor._is_view())

    def storage(self) -> dict[Value, int]:
        """For every value, which memory it lies in."""
        return {value: memory(tensor) for value, tensor in self.tensors.items()}


TRANSFORMS = (
    *((apis, name) for name in ("vmap_impl", "chunked_vmap_impl") if hasattr(apis, name)),
    *((eager_transforms, name) for name in ("grad_impl", "grad_and_value_impl") if hasattr(eager_transforms, name)),
    *((torch.func, name) for name in ("vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize")),
)
SETTINGS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
checkpointing = checkpoint._checkpoint_without_reentrant_generator


def _hooks(module: nn.Module) -> bool:
    tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(tables)
