# SPDX-License-Identifier: Apache-2.0
"""The time and memory that a proof takes of a mixture of experts with 671 billion parameters, on the meta device.

    python -m benchmarks.proving [LAYERS]

The sizes are those of DeepSeek-V3 (`benchmarks/common/mixtures.py`): 61 layers, 256 experts of which 8 are chosen,
1,024 tokens. 16 ranks, zero bubble, 64 microbatches, of which two run. Times are those of the processor.
"""

from __future__ import annotations

import resource
import sys
import time

import torch

import fpipe
from benchmarks.common.mixtures import Mixture
from benchmarks.common.models import cross_entropy
from benchmarks.common.rows import row
from schedules import zb_h1

RANKS, MICROBATCHES, LENGTH, LAYERS = 16, 64, 1024, 61


def main() -> None:
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else LAYERS
    with torch.device("meta"):
        model = make_mixture(layers)
        x, y = torch.empty(2, MICROBATCHES, LENGTH, dtype=torch.int64)
    start = time.process_time()
    schedule = zb_h1(ranks=RANKS, microbatches=MICROBATCHES)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=cross_entropy, schedule=schedule)
    built = time.process_time()
    proof = fpipe.prove(pipe, model, (x[:2],), y[:2])
    done = time.process_time()
    if not proof.is_complete:
        raise SystemExit(str(proof))
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    what = f"{billions:.0f} billion parameters, {proof.operators:,} operators, {len(proof.reference):,} results"
    print(row(f"build a pipeline of a mixture of experts, {what}", "s", built - start, None))
    print(row("prove it", "s", done - built, None))
    print(row("memory", "MiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, None), flush=True)


def make_mixture(layers: int) -> Mixture:
    """Return the model, with room for twice an even share of the tokens in each expert."""
    return Mixture(layers=layers, inner=2048, experts=256, chosen=8, capacity=64)


if __name__ == "__main__":
    main()
