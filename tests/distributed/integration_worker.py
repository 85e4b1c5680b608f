# SPDX-License-Identifier: Apache-2.0
"""Training with other libraries, as one process or one rank of several, against a plain loop in the same process.

python integration_worker.py FOLDER LIBRARY...
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import re
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b
from tests.common.sizes import NIGHTLY

RANKS, M = int(os.environ.get("WORLD_SIZE", "2")), 4
STEPS, EPOCHS = (20, 7) if NIGHTLY else (7, 3)


def require_same(model, plain) -> None:
    """What this process holds is what the plain model has."""
    known = plain.state_dict()
    assert all(same_bits(known[name], value) for name, value in model.state_dict().items())
    assert RANKS == 1 or len(list(model.parameters())) <= len(list(plain.parameters()))


def make_net(rows):
    """Return a model with a norm, a copy of it for the plain loop, and the data, whose last batch may be small."""
    torch.manual_seed(0)
    x, y = torch.randn(rows, 6), torch.randint(0, 3, (rows,))
    norm = nn.LayerNorm(16) if rows % 8 else nn.BatchNorm1d(16)
    net = nn.Sequential(nn.Linear(6, 16), norm, nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    return net, copy.deepcopy(net), x, y, DataLoader(TensorDataset(x, y), batch_size=8)


def pipelined(net, x, y):
    how = one_f_one_b(RANKS, M)
    return fpipe.Pipelined(net, loss=functional.cross_entropy, example=(x[:8],), targets=y[:8], schedule=how)


def train_plainly(plain, data, epochs, limit, *tools, every=2, context=nullcontext):
    """Train with some accumulated batches per update, and at the end of an epoch; return the losses of all batches."""
    losses = []
    for _ in range(epochs):
        for k, (a, b) in enumerate(data):
            total, count = 0.0, min(M, len(a))
            for c, d in zip(a.chunk(M), b.chunk(M), strict=True):
                with context():
                    part = functional.cross_entropy(plain(c), d) / count
                (part / every).backward()
                total = total + part.detach()
            losses.append(total)
            if k % every == every - 1 or k + 1 == len(data):
                nn.utils.clip_grad_norm_(plain.parameters(), limit)
                for one in tools:
                    one.step()
                plain.zero_grad()
    return losses


def with_accelerate(folder, every=2, epochs=6, precision="no", rows=56) -> None:
    from fpipe.integrations.accelerate import PipelineAccelerator

    net, plain, x, y, data = make_net(rows)

    def tools(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    accelerator = PipelineAccelerator(gradient_accumulation_steps=every, cpu=True, mixed_precision=precision)
    model = pipelined(net, x, y)
    model, loader, optimizer, scheduler = accelerator.prepare(model, data, *tools(model))
    losses = []
    for _ in range(epochs):
        for a, b in loader:
            with accelerator.accumulate(model):
                loss = model(a, targets=b)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(accelerator.gather_for_metrics(loss).detach())

    context = nullcontext if precision == "no" else in_bfloat16
    expected = train_plainly(plain, data, epochs, 0.1, *tools(plain), every=every, context=context)
    assert len(losses) == len(expected) == 7 * epochs
    assert all(same_bits(one, two) for one, two in zip(losses, expected, strict=True))
    require_same(model, plain)
    require_methods(accelerator, model, plain, x, folder)


def in_bfloat16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def require_methods(accelerator, model, plain, x, folder) -> None:
    """What a script asks of all processes is answered for all of them, or refused."""
    rank = int(os.environ.get("RANK", "0"))
    with accelerator.split_between_processes(x) as rows:
        assert same_bits(rows, x)
    assert not accelerator.check_trigger()
    if rank == RANKS - 1 or not dist.is_initialized():
        accelerator.set_trigger()
    assert [accelerator.check_trigger(), accelerator.check_trigger()] == [True, False]
    for ask in (accelerator.gather, accelerator.reduce, accelerator.gather_for_metrics):
        assert same_bits(ask({"x": x})["x"], x)
        if RANKS > 1 and dist.is_initialized():
            with pytest.raises(fpipe.PipelineError, match="got ranks that differ"):
                ask(torch.tensor(rank))
    whole = accelerator.get_state_dict(model)
    assert list(whole) == list(plain.state_dict())
    assert all(same_bits(whole[name], value) for name, value in plain.state_dict().items())
    accelerator.save_model(model, f"{folder}/weights")
    saved = fpipe.safetensors(f"{folder}/weights")
    assert all(same_bits(saved[name], value) for name, value in whole.items())
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=4))
    assert [batch.tolist() for batch in stream] == [[0, 1, 2, 3], [4, 5]]
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(fpipe.InputError, match=r"Call fpipe.save"):
            call(folder)
    with pytest.raises(fpipe.InputError, match="Leave them out"):
        accelerator.save_model(model, folder, max_shard_size="1MB")


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(6)


def with_transformers(folder) -> None:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        TrainingArguments,
        get_linear_schedule_with_warmup,
    )

    from fpipe.integrations.transformers import PipelineTrainer

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=4, n_head=2, use_cache=False, loss_type="ForCausalLM",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    net, rows = GPT2LMHeadModel(config), torch.randint(0, 40, (43, 12))
    labels = torch.where(torch.arange(12) > 11 - 5 * torch.arange(43)[:, None] % 11, -100, rows)  # padded
    plain, stock = copy.deepcopy(net).train(), copy.deepcopy(net).train()
    data = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]
    batch = {"input_ids": rows[:8], "labels": labels[:8]}
    model = fpipe.Pipelined(
        net.train(), loss=lambda out: out.loss, example=batch, schedule=one_f_one_b(RANKS, M), stages=RANKS
    )
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=8, gradient_accumulation_steps=3, max_steps=STEPS,
        learning_rate=0.01, warmup_steps=5, max_grad_norm=0.5, optim="adamw_torch", save_strategy="no", report_to=[],
        use_cpu=True, remove_unused_columns=False, logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    seen: list[dict[str, torch.Tensor]] = []

    class Recorded(PipelineTrainer):
        def training_step(self, model, inputs, *rest):
            seen.append(inputs)
            return super().training_step(model, inputs, *rest)

    trainer = Recorded(
        *(model, arguments), train_dataset=data, eval_dataset=data[:19],
        compute_metrics=lambda found: {"rows": len(found.label_ids)},
    )  # fmt: skip
    trainer.train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    scheduler, norms, losses = get_linear_schedule_with_warmup(optimizer, 5, STEPS), [], [0.0] * STEPS

    def count(given):
        return float(given.ne(-100).sum())

    for k, inputs in enumerate(seen):
        # The Trainer does not know that the loss of this class shifts labels, and counts the first ones.
        total = sum(count(one["labels"]) for one in seen[k // 3 * 3 : k // 3 * 3 + 3])
        if k % 3 == 0:
            stock.load_state_dict(plain.state_dict())
        losses[k // 3] += stock(**inputs, num_items_in_batch=torch.tensor(total)).loss.item()  # as the Trainer's own
        for i in range(min(M, len(inputs["labels"]))):
            part = {name: value.chunk(M)[i] for name, value in inputs.items()}
            (plain(**part).loss * (count(part["labels"][:, 1:]) / total)).backward()
        if k % 3 == 2:
            norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert len(norms) == STEPS
    assert [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line] == norms
    require_same(model, plain)
    found = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    torch.testing.assert_close(found, losses, rtol=0, atol=2e-5)
    plain.eval()
    ends, whole = ((0, 8), (8, 16), (16, 19)), 0.0
    for first, last in ends:  # as the Trainer's own
        part = {"input_ids": rows[first:last], "labels": labels[first:last]}
        divisor = torch.tensor(count(part["labels"]))
        whole += (last - first) / 19 * plain(**part, num_items_in_batch=divisor).loss.item()
    assert abs((evaluated := trainer.evaluate())["eval_loss"] - whole) < 1e-5
    assert evaluated["eval_rows"] == 19
    for _ in range(2):  # the second replaces the first
        trainer.save_model(f"{folder}/saved")
    if RANKS > 1 and dist.is_initialized():
        dist.barrier()
    require_same(GPT2LMHeadModel.from_pretrained(f"{folder}/saved"), plain)
    arguments.output_dir = f"{folder}/others"
    Path(arguments.output_dir).mkdir(exist_ok=True)
    Path(arguments.output_dir, "model.safetensors").touch()
    with pytest.raises(fpipe.InputError, match=r"others: got \['model.safetensors'\], expected a dir"):
        PipelineTrainer(model, arguments, train_dataset=data)  # not after the training


def with_lightning(folder, every=2, epochs=EPOCHS, precision="32-true", rows=48) -> None:
    import lightning

    from fpipe.integrations.lightning import PipelineStrategy

    net, plain, x, y, data = make_net(rows)
    losses, checked = [], []

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = pipelined(net, x, y)

        def training_step(self, batch, index):
            loss = self.model(batch[0], targets=batch[1])
            losses.append(loss.detach())
            return loss

        def validation_step(self, batch, index):
            checked.append(self.model(batch[0]).argmax(1))

        def configure_optimizers(self):
            return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    task = Task()
    trainer = lightning.Trainer(
        strategy=PipelineStrategy(), accelerator="cpu", devices=1, max_epochs=epochs, accumulate_grad_batches=every,
        gradient_clip_val=0.5, precision=precision, enable_checkpointing=False, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(task, data, DataLoader(TensorDataset(x, y), batch_size=20))
    sgd = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    context = nullcontext if precision == "32-true" else in_bfloat16
    expected = train_plainly(plain, data, epochs, 0.5, sgd, every=every, context=context)
    assert len(losses) == len(expected) == 6 * epochs
    assert all(same_bits(one, two) for one, two in zip(losses, expected, strict=True))
    require_same(task.model, plain)
    with context():
        assert torch.equal(torch.cat(checked[-3:]), plain.eval()(x).argmax(1))
    strategy, rank = trainer.strategy, int(os.environ.get("RANK", "0"))
    assert strategy.broadcast({"path": Path("a"), "rank": rank}) == {"path": "a", "rank": 0}
    flags = [strategy.reduce_boolean_decision(rank == 0, all=every) for every in (True, False)]
    assert flags == [RANKS == 1 or not dist.is_initialized(), True]


def options(folder) -> None:
    """Each option and method of the libraries is in a table, and those that are refused are, with the repair."""
    import lightning
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, KwargsHandler
    from lightning.pytorch import plugins
    from lightning.pytorch.accelerators import CUDAAccelerator
    from transformers import Trainer, TrainingArguments

    from fpipe.integrations import accelerate as one
    from fpipe.integrations import lightning as two
    from fpipe.integrations import transformers as three

    def parameters(cls):
        return [*inspect.signature(cls.__init__).parameters][1:]

    def fields(cls):
        return [one.name for one in dataclasses.fields(cls)]

    def kinds(cls):
        return {other for one in cls.__subclasses__() for other in (one, *kinds(one))}

    def methods(cls):
        return [name for name in dir(cls) if not name.startswith("_")]

    tables = (*one.ACCELERATE, *two.LIGHTNING, *three.TRANSFORMERS)
    theirs = (
        *(parameters(Accelerator), fields(DataLoaderConfiguration), [cls.__name__ for cls in kinds(KwargsHandler)]),
        *(methods(Accelerator), parameters(lightning.Trainer)),
        *(methods(lightning.pytorch.strategies.SingleDeviceStrategy), fields(TrainingArguments)),
        *(parameters(Trainer), methods(Trainer)),
    )
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    for table, names in zip(tables, theirs, strict=True):
        section = page.partition(f"### {table.subject}\n")[2].partition("\n#")[0]
        honored = re.findall(r"`(\w+)`", section.partition("Honored: ")[2].partition("\n\n")[0])
        assert sorted(names) == sorted((*honored, *table.refused)), table.subject
        rows = "".join(f"| `{name}` | {refusal} |\n" for name, refusal in table.refused.items())
        assert f"| refused | expected |\n|---|---|\n{rows}" in f"{section}\n", f"the page lacks this:\n{rows}"

    def make_accelerator(**given):
        return one.PipelineAccelerator(cpu=True, **given)

    net, _, x, y, data = make_net(16)
    model, calm = pipelined(net, x, y), {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}

    def make_lightning(**given):
        return lightning.Trainer(strategy=two.PipelineStrategy(), accelerator="cpu", **(calm | given))

    def make_trainer(trainer=None, **given):
        usual = {"save_strategy": "no", "remove_unused_columns": False, "report_to": [], "use_cpu": True}
        arguments = TrainingArguments(f"{folder}/none", **(usual | given))
        return three.PipelineTrainer(model, arguments, train_dataset=[0], **(trainer or {}))

    refusals = [
        (make_accelerator, {"mixed_precision": "fp16"}),
        (make_accelerator, {"dynamo_backend": "inductor"}),
        (make_accelerator, {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}),
        (make_accelerator, {"kwargs_handlers": [DistributedDataParallelKwargs()]}),
        (make_lightning, {"precision": "64-true"}),
        (make_lightning, {"precision": "bf16-true"}),
        (make_lightning, {"devices": 2}),
        (make_lightning, {"num_nodes": 2}),
        (make_lightning, {"sync_batchnorm": True}),
        (make_lightning, {"plugins": [plugins.TorchCheckpointIO()]}),
        *((make_trainer, {name: True}) for name in ("auto_find_batch_size", "bf16_full_eval", "torch_compile")),
        *((make_trainer, {name: True}) for name in ("remove_unused_columns", "use_liger_kernel", "fp16_full_eval")),
        (make_trainer, {"save_strategy": "epoch"}),
        (make_trainer, {"label_smoothing_factor": 0.1}),
        (make_trainer, {"ddp_find_unused_parameters": False}),
        (make_trainer, {"accelerator_config": {"dispatch_batches": True}}),
        (make_trainer, {"optim": "adalomo"}),
        (make_trainer, {"trainer": {"compute_loss_func": functional.mse_loss}}),
    ]
    for make, given in refusals:
        with pytest.raises(fpipe.InputError, match=r"got \w+=.*, expected "):
            make(**given)

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            raise AssertionError("refused before")

        def configure_optimizers(self):
            return torch.optim.SGD(self.model.parameters(), lr=0.05)

    with pytest.raises(fpipe.InputError, match="got enable_checkpointing=True, expected False"):
        make_lightning(max_epochs=1, default_root_dir=folder).fit(Task(), data)
    strategy = two.PipelineStrategy()
    strategy.accelerator = CUDAAccelerator()  # as Trainer(accelerator="cuda") would
    with pytest.raises(fpipe.InputError, match="accelerator: got 'cuda' with a pipeline on cpu, expected the same"):
        strategy.connect(Task())


LIBRARIES = {
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "transformers": with_transformers,
    "options": options,
    "accelerate in bfloat16": partial(with_accelerate, every=3, epochs=1, precision="bf16", rows=51),
    "lightning in bfloat16": partial(with_lightning, every=3, epochs=1, precision="bf16-mixed", rows=43),
}


def main(rank: int, store: str, folder: str, *libraries: str) -> None:
    """Be one of two ranks that were started by hand, with what torchrun puts into the environment."""
    warnings.resetwarnings()  # libraries use what others deprecate
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # the group exists already
    run(folder, *libraries)


def run(folder: str, *libraries: str) -> None:
    """Train with some libraries, one after the other."""
    torch.set_num_threads(1)
    for library in libraries:
        LIBRARIES[library](folder)
        print(f"passed with {library}")


if __name__ == "__main__":
    run(*sys.argv[1:])
