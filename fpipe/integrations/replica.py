# SPDX-License-Identifier: Apache-2.0
"""The drop-in models of a script, as the one replica that all of its ranks are.

Problem. Libraries ask all processes for a decision, a norm or a sum, as if each were a replica with rows of its own.

Idea. What is the same on every rank is returned as it is, once the ranks have compared it. A decision that a rank takes
by itself, because of a signal or of its clock, is told to the others.

Runs when it is called, around every step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from fpipe.drop_in.pipelined import Pipelined
from fpipe.pipelines.handshake import require_same
from fpipe.pipelines.inputs import State
from fpipe.verification.verify import gather_state

Models = Sequence[Pipelined]


def find_model(models: Models, parameters: Iterable[Tensor]) -> Pipelined | None:
    """Return the model that has exactly these parameters, without the empty one of a rank that trains nothing."""
    wanted = {id(p) for p in parameters if p.numel()}
    return next((one for one in models if wanted == {id(p) for p in one.parameters() if p.numel()}), None)


def compare(models: Models, call: str, value: object) -> Any:
    """Return the value; raise `TransportError` on all ranks if it differs between them. Every rank must call this."""
    for model in models[:1]:
        require_same(model.pipe, **{call: value})
    return value


def collect_flags(models: Models, call: str, flag: bool) -> list[bool]:
    """Return the flags of all ranks; every rank must call this."""
    for model in models[:1]:
        with model.pipe.ranks.enter_call(call):
            return [bool(note) for note in model.pipe.ranks.agree(note=int(flag))]
    return [flag]


def broadcast_value(models: Models, call: str, value: Any, source: int = 0) -> Any:
    """Return the number, text, or list or dict of them that rank `source` passes; every rank must call this."""
    for model in models[:1]:
        with model.pipe.ranks.enter_call(call):
            return json.loads(model.pipe.ranks.exchange_text(json.dumps(value, default=os.fspath), call)[source])
    return value


def collect_state(model: Pipelined) -> dict[str, Tensor]:
    """Return the state dict of the whole model, on every rank; every rank must call this."""
    pipe = model.pipe
    params: State = dict(model.named_parameters())
    buffers: State = dict(model.named_buffers())
    return pipe.module(*gather_state(pipe, pipe.model, params, buffers, "get_state_dict")).state_dict()


def scale_losses(model: nn.Module, find_divisor: Callable[[], int]) -> None:
    """Tell each training forward the number that its loss will be divided by, unless the script passes a scale."""

    def tell(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not module.training or "scale" in kwargs or (divisor := find_divisor()) == 1:
            return None
        return args, {**kwargs, "scale": 1 / divisor}

    model.register_forward_pre_hook(tell, with_kwargs=True)
