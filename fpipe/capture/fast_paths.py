# SPDX-License-Identifier: Apache-2.0
"""Make torch's attention modules take their fast inference path on fake tensors where they do on real ones.

Problem. In eval mode, where nothing requires a gradient, `TransformerEncoderLayer` and `MultiheadAttention` call one
fused operator, whose last bits differ; but not under a torch function mode, which recording needs, nor while traced.

Idea. They ask `torch.overrides.has_torch_function`, and whether they are being traced; answer both as in an eager run.
`TransformerEncoder` asks, too, and would make a nested tensor of the entries that are not padding, which fake tensors
do not support. It takes the slow path on fake tensors, and the recorder is notified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.patching import caller, replace
from fpipe.torch_private import FUSED_ATTENTION, IS_TRACING, FakeTensor, fused_encoder_layer

TENSOR_TYPES = (Tensor, nn.Parameter, FakeTensor)
FUSED: tuple[Any, ...] = (fused_encoder_layer, FUSED_ATTENTION.value)
"""The operators of the fast paths."""
has_torch_function: Any = torch.overrides.has_torch_function


@contextmanager
def allow_fast_paths(nested: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Answer torch's modules inside as in an eager run; call `nested` where that would make nested tensors."""

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
    """Call the fused attention; if weights are not requested, drop those that fake tensors, unlike real ones, get."""
    out, weights = FUSED[1](*args, **kwargs)
    return out, weights if _wants_weights(args, kwargs) else None


def _wants_weights(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    position = 10
    return bool(args[position] if len(args) > position else kwargs.get("need_weights", True))
