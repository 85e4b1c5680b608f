# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Accelerate, for processes that are the ranks of one pipeline.

Problem. An `Accelerator` takes the processes of a job for replicas. It wraps the model in DDP, gives each process
another part of the data, clips by the norm of one process's gradients, steps schedulers once per process, gathers
metrics as if each process had other rows, and saves what the first process holds.

Idea. There is one replica. Everything that asks how many there are gets that answer; what asks which process this is,
to print or to save once, gets the real one. Weights are collected from all ranks.

Runs when it is called, around every step.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final

from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DynamoBackend, ProfileKwargs, recursively_apply
from torch import Tensor, nn

from fpipe.checkpoints.export import export
from fpipe.drop_in.pipelined import Pipelined
from fpipe.errors import InputError
from fpipe.integrations.options import Exclusion, Refusals, refusing
from fpipe.integrations.replica import collect_flags, collect_state, compare, find_model, scale_losses

OWN_RANKS: Final = "The model is an fpipe.Pipelined, which has its own ranks: pass place=fpipe.Place(mesh=...) to it."
COMPILE: Final = "Compile modules of the model before fpipe.Pipelined(model, ...)."
NO_DDP: Final = Exclusion("Nothing wraps the model in DDP.", accepted=(None,))
_SAVE: Final = (
    "Call fpipe.save(model.pipe, path, params=dict(model.named_parameters()), buffers=dict(model.named_buffers())) on "
    "every rank, or accelerator.save_model for the weights alone."
)
_SHARDS: Final = Exclusion(OWN_RANKS, accepted=(None,))
_HALF: Final = Exclusion(
    "The scaler of float16 sees the gradients of only one rank: use bf16.", accepted=(None, "no", "bf16")
)

_OPTIONS: Final = Refusals(
    "PipelineAccelerator(...)",
    {
        "mixed_precision": _HALF,
        **dict.fromkeys(("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "torch_tp_plugin"), _SHARDS),
        **dict.fromkeys(("megatron_lm_plugin", "parallelism_config"), _SHARDS),
        "dynamo_backend": Exclusion(COMPILE, accepted=(None, "no", "NO", DynamoBackend.NO)),
        "dynamo_plugin": Exclusion(COMPILE, accepted=(None,)),
    },
)
LOADERS: Final = Refusals(
    "DataLoaderConfiguration(...)",
    {
        "dispatch_batches": Exclusion(
            "It sends different rows to each rank; here every rank takes the whole batch.", accepted=(None, False)
        )
    },
)
_HANDLERS: Final = Refusals(
    "kwargs_handlers",
    {
        "DistributedDataParallelKwargs": NO_DDP,
        **dict.fromkeys(
            ("GradScalerKwargs", "FP8RecipeKwargs", "AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs"),
            Exclusion("Use mixed_precision='bf16'.", accepted=(None,)),
        ),
        "GradientAccumulationPlugin": Exclusion("Pass it as gradient_accumulation_plugin=.", accepted=(None,)),
        "TorchDynamoPlugin": Exclusion(COMPILE, accepted=(None,)),
    },
)
_METHODS: Final = Refusals(
    "methods of PipelineAccelerator",
    {
        **dict.fromkeys(("save_state", "load_state", "register_for_checkpointing"), Exclusion(_SAVE)),
        **dict.fromkeys(("register_save_state_pre_hook", "register_load_state_pre_hook"), Exclusion(_SAVE)),
        "lomo_backward": Exclusion(
            "It updates during the backward, but the forward has already computed the gradients: use an optimizer "
            "with a step."
        ),
        "deepspeed_ulysses_dl_adapter": Exclusion(OWN_RANKS),
    },
)
ACCELERATE: Final = (_OPTIONS, LOADERS, _HANDLERS, _METHODS)


@refusing(_METHODS)
class PipelineAccelerator(Accelerator):
    """An `Accelerator` that trains an `fpipe.Pipelined` model; everything else is as usual, or refused (`ACCELERATE`).

    Loaders give every process the whole batch, and gathering returns what a process has, once all ranks have agreed
    that they have the same: outputs and losses are. `clip_grad_norm_` clips by the norm over the whole model.

    Raise `InputError` for options that the table refuses, from arguments or from the environment.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(Accelerator.__init__).bind(self, *args, **kwargs).arguments
        _OPTIONS.require(given)
        _HANDLERS.require({type(one).__name__: one for one in given.get("kwargs_handlers") or ()})
        LOADERS.require(vars(given.get("dataloader_config") or object))
        super().__init__(*args, **kwargs)
        self.become_one_replica()

    def become_one_replica(self) -> None:
        """Take the processes for one replica; raise `InputError` if the environment asks for something else."""
        self.pipelined: list[Pipelined] = []
        self.is_set = False
        shards = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")
        _OPTIONS.require({name: getattr(self.state, name, None) for name in shards})
        _OPTIONS.require({"mixed_precision": self.mixed_precision, "parallelism_config": self.parallelism_config})
        _OPTIONS.require({"dynamo_backend": self.state.dynamo_plugin.backend})

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

    @property
    def dispatch_batches(self) -> bool:
        """False: no rank reads data for others, not even from an iterable dataset."""
        return False

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the model without a wrapper; raise `InputError` unless it is an `fpipe.Pipelined`."""
        if not isinstance(model, Pipelined):
            raise InputError(
                f"model: got {type(model).__name__}, expected fpipe.Pipelined. Wrap the model before "
                "accelerator.prepare: model = fpipe.Pipelined(model, ...)."
            )
        if model not in self.pipelined:
            self.pipelined.append(model)
            scale_losses(model, lambda: self.gradient_accumulation_steps)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return a scheduler that takes one step per step of the optimizer, not one per process."""
        prepared = super().prepare_scheduler(scheduler)
        if isinstance(prepared, AcceleratedScheduler):
            prepared.split_batches = True
        return prepared

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip all gradients of the model that has these parameters, by their norm over all ranks; return the norm."""
        listed = list(parameters)
        if (model := find_model(self.pipelined, listed)) is not None:
            self.unscale_gradients()
            return model.clip_grad_norm_(max_norm, norm_type)
        raise InputError(
            f"clip_grad_norm_: got {len(listed)} parameters that are not those of one prepared model, expected all of "
            "model.parameters(). To clip some, use fpipe.clip(model.pipe, ..., names=...)."
        )

    def gather(self, tensor: Any) -> Any:
        """Return what this process has; raise `TransportError` if another rank has something else."""
        return compare(self.pipelined, "accelerator.gather", tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return what this process has, as one process does: of the last batch, no more rows than it has.

        Raise `TransportError` if another rank has something else.
        """
        data = compare(self.pipelined, "accelerator.gather_for_metrics", input_data)
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        with suppress(Exception):  # of data without rows, as there
            try:
                return recursively_apply(lambda one: one[: state.remainder], data, error_on_other_type=True)
            except TypeError:
                return data[: state.remainder]
        return data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return what this process has, as one process does; raise `TransportError` if another rank differs."""
        return compare(self.pipelined, "accelerator.reduce", tensor)

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what this process has: all ranks have the same shapes."""
        return tensor

    def set_trigger(self) -> None:
        """Set the trigger, which the next `check_trigger` of all ranks sees."""
        self.is_set = True

    def check_trigger(self) -> bool:
        """Return whether any rank has set the trigger, and reset it; every rank must call this."""
        flags = collect_flags(self.pipelined, "check_trigger", self.is_set)
        self.is_set = False
        return any(flags)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield all inputs: there is one replica, and its ranks work on the same rows."""
        yield inputs

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Profile what is inside; each process writes its trace into a folder of its own."""
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        if handler.output_trace_dir is not None and self.state.num_processes > 1:
            folder = os.path.join(handler.output_trace_dir, f"process_{self.state.process_index}")
            handler = replace(handler, output_trace_dir=folder)
        with super().profile(handler) as profiler:
            yield profiler

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the state dict of the whole model, on every rank; every rank must call this."""
        return collect_state(_require_pipelined("get_state_dict", model))

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of the whole model, as `fpipe.export` does: a file for each rank; every rank must call it.

        Raise `InputError` for another `max_shard_size`, and without `safe_serialization`.
        """
        if max_shard_size != "10GB" or not safe_serialization:
            raise InputError(
                f"save_model: got max_shard_size={max_shard_size!r} and safe_serialization={safe_serialization}, "
                "expected the defaults: each rank writes one file of safetensors. Leave them out."
            )
        known = _require_pipelined("save_model", model)
        export(known.pipe, save_directory, dict(known.named_parameters()), dict(known.named_buffers()))


def _require_pipelined(call: str, model: nn.Module) -> Pipelined:
    if isinstance(model, Pipelined):
        return model
    raise InputError(
        f"{call}: got {type(model).__name__}, expected the prepared fpipe.Pipelined. A part of it has the tensors of "
        "this process only."
    )
