# SPDX-License-Identifier: Apache-2.0
"""Refuse what a traced graph would silently lose.

Problem. A graph of operators keeps what was computed. It loses the backward of a custom `autograd.Function`, activation
checkpointing and other saved-tensor hooks, hooks on modules, tensors and parameters, and state that the forward assigns
to its modules.

Idea. While the model runs under capture, replace the functions of torch that these go through; each replacement raises
an error that names the calling module.

Invariant: the guard is on only while the user's forward and loss run; calls of the tracer itself are not checked.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpipe.capture.module_state import is_no_change, is_torchs
from fpipe.capture.places import current_place, identity, module_place, places
from fpipe.errors import CaptureError
from fpipe.ir.refusals import foreign_parameter_error, seeding_error
from fpipe.patching import current, replace
from fpipe.tensors.attributes import refuse_marks
from fpipe.tensors.settings import changes_since, settings
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
    for path, module in model.named_modules():
        for table in HOOK_TABLES:
            for hook in getattr(module, table).values():
                what = f"a hook {_hook_name(hook)} in {table}"
                refuse_in_graph(what, module_place(path, module), "hooks are not part of the graph")


@contextmanager
def guard(model: nn.Module) -> Iterator[None]:
    """Raise `CaptureError`, inside this context, for whatever `model` does that a graph would lose."""
    modules = places(model)
    refusals = _Refusals(modules)
    with (
        replace(torch.autograd.Function, "apply", refusals.custom_function),
        replace(torch.autograd.graph.saved_tensors_hooks, "__enter__", refusals.saved_tensor_hooks),
        replace(Tensor, "register_hook", refusals.tensor_hook),
        replace(torch, "manual_seed", refusals.seed),
        replace(torch.random, "manual_seed", refusals.seed),
        replace(nn.Module, "__setattr__", refusals.assignments(current(nn.Module, "__setattr__"))),
        _NoForeignParameters(modules),
        _SameSettings(modules),
        refuse_marks(),
    ):
        yield


class _Refusals:
    """Replacements for functions of torch that refuse to be called; `modules` (see `places`) names the caller."""

    def __init__(self, modules: Mapping[int, str]) -> None:
        self.modules = modules

    def custom_function(self, cls: Any, /, *args: object, **kwargs: object) -> NoReturn:
        """Refuse `autograd.Function.apply`."""
        if cls is SAVED_INPUTS:
            self._refuse("activation checkpointing")
        self._refuse(f"the custom autograd function {cls.__name__}", "its backward would be lost")

    def saved_tensor_hooks(self, hooks: object) -> NoReturn:
        """Refuse to enter a context of saved-tensor hooks, as checkpoints do."""
        self._refuse("activation checkpointing" if "checkpoint" in type(hooks).__module__ else "saved-tensor hooks")

    def tensor_hook(self, tensor: Tensor, hook: object) -> NoReturn:
        """Refuse `Tensor.register_hook`."""
        self._refuse(f"the tensor hook {_hook_name(hook)}")

    def seed(self, *_: object) -> NoReturn:
        """Refuse `torch.manual_seed`."""
        raise seeding_error(current_place(self.modules))

    def assignments(self, assign: Callable[..., None]) -> Callable[[nn.Module, str, object], None]:
        """Wrap `assign`, the modules' `__setattr__`: refuse changes to attributes of the user's modules."""

        def assign_same(module: nn.Module, name: str, value: object) -> None:
            where = self.modules.get(identity(module))
            is_users = where is not None and not is_torchs(module)
            if is_users and not is_no_change(getattr(module, name, None), value):
                kind = "buffer" if name in module._buffers else "attribute"
                refuse_in_graph(f"an assignment to the {kind} {name!r}", str(where), "the new value would be lost")
            assign(module, name, value)

        return assign_same

    def _refuse(self, what: str, why: str = "it would be lost") -> NoReturn:
        refuse_in_graph(what, current_place(self.modules), why)


@contextmanager
def refuse_autocast(model: nn.Module) -> Iterator[None]:
    """Refuse autocast inside this context, for front ends whose graphs would lose it."""
    modules = places(model)

    def enter(_: object) -> NoReturn:
        raise CaptureError(
            f"{current_place(modules)}: got autocast, expected none: this front end would lose it. Choose "
            'capture="trace", where modules run as they are.'
        )

    with replace(torch.autocast, "__enter__", enter):
        yield


def _hook_name(hook: Any) -> str:
    return getattr(hook, "__qualname__", repr(hook))


class _NoForeignParameters(TorchFunctionMode):
    """A mode that refuses operations on real tensors that require a gradient: the model's own are fake, or on meta."""

    def __init__(self, modules: Mapping[int, str]) -> None:
        super().__init__()
        self.modules = modules

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in (*args, *kwargs.values()):
            if type(leaf) in (Tensor, nn.Parameter) and leaf.requires_grad and leaf.device.type != "meta":
                raise foreign_parameter_error(current_place(self.modules), leaf.shape)
        return func(*args, **kwargs)


class _SameSettings(TorchFunctionMode):
    """A mode that refuses torch calls under settings of torch other than those when it was created."""

    def __init__(self, modules: Mapping[int, str]) -> None:
        super().__init__()
        self.modules, self.before = modules, settings()

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        names = changes_since(self.before)
        if names:
            what = f"a change of torch's settings ({names})"
            refuse_in_graph(what, current_place(self.modules), "they would be lost")
        return func(*args, **(kwargs or {}))
