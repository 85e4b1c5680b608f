# SPDX-License-Identifier: Apache-2.0
"""Scripts in the manner of each library's own examples, with options drawn at random: with a pipeline, and without.

A script returns what a user would look at: parameters, losses, logged numbers, evaluations. The options are drawn from
tables of values, refused ones among them. With one microbatch the pipeline computes what the plain model does on the
whole batch; with several, sums are rounded otherwise.
"""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fpipe
from schedules import one_f_one_b

ROWS, WIDTH = 43, 6
DRAWN = 5
Outcome = dict[str, Any]


class Draw(NamedTuple):
    """A script of a library, the options that were drawn, and the number of microbatches of the pipeline.

    - `refused`: whether one of the options must be refused.
    """

    library: str
    options: dict[str, Any]
    microbatches: int
    refused: bool = False


def draw(seed: int) -> Draw:
    """Return what is drawn from a seed: a library in turn, and options of different names."""
    drawn, library = Random(seed), [*LIBRARIES][seed % len(LIBRARIES)]
    _, honored, refused = LIBRARIES[library]
    options = {name: drawn.choice(honored[name]) for name in drawn.sample(sorted(honored), DRAWN)}
    wrong = drawn.random() < 0.2
    if wrong:
        name = drawn.choice(sorted(refused))
        del options[drawn.choice([name] if name in options else [*options])]
        options[name] = drawn.choice(refused[name])
    return Draw(library, options, drawn.choice((1, 4)), wrong)


def run(one: Draw, ranks: int | None) -> Outcome:
    """Run a script with a pipeline of so many ranks, or with none. Raise what it raises."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LIBRARIES[one.library].script(dict(one.options), one.microbatches, ranks, folder)


OPTIMIZERS = [partial(torch.optim.SGD, momentum=0.9), partial(torch.optim.AdamW, eps=1e-3)]
"""Those that do not blow up what is 0 but for rounding."""


def make_net() -> nn.Module:
    """Return a model whose rows do not depend on each other, and that draws nothing."""
    layers = [nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    return nn.Sequential(*layers)


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets; the last batch is smaller."""
    return torch.randn(ROWS, WIDTH), torch.randint(0, 3, (ROWS,))


def make_model(net: nn.Module, data: Any, microbatches: int, ranks: int | None) -> nn.Module:
    """Return the model as a pipeline of so many ranks, or as it is."""
    if ranks is None:
        return net
    x, y = data
    how = one_f_one_b(ranks, microbatches)
    return fpipe.Pipelined(
        net,
        loss=functional.cross_entropy,
        example=(x[:8],),
        targets=y[:8],
        schedule=how,
        microbatching=fpipe.Microbatching(weight=count_rows),
    )


def count_rows(inputs: Any, targets: torch.Tensor) -> int:
    """Return the weight of a microbatch: microbatches of a small batch differ in their rows."""
    return len(targets)


def compute_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch: the line that the drop-in module changes."""
    return model(x, targets=y) if isinstance(model, fpipe.Pipelined) else functional.cross_entropy(model(x), y)


def copy_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what this process holds of the state."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# ----------------------------------------------------------------------------------------------------------- accelerate


def with_accelerate(given: dict[str, Any], microbatches: int, ranks: int | None, folder: str) -> Outcome:
    """Train and evaluate as the examples of Accelerate do."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState

    from fpipe.integrations.accelerate import PipelineAccelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    own = {name: given.pop(name) for name in [*given] if name in SCRIPT}
    loader = {name.partition(".")[2]: given.pop(name) for name in [*given] if name.startswith("loader.")}
    config = {"dataloader_config": DataLoaderConfiguration(**loader)} if loader else {}
    given = {name: value() if callable(value) else value for name, value in given.items()}
    kind = Accelerator if ranks is None else PipelineAccelerator
    accelerator = kind(cpu=True, project_dir=folder, **given, **config)

    data = make_rows()
    net = make_net()
    model = make_model(net, data, microbatches, ranks)
    optimizer = own.get("optimizer", torch.optim.SGD)(model.parameters(), lr=0.05)
    scheduler = own.get("scheduler", lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.9))(optimizer)
    sizes = {"batch_size": own.get("batch_size", 8), "drop_last": own.get("drop_last", False)}
    train = DataLoader(
        TensorDataset(*data), shuffle=own.get("shuffle", False), generator=torch.Generator().manual_seed(1), **sizes
    )
    check = DataLoader(TensorDataset(*data), batch_size=own.get("eval_batch_size", 8))
    model, optimizer, train, check, scheduler = accelerator.prepare(model, optimizer, train, check, scheduler)
    found: Outcome = {"losses": [], "right": [], "rates": [], "norms": []}
    for epoch in range(2):
        model.train()
        batches = accelerator.skip_first_batches(train, 2) if own.get("resumed") and not epoch else train
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = compute_loss(model, x, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients and own.get("clip") is not None:
                    found["norms"].append(accelerator.clip_grad_norm_(model.parameters(), own["clip"]).detach())
                if accelerator.sync_gradients and own.get("clip_value") is not None:
                    accelerator.clip_grad_value_(model.parameters(), own["clip_value"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found["losses"].append(accelerator.gather_for_metrics(loss.detach()))
            found["rates"].append(scheduler.get_last_lr())
        model.eval()
        for x, y in check:
            with torch.no_grad():
                outputs = model(x)
            outputs, y = accelerator.gather_for_metrics((outputs, y))
            found["right"].append((outputs.float(), y))
    accelerator.end_training()
    return {**found, "state": copy_state(accelerator.unwrap_model(model))}


def make_plugin(**given: Any) -> Callable[[], Any]:
    """Return a function that makes a plugin for accumulated gradients, which belongs to one run."""

    def make() -> Any:
        from accelerate.utils import GradientAccumulationPlugin

        return GradientAccumulationPlugin(**given)

    return make


def make_handlers(name: str, **given: Any) -> Callable[[], Any]:
    """Return a function that makes a list of one handler."""

    def make() -> Any:
        from accelerate import utils

        return [getattr(utils, name)(**given)]

    return make


SCRIPT = {
    "optimizer": OPTIMIZERS,
    "scheduler": [
        lambda one: torch.optim.lr_scheduler.StepLR(one, 3, 0.5),
        lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=60),
    ],
    "batch_size": [5, 16],
    "eval_batch_size": [6, 20],
    "drop_last": [True],
    "shuffle": [True],
    "resumed": [True],
    "clip": [0.1, 1.0],
    "clip_value": [0.01],
}
ACCELERATE: Mapping[str, list[Any]] = {
    **SCRIPT,
    "gradient_accumulation_steps": [2, 3, 4],
    "mixed_precision": ["no", "bf16"],
    "split_batches": [True],
    "step_scheduler_with_optimizer": [False],
    "rng_types": [["torch"], ["generator"]],
    "device_placement": [False],
    "dynamo_backend": ["no"],
    "loader.even_batches": [False],
    "loader.use_seedable_sampler": [True],
    "loader.data_seed": [3],
    "loader.non_blocking": [True],
    "loader.dispatch_batches": [False],
    "gradient_accumulation_plugin": [
        make_plugin(num_steps=2, adjust_scheduler=False),
        make_plugin(num_steps=3, sync_with_dataloader=False),
        make_plugin(num_steps=2, sync_each_batch=True),
    ],
    "kwargs_handlers": [make_handlers("AutocastKwargs", enabled=False)],
}
ACCELERATE_REFUSES: Mapping[str, list[Any]] = {
    "mixed_precision": ["fp16"],
    "dynamo_backend": ["inductor"],
    "loader.dispatch_batches": [True],
    "kwargs_handlers": [make_handlers("GradScalerKwargs"), make_handlers("DistributedDataParallelKwargs")],
}


# ------------------------------------------------------------------------------------------------------------ lightning


def with_lightning(given: dict[str, Any], microbatches: int, ranks: int | None, folder: str) -> Outcome:
    """Fit, validate and test as the examples of Lightning do."""
    import lightning

    from fpipe.integrations.lightning import PipelineStrategy

    data, net = make_rows(), make_net()
    own = {name: given.pop(name) for name in [*given] if name in TASK}
    given = {name: value() if callable(value) else value for name, value in given.items()}
    found: Outcome = {"losses": [], "right": []}

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(net, data, microbatches, ranks)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = compute_loss(self.model, *batch)
            self.log("train", loss, on_step=True, on_epoch=True, sync_dist=own.get("sync_dist", False))
            found["losses"].append(loss.detach())
            return {"loss": loss, "more": index} if own.get("as_dict") else loss

        def validation_step(self, batch: Any, index: int) -> None:
            outputs = self.model(batch[0])
            self.log("check", functional.cross_entropy(outputs.float(), batch[1]), prog_bar=True)
            found["right"].append(outputs.float())

        def test_step(self, batch: Any, index: int) -> None:
            self.log("test", (self.model(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self) -> Any:
            optimizer = own.get("optimizer", torch.optim.SGD)(self.model.parameters(), lr=0.05)
            interval = own.get("scheduler")
            if interval is None:
                return optimizer
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

    usual = {"max_epochs": 2, "enable_checkpointing": False, "logger": False, "devices": 1, "accelerator": "cpu"}
    usual |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
    strategy = {} if ranks is None else {"strategy": PipelineStrategy()}
    trainer = lightning.Trainer(**{**usual, **given}, **strategy)
    task = Task()
    size = {"batch_size": own.get("batch_size", 8), "drop_last": own.get("drop_last", False)}
    shuffled = {"shuffle": True, "generator": torch.Generator().manual_seed(1)} if own.get("shuffle") else {}
    check = DataLoader(TensorDataset(*data), batch_size=20)
    trainer.fit(task, DataLoader(TensorDataset(*data), **size, **shuffled), check)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tested = trainer.test(task, check, verbose=False)
    found |= {"logged": logged, "tested": tested, "steps": [trainer.global_step, trainer.current_epoch]}
    return {**found, "state": copy_state(task.model)}


def make_callbacks(name: str, *given: Any, **named: Any) -> Callable[[], Any]:
    """Return a function that makes a list of one callback."""

    def make() -> Any:
        from lightning.pytorch import callbacks

        return [getattr(callbacks, name)(*given, **named)]

    return make


TASK = {
    "optimizer": OPTIMIZERS,
    "scheduler": ["step", "epoch"],
    "batch_size": [5, 16],
    "drop_last": [True],
    "shuffle": [True],
    "sync_dist": [True],
    "as_dict": [True],
}
LIGHTNING: Mapping[str, list[Any]] = {
    **TASK,
    "precision": ["32-true", "bf16-mixed"],
    "max_epochs": [1, 3],
    "min_epochs": [2],
    "max_steps": [3, 7],
    "min_steps": [9],
    "max_time": ["00:01:00:00"],
    "limit_train_batches": [3, 0.5],
    "limit_val_batches": [0, 1, 0.5],
    "limit_test_batches": [1],
    "overfit_batches": [2],
    "val_check_interval": [0.5, 2],
    "check_val_every_n_epoch": [2],
    "num_sanity_val_steps": [0, 1],
    "log_every_n_steps": [1],
    "accumulate_grad_batches": [2, 3],
    "gradient_clip_val": [0.1],
    "gradient_clip_algorithm": ["value", "norm"],
    "deterministic": [True],
    "benchmark": [True],
    "inference_mode": [False],
    "use_distributed_sampler": [False],
    "detect_anomaly": [True],
    "barebones": [True],
    "reload_dataloaders_every_n_epochs": [1],
    "fast_dev_run": [True, 2],
    "profiler": ["simple"],
    "callbacks": [
        make_callbacks("EarlyStopping", "check", patience=1, min_delta=10.0),
        make_callbacks("GradientAccumulationScheduler", {0: 1, 1: 2}),
        make_callbacks("Timer", {"hours": 1}),
    ],
}
LIGHTNING_REFUSES: Mapping[str, list[Any]] = {
    "precision": ["64-true", "16-mixed", "bf16-true"],
    "enable_checkpointing": [True],
    "devices": [2],
    "num_nodes": [2],
    "sync_batchnorm": [True],
}


# --------------------------------------------------------------------------------------------------------- transformers


def with_transformers(given: dict[str, Any], microbatches: int, ranks: int | None, folder: str) -> Outcome:
    """Train and evaluate a small GPT-2 with the Trainer."""
    from accelerate.state import AcceleratorState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from fpipe.integrations.transformers import PipelineTrainer

    AcceleratorState._reset_state(reset_partial_state=True)
    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False, loss_type="ForCausalLM",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    net, rows = GPT2LMHeadModel(config).train(), torch.randint(0, 40, (ROWS, 12))
    labels = torch.where(torch.arange(12) > 11 - 5 * torch.arange(ROWS)[:, None] % 11, -100, rows)  # padded
    data = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]
    model: nn.Module = net
    if ranks is not None:
        example, how = {"input_ids": rows[:8], "labels": labels[:8]}, one_f_one_b(ranks, microbatches)
        model = fpipe.Pipelined(net, loss=lambda out: out.loss, example=example, schedule=how)
    more = {name: given.pop(name) for name in [*given] if name in (*TRAINER, "compute_loss_func")}
    usual = {"per_device_train_batch_size": 8, "max_steps": 5, "learning_rate": 0.01, "save_strategy": "no"}
    usual |= {"report_to": [], "use_cpu": True, "remove_unused_columns": False, "logging_steps": 1, "optim": "sgd"}
    usual |= {"adam_epsilon": 1e-3}  # a gradient that is 0 but for rounding, of the biases of keys, moves nothing
    arguments = TrainingArguments(folder, disable_tqdm=True, **{**usual, **given})
    events: list[str] = []

    class Noted(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            events.append(f"step {state.global_step}")

        def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            events.append("evaluated")

    if "compute_metrics" in more:
        more["compute_metrics"] = _count_right if more["compute_metrics"] == "right" else _CountInParts()
    kind = Trainer if ranks is None else PipelineTrainer
    trainer = kind(model, arguments, train_dataset=data, eval_dataset=data[:19], callbacks=[Noted()], **more)
    trainer.train()
    measured = ("runtime", "per_second", "flos", "mem_", "memory")  # the operations of another way to count them
    history = [
        {name: value for name, value in line.items() if not any(word in name for word in measured)}
        for line in trainer.state.log_history
    ]
    checked = {name: value for name, value in trainer.evaluate().items() if not any(word in name for word in measured)}
    predicted = trainer.predict(data[:5])
    outputs = [] if predicted.predictions is None else [torch.tensor(predicted.predictions)]
    return {"history": history, "checked": checked, "outputs": outputs, "events": events, "state": copy_state(model)}


def _count_right(found: Any) -> dict[str, float]:
    return {"right": float((found.predictions.argmax(-1) == found.label_ids).sum())}


class _CountInParts:
    """Metrics of one batch after the other, as `batch_eval_metrics` asks for."""

    def __init__(self) -> None:
        self.right = 0.0

    def __call__(self, found: Any, compute_result: bool = False) -> dict[str, float]:
        outputs, labels = torch.as_tensor(found.predictions), torch.as_tensor(found.label_ids)
        self.right += float((outputs.argmax(-1) == labels).sum())
        return {"right": self.right} if compute_result else {}


TRAINER: dict[str, list[Any]] = {
    "compute_metrics": ["right"],
    "optimizer_cls_and_kwargs": [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True})],
    "preprocess_logits_for_metrics": [lambda logits, labels: logits[..., :5]],
}
TRANSFORMERS: Mapping[str, list[Any]] = {
    **TRAINER,
    "per_device_train_batch_size": [5, 16],
    "per_device_eval_batch_size": [3, 16],
    "gradient_accumulation_steps": [2, 3],
    "max_steps": [-1, 3],
    "num_train_epochs": [1, 1.5],
    "max_grad_norm": [0.0, 0.1],
    "learning_rate": [0.1],
    "lr_scheduler_type": ["linear", "cosine", "constant", "constant_with_warmup", "polynomial"],
    "warmup_steps": [2, 0.5],
    "weight_decay": [0.1],
    "optim": ["adamw_torch"],
    "adam_beta1": [0.5],
    "adam_beta2": [0.9],
    "bf16": [True],
    "seed": [7],
    "data_seed": [5],
    "logging_strategy": ["epoch", "no"],
    "logging_steps": [2],
    "logging_first_step": [True],
    "logging_nan_inf_filter": [False],
    "eval_strategy": ["steps", "epoch"],
    "eval_steps": [2],
    "eval_delay": [3],
    "eval_on_start": [True],
    "eval_accumulation_steps": [1],
    "eval_do_concat_batches": [False],
    "eval_use_gather_object": [True],
    "prediction_loss_only": [True],
    "include_for_metrics": [["inputs"], ["loss"]],
    "include_num_input_tokens_seen": ["all", "non_padding", True],
    "average_tokens_across_devices": [False],
    "dataloader_drop_last": [True],
    "dataloader_num_workers": [1],
    "dataloader_pin_memory": [False],
    "train_sampling_strategy": ["sequential", "group_by_length"],
    "label_names": [["labels"]],
    "gradient_checkpointing": [True],
    "torch_empty_cache_steps": [1],
    "ignore_data_skip": [True],
    "skip_memory_metrics": [False],
    "accelerator_config": [{"split_batches": True}, {"even_batches": False}, {"use_seedable_sampler": False}],
}
TRANSFORMERS_REFUSES: Mapping[str, list[Any]] = {
    "optim": ["lomo"],
    "fp16": [True],
    "bf16_full_eval": [True],
    "label_smoothing_factor": [0.1],
    "save_strategy": ["epoch", "steps"],
    "remove_unused_columns": [True],
    "auto_find_batch_size": [True],
    "torch_compile": [True],
    "ddp_find_unused_parameters": [True],
    "accelerator_config": [{"dispatch_batches": True}],
    "compute_loss_func": [lambda outputs, labels, num_items_in_batch=None: outputs.logits.sum()],
}


class Library(NamedTuple):
    """A script, and the values of its options: those that are honored, and those that are refused."""

    script: Callable[[dict[str, Any], int, int | None, str], Outcome]
    honored: Mapping[str, list[Any]]
    refused: Mapping[str, list[Any]]


LIBRARIES: Mapping[str, Library] = {
    "accelerate": Library(with_accelerate, ACCELERATE, ACCELERATE_REFUSES),
    "lightning": Library(with_lightning, LIGHTNING, LIGHTNING_REFUSES),
    "transformers": Library(with_transformers, TRANSFORMERS, TRANSFORMERS_REFUSES),
}


# -------------------------------------------------------------------------------------------------------------- compare


def find_difference(got: Any, want: Any, tolerance: float, where: str = "") -> str:
    """Return where two outcomes differ by more than the tolerance; nothing if nowhere. A state may be a share."""
    if isinstance(want, Mapping):
        if where == ".state":
            want = {name: want[name] for name in got}
        if got.keys() != want.keys():
            return f"{where}: got {sorted(got)}, expected {sorted(want)}"
        pairs = [(got[name], want[name], f"{where}.{name}") for name in want]
    elif isinstance(want, list | tuple):
        if len(got) != len(want):
            return f"{where}: got {len(got)} entries, expected {len(want)}"
        pairs = [(one, two, f"{where}[{k}]") for k, (one, two) in enumerate(zip(got, want, strict=True))]
    elif isinstance(want, torch.Tensor) or (isinstance(want, float) and isinstance(got, float)):
        one, two = torch.as_tensor(got).double(), torch.as_tensor(want).double()
        if one.shape != two.shape:
            return f"{where}: got shape {list(one.shape)}, expected {list(two.shape)}"
        near = torch.allclose(one, two, rtol=tolerance, atol=tolerance, equal_nan=True)
        return "" if near else f"{where}: got {got}, expected {want}"
    else:
        return "" if got == want else f"{where}: got {got!r}, expected {want!r}"
    return next((found for pair in pairs if (found := find_difference(*pair[:2], tolerance, pair[2]))), "")


def choose_tolerance(one: Draw) -> float:
    """Return how far the results of a draw may be from the plain script's."""
    half = one.options.get("mixed_precision") == "bf16" or one.options.get("precision") == "bf16-mixed"
    if half or one.options.get("bf16"):
        return 0.1
    is_exact = one.microbatches == 1 and one.library != "transformers"  # whose loss is a sum over tokens
    return 0.0 if is_exact else 2e-4


def judge(one: Draw, got: Outcome | Exception, want: Outcome | Exception | None) -> str:
    """Return how a draw ended with a pipeline, given how the plain script did; raise if not as promised.

    The plain script of a draw that must be refused is not run: it may start processes, or compile for a minute.
    """
    if one.refused:
        assert isinstance(got, fpipe.InputError | ValueError), f"expected a refusal, got {got!r}"
        return f"refused: {str(got).partition('=')[0][:80]}"
    if isinstance(want, Exception) and isinstance(got, Exception):
        return f"refused by both: {type(got).__name__}"
    for found in (got, want):
        if isinstance(found, Exception):
            raise found
    difference = find_difference(got, want, choose_tolerance(one))
    assert not difference, difference
    assert isinstance(got, dict)
    assert not math.isnan(float(sum(value.double().sum() for value in got["state"].values())))
    return "equal"


def attempt(one: Draw, ranks: int | None) -> Outcome | Exception:
    """Return what a script leaves, or the error that it raises."""
    try:
        return run(one, ranks)
    except Exception as error:
        return error
