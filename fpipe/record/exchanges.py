# SPDX-License-Identifier: Apache-2.0
"""Refuse code of a model, its loss and its hooks that communicates with processes that never join in.

Problem. Every process records the whole model, but in a step it runs some of the stages only. A collective in a layer,
a loss, a hook or a backward, over processes that run other stages, would hang until the timeout of its group.

Idea. Every operator that communicates is seen on fake tensors, in the forward and in the backward, whoever calls it:
torch.distributed, its functional collectives, a DTensor. So it is known when a pipeline is built between which
processes it is, and they must all be the same rank of a pipeline: then they run the same stages.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fpipe.errors import CaptureError
from fpipe.record.captured import Captured, Parameter
from fpipe.record.fakes.assumed_values import assume_values
from fpipe.record.model.places import current_line
from fpipe.record.model.snapshot import Snapshot
from fpipe.tensors.effects import Effects, find_partners, operator_name
from fpipe.tensors.fake import note_effects


def require_joined(
    ranks_of: Mapping[int, int], here: Callable[[], str], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise `CaptureError` if an operator, `here`, communicates between processes that are not the same rank.

    `ranks_of` is the rank that each process of the job is, by its number there; empty if one process is all ranks.
    """
    if not ranks_of:
        return
    found = {process: ranks_of.get(process) for process in find_partners(func, args, kwargs)}
    if len({*found.values()}) > 1:
        places = ", ".join(f"{process} (rank {rank})" for process, rank in found.items())
        raise CaptureError(
            f"{here()}: got a collective or message ({operator_name(func)}{current_line()}) between the processes "
            f"{places}, expected processes that are the same rank of a pipeline: each stage runs only on some of the "
            "processes, so the others would never join. Use a group of processes that run the same stage, such as "
            'mesh.get_group("tp"). Or do it outside the step: count tokens before it, and pass a weight; the results '
            "of a step are the same on all ranks."
        )


@contextmanager
def watch_exchanges(captured: Captured, effects: Effects, where: str) -> Iterator[None]:
    """Inside, record operators in `effects`, and raise `CaptureError` for one that others would not join in."""
    with (
        note_effects(captured.mode, effects),
        effects.observe(partial(require_joined, captured.ranks_of, partial(str, where))),
    ):
        yield


def require_joined_hooks(captured: Captured) -> None:
    """Raise `CaptureError` for a hook on a parameter's gradient that communicates with processes that don't join in.

    Each is called with a fake gradient. What it changes is restored, and errors of its own are left to a step.
    """
    fakes = {one.name: captured.fakes[v] for v, one in captured.sources.items() if isinstance(one, Parameter)}
    for name, hooks in captured.hooks.items() if captured.ranks_of else ():
        before = Snapshot.of(nn.Module(), (), *hooks)
        try:
            with watch_exchanges(captured, Effects(), f"parameter {name}, its hook"), captured.mode, torch.no_grad():
                for hook in hooks:
                    with assume_values(captured.mode):
                        try:
                            hook(torch.empty_like(fakes[name]))
                        except CaptureError:
                            raise
                        except Exception as error:  # a step will raise it
                            del error
        finally:
            before.restore()
