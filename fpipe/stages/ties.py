# SPDX-License-Identifier: Apache-2.0
"""Tied parameters: the two ways to combine the gradients of a parameter that several stages use.

- `exact`: in every microbatch its cotangent goes back from user to user, as on one device, and the bits are the same.
  At the end of the step the first user, its owner, sends the gradient to all stages that hold a copy.
- `sum`: each stage sums its own gradient over the microbatches, as for any parameter. At the end of the step the stages
  exchange these sums, and each stage adds all of them in stage order. Nothing is sent before that. The bits are those
  of a model with a copy of the parameter in every stage, whose gradients are added. A rank then holds one gradient for
  every stage that uses the parameter, so if very many do, `exact` takes less memory.

Between stages on one rank nothing is sent, in either mode.

Runs when a pipeline is built and when a plan is made.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import nn

from fpipe.errors import InputError
from fpipe.tensors.tree import first_names
from schedules import Placement

Tied: TypeAlias = str | Mapping[str, str]
MODES = ("exact", "sum")


def parameters_to_sum(tied: Tied, model: nn.Module) -> frozenset[str]:
    """Return the parameters with mode `sum`, by their first names.

    `tied` is a mode for all, or a dict from any name of a parameter to its mode; parameters not in it are `exact`.
    Raises `InputError` for an unknown mode or name, and for two modes of one parameter.

    >>> pair = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> pair[1].weight = pair[0].weight
    >>> parameters_to_sum({"1.weight": "sum"}, pair)
    frozenset({'0.weight'})
    """
    first = first_names(model, "parameters")
    if isinstance(tied, str):
        _require_mode("tied", tied)
        return frozenset(first.values() if tied == "sum" else ())
    if not isinstance(tied, Mapping):
        raise InputError(f"tied: got {tied!r}, expected one of {list(MODES)}, or a dict of them by parameter name.")
    found: dict[str, str] = {}
    for name, mode in tied.items():
        where = f"tied[{name!r}]"
        _require_mode(where, mode)
        if name not in first:
            close = difflib.get_close_matches(str(name), list(first), n=3) or list(first)[:8]
            raise InputError(f"{where}: got an unknown name, expected a parameter's. Did you mean one of {close}?")
        if found.setdefault(first[name], mode) != mode:
            raise InputError(
                f"{where}: got {mode!r}, expected {found[first[name]]!r}, as for another name of the same parameter. "
                "Use one of its names only."
            )
    return frozenset(name for name, mode in found.items() if mode == "sum")


def _require_mode(where: str, mode: object) -> None:
    if mode not in MODES:
        raise InputError(f"{where}: got {mode!r}, expected one of {list(MODES)}. Choose one.")


def needs_gradient(placement: Placement, source: int, target: int, holders: Sequence[int]) -> bool:
    """Return whether stage `source` must send its gradient of a parameter to stage `target`, one of its `holders`.

    A rank needs it only once, for all holders on it, and not at all if `source` is on it too.

    >>> from schedules import looped
    >>> [needs_gradient(looped(ranks=2, chunks=2), 0, target, range(4)) for target in (1, 2, 3)]
    [True, False, False]
    """
    return any(
        homes[target] not in placement.replicas(source)
        and target == min(stage for stage in holders if homes[stage] == homes[target])
        for homes in placement.routes
    )
