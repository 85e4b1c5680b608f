# SPDX-License-Identifier: Apache-2.0
"""Gradients clipped by norm or by value, with the bits of `torch.nn.utils`.

The functions of `torch.nn.utils` change `.grad` of parameters in place. Here they get tensors that have the gradients,
or copies of them, as their `.grad`.

Invariant: every process scales all gradients that it holds by the same factor, so a tied parameter stays equal on every
rank.

Runs in every step, after the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_

from fpipe.errors import InputError
from fpipe.pipelines.handshake import call_together
from fpipe.pipelines.inputs import State
from fpipe.pipelines.pipeline import Pipeline
from fpipe.tensors.arguments import describe_argument, require_arguments, require_dense, require_tensors
from fpipe.tensors.names import accept_trees, restore_like
from fpipe.tensors.placed import local_part, without_partial
from fpipe.training.norms import choose_gradients, compute_total


@accept_trees("grads", restore=restore_like("grads"))
def clip(
    pipe: Pipeline,
    grads: State,
    max_norm: float,
    order: float = 2.0,
    names: str | Iterable[str] = "*",
    donate: bool = False,
) -> tuple[State, Tensor]:
    """Return the gradients, scaled so that their norm over the whole model is at most `max_norm`, and the norm before.

    The bits are those of `torch.nn.utils.clip_grad_norm_` on one device, on any ranks, cuts and schedules. If you call
    torch's function on one rank's parameters, it uses the norm of that rank's share, and copies of a tied parameter
    drift apart.

    - `max_norm`, `order`: as in `torch.nn.utils.clip_grad_norm_`.
    - `names`: a pattern or patterns; only matching gradients count and are scaled, all others are returned unchanged.
      To clip groups by separate norms, call this once per group.
    - `donate`: scale in place; the same tensors are returned, and no second set of gradients is held.

    Under torch.distributed every rank must call this with the same arguments. Raise as `fpipe.norm` does.

    >>> import torch, fpipe
    >>> from schedules import gpipe
    >>> model = torch.nn.Linear(3, 1)
    >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 3),), loss=torch.mean, schedule=gpipe(1, 2))
    >>> _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (torch.ones(2, 3),))
    >>> clipped, norm = fpipe.clip(pipe, grads, 1.0)
    >>> norm, fpipe.norm(pipe, clipped)
    (tensor(2.), tensor(1.0000))
    """
    with call_together(clip, {"pipe": pipe, "order": order, "names": names, "donate": donate}):
        limit, chosen = require_bound("max_norm", max_norm), choose_gradients(pipe, grads, names)
        total = compute_total(pipe, chosen, order, f"names={names!r}", f"max_norm={limit}")
    scaled = scale_to_norm({name: grad if donate else grad.clone() for name, grad in chosen.items()}, limit, total)
    return {**grads, **scaled}, total


def scale_to_norm(grads: State, max_norm: float, total: Tensor) -> State:
    """Return the gradients, scaled in place to a norm of at most `max_norm`, given that it is `total`."""
    clip_grads_with_norm_(_hold(grads.values()), max_norm, total)
    return grads


@accept_trees("grads", restore=restore_like("grads"))
def clip_value(grads: State, value: float, donate: bool = False) -> State:
    """Return the gradients with every element clamped to [-value, value], as `torch.nn.utils.clip_grad_value_` does.

    It does not communicate. With `donate`, the gradients are clamped in place and the same tensors returned. Raise
    `InputError` for a negative value.

    >>> import torch, fpipe
    >>> fpipe.clip_value({"bias": torch.tensor([-3.0, 0.5])}, 1.0)
    {'bias': tensor([-1.0000,  0.5000])}
    """
    require_arguments(clip_value, {"donate": donate})
    require_tensors("grads", grads)
    for name, grad in grads.items():
        require_dense(f"grads[{name!r}]", grad)
    limit = require_bound("value", value)
    complete = {name: without_partial(grad) for name, grad in grads.items()}
    clamped = {name: grad if donate else grad.clone() for name, grad in complete.items()}
    clip_grad_value_(_hold(clamped.values()), limit)
    return clamped


def require_bound(what: str, value: Any) -> float:
    """Return the number as a float; raise `InputError` if it is negative or nan."""
    try:
        number = math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not number >= 0:
        raise InputError(
            f"{what}: got {describe_argument(value)}, expected a number of at least 0. Pass the largest allowed value."
        )
    return number


def _hold(grads: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors that have these, or their local tensors, as their `.grad`."""
    holders = []
    for local in map(local_part, grads):
        grad = local._values() if local.is_sparse else local  # shares its memory
        holder = grad.detach()
        holder.grad = grad
        holders.append(holder)
    return holders
