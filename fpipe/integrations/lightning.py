# SPDX-License-Identifier: Apache-2.0
"""Lightning, for processes that are the ranks of one pipeline.

Problem. A Lightning strategy for several processes wraps the module in DDP or shards it, shards the data by process,
and clips by what one process holds.

Idea. For Lightning this is one device: there is one replica, and every rank runs the same module on the same data. Only
who prints and saves, and the norm for clipping, are questions about all ranks.

Runs when it is called, around every step.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from fpipe.drop_in.pipelined import Pipelined
from fpipe.errors import InputError


class PipelinePrecision(Precision):
    """Full precision; the gradients of `models` are clipped by the norm over each whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.models: tuple[Pipelined, ...] = ()

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip the gradients of the pipelined model whose parameters the optimizer has."""
        params = {id(p) for group in optimizer.param_groups for p in group["params"] if p.numel()}
        for model in self.models:
            if params == {id(p) for p in model.parameters() if p.numel()}:
                model.clip_grad_norm_(clip_val)
                return
        raise InputError(
            f"gradient_clip_val: got an optimizer of {len(params)} parameters that are not those of one "
            "fpipe.Pipelined, expected all of model.parameters(). Override configure_gradient_clipping."
        )


class PipelineStrategy(SingleDeviceStrategy):
    """A strategy for a LightningModule that has a `fpipe.Pipelined` as an attribute; everything else is as usual.

    Pass it with `devices=1`, under torchrun too, and with `enable_checkpointing=False`: each rank holds a part, so save
    with `fpipe.save`. The loss of `training_step` is what the pipelined model returned.
    """

    def __init__(self) -> None:
        super().__init__(device="cpu", precision_plugin=PipelinePrecision())

    def connect(self, model: nn.Module) -> None:
        """Accept a module; raise `InputError` unless it has a pipelined model."""
        models = tuple(one for one in model.modules() if isinstance(one, Pipelined))
        if not models:
            raise InputError(
                f"model: got {type(model).__name__} without a fpipe.Pipelined, expected one as an attribute. Make it "
                "in __init__: self.model = fpipe.Pipelined(...)."
            )
        self.precision_plugin.models = models
        super().connect(model)

    @property
    def is_global_zero(self) -> bool:
        """True on the first rank, which prints."""
        return not dist.is_initialized() or dist.get_rank() == 0

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Raise `InputError`: this process has a part of the weights only."""
        raise InputError(
            "save_checkpoint: got a checkpoint of one rank's part, expected enable_checkpointing=False. Call "
            "fpipe.save(model.pipe, path, ...) on every rank, as in on_train_epoch_end."
        )
