# SPDX-License-Identifier: Apache-2.0
"""Bring to a recorder what a `TorchFunctionMode` cannot see.

That is: calls of modules, custom autograd functions, checkpointed functions, function transforms, assignments to
attributes, and contexts that change how calls inside them run: autocast, saved-tensor hooks, the choice of attention
kernels. Each is patched at its one place in torch for the duration of the recording.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import checkpoint

from fpipe.capture.assumed_values import check_all, check_valid
from fpipe.capture.eager_types import hide_fakes
from fpipe.capture.fast_paths import allow_fast_paths, attention
from fpipe.capture.guards import is_torchs
from fpipe.capture.trace.decisions import Decisions
from fpipe.capture.trace.recorder import Recorder
from fpipe.capture.trace.reentrant_checks import require_explicit_arguments
from fpipe.errors import CaptureError
from fpipe.patching import current, original, replace
from fpipe.runtime.segments.reentrant import CheckpointNode, Reentrant
from fpipe.tensors.attributes import refuse_marks
from fpipe.torch_private import (
    ARGUMENT_CHECK,
    CHECKPOINT,
    FUSED_ATTENTION,
    INNER_TRANSFORMS,
    SAVED_INPUTS,
    TENSOR_CHECK,
    CheckpointHook,
    Place,
    unseen_by_modes,
)

TRANSFORMS = (
    *INNER_TRANSFORMS,
    *(Place(torch.func, name) for name in ("vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize")),
)
SEEDING = (Place(torch, "manual_seed"), Place(torch.random, "manual_seed"))
"""Where forwards find the function that seeds the generators."""
UNSEEN = (CheckpointNode, SAVED_INPUTS)
"""Autograd functions that checkpointing calls itself."""
SETTINGS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


@contextmanager
def intercepted(recorder: Recorder, model: nn.Module, whole: Collection[str]) -> Iterator[None]:
    """Bring everything that happens inside to `recorder`; seal the modules of `model` named in `whole`."""
    patched = _Patched.now()
    with ExitStack() as stack:
        watching = _Watching(recorder, model, whole, patched, Decisions(recorder.stack, stack))
        for owner, name, function in watching.replacements():
            stack.enter_context(replace(owner, name, function))
        stack.enter_context(refuse_marks())
        stack.enter_context(hide_fakes())
        stack.enter_context(allow_fast_paths(watching.nests))
        stack.enter_context(recorder)
        try:
            yield
        finally:
            watching.active = False


class _Patched(NamedTuple):
    """torch's own functions, as they were before patching."""

    call: Any
    apply: Any
    assign: Any
    register: Any
    saved: Any
    entered: Any
    left: Any
    checkpointed: Any
    scripted: Any

    @classmethod
    def now(cls) -> _Patched:
        return cls(
            current(nn.Module, "__call__"),
            original(torch.autograd.Function, "apply"),
            current(nn.Module, "__setattr__"),
            current(nn.Module, "register_buffer"),
            current(torch.autograd.graph.saved_tensors_hooks, "__enter__"),
            current(torch.autocast, "__enter__"),
            current(torch.autocast, "__exit__"),
            current(*CHECKPOINT),
            current(torch.jit.ScriptFunction, "__call__"),
        )


class _Watching:
    """Replacements for torch's functions that do the same and notify the recorder.

    Code that kept a bound method may call one after the recording too; `active` is off by then.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        whole: Collection[str],
        patched: _Patched,
        decisions: Decisions,
    ) -> None:
        self.recorder, self.stack, self.whole, self.torch = recorder, recorder.stack, whole, patched
        self.decisions = decisions
        self.ours = {id(module) for module in model.modules() if not is_torchs(module)}
        self.active = True

    @property
    def idle(self) -> bool:
        """True if the recorder need not see what happens now."""
        return self.recorder.inside or not self.active

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield each patched owner, the name there, and the replacement."""
        yield nn.Module, "__call__", self._called
        yield nn.Module, "__setattr__", self._assigned
        yield nn.Module, "register_buffer", self._registered
        yield torch.autograd.Function, "apply", self._applied
        yield torch.autograd.graph.saved_tensors_hooks, "__enter__", self._saved
        yield torch.autocast, "__enter__", self._entered
        yield torch.autocast, "__exit__", self._left
        yield torch.jit.ScriptFunction, "__call__", self._scripted
        for owner, name in SEEDING:
            yield owner, name, self._seeded
        yield *TENSOR_CHECK, self._transform(check_all)
        yield *ARGUMENT_CHECK, self._transform(check_valid)
        yield *FUSED_ATTENTION, self._transform(attention)
        yield *CHECKPOINT, self._checkpointed
        for owner, name in TRANSFORMS:
            yield owner, name, self._transform(current(owner, name))

    def _called(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        path = self.stack.paths.get(id(module))
        if path is None or self.idle:
            return self.torch.call(module, *args, **kwargs)
        sealed = "parts, which are never cut," if path in self.whole else _backward_hook(module)
        frame = self.recorder.frame(path, type(module), module, args, kwargs, sealed)
        return self.recorder.called(frame, lambda: self.torch.call(module, *args, **kwargs))

    def _assigned(self, module: nn.Module, name: str, value: object) -> None:
        if id(module) in self.ours and self.active:
            if name in module._parameters and value is not module._parameters[name]:
                raise CaptureError(
                    f"{self.stack.here()}: got an assignment to the parameter {name!r}, expected parameters to be read "
                    "only; the new value would be lost. Compute a new tensor from it (torch.nn.utils.parametrize)."
                )
            if name not in module._buffers:  # assigning a buffer goes through register_buffer
                self.stack.note_assignment(module, name, value, self.recorder.values)
                self.decisions.assigned(module, name, value)
        self.torch.assign(module, name, value)

    def _registered(self, module: nn.Module, name: str, tensor: Any, *args: Any, **kwargs: Any) -> None:
        if id(module) in self.ours and self.active and name in module._buffers:
            if self.recorder.inside:
                raise CaptureError(
                    f"{self.stack.here()}: got an assignment to the buffer {name!r} inside a torch call, such as a "
                    "custom autograd function, expected one in a forward. Return the tensor, and assign it outside."
                )
            tensor = self.recorder.reassigned.assign(module, name, tensor, self.recorder.call)
            self.stack.note_assignment(module, name, tensor, self.recorder.values)
        self.torch.register(module, name, tensor, *args, **kwargs)

    def _applied(self, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        if cls is checkpoint.CheckpointFunction and not self.idle:
            return self._reentrant(*args)
        function = self.torch.apply.__get__(None, cls)
        unseen = self.idle or cls in UNSEEN
        return function(*args, **kwargs) if unseen else self.recorder.call(function, args, kwargs)

    def _reentrant(self, function: Any, preserve: bool, *args: Any) -> Any:
        """Replace torch's node with one that supports gradients of chosen inputs, and record a frame."""
        outer, recorder = self.stack.frames[-1], self.recorder
        if not preserve:
            raise CaptureError(
                f"{self.stack.here()}: got a reentrant checkpoint with preserve_rng_state=False, expected the same "
                "random numbers in both runs. Drop the argument."
            )
        recorder.hooked.append(len(recorder.units))
        frame = recorder.frame(outer.path, outer.kind, Reentrant(), (function, *args), {}, "activation checkpointing")
        frame.checkpoint = frame.reentrant = True

        def run(*args: Any) -> Any:
            return recorder.own(frame, function(*args))

        with self.stack.enter(frame):
            out = Reentrant()(run, *args)
        recorder.ended(frame, out)
        tensors, given = recorder.values.tensors, recorder.values.within(args)
        wanting = frozenset(value for value, tensor in tensors.items() if tensor.requires_grad)
        require_explicit_arguments(frame, recorder.units, wanting, [*given, *recorder.values.sources])
        return out

    def _transform(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.idle else self.recorder.call(function, args, kwargs)

        return recorded

    def _scripted(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Record a call of a function that `torch.jit.script` made; its torch calls run in C++, unseen."""
        if self.idle:
            return self.torch.scripted(function, *args, **kwargs)
        first = self.recorder.tick
        out = self.recorder.call(function, args, kwargs)
        if self.recorder.draws.has_from(first):
            raise CaptureError(
                f"{self.stack.here()}: got the torch.jit.script function {function.name!r} that draws random numbers, "
                "expected ones that follow from the step's seed. Call the function without torch.jit.script."
            )
        return out

    def _saved(self, hooks: Any) -> None:
        self.recorder.hooked.append(len(self.recorder.units))
        if not isinstance(hooks, CheckpointHook):
            self.stack.seal("saved-tensor hooks around what it calls")
        self.torch.saved(hooks)

    def _entered(self, context: Any) -> Any:
        if not self.idle:
            self.recorder.regions += not self.recorder.depth
            self.recorder.depth += 1
        entered = self.torch.entered(context)
        if self.active:
            torch.set_autocast_cache_enabled(False)  # so that every use is seen to cast; exit restores it
        return entered

    def _left(self, context: Any, *error: Any) -> Any:
        self.recorder.depth -= not self.idle
        return self.torch.left(context, *error)

    def nests(self) -> None:
        """Note that the module nests real tensors, and takes another path on fake ones."""
        self.stack.seal("an encoder with a padding mask, which nests tensors")

    def _seeded(self, *_: object) -> None:
        raise CaptureError(
            f"{self.stack.here()}: got a forward that seeds the generator, expected random numbers that follow "
            "from the step's seed. Drop torch.manual_seed."
        )

    def _checkpointed(self, function: Any, *settings: Any, **kwargs: Any) -> Iterator[None]:
        """Wrap torch's generator around a checkpointed function, and record a frame.

        What the function returned is a local variable of `checkpoint`, which drives the generator.
        """
        generator = self.torch.checkpointed(function, *settings, **kwargs)
        if self.idle:
            yield from generator
            return
        how, args = dict(zip(SETTINGS, settings, strict=False)), settings[len(SETTINGS) :]

        def again(function: Any, *args: Any, **kwargs: Any) -> Any:
            return checkpoint.checkpoint(function, *args, use_reentrant=False, **how, **kwargs)

        outer = self.stack.frames[-1]
        with unseen_by_modes():
            next(generator)
        frame = self.recorder.frame(
            outer.path, outer.kind, again, (function, *args), kwargs, "activation checkpointing"
        )
        frame.checkpoint = True
        with self.stack.enter(frame):
            yield
        self.recorder.ended(frame, sys._getframe(1).f_locals["ret"])
        if frame.stream is not None or self.recorder.draws.has_from(frame.first_tick):
            how["preserve_rng_state"] = True  # else the rerun draws from whatever state the schedule left
        yield from generator


def _backward_hook(module: nn.Module) -> str:
    """Name a hook that torch attaches to the autograd graph around a module's call; empty if it has none."""
    hooks: list[Any] = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    return f"the backward hook {getattr(hooks[0], '__qualname__', repr(hooks[0]))}" if hooks else ""
