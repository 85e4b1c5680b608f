# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face Llama with grouped heads, compared with a plain loop and with torch.distributed.pipelining.

    python -m benchmarks.llama

Eight layers of width 256 with 8 heads, pairs of which share keys and values; 64 tokens, one thread. First the CPU time
of a whole step in one process over that of a plain loop over microbatches, with no mask and with a mask of ones;
interleaved, medians of six rounds, whose ratio has a standard deviation of 4 % on a machine with ten other jobs; freed
memory stays with the process, as in `benchmarks/throughput.py`. Then steps per second of 1F1B on 2 and on 4 ranks,
measured as there: fpipe cuts the unedited model, and torch gets stages cut by hand, each of which computes its own
rotary tables.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import throughput
from benchmarks.common import ranks
from benchmarks.common.contests import Task
from benchmarks.common.models import cross_entropy
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import most, row
from benchmarks.common.turns import medians

LAYERS, WIDTH, HEADS, GROUPS, WORDS, LENGTH = 8, 256, 8, 4, 256, 64
ROWS, MICROBATCHES, ROUNDS = 16, 4, rounds(6)


def llama(layers: int = LAYERS) -> Any:
    """Return the model, the same in every process."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=688,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


class Piece(nn.Module):
    """Layers `start` to `stop` of a Llama, with the embedding before the first and the head after the last."""

    def __init__(self, model: Any, start: int, stop: int) -> None:
        super().__init__()
        inner = model.model
        self.embed = inner.embed_tokens if start == 0 else nn.Identity()
        self.rotary, self.layers = inner.rotary_emb, inner.layers[start:stop]
        self.head = nn.Sequential(inner.norm, model.lm_head) if stop == LAYERS else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers on tokens or hidden states."""
        hidden = self.embed(x)
        places = torch.arange(LENGTH).unsqueeze(0)
        tables = self.rotary(hidden, places)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=places, position_embeddings=tables)
        logits: Tensor = self.head(hidden)
        return logits


def task() -> Task:
    """Return the same task in every process."""
    model = llama()
    tokens, targets = torch.randint(0, WORDS, (2, ROWS, LENGTH))

    def begins(stages: int) -> list[int]:
        return [LAYERS * stage // stages for stage in range(1, stages)]

    def cuts(stages: int) -> list[str]:
        return [f"model.layers.{layer}" for layer in begins(stages)]

    def pieces(stages: int) -> list[nn.Module]:
        ends = [0, *begins(stages), LAYERS]
        return [Piece(model, start, stop) for start, stop in pairwise(ends)]

    return Task(
        model, tokens, targets, MICROBATCHES, cuts, pieces, lambda out, wanted: cross_entropy(out.logits, wanted)
    )


def plain(model: Any, batch: dict[str, Tensor]) -> Callable[[], None]:
    """Return a step of the plain loop."""

    def step() -> None:
        model.zero_grad()
        for i in range(MICROBATCHES):
            loss = model(**{name: leaf.chunk(MICROBATCHES)[i] for name, leaf in batch.items()}).loss / MICROBATCHES
            loss.backward()

    return step


def piped(model: Any, batch: dict[str, Tensor]) -> Callable[[], object]:
    """Return a step of a pipeline with all stages in this process, cut where fpipe chooses."""
    import fpipe
    from schedules import one_f_one_b

    how = one_f_one_b(ranks=2, microbatches=MICROBATCHES)
    pipe = fpipe.pipeline(model, example=batch, loss=lambda out: out.loss, schedule=how)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    return lambda: step(*state, batch)


def beside_a_loop() -> Iterator[str]:
    """Yield a row for each kind of batch."""
    model, tokens = llama(), torch.randint(0, WORDS, (ROWS, LENGTH))
    bare = {"input_ids": tokens, "labels": tokens}
    for what, batch in (("no mask", bare), ("a mask of ones", bare | {"attention_mask": torch.ones_like(tokens)})):
        found = medians({"plain": plain(model, batch), "piped": piped(model, batch)}, ROUNDS)
        title = f"processor time of a step / of a plain loop: Llama of {LAYERS} layers, {what}"
        yield row(title, "ratio", found["piped"] / found["plain"], None, most(1 / 1.05))


def loop() -> None:
    """Print the rows of the loop, in a process of its own."""
    torch.set_num_threads(1)
    for line in beside_a_loop():
        print(line, flush=True)


def main() -> None:
    command = [sys.executable, "-m", "benchmarks.llama", "loop"]
    subprocess.run(command, check=True, env={**os.environ, **throughput.KEPT})
    for line in throughput.rows("benchmarks.llama", f"Llama of {LAYERS} layers", ["1F1B"], starts=1):
        print(line, flush=True)


if __name__ == "__main__":
    if ranks.inside():
        throughput.rank(task(), *sys.argv[1:])
    else:
        loop() if sys.argv[1:] == ["loop"] else main()
