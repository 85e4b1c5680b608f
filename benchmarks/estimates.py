# SPDX-License-Identifier: Apache-2.0
"""The time and memory that it takes to plan a model that this machine could never run: Llama of 70 billion parameters.

    python -m benchmarks.estimates

The unedited model of `transformers`, in bfloat16 on the meta device, 4,096 tokens in each of 16 microbatches, on 8
ranks of 80 GB. Nothing is run: operations are counted on fake tensors, for a device of 400 TFLOP/s. Then plans are made
for several amounts of training state: parameters alone, with their gradients, and with the two moments of AdamW, too.
"""

from __future__ import annotations

import resource
import time
from typing import Any, Final

import torch

import fpipe
from benchmarks.common.rows import most, row
from fpipe.pipelines.description import format_bytes
from schedules import Link

RANKS, MICROBATCHES, LENGTH, MEMORY = 8, 16, 4096, "80GB"
DEVICE: Final = fpipe.Roofline(flops=4e14, bandwidth=3e12, overhead=4e-6)
LINK: Final = Link(latency=1e-5, bandwidth=2e11)
SEARCH: Final = 30.0
"""Seconds that a search may take."""
STATES: Final = {1.0: "parameters", 2.0: "parameters and gradients", 4.0: "parameters, gradients and AdamW's moments"}


def llama() -> Any:
    """Return the model without values."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def resident() -> float:
    """Return the most bytes that this process has held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    model, tokens = llama(), torch.zeros(MICROBATCHES, LENGTH, dtype=torch.int64)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    arguments: dict[str, Any] = {
        "model": model,
        "example": {"input_ids": tokens, "labels": tokens},
        "loss": lambda out: out.loss,
        "microbatches": MICROBATCHES,
    }
    before, begin, computed = resident(), time.perf_counter(), time.process_time()
    profile = fpipe.profile(**arguments, device=DEVICE, link=LINK)
    profiling, computed = time.perf_counter() - begin, time.process_time() - computed
    texts, times = [], []
    for weights, state in STATES.items():
        begin = time.perf_counter()
        found = describe(arguments, profile, weights)
        times.append(time.perf_counter() - begin)
        texts.append(f"\n### Held: {state}\n\n{found}")
    of = f"Llama of {millions:,.0f} million parameters on the meta device, {RANKS} ranks"
    print(row(f"time to profile and to plan, {of}", "s", profiling + max(times), None, most(60)))
    print(row(f"of it, to profile; a search may take {SEARCH:g} s", "s", profiling, None))
    print(row("processor time of that profile", "s", computed, None))
    print(row("growth of the process's memory by all of that", "MiB", (resident() - before) / 2**20, None))
    print(f"\n## Plans for a {of}", *texts, sep="\n")


def describe(arguments: dict[str, Any], profile: fpipe.Profile, weights: float) -> str:
    """Return the plan, or why there is none."""
    try:
        plan = fpipe.plan(**arguments, ranks=RANKS, memory=MEMORY, weights=weights, profile=profile, seconds=SEARCH)
    except fpipe.InputError as error:
        return str(error)
    return f"{plan}\n  most held    {format_bytes(max(plan.predicted.memory))}"


if __name__ == "__main__":
    main()
