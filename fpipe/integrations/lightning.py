# SPDX-License-Identifier: Apache-2.0
"""Lightning, for processes that are the ranks of one pipeline.

Problem. A Lightning strategy for several processes wraps the module in DDP or shards it, shards the data by process,
and clips by what one process holds. One for a single device lets each process decide alone when to stop.

Idea. For Lightning this is one device: there is one replica, and every rank runs the same module on the same data. Only
who prints and saves, the norm for clipping, and decisions, are questions about all ranks.

Invariant: what Lightning sets on a strategy is honored or refused there, when the Trainer is made; what only a run
shows is refused before its first batch.

Runs when it is called, around every step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

from fpipe.drop_in.pipelined import Pipelined
from fpipe.errors import InputError
from fpipe.integrations.options import Exclusion, Refusals, refusing
from fpipe.integrations.replica import broadcast_value, collect_flags, compare, find_model, scale_losses

_SAVE: Final = (
    "Each rank holds only a part. Call fpipe.save(model.pipe, path, ...) on every rank, as in on_train_epoch_end, and "
    "fpipe.load."
)

_OPTIONS: Final = Refusals(
    "Trainer(strategy=PipelineStrategy(), ...)",
    {
        "devices": Exclusion("Start a process per rank with torchrun.", accepted=(1, "auto")),
        "num_nodes": Exclusion("torchrun sets the number of nodes.", accepted=(1,)),
        "precision": Exclusion(
            "The scaler of float16 sees the gradients of only one rank; for a model in another dtype, convert it "
            "before fpipe.Pipelined(model, ...).",
            accepted=(None, "32-true", "bf16-mixed"),
        ),
        "enable_checkpointing": Exclusion(_SAVE, accepted=(False,)),
        "plugins": Exclusion("A plugin would replace a part of the strategy.", accepted=(None,)),
        "sync_batchnorm": Exclusion("There is one replica, with the whole batch.", accepted=(False,)),
    },
)
_METHODS: Final = Refusals(
    "methods of PipelineStrategy",
    dict.fromkeys(
        (
            *("save_checkpoint", "load_checkpoint", "remove_checkpoint", "lightning_module_state_dict"),
            *("load_model_state_dict", "load_optimizer_state_dict", "optimizer_state"),
        ),
        Exclusion(_SAVE),
    ),
)
LIGHTNING: Final = (_OPTIONS, _METHODS)


class PipelinePrecision(Precision):
    """Full precision, or `bf16-mixed`; gradients of `models` are clipped by the norm over each whole model."""

    def __init__(self, precision: Any = "32-true", device: str = "cpu") -> None:
        super().__init__()
        self.precision, self.device = precision, device
        self.models: tuple[Pipelined, ...] = ()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of a step: autocast to bfloat16, or nothing."""
        if self.precision == "32-true":
            return nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip the gradients of the pipelined model whose parameters the optimizer has."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if (model := find_model(self.models, params)) is None:
            raise InputError(
                f"gradient_clip_val: got an optimizer of {len(params)} parameters that are not those of one "
                "fpipe.Pipelined, expected all of model.parameters(). Override configure_gradient_clipping."
            )
        model.clip_grad_norm_(clip_val)


@refusing(_METHODS)
class PipelineStrategy(SingleDeviceStrategy):
    """A strategy for a LightningModule that has an `fpipe.Pipelined` as an attribute; everything else is as usual.

    Pass it with `devices=1`, under torchrun too, and with `enable_checkpointing=False`: each rank holds a part, so save
    with `fpipe.save`. The loss of `training_step` is what the pipelined model returned. `LIGHTNING` is the table.

    Raise `InputError` for other options when the Trainer is made, and for a checkpoint callback before the first batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.models: tuple[Pipelined, ...] = ()

    def connect(self, model: LightningModule) -> None:
        """Accept a module; raise `InputError` unless it has a pipelined model."""
        models = tuple(one for one in model.modules() if isinstance(one, Pipelined))
        if not models:
            raise InputError(
                f"model: got {type(model).__name__} without an fpipe.Pipelined, expected one as an attribute. Make it "
                "in __init__: self.model = fpipe.Pipelined(...)."
            )
        for one in models:
            if one not in self.models:
                scale_losses(one, lambda: model.trainer.accumulate_grad_batches)
        self.models, self._root_device = models, models[0].pipe.device
        if self.accelerator is not None and (kind := self.accelerator.name()) != self.root_device.type:
            raise InputError(
                f"accelerator: got {kind!r} with a pipeline on {self.root_device}, expected the same. Pass "
                f"Trainer(accelerator={self.root_device.type!r}), or place=fpipe.Place(device=...) to fpipe.Pipelined."
            )
        self.precision_plugin = PipelinePrecision(self.precision_plugin.precision, self.root_device.type)
        self.precision_plugin.models = models
        super().connect(model)

    def setup(self, trainer: Any) -> None:
        """Prepare a run; raise `InputError` if it would save checkpoints."""
        if trainer.state.fn == "fit":
            _OPTIONS.require({"enable_checkpointing": bool(trainer.checkpoint_callbacks)})
        super().setup(trainer)

    def teardown(self) -> None:
        """End a run; the model stays on its device, where its pipeline is."""
        super().teardown()
        if self.lightning_module is not None:
            self.lightning_module.to(self.root_device)

    @property
    def root_device(self) -> torch.device:
        """The device of the pipelined model."""
        return self.models[0].pipe.device if self.models else torch.device("cpu")

    @property
    def is_global_zero(self) -> bool:
        """True on the first rank, which prints."""
        return not dist.is_initialized() or dist.get_rank() == 0

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return what this process has; raise `TransportError` if another rank has something else."""
        return compare(self.models, "strategy.all_gather", tensor)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what this process has; raise `TransportError` if another rank has something else."""
        return compare(self.models, "strategy.reduce", tensor)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        collect_flags(self.models, "strategy.barrier", flag=False)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what rank `src` passes: a number, a text, or lists and dicts of them; every rank must call this."""
        return broadcast_value(self.models, "strategy.broadcast", obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks decide so, or any of them; every rank must call this."""
        flags = collect_flags(self.models, "strategy.reduce_boolean_decision", bool(decision))
        return False not in flags if all else True in flags

    # The Trainer sets these when it is made.

    @property
    def precision_plugin(self) -> Precision:
        """The precision of steps."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and not isinstance(plugin, PipelinePrecision):
            _OPTIONS.require({"precision": plugin.precision})
            if type(plugin).__module__.partition(".")[0] != "lightning":
                _OPTIONS.require({"plugins": plugin})
            plugin = PipelinePrecision(plugin.precision)
        self._precision_plugin = plugin

    @property
    def checkpoint_io(self) -> Any:
        """Return the plugin that would write checkpoints. Setting one raises `InputError`."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: object) -> None:
        _OPTIONS.require({"plugins": plugin})

    @property
    def parallel_devices(self) -> None:
        """Nothing; setting more than one device raises `InputError`."""

    @parallel_devices.setter
    def parallel_devices(self, devices: list[object]) -> None:
        _OPTIONS.require({"devices": len(devices)})

    @property
    def num_nodes(self) -> int:
        """One; setting another number raises `InputError`."""
        return 1

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        _OPTIONS.require({"num_nodes": count})

    @property
    def _layer_sync(self) -> None:
        """Nothing; Lightning sets it for `sync_batchnorm`, and for plugins, which raises `InputError`."""

    @_layer_sync.setter
    def _layer_sync(self, plugin: object) -> None:
        _OPTIONS.require({"sync_batchnorm": plugin is not None})
