# SPDX-License-Identifier: Apache-2.0
"""The total weight of the rows of all copies of a pipeline.

Problem. If every process is passed the rows of its own copy only, none knows the weight of the whole batch, by which
each weighted loss is divided.

Idea. Processes exchange the weights of their rows. Those that were not given what the weight reads have none, but some
process of every copy has, since its loss is computed there.

Runs in every step of a pipeline with a weight on a mesh whose processes are passed rows of their own.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fpipe.batching.loss_weights import count_weight
from fpipe.errors import InputError
from fpipe.ir.variant import Variant
from fpipe.pipelines.pipeline import Pipeline


def find_weight_of_all(pipe: Pipeline, variant: Variant, inputs: Any, targets: Any) -> float | None:
    """Return the weight of the rows of all copies; `None` if this process is passed all of them, or without a weight.

    Every rank must call this. Raise `InputError` if a copy has no process that can weigh its rows.
    """
    batching, copies = pipe.captures.batchings[variant.loss], pipe.copies
    if not copies.own_rows or copies.count == 1 or batching.weight is None:
        return None
    (copy,) = copies.here
    try:
        own = count_weight(batching.weight, batching.split_batch(inputs, targets).trees())
    except InputError:
        own = math.nan
    rows = torch.cat(pipe.ranks.gather_rows(torch.tensor([[copy, own]], dtype=torch.float64)))
    weights = [rows[(rows[:, 0] == k) & ~rows[:, 1].isnan(), 1].tolist() for k in range(copies.count)]
    if not all(weights):
        raise InputError(
            f"weight: got no process of copy {weights.index([])} that could compute it, expected one: rows='own' is "
            "given. Pass what the weight reads on the ranks that compute the loss, or pass total=."
        )
    return float(sum(found[0] for found in weights))
