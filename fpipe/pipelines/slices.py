# SPDX-License-Identifier: Apache-2.0
"""Sequences in slices: how a pipeline's batches are cut along the sequence, and what can't be.

Runs when a pipeline is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from typing import Any, Final

import torch
from torch import nn

from fpipe.errors import InputError
from fpipe.pipelines.batch import Batching
from fpipe.pipelines.leaf import META
from fpipe.pipelines.options import Microbatching, Recording
from fpipe.record.slicing import CACHE, CARRY, Slicing, find_carry
from fpipe.tensors.tree import broadcast, flatten
from schedules import Schedule

OTHERWISE: Final = "or choose a schedule of whole microbatches"


def find_slicing(
    model: nn.Module, batching: Batching, schedule: Schedule, how: Microbatching, recording: Recording
) -> Slicing | None:
    """Return how microbatches are cut into slices; `None` for whole ones of a model without a carry.

    Raise `InputError`, naming what can't be cut, and the repair.
    """
    halves, count = batching.example.halves, schedule.slices
    inputs, targets = (half.unflatten([torch.empty(0, device=META)] * len(half.names)) for half in halves)
    keyword = find_carry(model, inputs)
    if count == 1 and keyword != CARRY:
        return None
    structure = flatten((inputs, targets))[1]
    shapes = [leaf.spec.shape for leaf in batching.leaves]
    along = broadcast("slice_dims", how.slice_dims, structure)
    dims = tuple(
        dim if dim is not None and dim < len(shape) else None for dim, shape in zip(along, shapes, strict=True)
    )
    if count > 1:
        _require_carry(model, keyword, count)
        _require_divisible(inputs, keyword, count, how, dims)
        if recording.front_end != "trace":
            raise InputError(
                f"front_end: got {recording.front_end!r} for {count} slices, expected 'trace', which records a call of "
                f"the model for each. Leave out front_end, {OTHERWISE}."
            )
    return Slicing(count, keyword, dims, how.slice_lengths, how.reduce == "mean")


def _require_carry(model: nn.Module, keyword: str, count: int) -> None:
    """Raise `InputError` for a model that takes no carry, or whose cache does not have all that a slice leaves."""
    name = type(model).__name__
    if not keyword:
        raise InputError(
            f"model: got {name}, whose forward takes no carry, expected one for {count} slices: later tokens depend on "
            "earlier ones. Write forward(..., carry=None), which returns the pair (outputs, carry) with what the next "
            f"slice needs, pass a decoder of Hugging Face's transformers, {OTHERWISE}."
        )
    if keyword != CACHE:
        return
    config: Any = getattr(model, "config", None)
    can_generate: Any = getattr(model, "can_generate", lambda: False)
    if not can_generate() or getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"model: got {name} for {count} slices, expected a causal language model: a token of an earlier slice must "
            f"not attend to later ones. Write a model with a carry of its own, {OTHERWISE}."
        )
    kinds = {*(getattr(config, "layer_types", None) or ())}
    if not kinds <= {"full_attention"} or getattr(config, "sliding_window", None):
        what = ", ".join(sorted(map(str, kinds))) or f"a sliding window of {config.sliding_window}"
        raise InputError(
            f"model: got {name} with {what} for {count} slices, expected full attention in every layer, whose cache "
            f"has the keys and values of all tokens. Write a model with a carry of its own, {OTHERWISE}."
        )


def _require_divisible(inputs: Any, keyword: str, count: int, how: Microbatching, dims: Sequence[int | None]) -> None:
    """Raise `InputError` for a loss that is not the sum of those of the slices, or a batch without a sequence."""
    if keyword == CACHE and isinstance(inputs, dict) and "labels" in inputs:
        raise InputError(
            f"inputs['labels']: got labels for {count} slices, expected none: the model shifts them by one token "
            "within each slice, so the last token of a slice would have no target. Pass targets= that are shifted "
            f"already, and a loss of outputs.logits and targets, {OTHERWISE}."
        )
    if all(dim is None for dim in dims):
        raise InputError(
            f"slice_dims: got {how.slice_dims!r}, a dimension that no tensor of the batch has, expected one for "
            f"{count} slices. Pass the dimension of the sequence, as in fpipe.Microbatching(slice_dims=1)."
        )


def even_costs(linear: float, quadratic: float) -> Callable[[int, int], Sequence[int]]:
    """Return the function that cuts a sequence into slices of even costs, for `fpipe.Microbatching(slice_lengths=)`.

    The first x tokens cost linear * x + quadratic * x^2 / 2: a token costs as much as any other in linear layers, and
    in attention in proportion to the tokens before it. Slice k of n ends where the cost is k / n of the whole, as in
    TeraPipe (arXiv 2102.07988) and Seq1F1B (arXiv 2406.03488). Every slice has at least one token.

    >>> import fpipe
    >>> fpipe.even_costs(linear=1, quadratic=0)(12, 4), fpipe.even_costs(linear=0, quadratic=1)(16, 4)
    ([3, 3, 3, 3], [8, 3, 3, 2])
    """
    if not (linear >= 0 and quadratic >= 0 and linear + quadratic > 0):
        raise InputError(
            f"even_costs: got linear={linear!r} and quadratic={quadratic!r}, expected numbers of 0 or more, and one "
            "above 0. Pass the time of a token in linear layers, and by how much each token before it adds to that."
        )

    def lengths(length: int, slices: int) -> list[int]:
        whole, ends = linear * length + quadratic * length**2 / 2, [0]
        for k in range(1, slices):
            cost = whole * k / slices
            end = (sqrt(linear**2 + 2 * quadratic * cost) - linear) / quadratic if quadratic else cost / linear
            ends.append(min(max(round(end), ends[-1] + 1), length - slices + k))
        ends.append(length)
        return [stop - start for start, stop in pairwise(ends)]

    return lengths
