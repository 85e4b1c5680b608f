# SPDX-License-Identifier: Apache-2.0
"""Checks of the user's arguments.

Runs when a pipeline is built, and when `value_and_grad`, `reference` or `verify` is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fpipe.errors import CaptureError, InputError
from fpipe.record.model.skeleton import require_plain_tensors, require_registered
from fpipe.record.objective import Loss, require_no_parameters
from fpipe.runtime.handlers import HANDLERS
from fpipe.stages.assembly import Assembly
from fpipe.tensors.arguments import describe_argument
from fpipe.tensors.torch_private import find_imported
from schedules import KINDS, OwnKind, Schedule, SizeError
from schedules.checking.rules import kinds_of
from schedules.endless import lengthen

REDUCTIONS: Final = ("mean", "sum")
MOST_IN_STEP: Final = 2**16
"""More microbatches than any step has; a plan of so many still fits into memory."""
WRAPPERS = ("FSDPModule", "FullyShardedDataParallel")
"""The wrappers of `torch.distributed.fsdp`."""


def require_buildable(model: nn.Module, example: Any, loss: Loss | None, schedule: Any) -> Schedule:
    """Return the schedule; raise `InputError` or `CaptureError` for arguments from which no pipeline can be built."""
    if not isinstance(schedule, Schedule):
        raise InputError(
            f"schedule: got {describe_argument(schedule)}, expected a Schedule. Call the factory, as in "
            "one_f_one_b(ranks=4, microbatches=8), or pass a plan."
        )
    if not isinstance(example, tuple | dict):
        raise InputError(
            f"example: got {type(example).__name__}, expected a tuple of positional or a dict of keyword arguments. "
            f"Write {'dict(batch), in steps, too' if isinstance(example, Mapping) else '(x,) for one argument'}."
        )
    wrappers = (
        DataParallel,
        DistributedDataParallel,
        *[find_imported("torch.distributed.fsdp", one) for one in WRAPPERS],
    )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"model {name or '(root)'}: got a module of torch.jit, {module.original_name}, expected one in Python: "
                "the parameters of a compiled module can't be replaced. Pass the module that it was compiled from."
            )
        if isinstance(module, wrappers):
            raise InputError(
                f"model {name or '(root)'}: got {type(module).__name__}, expected a plain module: the wrapper's "
                "gradient hooks do not run under autograd.grad. Pass the plain module, and let the pipeline replicate "
                'or shard it: fpipe.Place(mesh=mesh, dp="dp"), or shard="fsdp".'
            )
    require_loss(loss, schedule)
    require_no_parameters(loss)
    require_plain_tensors(model)
    require_registered(model)
    require_runnable(schedule)
    return schedule


def require_count(name: str, count: object) -> None:
    """Raise `InputError` unless an argument is a positive integer."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InputError(f"{name}: got {count!r}, expected an integer of 1 or more. Pass how many to keep.")


def require_reduction(reduce: object, weight: object) -> None:
    """Raise `InputError` unless losses are averaged or summed, and not weighted besides being summed."""
    if reduce not in REDUCTIONS:
        raise InputError(f"reduce: got {reduce!r}, expected one of {list(REDUCTIONS)}. Choose one.")
    if reduce == "sum" and weight is not None:
        raise InputError(
            "reduce: got 'sum' besides a weight, expected one of them: a weight is for losses that are means over "
            "its rows or tokens. Leave out weight if the loss is a sum, and reduce if it is a mean."
        )


def require_loss(loss: object, schedule: Schedule) -> None:
    """Raise `InputError` unless the loss can be called; with a schedule without a backward, there may be no loss."""
    if callable(loss) or (loss is None and not schedule.backward):
        return
    raise InputError(
        f"loss: got {loss!r}, expected a function loss(outputs, targets) that returns a scalar: without one, nothing "
        "is trained. For a model that computes its own loss, write loss=lambda outputs: outputs.loss."
    )


def require_trained(assembly: Assembly, schedule: Schedule) -> None:
    """Raise `CaptureError` if no parameter that requires a gradient gets one, naming a reentrant checkpoint."""
    trainable = sorted(assembly.captured.trainable)
    if not trainable or not schedule.backward or any(stage.grads for stage in assembly.stages):
        return
    more = f" and {len(trainable) - 3} more" if len(trainable) > 3 else ""
    lost = next((call.path for call in assembly.captured.calls if call.checkpointed and call.python), None)
    if lost is not None:
        raise CaptureError(
            f"module {lost}: got a reentrant checkpoint whose inputs require no gradient, expected gradients for some "
            f"of {trainable[:3]}{more}: in that case, torch computes none for the parameters inside. Pass "
            "use_reentrant=False to checkpoint()."
        )
    raise CaptureError(
        f"loss: got one without a gradient for any parameter, expected gradients for some of {trainable[:3]}{more}, "
        "which require them. Return the loss itself: don't detach it, copy it into a new tensor, or compute it under "
        "no_grad. To train nothing, freeze the model."
    )


def require_runnable(schedule: Schedule) -> None:
    """Raise `InputError` for a schedule that can be checked and simulated, but not run."""
    repair = "A pipeline can't run it. Choose a synchronous schedule, or run pure stages with fpipe.execute."
    if schedule.microbatches > MOST_IN_STEP:
        raise InputError(
            f"schedule: got {describe_argument(schedule)} of {schedule.microbatches} microbatches, expected at most "
            f"{MOST_IN_STEP} in a step. Take several steps, and add their gradients up with onto=."
        )
    kinds = kinds_of(schedule)  # generated only now: it isn't too long
    if "U" in kinds:
        if schedule.slices > 1:
            raise InputError(
                f"schedule: got {describe_argument(schedule)} of {schedule.slices} slices, with updates in flight, "
                "expected whole microbatches or no updates. Choose a synchronous schedule of slices."
            )
        _require_one_update(schedule)
    if kinds <= HANDLERS.keys():
        return
    for rank in range(schedule.ranks):
        for action in schedule.actions(rank):
            if isinstance(action.kind, OwnKind) and action.kind.handler is None:
                raise InputError(
                    f"schedule: got {action} on rank {rank}, expected a kind with a handler, which runs it. Pass "
                    f"handler= to OwnKind({str(action.kind)!r}, ...)."
                )
            if action.kind not in HANDLERS and not isinstance(action.kind, OwnKind):
                known = " ".join(kind for kind in HANDLERS if not KINDS[kind].mark and kind != "U")
                raise InputError(f"schedule: got {action} on rank {rank}, expected actions of kinds {known}. {repair}")


def _require_one_update(schedule: Schedule) -> None:
    """Raise `InputError` unless a batch of this schedule is what one update applies, on every stage and every time."""
    try:
        twice = lengthen(schedule, 2)
    except SizeError as error:
        raise InputError(f"schedule: got {describe_argument(schedule)}, with updates in flight, and {error}") from error
    ends = [schedule.microbatches - 1, 2 * schedule.microbatches - 1]
    for rank in range(schedule.ranks):
        found = sorted(action[1:3] for action in twice.actions(rank) if action.kind == "U")
        if found != [(s, i) for s in sorted(schedule.placement.stages_on(rank)) for i in ends]:
            updates = " ".join(f"{s}U{i}" for s, i in found[:4]) + (" ..." if len(found) > 4 else "")
            raise InputError(
                f"schedule: got {describe_argument(schedule)}, with updates {updates or 'none'} of two batches on rank "
                f"{rank}, expected one of each stage after microbatches {ends[0]} and {ends[1]}: a batch is what one "
                "update applies. Choose as many microbatches as come before an update, as in pipedream(ranks, "
                "microbatches=1) or pipedream_2bw(ranks, microbatches=m, accumulate=m): batches follow each other "
                "without a flush. To update at the end of a step, pass the schedule without updates, and "
                "call fpipe.train_step."
            )


def updates_in_flight(schedule: Schedule) -> bool:
    """Return whether the schedule itself updates weights."""
    return "U" in kinds_of(schedule)


def require_steps(schedule: Schedule) -> None:
    """Raise `InputError` for a schedule with updates in flight."""
    if updates_in_flight(schedule):
        raise InputError(
            f"schedule: got {describe_argument(schedule)}, which updates weights while microbatches are in flight, "
            "expected one without updates. Call fpipe.train_stream(pipe, optimizer); or pass the schedule without "
            "them, and call fpipe.train_step, which adds them at the end."
        )


def require_backward(schedule: Schedule) -> None:
    """Raise `InputError` for a schedule without a backward, or with updates in flight."""
    require_steps(schedule)
    if not schedule.backward:
        raise InputError(
            f"schedule: got {describe_argument(schedule)}, which has no backward, expected one that computes "
            "gradients. Call evaluate(pipe), or choose another schedule."
        )
