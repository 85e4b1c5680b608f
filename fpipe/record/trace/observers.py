# SPDX-License-Identifier: Apache-2.0
"""Find code of a model that does more than compute: it prints, or fills a list of the user's.

Steps run recorded torch calls, so such code runs only when the model is recorded. A pipeline says so in its log when it
is built, and names what keeps it: `whole`.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

import builtins
from collections.abc import Collection, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from fpipe.record.model.places import LOSS
from fpipe.record.model.snapshot import ContainerState
from fpipe.record.model.walk import code_names, is_users
from fpipe.tensors.closures import closure_variables


def find_observers(
    model: nn.Module, loss: Any, written: Sequence[ContainerState], whole: Collection[str]
) -> tuple[str, ...]:
    """Return what code of the model and the loss does besides computing, outside of the modules in `whole`.

    `written` are the containers that every run changes.
    """
    changed = {id(one.container) for one in written if one.outside}
    found: dict[str, None] = {}
    for path, function in _functions(model, loss):
        if any(f"{path}.".startswith(f"{name}.") for name in whole):
            continue
        where = "the loss" if path == LOSS else f"module {path or '(root)'}"
        names, space = code_names(function), function.__globals__
        if "print" in names and space.get("print", builtins.print) is builtins.print:
            found[f"{where} prints"] = None
        held = closure_variables(function) | {name: space[name] for name in names & space.keys()}
        found |= dict.fromkeys(f"{where} changes {name!r}" for name, one in held.items() if id(one) in changed)
    return tuple(found)


def _functions(model: nn.Module, loss: Any) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions in Python that a forward of users' modules, their hooks, and the loss consist of."""
    named = [*model.named_modules(), *(loss.named_modules(prefix=LOSS) if isinstance(loss, nn.Module) else ())]
    for path, module in named:
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        for one in (*((type(module).forward,) if is_users(type(module)) else ()), *hooks):
            function = one.__func__ if isinstance(one, MethodType) else one
            if isinstance(function, FunctionType) and is_users(function):
                yield path, function
    if isinstance(loss, FunctionType):
        yield LOSS, loss
