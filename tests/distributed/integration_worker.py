# SPDX-License-Identifier: Apache-2.0
"""Training with other libraries, as one process or one rank of several, against a plain loop in the same process.

python integration_worker.py FOLDER LIBRARY...
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

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
    """Return a model with BatchNorm, a copy of it for the plain loop, a batch and the data."""
    torch.manual_seed(0)
    x, y = torch.randn(rows, 6), torch.randint(0, 3, (rows,))
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    return net, copy.deepcopy(net), x, y, DataLoader(TensorDataset(x, y), batch_size=8)


def pipelined(net, x, y):
    how = one_f_one_b(RANKS, M)
    return fpipe.Pipelined(net, loss=functional.cross_entropy, example=(x[:8],), targets=y[:8], schedule=how)


def train_plainly(plain, data, epochs, limit, *tools):
    """Train with two accumulated batches per update, and at the end of an epoch; return the losses of all batches."""
    losses = []
    for _ in range(epochs):
        for k, (a, b) in enumerate(data):
            total = 0.0
            for c, d in zip(a.chunk(M), b.chunk(M), strict=True):
                part = functional.cross_entropy(plain(c), d) / M
                (part / 2).backward()
                total = total + part.detach()
            losses.append(total)
            if k % 2 or k + 1 == len(data):
                nn.utils.clip_grad_norm_(plain.parameters(), limit)
                for one in tools:
                    one.step()
                plain.zero_grad()
    return losses


def with_accelerate(folder) -> None:
    from fpipe.integrations.accelerate import PipelineAccelerator

    net, plain, x, y, data = make_net(56)

    def tools(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    accelerator = PipelineAccelerator(gradient_accumulation_steps=2, cpu=True)
    model = pipelined(net, x, y)
    model, loader, optimizer, scheduler = accelerator.prepare(model, data, *tools(model))
    losses = []
    for _ in range(6):
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

    expected = train_plainly(plain, data, 6, 0.1, *tools(plain))
    assert len(losses) == len(expected) == 42
    assert all(same_bits(one, two) for one, two in zip(losses, expected, strict=True))
    require_same(model, plain)


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
    net, rows = GPT2LMHeadModel(config), torch.randint(0, 40, (48, 12))
    plain, data = copy.deepcopy(net).train(), [{"input_ids": row, "labels": row} for row in rows]
    batch = {"input_ids": rows[:8], "labels": rows[:8]}
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

    trainer = Recorded(model, arguments, train_dataset=data, eval_dataset=data[:16])
    trainer.train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    scheduler, norms = get_linear_schedule_with_warmup(optimizer, 5, STEPS), []
    for k, inputs in enumerate(seen):
        for i in range(M):
            part = plain(**{name: value.chunk(M)[i] for name, value in inputs.items()}).loss / M
            (part / 3).backward()
        if k % 3 == 2:
            norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert len(norms) == STEPS
    assert [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line] == norms
    require_same(model, plain)
    assert abs(trainer.evaluate()["eval_loss"] - plain.eval()(rows[:16], labels=rows[:16]).loss.item()) < 1e-5
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


def with_lightning(folder) -> None:
    import lightning

    from fpipe.integrations.lightning import PipelineStrategy

    net, plain, x, y, data = make_net(48)
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
        strategy=PipelineStrategy(), accelerator="cpu", devices=1, max_epochs=EPOCHS, accumulate_grad_batches=2,
        gradient_clip_val=0.5, enable_checkpointing=False, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(task, data, DataLoader(TensorDataset(x, y), batch_size=16))
    sgd = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    expected = train_plainly(plain, data, EPOCHS, 0.5, sgd)
    assert len(losses) == len(expected) == 6 * EPOCHS
    assert all(same_bits(one, two) for one, two in zip(losses, expected, strict=True))
    require_same(task.model, plain)
    assert torch.equal(torch.cat(checked[-3:]), plain.eval()(x).argmax(1))


LIBRARIES = {"accelerate": with_accelerate, "lightning": with_lightning, "transformers": with_transformers}


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
