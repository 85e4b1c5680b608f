# SPDX-License-Identifier: Apache-2.0
"""Refuse what a traced graph would lose silently.

A graph of operators keeps what was computed, and loses: the backward of a custom `autograd.Function`, activation
checkpointing and other saved-tensor hooks, hooks on modules, tensors and parameters, and state that the forward assigns
to its modules. While the model runs under capture, watch for these, and refuse them with the name of the module.

Invariant: the watch is on only while the user's forward and loss run, so what the tracer itself does goes unseen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from linecache import getline
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpipe.errors import CaptureError
from fpipe.patching import current, replace
from fpipe.tensors.attributes import refuse_marks
from fpipe.tensors.settings import changes_since, settings
from fpipe.tensors.tree import Structure, flatten
from fpipe.torch_private import SAVED_INPUTS

HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def refuse_in_graph(what: str, where: str, why: str) -> NoReturn:
    """Raise `CaptureError` for something that a graph cannot keep."""
    raise CaptureError(
        f"{where}: got {what}, expected a forward that a graph of operators describes fully; {why}. "
        'Remove it, or choose capture="trace", where modules run as they are.'
    )


def refuse_hooks(model: nn.Module) -> None:
    """Raise `CaptureError` for hooks on modules: forward hooks would run once, at capture, backward hooks never."""
    for name, module in model.named_modules():
        for table in HOOK_TABLES:
            if getattr(module, table):
                hook = next(iter(getattr(module, table).values()))
                refuse_in_graph(
                    f"a hook {_hook_name(hook)} in {table}",
                    module_place(name, module),
                    "hooks are not part of the graph",
                )


@contextmanager
def guard(model: nn.Module) -> Iterator[None]:
    """Refuse, inside, whatever `model` does that the graph would lose."""
    modules = places(model)

    def custom_function(cls: Any, /, *args: object, **kwargs: object) -> NoReturn:
        if cls is SAVED_INPUTS:
            refuse_in_graph("activation checkpointing", current_place(modules), "it would be lost")
        refuse_in_graph(
            f"the custom autograd function {cls.__name__}", current_place(modules), "its backward would be lost"
        )

    def saved_tensor_hooks(hooks: object) -> NoReturn:
        what = "activation checkpointing" if "checkpoint" in type(hooks).__module__ else "saved-tensor hooks"
        refuse_in_graph(what, current_place(modules), "it would be lost")

    def tensor_hook(tensor: Tensor, hook: object) -> NoReturn:
        refuse_in_graph(f"the tensor hook {_hook_name(hook)}", current_place(modules), "it would be lost")

    def seed(*_: object) -> NoReturn:
        raise CaptureError(
            f"{current_place(modules)}: got a forward that seeds the generator, expected random numbers that follow "
            "from the step's seed. Remove torch.manual_seed."
        )

    def assignment(module: nn.Module, name: str, where: str) -> NoReturn:
        kind = "buffer" if name in module._buffers else "attribute"
        refuse_in_graph(f"an assignment to the {kind} {name!r}", where, "the new value would be lost")

    with (
        replace(torch.autograd.Function, "apply", custom_function),
        replace(torch.autograd.graph.saved_tensors_hooks, "__enter__", saved_tensor_hooks),
        replace(Tensor, "register_hook", tensor_hook),
        replace(torch, "manual_seed", seed),
        replace(torch.random, "manual_seed", seed),
        _assignments(modules, lambda old, new: not _is_harmless(old, new), assignment),
        _NoForeignParameters(modules, "the loss"),
        _SameSettings(modules),
        refuse_marks(),
    ):
        yield


@contextmanager
def refuse_autocast(model: nn.Module) -> Iterator[None]:
    """Refuse autocast inside, for front ends whose graphs would lose it."""
    modules = places(model)

    def enter(_: object) -> NoReturn:
        raise CaptureError(
            f"{current_place(modules)}: got autocast, expected none: this front end would lose it. Choose "
            'capture="trace", where modules run as they are.'
        )

    with replace(torch.autocast, "__enter__", enter):
        yield


@contextmanager
def _assignments(
    modules: Mapping[int, str],
    unwanted: Callable[[object, object], bool],
    refuse: Callable[[nn.Module, str, str], NoReturn],
) -> Iterator[None]:
    """Call `refuse(module, name, where)` for each assignment to one of `modules` of an unwanted (old, new) value."""
    assign: Callable[..., None] = current(nn.Module, "__setattr__")

    def watching(module: nn.Module, name: str, value: object) -> None:
        where = modules.get(_identity(module))
        if where is not None and not is_torchs(module) and unwanted(getattr(module, name, None), value):
            refuse(module, name, where)
        assign(module, name, value)

    with replace(nn.Module, "__setattr__", watching):
        yield


def plain_state(model: nn.Module, prefix: str = "") -> dict[str, Structure]:
    """Return, by module and attribute, what the user's modules hold besides parameters, buffers and submodules."""
    return {
        f"{module_place(path, module)}, attribute {name!r}": flatten(value, opaque=True)[1]
        for path, module in model.named_modules(prefix=prefix)
        if not is_torchs(module)
        for name, value in (*vars(module).items(), ("_buffers", dict.fromkeys(module._buffers)))
        if name not in ("_parameters", "_modules", "_backward_hooks", "training")
    }


def require_unchanged(before: Mapping[str, Structure], after: Mapping[str, Structure], lost: str) -> None:
    """Raise `CaptureError`, naming the attribute, if running the model changed what its modules hold."""
    for where in {**before, **after}:
        if where not in before or where not in after or not _is_same_structure(before[where], after[where]):
            raise CaptureError(
                f"{where}: got a forward that changes it, expected one without state of its own but buffers: {lost}. "
                "Make it a buffer that is changed in place, or fill it before the pipeline is built."
            )


def _is_same_structure(a: Structure, b: Structure) -> bool:
    same = a.spec == b.spec and len(a.constants) == len(b.constants)
    pairs = zip(a.constants, b.constants, strict=False)
    return same and all(i == j and _is_harmless(old, new) for (i, old), (j, new) in pairs)


def is_torchs(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own, which keep nothing but caches."""
    return type(module).__module__.startswith("torch.nn.")


def current_place(modules: Mapping[int, str], otherwise: str = "the loss") -> str:
    """Return the innermost of `modules` (see `places`) in whose method the caller runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = modules.get(_identity(frame.f_locals.get("self")))
        if found:
            return found
        frame = frame.f_back
    return otherwise


def blame(traceback: TracebackType | None, model: nn.Module) -> str:
    """Return the innermost module of `model` in whose method an exception was raised."""
    modules = places(model)
    found = "the loss"
    while traceback is not None:
        found = modules.get(_identity(traceback.tb_frame.f_locals.get("self")), found)
        traceback = traceback.tb_next
    return found


def traceback_line(traceback: TracebackType | None) -> str:
    """Return the innermost line of user code in a traceback: `" in model.py, line 3: if x.sum() > 0"`."""
    lines = [(frame, line) for frame, line in walk_tb(traceback) if _is_users(frame)]
    return _line_text(*lines[-1]) if lines else ""


def current_line() -> str:
    """Return the innermost line of user code now running, in the same form."""
    return next((_line_text(frame, line) for frame, line in walk_stack(None) if _is_users(frame)), "")


def _is_users(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").split(".")[0] not in ("torch", "fpipe", "optree", "contextlib")


def _line_text(frame: FrameType, line: int) -> str:
    path = frame.f_code.co_filename
    return f" in {Path(path).name}, line {line}: {getline(path, line).strip()}"


def _is_harmless(old: object, new: object) -> bool:
    """Return whether an assignment leaves the module unchanged; in-place operators assign the same tensor again."""
    return old is new or (type(old) is type(new) and isinstance(old, bool | int | float | str) and old == new)


def places(model: nn.Module, prefix: str = "") -> dict[int, str]:
    """Return how to name each module of `model` in messages, by `_identity`."""
    return {_identity(module): module_place(name, module) for name, module in model.named_modules(prefix=prefix)}


def _identity(module: object) -> int:
    """Return a key unique among live modules; export runs short-lived proxies, which share a module's `__dict__`."""
    return id(getattr(module, "__dict__", module))


def module_place(name: str, module: nn.Module) -> str:
    """Return what to call a module in errors."""
    return f"module {name or '(root)'} ({type(module).__name__})"


def _hook_name(hook: Any) -> str:
    return getattr(hook, "__qualname__", repr(hook))


class _NoForeignParameters(TorchFunctionMode):
    """Refuses operations on real tensors that require a gradient: the captured model's are fake, or on meta."""

    def __init__(self, modules: Mapping[int, str], otherwise: str) -> None:
        super().__init__()
        self.modules, self.otherwise = modules, otherwise

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in (*args, *kwargs.values()):
            if type(leaf) in (Tensor, nn.Parameter) and leaf.requires_grad and leaf.device.type != "meta":
                raise CaptureError(
                    f"{current_place(self.modules, self.otherwise)}: got a tensor of shape {list(leaf.shape)} "
                    "that requires a gradient but is not a parameter of the model (from a closure, a global or an "
                    "attribute), expected only the model's parameters: it would get no gradient. Register it as a "
                    "parameter of the model, or detach it."
                )
        return func(*args, **kwargs)


class _SameSettings(TorchFunctionMode):
    """Refuses torch calls under other settings of torch than at its beginning."""

    def __init__(self, modules: Mapping[int, str]) -> None:
        super().__init__()
        self.modules, self.before = modules, settings()

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        names = changes_since(self.before)
        if names:
            refuse_in_graph(
                f"a change of torch's settings ({names})", current_place(self.modules), "they would be lost"
            )
        return func(*args, **(kwargs or {}))
