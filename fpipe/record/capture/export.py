# SPDX-License-Identifier: Apache-2.0
"""Front ends: `torch.export`, non-strict, which runs the model's Python, and strict, where dynamo reads its bytecode.

The graph is the training graph of ATen operators, specialized to the microbatch's shapes and to train or eval mode.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from fpipe.record.capture.eager_types import show_fakes


def export_model(model: nn.Module, inputs: Any) -> nn.Module:
    """Return what non-strict `torch.export` makes of a model."""
    return _export(model, inputs, strict=False)


def dynamo(model: nn.Module, inputs: Any) -> nn.Module:
    """Return what strict `torch.export` makes of a model."""
    with warnings.catch_warnings(), show_fakes():
        # it warns about in-place changes of buffers, but they are in the graph
        warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
        return _export(model, inputs, strict=True)


def _export(model: nn.Module, inputs: Any, strict: bool) -> nn.Module:
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return torch.export.export(model, args, kwargs, strict=strict).module(check_guards=False)
