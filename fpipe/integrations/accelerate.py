# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Accelerate, for processes that are the ranks of one pipeline.

Problem. An `Accelerator` takes the processes of a job for replicas. It wraps the model in DDP, gives each process
another part of the data, clips by the norm of one process's gradients, steps schedulers once per process, and gathers
metrics as if each process had other rows.

Idea. There is one replica. Everything that asks how many there are gets that answer; what asks which process this is,
to print or to save once, gets the real one.

Runs when it is called, around every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn

from fpipe.drop_in.pipelined import Pipelined
from fpipe.errors import InputError


class PipelineAccelerator(Accelerator):
    """An `Accelerator` that trains a `fpipe.Pipelined` model; everything else is as usual.

    Loaders give every process the whole batch, and gathering returns what a process has: outputs and losses are the
    same on every rank. `clip_grad_norm_` clips by the norm over the whole model.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pipelined: list[Pipelined] = []

    @property
    def num_processes(self) -> int:
        """The number of replicas of the model."""
        return 1

    @property
    def process_index(self) -> int:
        """The number of this process's replica."""
        return 0

    @property
    def use_distributed(self) -> bool:
        """False: there are no other replicas."""
        return False

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the model without a wrapper; raise `InputError` unless it is a `fpipe.Pipelined`."""
        if not isinstance(model, Pipelined):
            raise InputError(
                f"model: got {type(model).__name__}, expected fpipe.Pipelined. Wrap the model before "
                "accelerator.prepare: model = fpipe.Pipelined(model, ...)."
            )
        self.pipelined.append(model)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return a scheduler that takes one step per step of the optimizer, not one per process."""
        prepared = super().prepare_scheduler(scheduler)
        if isinstance(prepared, AcceleratedScheduler):
            prepared.split_batches = True
        return prepared

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip all gradients of the model that has these parameters, by their norm over all ranks; return the norm."""
        wanted = {id(p) for p in parameters if p.numel()}  # not the empty one of a rank that trains nothing
        for model in self.pipelined:
            if wanted == {id(p) for p in model.parameters() if p.numel()}:
                self.unscale_gradients()
                return model.clip_grad_norm_(max_norm, norm_type)
        raise InputError(
            f"clip_grad_norm_: got {len(wanted)} parameters that are not those of one prepared model, expected all of "
            "model.parameters(). To clip some, use fpipe.clip(model.pipe, ..., names=...)."
        )

    def gather(self, tensor: Any) -> Any:
        """Return what this process has: all ranks have the same."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return what this process has: all ranks have the same."""
        return input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return what this process has, times `scale`: all ranks have the same."""
        return tensor if scale == 1 else tensor * scale

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what this process has: all ranks have the same shapes."""
        return tensor
