# SPDX-License-Identifier: Apache-2.0
"""The bytes that cross a cut, and that a stage keeps, for decoders of Hugging Face's transformers.

    python -m benchmarks.crossings

Models of 70, 9, 4 and 7 billion parameters and a GPT-2, on the meta device, so that nothing is allocated: Llama 70B,
Gemma 2 9B, Gemma 3 4B, Falcon 7B with ALiBi, and GPT-2 large, with their numbers of heads and widths but 8 layers, in
four stages of two layers each. A microbatch is one row of 4,096 tokens (1,024 for GPT-2, its longest) with padding, so
that there is a mask; bfloat16, and float32 for Llama, too. The rows of a model: what its first stage sends for a
microbatch, and what the second keeps of one until its backward, if it is recomputed, and if it isn't. The column of the
incumbent has the same of the same stages, if each value is sent from the stage that makes it to those that use it, as
`torch.distributed.pipelining` does. What a stage holds once for all microbatches is at most a few MiB here.

Then the processor time of a step of a Llama of 8 layers and width 256, 256 tokens, four stages in one process, over
that of the same stages which send all values; interleaved, medians.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, Final
from unittest.mock import patch

import torch
import transformers as hf

import fpipe
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import most, row
from benchmarks.common.turns import medians
from fpipe.cutting.repetition import Repetition
from fpipe.pipelines.footprint import measure_footprints
from fpipe.stages import assembly as assemblies
from fpipe.stages.assembly import Assembly
from fpipe.tensors.spec import Spec
from schedules import one_f_one_b

LAYERS, STAGES, MICROBATCHES, ROUNDS = 8, 4, 4, rounds(8)
MIB: Final = 2**20


def llama(dtype: torch.dtype) -> Any:
    """Return a Llama with the sizes of the one of 70 billion parameters."""
    return hf.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8, **common(dtype)
    )


def common(dtype: torch.dtype) -> dict[str, Any]:
    return {"num_hidden_layers": LAYERS, "vocab_size": 32000, "use_cache": False, "dtype": dtype}


def configurations() -> Iterator[tuple[str, Any, str, int]]:
    """Yield a title, a configuration, the name of the layers, and the number of tokens of each model."""
    half = torch.bfloat16
    yield "Llama 70B, float32", llama(torch.float32), "model.layers", 4096
    yield "Llama 70B", llama(half), "model.layers", 4096
    sizes: dict[str, Any] = {"hidden_size": 3584, "intermediate_size": 14336, "head_dim": 256}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    yield "Gemma 2 9B", hf.Gemma2Config(**sizes, **heads, sliding_window=4096, **common(half)), "model.layers", 4096
    sizes |= {"hidden_size": 2560, "intermediate_size": 10240}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    yield "Gemma 3 4B", hf.Gemma3TextConfig(**sizes, **heads, sliding_window=1024, **common(half)), "model.layers", 4096
    falcon = hf.FalconConfig(hidden_size=4544, num_attention_heads=71, alibi=True, **common(half))
    yield "Falcon 7B, ALiBi", falcon, "transformer.h", 4096
    gpt2 = hf.GPT2Config(n_embd=1280, n_layer=LAYERS, n_head=20, use_cache=False, dtype=half)
    yield "GPT-2 large", gpt2, "transformer.h", 1024


def loss(outputs: Any) -> torch.Tensor:
    found: torch.Tensor = outputs.loss
    return found


def build(model: Any, layers: str, tokens: int, device: str) -> fpipe.Pipeline:
    """Return the pipeline of a model, cut evenly at its layers, for padded rows of so many tokens."""
    ids, mask = torch.ones(2, MICROBATCHES, tokens, dtype=torch.long, device="cpu")
    mask[:, -tokens // 8 :] = 0
    batch = {"input_ids": ids.to(device), "attention_mask": mask, "labels": ids.to(device)}
    cuts = [f"{layers}.{LAYERS * stage // STAGES}" for stage in range(1, STAGES)]
    how = one_f_one_b(ranks=STAGES, microbatches=MICROBATCHES)
    return fpipe.pipeline(model, example=batch, loss=loss, schedule=how, cuts=cuts)


def send_all(captured: object, observed: object, partition: tuple[int, ...], *_: object) -> tuple[Repetition, ...]:
    """Repeat nothing."""
    return (Repetition(),) * (len(partition) + 1)


def sending(make: Callable[[], fpipe.Pipeline]) -> fpipe.Pipeline:
    """Return a pipeline that sends every value from the stage that makes it."""
    with patch.object(assemblies, "choose_repetitions", send_all):
        return make()


def size(specs: Iterator[Spec]) -> float:
    """Return the MiB of tensors, as sent: a broadcast dimension counts once."""
    return (
        sum(
            spec.dtype.itemsize * prod(n if s else 1 for n, s in zip(spec.shape, spec.stride, strict=True))
            for spec in specs
        )
        / MIB
    )


def figures(cut: Assembly) -> tuple[float, float, float]:
    """Return the MiB that the first stage sends for a microbatch, and the second keeps of one: recomputed, or not."""
    sent, kept = size(spec for one in cut.stages[0].gives for spec in one.specs), measure_footprints(cut)[1]
    return sent, kept.inputs / MIB, kept.activation / MIB


def bytes_of(title: str, config: Any, layers: str, tokens: int) -> Iterator[str]:
    """Yield the rows of a model."""
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config, dtype=config.dtype)

    def make() -> fpipe.Pipeline:
        return build(model, layers, tokens, "meta")

    pairs = zip(*(figures(one.training.assembly) for one in (make(), sending(make))), strict=True)
    what = ("sent over the first cut", "kept by a stage that is recomputed", "kept by a stage of two layers")
    for title_of_row, (ours, theirs) in zip(what, pairs, strict=True):
        yield row(f"{title_of_row}, {title}, {tokens:,} tokens", "MiB", ours, theirs, most(1, of="ratio"))


def time_of_step() -> str:
    """Return the row of the time of a step."""
    torch.manual_seed(0)
    sizes: Mapping[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **common(torch.float32) | {"vocab_size": 256}))

    def stepper(pipe: fpipe.Pipeline) -> Callable[[], object]:
        state, step = pipe.init(model), fpipe.value_and_grad(pipe)
        ids, mask = torch.ones(2, MICROBATCHES, 256, dtype=torch.long)
        mask[:, -32:] = 0
        return lambda: step(*state, {"input_ids": ids, "attention_mask": mask, "labels": ids})

    def make() -> fpipe.Pipeline:
        return build(model, "model.layers", 256, "cpu")

    found = medians({"ours": stepper(make()), "all": stepper(sending(make))}, ROUNDS)
    title = "processor time of a step / of stages that send all values, Llama of 8 layers"
    return row(title, "ratio", found["ours"] / found["all"], None, most(1.02))


def main() -> None:
    torch.set_num_threads(1)
    for one in configurations():
        for line in bytes_of(*one):
            print(line, flush=True)
    print(time_of_step(), flush=True)


if __name__ == "__main__":
    main()
