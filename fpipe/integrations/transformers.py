# SPDX-License-Identifier: Apache-2.0
"""The Trainer of Hugging Face transformers, for processes that are the ranks of one pipeline.

Problem. The Trainer wraps the model in DDP, shards batches by process, clips each process by its own norm, multiplies
the loss by the number of processes, and saves what the first process holds.

Idea. Its accelerator becomes a `PipelineAccelerator`, which settles the first three. The loss is the one that the
drop-in module returns, told of the divisor of accumulated steps, and saving exports all ranks' weights.

Runs when it is called, around every step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from fpipe.checkpoints.export import export, require_no_other_weights
from fpipe.drop_in.pipelined import Pipelined
from fpipe.errors import InputError
from fpipe.integrations.accelerate import PipelineAccelerator


class PipelineTrainer(Trainer):
    """A `Trainer` of a `fpipe.Pipelined` model whose example is a dict; everything else is as usual.

    Accumulated steps are averaged as equals. `save_model` writes what `from_pretrained` reads. Optimizer state is not
    in the Trainer's checkpoints, so pass `save_strategy="no"`, and `remove_unused_columns=False`, since the columns
    that the model takes are those of its example. Raise `InputError` otherwise, and for an `output_dir` with weights
    that are not of an earlier `save_model`.
    """

    def __init__(self, model: nn.Module, args: Any, **options: Any) -> None:
        got = (type(model).__name__, str(args.save_strategy.value), args.remove_unused_columns)
        if not isinstance(model, Pipelined) or got[1:] != ("no", False):
            raise InputError(
                f"PipelineTrainer: got model {got[0]}, save_strategy={got[1]!r} and remove_unused_columns={got[2]}, "
                'expected fpipe.Pipelined, "no" and False. Save with trainer.save_model(path), or with fpipe.save in a '
                "callback."
            )
        require_no_other_weights(Path(args.output_dir))  # rather than after the training
        super().__init__(model, args, **options)
        self.model_accepts_loss_kwargs = False  # so that the loss is divided by the number of accumulated steps
        self.can_return_loss = True  # which is read off a signature

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, as one whose processes are ranks: the Trainer does not ask which class to make."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__, self.accelerator.pipelined = PipelineAccelerator, []

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor | tuple[Tensor, Any]:
        """Return the loss of a batch; in eval mode, with the model's outputs if requested."""
        if model.training:
            return model(**inputs, scale=1 / self.current_gradient_accumulation_steps)
        outputs = model(**inputs)
        loss = outputs["loss"].mean()
        return (loss, outputs) if return_outputs else loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write configuration and weights into a directory, for `from_pretrained`; every rank must call this."""
        path, model = Path(output_dir or self.args.output_dir), self.model
        export(model.pipe, path, dict(model.named_parameters()), dict(model.named_buffers()))
        if self.args.process_index == 0:
            model.config.save_pretrained(path)
