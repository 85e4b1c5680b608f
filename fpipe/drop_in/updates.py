# SPDX-License-Identifier: Apache-2.0
"""Check that an optimizer may update a rank's share of the parameters without the others.

Problem. A script for one device chooses its optimizer. Some combine all parameters, as Lamb does to clip by a norm.
On one rank's share, each rank would compute other numbers, and nobody would notice. What one process refuses, and what
it accepts, several do.

Idea. An optimizer's first step on such parameters is preceded by a trial of its class with its options
(`fpipe.training.trial`). Those of torch need none.

Runs before each step of an optimizer, while there is a module of several ranks; the trial, once per optimizer.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import LBFGS, Adafactor, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fpipe.errors import InputError
from fpipe.training.trial import is_independent

_LOG: Final = logging.getLogger(__name__)


def watch_optimizers(module: nn.Module, dtypes: Collection[torch.dtype]) -> None:
    """Refuse steps of optimizers that combine parameters of this module, for as long as it exists.

    `dtypes`: those of the parameters of all ranks.
    """
    ref, tried = weakref.ref(module), WeakSet[Optimizer]()

    def require(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        known = ref()
        if known is None or optimizer in tried:
            return
        own = {id(p) for p in known.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            require_independent(optimizer)
            _require_epsilon(optimizer, dtypes)
            tried.add(optimizer)

    weakref.finalize(module, register_optimizer_step_pre_hook(require).remove)


def require_independent(optimizer: Optimizer) -> None:
    """Raise `InputError` for an optimizer that combines parameters; log a warning if that can't be told."""
    cls = type(optimizer)
    if cls.__module__.startswith("torch.optim.") and cls is not LBFGS:
        return
    found = is_independent(optimizer)
    if found is None:
        _LOG.warning(
            "%s: this optimizer could not be tested. If it combines parameters, for example in a norm of all "
            "gradients, results differ from those of one device, because each rank updates only its share.",
            cls.__name__,
        )
    elif not found:
        raise InputError(
            f"optimizer.step(): got {cls.__name__}, whose update of a parameter depends on other parameters, expected "
            "an optimizer that updates each from its own gradient and state: each rank updates its share of the "
            "parameters. Turn off the option that combines them (for a norm, call model.clip_grad_norm_ first), or "
            "choose another optimizer."
        )


def _require_epsilon(optimizer: Optimizer, dtypes: Collection[torch.dtype]) -> None:
    """Raise `InputError` for an Adafactor that would take its epsilon from the dtype of another parameter."""
    if type(optimizer) is Adafactor and len(dtypes) > 1 and any(g["eps"][0] is None for g in optimizer.param_groups):
        raise InputError(
            f"optimizer.step(): got Adafactor without an epsilon for parameters in {sorted(map(str, dtypes))}, "
            "expected one: a group takes the epsilon of its first parameter's dtype, and a rank holds only some of "
            "them. Pass eps=(1e-16, 1e-3)."
        )
