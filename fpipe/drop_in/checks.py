# SPDX-License-Identifier: Apache-2.0
"""Checks of what a script does with a drop-in module, and the values that a step needs.

Runs when the module is made, and in every step before ranks agree to begin it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.errors import InputError
from fpipe.pipelines.modes import active_casts
from fpipe.pipelines.pipeline import Pipeline

OWN_KEYWORDS = ("targets", "steps", "total", "scale", "seed")


def require_parameters_everywhere(pipe: Pipeline) -> None:
    """Raise `InputError`, on every rank, if a rank holds no parameter: torch's optimizers refuse an empty list."""
    placement = pipe.schedule.placement
    for rank in range(pipe.schedule.ranks):
        here = [s for s in pipe.stages if rank in placement.replicas(s.index)]
        if not any((*s.parameters, *s.unused) for s in here):
            raise InputError(
                f"rank {rank}: got stages {[s.index for s in here]} without parameters, expected some on every rank: "
                "torch's optimizers refuse an empty list. Choose other cuts=, or fewer ranks."
            )


def require_free_names(example: Any) -> None:
    """Raise `InputError` if a keyword argument of the model has the name of one of the drop-in module's."""
    taken = [name for name in OWN_KEYWORDS if isinstance(example, dict) and name in example]
    if taken:
        raise InputError(
            f"example: got arguments named {taken}, expected other names than {list(OWN_KEYWORDS)}, which "
            "fpipe.Pipelined takes itself. Pass inputs by position, or use fpipe.pipeline."
        )


def join_inputs(inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...] | dict[str, Any]:
    """Return the inputs as the pipeline takes them; raise `InputError` for a mixture."""
    if inputs and keywords:
        raise InputError(
            f"the model: got {len(inputs)} positional arguments and {sorted(keywords)} by keyword, expected either. "
            "Pass them as in example=."
        )
    return keywords or inputs


def find_total(pipe: Pipeline, steps: int, total: float | None) -> float | None:
    """Return the weight of all accumulated microbatches, or `None` for those of this step; raise `InputError`."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(
            f"steps: got {steps!r}, expected a whole number above 0. Pass how many losses are accumulated."
        )
    if steps == 1 or total is not None:
        if steps > 1:
            raise InputError(f"steps: got {steps} and total={total}, expected one of them. Pass total alone.")
        return total
    if pipe.captures.batchings[True].weight is not None:
        raise InputError(
            f"steps: got {steps} for a pipeline with a weight, expected total: the weights of later steps are unknown. "
            "Pass total=, the weight of all accumulated microbatches."
        )
    return steps * pipe.captures.batchings[True].example.divisor


def require_eval_mode(module: nn.Module) -> None:
    """Raise `InputError` if a submodule is in train mode while the model is in eval mode."""
    found = [name for name, one in module.named_modules() if one.training]
    if found:
        raise InputError(
            f"{found[0]}: got train mode in a model in eval mode, expected eval mode everywhere. Call model.eval() "
            "last, or evaluate with the plain model."
        )


def require_no_hooks(params: Mapping[str, Tensor]) -> None:
    """Raise `InputError` for hooks on gradients of parameters, which would get the sum over microbatches."""
    for name, p in params.items():
        if p._backward_hooks:
            hook = next(iter(p._backward_hooks.values()))
            raise InputError(
                f"{name}: got a hook on its gradient, {getattr(hook, '__qualname__', repr(hook))}, expected none: it "
                "would get the sum of all microbatches instead of each. Register it on the model before "
                "fpipe.Pipelined(model, ...), or change .grad after loss.backward()."
            )


def draw_seed() -> int:
    """Return a new seed from torch's default generator, as its data loaders do."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


def uses_half(pipe: Pipeline) -> bool:
    """Return whether parameters, or autocast around the call, are float16."""
    dtypes = {p.dtype for p in pipe.model.parameters()} | {dtype for _, dtype in active_casts()}
    return torch.float16 in dtypes


def update_buffers(held: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Write the buffers of a step into those of the module."""
    with torch.no_grad():
        for name, value in new.items():
            if value is not held[name]:
                held[name].copy_(value)


def ignore_other_ranks(module: nn.Module, keys: Any) -> None:
    """Drop the names of tensors on other ranks from those that `load_state_dict` did not expect."""
    others = module.pipe.model.state_dict().keys()  # type: ignore[union-attr]
    keys.unexpected_keys[:] = [name for name in keys.unexpected_keys if name not in others]
