# SPDX-License-Identifier: Apache-2.0
"""What users pass, checked before anything else happens."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fpipe.capture.losses import Loss, without_parameters
from fpipe.capture.skeleton import require_plain_tensors, require_registered
from fpipe.errors import InputError
from fpipe.handlers import HANDLERS
from schedules import KINDS, Schedule

WRAPPERS = (DataParallel, DistributedDataParallel, FSDPModule, FullyShardedDataParallel)


def require_arguments(model: nn.Module, example: Any, loss: Loss, schedule: Any) -> None:
    """Raise `InputError` or `CaptureError` for what no pipeline can be built from."""
    if not isinstance(schedule, Schedule):
        raise InputError(
            f"schedule: got {schedule!r}, expected a Schedule. Call the factory, as in one_f_one_b(ranks=4, "
            "microbatches=8)."
        )
    if not isinstance(example, tuple | dict):
        raise InputError(
            f"example: got {type(example).__name__}, expected a tuple of positional or a dict of keyword arguments. "
            "Write (x,) for one argument."
        )
    for name, module in model.named_modules():
        if isinstance(module, WRAPPERS):
            raise InputError(
                f"model {name or '(root)'}: got {type(module).__name__}, expected a plain module: the wrapper's "
                "gradient hooks do not run under autograd.grad. Pass the wrapped module, and reduce gradients over the "
                "data-parallel group after the step."
            )
    without_parameters(loss)
    require_plain_tensors(model)
    require_registered(model)
    _require_runnable(schedule)


def _require_runnable(schedule: Schedule) -> None:
    """Raise `InputError` for what can be checked and simulated, but is not run yet."""
    repair = "Check and simulate it, or choose a synchronous schedule of whole microbatches to run."
    if schedule.slices > 1:
        raise InputError(f"schedule: got {schedule!r} of {schedule.slices} slices, expected whole ones. {repair}")
    for rank in range(schedule.ranks):
        for action in schedule.actions(rank):
            if action.kind not in HANDLERS:
                kinds = " ".join(kind for kind in HANDLERS if not KINDS[kind].mark)
                raise InputError(f"schedule: got {action} on rank {rank}, expected actions of kinds {kinds}. {repair}")


def require_backward(schedule: Schedule) -> None:
    """Raise `InputError` for a schedule without gradients."""
    if not schedule.backward:
        raise InputError(
            f"schedule: got {schedule!r}, which has no backward, expected gradients. Call evaluate(pipe), or "
            "choose another schedule."
        )
