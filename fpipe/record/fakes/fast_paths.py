# SPDX-License-Identifier: Apache-2.0
"""Make torch's attention modules take their fast inference path on fake tensors where they do on real ones.

Problem. In eval mode, if nothing requires a gradient, `TransformerEncoderLayer` and `MultiheadAttention` call one fused
operator, whose results differ in the last bits. But they don't under a torch function mode, which recording needs, or
while they are traced.

Idea. They call `torch.overrides.has_torch_function`, and check whether they are being traced; answer both as in an
eager run. `TransformerEncoder` does so too, but would pack the entries that are not padding into a nested tensor, which
fake tensors do not support. It takes the slow path on fake tensors, and the recorder is notified.

Runs when a pipeline is built, and when a new kind of batch first comes; a recorded `attention` runs in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.tensors.patching import caller, replace
from fpipe.tensors.torch_private import FUSED_ATTENTION, IS_TRACING, FakeTensor, fused_encoder_layer

TENSOR_TYPES = (Tensor, nn.Parameter, FakeTensor)
FUSED: tuple[Any, ...] = (fused_encoder_layer, FUSED_ATTENTION.value)
"""The operators of the fast paths."""
has_torch_function: Any = torch.overrides.has_torch_function


@contextmanager
def allow_fast_paths(nested: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Answer torch's modules as in an eager run, inside this context; call `nested` where one would nest tensors."""

    def answered(tensors: Iterable[Any]) -> Any:
        asking = caller()
        if not asking.f_globals.get("__name__", "").startswith("torch.nn.modules."):
            return has_torch_function(tensors)
        if _is_encoder(asking):
            if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
                nested()
            return True
        return any(isinstance(tensor, Tensor) and type(tensor) not in TENSOR_TYPES for tensor in tensors)

    with (
        replace(torch.overrides, "has_torch_function", answered),
        replace(*IS_TRACING, lambda: False),
    ):
        yield


def _is_encoder(frame: FrameType) -> bool:
    return frame.f_code is nn.TransformerEncoder.forward.__code__


def attention(*args: Any, **kwargs: Any) -> Any:
    """Return the fused attention's results, with `None` for weights that only the fake kernel returns unrequested."""
    out, weights = FUSED[1](*args, **kwargs)
    return out, weights if _wants_weights(args, kwargs) else None


def _wants_weights(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    position = 10
    return bool(args[position] if len(args) > position else kwargs.get("need_weights", True))
