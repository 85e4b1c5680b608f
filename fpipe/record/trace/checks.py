# SPDX-License-Identifier: Apache-2.0
"""Refuse models that a pipeline would not run as one device does; each check raises `CaptureError`.

- In a step, modules hold the step's tensors in place of their own, and other microbatches are under way. So a tensor's
  address, a parameter's `.grad`, and what a forward assigns to `.data` differ from what they are on one device.
- Each stage runs on some of the processes only, and keeps no tensors but buffers: effects outside of them are lost.
- Hooks, `backward` methods and checkpointed functions run in the backward, when the forward's Python state is gone.
- Some calls raise on fake tensors that would not on real ones. A forward that catches the error takes another branch in
  the capture than in a step.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile
from traceback import walk_stack
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.errors import CaptureError, PipelineError
from fpipe.record.captured import Parameter, Unit, Value
from fpipe.record.fakes.assumed_values import UNKNOWN
from fpipe.record.model.places import LOSS, current_line
from fpipe.record.model.snapshot import ContainerState
from fpipe.record.model.walk import code_names, is_users
from fpipe.record.refusals import own_generator_error, unregistered_write_error
from fpipe.record.trace.frames import Frame, all_frames
from fpipe.record.trace.record import Record, Values
from fpipe.tensors.effects import Effects, storage_id
from fpipe.tensors.torch_private import FAKE_ERRORS, TENSOR_METHODS, DisableTorchFunction, FakeTensor
from fpipe.tensors.tree import closure_variables

GRAD: Any = TENSOR_METHODS["grad"]
UNANSWERABLE: Mapping[Any, str] = MappingProxyType({GRAD.__get__: "is asked for", GRAD.__set__: "is assigned to"})
"""The functions that torch calls when a tensor's `.grad` is used."""
ELSEWHERE = (Tensor.numpy, Tensor.__array__)
"""Functions that raise various errors on fake tensors."""
GATHERING = frozenset({torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor})
"""Functions that copy the values of tensors in lists without calling an operator."""
USE_OTHER = "Pass use_reentrant=False to checkpoint() (gradient_checkpointing_kwargs of transformers has it)."

# ---------------------------------------------------------------------------------------------------- as calls are made


def require_answerable(function: Any, args: Sequence[Any], name: Callable[[Any], str], here: Callable[[], str]) -> None:
    """Raise for a tensor's address, values gathered from a list, or a parameter's gradient.

    `name` maps a tensor to its parameter's name; `here` returns the running module. torch's own modules may ask, in
    `nn.Module.to` say, because they only move the tensor.
    """
    if function is Tensor.data_ptr and not _is_called_by_torch():
        raise CaptureError(
            f"{here()}: got a forward that asks for the address of a tensor, expected one that does not depend on it. "
            "Addresses differ in every step. Compare tensors with `is`, or remove the call."
        )
    if function in GATHERING and any(isinstance(arg, list | tuple) and _contains_fakes(arg) for arg in args):
        raise CaptureError(
            f"{here()}: got {function.__name__}() of a list with tensors in it{current_line()}, expected a list of "
            "numbers, because it copies values in a way that fpipe can't record. Write torch.stack() or torch.cat(), "
            "or do it before the step and pass the result."
        )
    if function not in UNANSWERABLE or not name(args[0]) or _is_called_by_torch():
        return
    raise CaptureError(
        f"{here()}: got a forward in which the .grad of parameter {name(args[0])} {UNANSWERABLE[function]}, expected "
        "one that does not use gradients. A step returns them and keeps none. Use those that it returns."
    )


def _contains_fakes(items: Sequence[Any]) -> bool:
    """Return whether nested lists hold nonempty fake tensors."""
    return any(
        _contains_fakes(one) if isinstance(one, list | tuple) else isinstance(one, FakeTensor) and one.numel() > 0
        for one in items
    )


def _is_called_by_torch() -> bool:
    """Return whether the innermost caller outside of fpipe is torch."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_stack(sys._getframe(1)))
    caller = next(dropwhile("fpipe".__eq__, (module.partition(".")[0] for module in modules)))
    return bool(caller == "torch")


def find_fake_error(function: Any, error: Exception, here: Callable[[], str]) -> PipelineError | None:
    """Return the error to raise even if the forward catches `error`; `None` if real tensors would raise it, too."""
    if isinstance(error, PipelineError):
        return error
    if not (isinstance(error, UNKNOWN) or function in ELSEWHERE or type(error).__module__ == FAKE_ERRORS):
        return None
    return CaptureError(
        f"{here()}: got {type(error).__name__}: {error}, which the forward caught, expected a forward that needs no "
        "values. In a step, this call would not raise. Move it out of the try block, or, if shapes do not depend on "
        "it, name the module in unsplittable."
    )


def require_allowed(effects: Effects, here: Callable[[], str]) -> None:
    """Raise for an in-place change of an unregistered tensor, or a draw from a generator other than the default."""
    if effects.unregistered:
        raise unregistered_write_error(here())
    if effects.foreign:
        raise own_generator_error(here())


def require_no_barrier(operator: str, here: Callable[[], str]) -> None:
    """Raise if an operator of torch.distributed is a barrier."""
    if operator.endswith("barrier"):
        raise CaptureError(
            f"{here()}: got a barrier of torch.distributed, expected none, because each stage runs only on some of the "
            "processes. Call it outside the model."
        )


def require_kept(is_lost: bool, collective: str, here: Callable[[], str]) -> None:
    """Raise if what a collective writes would be lost."""
    if is_lost:
        raise CaptureError(
            f"{here()}: got a collective ({collective}) that writes to a parameter, a buffer or a tensor from outside "
            "the module, expected one that writes to a tensor created in the module. The change would be lost. Pass it "
            "a clone, and use the clone, or copy it back with copy_()."
        )


def require_own_gradients(values: Values, here: Callable[[], str]) -> None:
    """Raise if a backward inside a forward has accumulated gradients of the model's parameters."""
    with DisableTorchFunction():  # not a call of the model
        parameters = ((v, one.name) for v, one in values.sources.items() if isinstance(one, Parameter))
        name = next((name for value, name in parameters if values.tensors[value].grad is not None), "")
    if name:
        raise CaptureError(
            f"{here()}: got a backward inside the forward or the loss that accumulates the gradient of {name}, "
            "expected none: a step returns gradients and keeps none, so this one would be lost. Return the loss, and "
            "let the schedule split the batch, or call torch.autograd.grad() on tensors of your own."
        )


# ------------------------------------------------------------------------------------------------------- after the run


def require_in_place(
    values: Values, value: Value, expected: Tensor, seats: Sequence[tuple[dict[str, Any], str]]
) -> None:
    """Raise unless all seats of a parameter or buffer hold the expected tensor, and nothing assigned to its `.data`."""
    in_place = all(table.get(name) is expected for table, name in seats)
    with DisableTorchFunction():  # not a call of the model
        in_place = in_place and storage_id(values.tensors[value]) == values.storage[value]
    if in_place:
        return
    source, (_, name) = values.sources[value], seats[0]
    kind, repair = "buffer", f"Change it in place, as in self.{name}.copy_(...)"
    if isinstance(source, Parameter):
        kind, repair = "parameter", "Compute a new tensor from it (torch.nn.utils.parametrize)"
        repair += ", or change it between steps"
    raise CaptureError(
        f"{kind} {source[0]}: got a forward that replaces it, or assigns to its .data, expected one that leaves it in "
        f"place. The new value would be lost. {repair}."
    )


def require_own_attributes(model: nn.Module, record: Record) -> None:
    """Raise if code of the backward reads an attribute that the forward assigns.

    A step does not run the forward's Python, and a whole call puts its attributes back.
    """
    assigned = {name for frame in record.frames for _, name in frame.touched}
    for where, function in (*_module_hooks(model), *_backward_code(record)) if assigned else ():
        for name in sorted(code_names(function) & assigned):
            raise CaptureError(
                f"{where}: got {function.__qualname__}, which runs in the backward and reads {name!r}, which a forward "
                "assigns, expected one that reads only attributes that no forward changes: several microbatches are in "
                "flight, so the value may belong to another one. Save the tensor with save_for_backward() of a custom "
                "autograd function, or register the hook in the forward, on a tensor, as a function that closes over "
                "the value."
            )


def _module_hooks(model: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    """Yield the backward hooks of modules, and where they are."""
    for path, module in model.named_modules():
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
            yield from ((f"module {path or '(root)'}", one) for one in _python_functions(hook))


def _backward_code(record: Record) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions that recorded calls run in the backward, and where the calls are."""
    for unit, facts in record.facts.items():
        call, where = facts.invocation, f"module {unit.path or '(root)'}"
        cls = getattr(call.function, "__self__", None)
        if call.function is Tensor.register_hook:
            yield from ((where, one) for leaf in call.leaves for one in _python_functions(leaf))
        elif isinstance(cls, type) and issubclass(cls, torch.autograd.Function):
            yield from ((where, one) for one in _python_functions(cls.backward))


def _python_functions(hook: Any) -> Iterator[FunctionType]:
    """Yield the function written in Python that a hook is, if it is one."""
    function = hook.__func__ if isinstance(hook, MethodType) else hook
    if isinstance(function, FunctionType):
        yield function


def bound_variables(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the variables that a function closes over now, by name."""
    return closure_variables(function) if isinstance(function, FunctionType) else {}


def require_same_variables(frames: Iterable[Frame]) -> None:
    """Raise if a checkpointed function closes over a variable that changed after its call, as a lambda in a loop does.

    On one device, the backward reruns the function with the new value.
    """
    for frame in frames:
        function, before = frame.checkpointed
        now = {} if function is None else bound_variables(function)
        for name in (name for name in before if now.get(name) is not before[name]):
            raise CaptureError(
                f"module {frame.path or '(root)'}: got a checkpointed function that closes over {name!r}, which "
                "changes after the call, expected one that behaves the same when the backward runs it again. Pass it "
                "as an argument of checkpoint(), or bind it, as in functools.partial."
            )


def require_explicit_arguments(frame: Frame, units: Sequence[Unit], given: Collection[Value], values: Values) -> None:
    """Raise if a reentrant checkpoint reads an outside tensor that requires a gradient and is not `given` to it.

    `units` are those inside it. A pipeline differentiates it as one node, with its arguments and parameters as inputs.
    """
    made = {value for unit in units for value in unit.makes}
    hidden = [value for unit in units for value in unit.reads if value not in made and value not in given]
    if values.requires_grad(hidden):
        raise CaptureError(
            f"module {frame.path or '(root)'}: got a reentrant checkpoint of a function that reads a tensor with "
            "requires_grad from a closure, a keyword argument or a tuple, expected it as a positional argument. torch "
            f"would run its backward once for each use. {USE_OTHER}"
        )


def require_own_parameters(record: Record) -> None:
    """Raise if a trained parameter is used both inside and outside of reentrant checkpoints.

    One device accumulates the two gradients separately, and adds them in an order that depends on both.
    """
    reentrant = [frame for frame in all_frames(record.frames) if frame.reentrant]
    inside = {unit for frame in reentrant for unit in record.units_in(frame)}
    outside = {value for unit in record.units if unit not in inside for value in unit.reads}
    for frame in reentrant:
        for value in (v for unit in record.units_in(frame) for v in unit.reads if v in outside):
            source = record.values.sources.get(value)
            if isinstance(source, Parameter) and record.values.tensors[value].requires_grad:
                raise CaptureError(
                    f"module {frame.path or '(root)'}: got a reentrant checkpoint that uses the parameter "
                    f"{source.name!r}, which is also used outside it, expected uses either inside or outside. The sum "
                    f"of its gradients would have other bits than on one device. {USE_OTHER}"
                )


# -------------------------------------------------------------------------------------------- what steps will not do


def find_observers(
    model: nn.Module, loss: Any, written: Sequence[ContainerState], whole: Collection[str]
) -> tuple[str, ...]:
    """Return, as text, what code of the model and the loss does besides computing, outside of the modules in `whole`.

    It prints, or fills a list of the user's. Steps run recorded torch calls, so they will not do it, and a pipeline
    says so in its log when it is built. `written` are the containers that every run changes.
    """
    changed = {id(one.container) for one in written if one.outside}
    found: dict[str, None] = {}
    for path, function in _forward_code(model, loss):
        if any(f"{path}.".startswith(f"{name}.") for name in whole):
            continue
        where = "the loss" if path == LOSS else f"module {path or '(root)'}"
        names, space = code_names(function), function.__globals__
        if "print" in names and space.get("print", builtins.print) is builtins.print:
            found[f"{where} prints"] = None
        held = closure_variables(function) | {name: space[name] for name in names & space.keys()}
        found |= dict.fromkeys(f"{where} changes {name!r}" for name, one in held.items() if id(one) in changed)
    return tuple(found)


def _forward_code(model: nn.Module, loss: Any) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions in Python that a forward of users' modules, their hooks, and the loss consist of."""
    named = [*model.named_modules(), *(loss.named_modules(prefix=LOSS) if isinstance(loss, nn.Module) else ())]
    for path, module in named:
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        for one in (*((type(module).forward,) if is_users(type(module)) else ()), *hooks):
            yield from ((path, function) for function in _python_functions(one) if is_users(function))
    if isinstance(loss, FunctionType):
        yield LOSS, loss
