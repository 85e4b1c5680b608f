# SPDX-License-Identifier: Apache-2.0
"""Report to a recorder what a `TorchFunctionMode` cannot see.

That is: calls of modules, custom autograd functions, scripted functions, checkpointed functions, function transforms,
fused attention, torch's own checks of values, seeding, assignments to attributes, and contexts that change how calls
inside them run: autocast and saved-tensor hooks. Each is patched at its one place in torch for the duration of the
recording.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import checkpoint

from fpipe.errors import CaptureError
from fpipe.record.captured import COMPILED_CODE
from fpipe.record.fakes.assumed_values import check_all, check_valid
from fpipe.record.fakes.eager_types import hide_fakes
from fpipe.record.fakes.fast_paths import allow_fast_paths, attention
from fpipe.record.model.places import current_line
from fpipe.record.model.state import is_torchs
from fpipe.record.numbers import learn, record_math
from fpipe.record.refusals import seeding_error
from fpipe.record.trace.call_stack import CallStack
from fpipe.record.trace.checkpoints import CheckpointFrames, CheckpointNode
from fpipe.record.trace.frames import Frame
from fpipe.record.trace.recorder import Recorder
from fpipe.tensors.fake import as_parameter, refuse_marks
from fpipe.tensors.patching import current, original, replace
from fpipe.tensors.torch_private import (
    APPLY,
    ARGUMENT_CHECK,
    CHECKPOINT,
    FUSED_ATTENTION,
    INNER_TRANSFORMS,
    NODE_INIT,
    PICKLE,
    TENSOR_CHECK,
    CheckpointHook,
    CheckpointInputs,
    PatchedName,
    compiled_place,
    without_modes,
)
from fpipe.tensors.tree import PLAIN

TRANSFORMS = (
    *INNER_TRANSFORMS,
    *(PatchedName(torch.func, name) for name in ("vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize")),
)
SEEDING = (PatchedName(torch, "manual_seed"), PatchedName(torch.random, "manual_seed"))
"""The places where forwards find the function that seeds the generators."""
LOCAL_READS = ("to_local", "redistribute", "full_tensor")
"""The methods of DTensors that look at the local tensor, which no recorded call has made."""


@contextmanager
def watch_torch(recorder: Recorder, model: nn.Module, seals: Mapping[str, str]) -> Iterator[None]:
    """Report everything that happens inside to `recorder`; `seals` says why modules of `model` are sealed."""
    with ExitStack() as stack:
        watching = Replacements(recorder, model, seals, Decisions(recorder.stack, stack))
        for owner, name, function in watching.replacements():
            before = original(owner, name) if (owner, name) == APPLY else current(owner, name)
            stack.enter_context(replace(owner, name, partial(function, before)))
        stack.enter_context(refuse_marks())
        stack.enter_context(hide_fakes())
        stack.enter_context(allow_fast_paths(watching.note_nesting))
        stack.enter_context(record_math())
        stack.enter_context(recorder)
        try:
            yield
        finally:
            watching.active = False


class Replacements:
    """Replacements for torch's functions that do the same and notify the recorder; each takes the patched one first.

    User code may keep one and call it after the recording; `active` is false by then.
    """

    def __init__(self, recorder: Recorder, model: nn.Module, seals: Mapping[str, str], decisions: Decisions) -> None:
        self.recorder, self.stack, self.seals, self.decisions = recorder, recorder.stack, seals, decisions
        self.checkpoints = CheckpointFrames(recorder)
        self.ours = {id(module) for module in model.modules() if not is_torchs(module)}
        self.active = True

    @property
    def is_idle(self) -> bool:
        """True if the recorder need not see what happens now: inside a torch call, or after the recording."""
        return self.recorder.is_in_torch_call or not self.active

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield each patched owner, the name there, and the replacement."""
        from torch.distributed.tensor import DTensor

        yield nn.Module, "__call__", self._call_module
        yield nn.Module, "__setattr__", self._set_attribute
        yield nn.Module, "register_buffer", self._register_buffer
        yield nn.Module, "_apply", self._convert_module
        yield *APPLY, self._apply
        yield *NODE_INIT, self._begin_function
        yield torch.autograd.graph.saved_tensors_hooks, "__enter__", self._enter_saved_hooks
        yield torch.autocast, "__enter__", self._enter_autocast
        yield torch.autocast, "__exit__", self._exit_autocast
        yield torch.jit.ScriptFunction, "__call__", self._call_script
        for owner, name in SEEDING:
            yield owner, name, self._refuse_seeding
        yield *TENSOR_CHECK, partial(self._record_other, check_all)
        yield *ARGUMENT_CHECK, partial(self._record_other, check_valid)
        yield *FUSED_ATTENTION, partial(self._record_other, attention)
        yield *CHECKPOINT, self._checkpoint
        yield *compiled_place(), self._run_compiled
        yield *PICKLE, self._refuse_objects
        yield torch, "from_numpy", self._from_numpy
        yield torch.utils.hooks.RemovableHandle, "remove", self._remove_hook
        for name in LOCAL_READS:
            yield DTensor, name, self._record
        for owner, name in TRANSFORMS:
            yield owner, name, self._record

    def _call_module(self, call: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        path = self.stack.paths.get(id(module))
        if path is None or self.is_idle:
            return call(module, *args, **kwargs)
        sealed = _backward_hook(module) or self.seals.get(path, "")
        frame = self.recorder.open_frame(path, type(module), module, args, kwargs, sealed)
        return self.recorder.call_in_frame(frame, lambda: call(module, *args, **kwargs))

    def _remove_hook(self, remove: Any, handle: Any) -> None:
        """Remove a hook; a call that removes one of a tensor runs as Python, since its record would keep the hook."""
        hooks = None if self.is_idle else handle.hooks_dict_ref()
        if hooks is not None and any(one._backward_hooks is hooks for one in self.recorder.values.tensors.values()):
            self.stack.seal("a hook on a tensor, which it removes again")
        remove(handle)

    def _set_attribute(self, set_attribute: Any, module: nn.Module, name: str, value: object) -> None:
        value = learn(value)
        if id(module) in self.ours and self.active:
            if name in module._parameters and value is not module._parameters[name]:
                raise CaptureError(
                    f"{self.stack.here()}: got an assignment to the parameter {name!r}, expected parameters that are "
                    "only read. The new value would be lost. Compute a new tensor from it (torch.nn.utils.parametrize)."
                )
            if name not in module._buffers:  # assigning a buffer goes through register_buffer
                self.stack.note_assignment(module, name, value, self.recorder.values)
                self.decisions.note_assignment(module, name, value)
        set_attribute(module, name, value)

    def _register_buffer(
        self, register: Any, module: nn.Module, name: str, tensor: Any, *args: Any, **kwargs: Any
    ) -> None:
        if id(module) in self.ours and self.active and name in module._buffers:
            if self.recorder.is_in_torch_call:
                raise CaptureError(
                    f"{self.stack.here()}: got an assignment to the buffer {name!r} inside a torch call, such as a "
                    "custom autograd function, expected one in a forward. Return the tensor, and assign it outside."
                )
            tensor = self.recorder.reassignments.assign(module, name, tensor, self.recorder.call)
            self.stack.note_assignment(module, name, tensor, self.recorder.values)
        register(module, name, tensor, *args, **kwargs)

    def _convert_module(self, apply: Any, module: nn.Module, convert: Any, recurse: bool = True) -> Any:
        """Convert a module, in `.to()` say; of one made in a forward, whose tensors torch cannot swap, replace them."""
        if id(module) in self.stack.paths or not self.active:
            return apply(module, convert, recurse)
        children: Any = module.children() if recurse else ()
        for child in children:
            child._apply(convert)
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                new: Any = None if tensor is None else convert(tensor)
                if new is not tensor:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    table[name] = as_parameter(new.detach(), tensor.requires_grad) if is_parameter else new
        return module

    def _apply(self, apply: Any, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        if cls is checkpoint.CheckpointFunction and not self.is_idle:
            return self.checkpoints.record_reentrant(*args)
        function = apply.__get__(None, cls)
        unseen = self.is_idle or cls in (CheckpointNode, CheckpointInputs)  # which checkpointing itself applies
        return function(*args, **kwargs) if unseen else self.recorder.call(function, args, kwargs)

    def _begin_function(self, begin: Any, context: Any) -> None:
        """Seal a module that calls a custom function by a method that it has kept, which nothing else shows."""
        function = context._forward_cls
        if not self.is_idle and function not in (CheckpointNode, CheckpointInputs):
            self.stack.seal(f"a call of {function.__name__}.apply, kept under another name since before the build")
        begin(context)

    def _record(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, and record it as a single torch call."""
        return function(*args, **kwargs) if self.is_idle else self.recorder.call(function, args, kwargs)

    def _record_other(self, function: Callable[..., Any], _: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function in place of torch's, likewise."""
        return self._record(function, *args, **kwargs)

    def _call_script(self, call: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Record a call of a function that `torch.jit.script` made; its torch calls run in C++, unseen."""
        if self.is_idle:
            return call(function, *args, **kwargs)
        first = self.recorder.record.tick
        out = self.recorder.call(function, args, kwargs)
        if self.recorder.record.draws.has_from(first):
            raise CaptureError(
                f"{self.stack.here()}: got the torch.jit.script function {function.name!r} that draws random numbers, "
                "expected draws that follow from the step's seed. Call the function without torch.jit.script."
            )
        return out

    def _enter_saved_hooks(self, enter: Any, hooks: Any) -> None:
        self.recorder.record.hooked.append(len(self.recorder.record.units))
        if not isinstance(hooks, CheckpointHook):
            self.stack.seal("saved-tensor hooks around what it calls")
        enter(hooks)

    def _enter_autocast(self, enter: Any, context: Any) -> Any:
        if not self.is_idle:
            self.recorder.enter_autocast()
        entered = enter(context)
        if self.active:
            torch.set_autocast_cache_enabled(False)  # so that each use shows its own cast; exit restores it
        return entered

    def _exit_autocast(self, exit_context: Any, context: Any, *error: Any) -> Any:
        if not self.is_idle:
            self.recorder.exit_autocast()
        return exit_context(context, *error)

    def note_nesting(self) -> None:
        """Seal the running module: it makes nested tensors of real inputs, but not of fake ones."""
        self.stack.seal(
            "a padding mask in an encoder that nests tensors (TransformerEncoder(enable_nested_tensor=False) does not)"
        )

    def _refuse_seeding(self, *_: object) -> None:
        raise seeding_error(self.stack.here())

    def _refuse_objects(self, *_: object) -> None:
        raise CaptureError(
            f"{self.stack.here()}: got an exchange of Python objects between processes{current_line()}, expected only "
            "tensors: steps would always use the objects from the recording. Exchange them before the step, and pass "
            "values that depend on them."
        )

    def _from_numpy(self, from_numpy: Any, array: Any) -> Any:
        """Return an array as a real tensor, which is a constant of the model."""
        with without_modes():
            return from_numpy(array)

    def _run_compiled(self, _: Any, callback: Any) -> Any:
        """Seal the running module, unless it is the model: compiled code computes something else than plain Python."""
        if self.active and self.stack.path and callable(callback):
            self.stack.seal(COMPILED_CODE)
        return None if self.active else callback

    def _checkpoint(self, generate: Any, /, *args: Any, **kwargs: Any) -> Iterator[None]:
        return generate(*args, **kwargs) if self.is_idle else self.checkpoints.record(generate, *args, **kwargs)


def _backward_hook(module: nn.Module) -> str:
    """Describe a hook that torch attaches to the autograd graph around a module's call; empty if it has none."""
    hooks: list[Any] = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    return f"the backward hook {getattr(hooks[0], '__qualname__', repr(hooks[0]))}" if hooks else ""


class Decision(NamedTuple):
    """An assignment: the path of the module, and the calls that it happened in, outermost first."""

    path: str
    calls: list[Frame]


class Decisions:
    """Tracks numbers that a module stores in attributes after branching on data.

    On fake tensors, a module in `unsplittable` takes one branch of many, and code that reads such a number elsewhere
    would get this branch's in every step. So seal the innermost call that contains both: its Python code then reads
    the number that the step's data led to. The first such attribute installs a patch to notice reads, which `exits`
    removes.
    """

    def __init__(self, stack: CallStack, exits: ExitStack) -> None:
        self.stack, self.exits = stack, exits
        self.made: dict[tuple[int, str], Decision] = {}

    def note_assignment(self, module: nn.Module, name: str, value: object) -> None:
        """Track an attribute of a module if data decided what was assigned to it."""
        branching = self.stack.is_opaque and self.stack.outermost_branching.branching
        if not branching or not isinstance(value, PLAIN):
            self.made.pop((id(module), name), None)
            return
        if not self.made:
            self._notice_reads()
        self.made[id(module), name] = Decision(self.stack.paths.get(id(module), ""), [*self.stack.frames])

    def _notice_reads(self) -> None:
        get: Any = current(nn.Module, "__getattribute__")

        def get_and_notice(module: nn.Module, name: str) -> Any:
            decision = self.made.get((id(module), name))
            if decision is not None:
                self._read(name, decision)
            return get(module, name)

        self.exits.enter_context(replace(nn.Module, "__getattribute__", get_and_notice))

    def _read(self, name: str, decision: Decision) -> None:
        """Seal the innermost call that contains both the assignment and this read."""
        around = {id(frame) for frame in decision.calls}
        both = [frame for frame in self.stack.frames if id(frame) in around and not frame.checkpoint]
        if both and not both[-1].sealed:
            both[-1].sealed = f"a read of {name!r}, which module {decision.path} sets after branching on data"
