# SPDX-License-Identifier: Apache-2.0
"""A script with the Trainer of transformers, as a pipeline: only the lines with a comment have changed.

    torchrun --standalone --nproc-per-node 2 examples/trainer.py    # one process per rank, over Gloo
    python examples/trainer.py                                      # both ranks in this process

Both print the same losses. The model is small and random, so nothing is downloaded. At the end, `from_pretrained` reads
the saved model on one device, and the loss must be the same, to the last digit.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import fpipe  # new
from fpipe.integrations.transformers import PipelineTrainer  # new, instead of Trainer
from schedules import one_f_one_b  # new

WORDS, LENGTH, ROWS, MICROBATCHES = 32, 16, 8, 4
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SIZES = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}


def make_data(rows: int) -> list[dict[str, Tensor]]:
    """Return rows that count from random numbers; labels are the words themselves."""
    ids = (torch.randint(WORDS, (rows, 1)) + torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in ids]


def train(folder: Path, steps: int) -> None:
    """Train, evaluate, save, and compare with the saved model on one device."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, use_cache=False, **SIZES))
    data, held_out = make_data(256), make_data(ROWS)
    batch = {name: torch.stack([row[name] for row in data[:ROWS]]) for name in data[0]}
    how = one_f_one_b(ranks=max(2, SIZE), microbatches=MICROBATCHES)
    model = fpipe.Pipelined(model, loss=lambda out: out.loss, example=batch, schedule=how)  # new
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS,
        max_steps=steps,
        learning_rate=0.01,
        logging_steps=max(1, steps // 5),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",  # new: the Trainer's checkpoints are of whole models
        remove_unused_columns=False,  # new: the columns are those of the example
    )
    trainer = PipelineTrainer(model, arguments, train_dataset=data, eval_dataset=held_out)
    trainer.train()
    found = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "model"))
    for entry in trainer.state.log_history if RANK == 0 else ():
        if "loss" in entry:
            print(f"step {entry['step']:4}  loss {entry['loss']:.6f}", flush=True)
    if RANK == 0:
        alone = GPT2LMHeadModel.from_pretrained(folder / "model").eval()
        ids = torch.stack([row["input_ids"] for row in held_out])
        with torch.no_grad():
            expected = sum(alone(input_ids=part, labels=part).loss / MICROBATCHES for part in ids.chunk(MICROBATCHES))
        assert found == expected.item(), f"got a loss of {found} on all ranks, and {expected} on one device"
        print(f"held-out loss {found:.6f}, with the saved model on one device too")


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train a small GPT-2 as a pipeline, with the Trainer of transformers.")
    parser.add_argument(
        "--path", type=Path, default=Path("run"), help="where the model is saved, the same on all ranks"
    )
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(options.path, options.steps)


if __name__ == "__main__":
    main()
