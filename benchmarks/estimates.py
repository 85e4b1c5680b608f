# SPDX-License-Identifier: Apache-2.0
"""The time and memory that it takes to plan a model that this machine could never run: Llama of 70 billion parameters.

    python -m benchmarks.estimates             # for 8 ranks, with three amounts of training state
    python -m benchmarks.estimates 8 64 512    # for so many ranks, and how far plans are from the bound at most

The unedited model of `transformers`, in bfloat16 on the meta device, two microbatches for each rank, on ranks of 80 GB.
Microbatches have 4,096 tokens; for 512 ranks, whose first one holds the inputs of 512 microbatches, 2,048. Nothing is
run: operations are counted on fake tensors, for a device of 400 TFLOP/s. By default, plans are made for several amounts
of training state: parameters alone, with their gradients, and with the two moments of AdamW, too; for numbers of ranks,
with gradients. A model of 80 layers is cut between them, and for more ranks within them, too.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any, Final, NamedTuple

import torch

import fpipe
from benchmarks.common.rows import most, row
from fpipe.pipelines.description import format_bytes
from schedules import Link

MEMORY = "80GB"
DEVICE: Final = fpipe.Roofline(flops=4e14, bandwidth=3e12, overhead=4e-6)
LINK: Final = Link(latency=1e-5, bandwidth=2e11)
SEARCH: Final = 30.0
"""Seconds that a search may take."""
STATES: Final = {1.0: "parameters", 2.0: "parameters and gradients", 4.0: "parameters, gradients and AdamW's moments"}
MODULES: Final = ("self_attn", "self_attn.*_proj", "post_attention_layernorm", "mlp", "mlp.*_proj")
"""Where a layer may be cut."""


class Case(NamedTuple):
    """Ranks and tokens in a microbatch, the seconds that a plan and its search may take, and where stages may begin."""

    ranks: int
    length: int
    most: float
    search: float
    cuts: list[str] | None

    def arguments(self, model: Any) -> dict[str, Any]:
        """Return what profiles and plans of the model take."""
        tokens = torch.zeros(2 * self.ranks, self.length, dtype=torch.int64)
        return {
            "model": model,
            "example": {"input_ids": tokens, "labels": tokens},
            "loss": lambda out: out.loss,
            "microbatches": 2 * self.ranks,
        }


CASES: Final = {
    8: Case(8, 4096, 10.0, 8.0, None),
    64: Case(64, 4096, 30.0, 20.0, None),
    512: Case(512, 2048, 60.0, 25.0, ["model.layers.*", *(f"model.layers.*.{name}" for name in MODULES)]),
}


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
    model = llama()
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    name = f"Llama of {millions:,.0f} million parameters on the meta device"
    numbers = [int(number) for number in sys.argv[1:]]
    for number in numbers:
        print_gap(CASES[number], model, name)
    if not numbers:
        print_states(CASES[8], model, f"{name}, 8 ranks")


def print_gap(case: Case, model: Any, name: str) -> None:
    """Print what a plan for so many ranks takes, and its gap."""
    arguments = case.arguments(model)
    begin, computed = time.perf_counter(), time.process_time()
    profile = fpipe.profile(**arguments, device=DEVICE, link=LINK, cuts=case.cuts)
    profiling = time.perf_counter() - begin, time.process_time() - computed
    begin, computed = time.perf_counter(), time.process_time()
    plan = fpipe.plan(**arguments, ranks=case.ranks, memory=MEMORY, weights=2.0, profile=profile, seconds=case.search)
    planning = time.perf_counter() - begin, time.process_time() - computed
    of = f"{name}, {case.ranks} ranks, {2 * case.ranks:,} microbatches"
    print(row(f"time to plan, {of}", "s", planning[0], None, most(case.most)))
    print(row("the same, the processor's time", "s", planning[1], None))
    print(row("the profile before it", "s", profiling[0], None))
    print(row("the same, the processor's time", "s", profiling[1], None))
    print(row("predicted step over the bound for every plan", "", plan.predicted.seconds / plan.bound, None))
    print(f"\n### {case.ranks} ranks\n\n{plan}\n", flush=True)


def print_states(case: Case, model: Any, of: str) -> None:
    """Print plans for several amounts of training state, and what they take."""
    arguments = case.arguments(model)
    before, begin, computed = resident(), time.perf_counter(), time.process_time()
    profile = fpipe.profile(**arguments, device=DEVICE, link=LINK)
    profiling, computed = time.perf_counter() - begin, time.process_time() - computed
    texts, times = [], []
    for weights, state in STATES.items():
        begin = time.perf_counter()
        found = describe(arguments, profile, weights)
        times.append(time.perf_counter() - begin)
        texts.append(f"\n### Held: {state}\n\n{found}")
    print(row(f"time to profile and to plan, {of}", "s", profiling + max(times), None, most(60)))
    print(row(f"of it, to profile; a search may take {SEARCH:g} s", "s", profiling, None))
    print(row("processor time of that profile", "s", computed, None))
    print(row("growth of the process's memory by all of that", "MiB", (resident() - before) / 2**20, None))
    print(f"\n## Plans for a {of}", *texts, sep="\n")


def describe(arguments: dict[str, Any], profile: fpipe.Profile, weights: float) -> str:
    """Return the plan, or why there is none."""
    try:
        plan = fpipe.plan(**arguments, ranks=8, memory=MEMORY, weights=weights, profile=profile, seconds=SEARCH)
    except fpipe.InputError as error:
        return str(error)
    return f"{plan}\n  most held    {format_bytes(max(plan.predicted.memory))}"


if __name__ == "__main__":
    main()
