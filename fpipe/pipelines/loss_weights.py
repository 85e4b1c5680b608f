# SPDX-License-Identifier: Apache-2.0
"""The weights of microbatches, or of their slices, in the loss of a step.

The mean of means is not the mean if microbatches hold different numbers of rows or tokens. With a weight, the loss of a
step is the sum of `loss_i * (weight_i / total)`, where total is the sum over all microbatches: those of the step, or
those of all steps and replicas that are averaged. Under a schedule of slices, each slice has its own loss, and so its
own weight.

Runs in every step of a pipeline with a weight, on the ranks that compute the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from sys import float_info
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from fpipe.errors import InputError

Weight: TypeAlias = Callable[[Any, Any], float | Tensor]
"""A function of the inputs and targets of a microbatch, or of a slice: a number, or a tensor with one element."""


WHOLE: Final = (
    "Pass the weight of all microbatches that the loss is averaged over: those of all accumulated steps, on all "
    "replicas. Without a weight, pass their number."
)


def compute_scales(
    weight: Weight, units: Iterable[tuple[Any, Any]], total: float | None = None, slices: int = 1
) -> list[float]:
    """Return `weight_i / total` for each microbatch, or slice; inputs or targets that this rank lacks are `None`.

    Without a `total`, it is the weight of these microbatches. Raise `InputError` if a weight is invalid, if all are 0,
    or if they exceed the given total.

    >>> compute_scales(lambda inputs, targets: targets["tokens"], [(None, {"tokens": 3}), (None, {"tokens": 1})])
    [0.75, 0.25]
    """
    counts = _count_units(weight, units, slices)
    here = sum(counts)
    if total is None and not here:
        raise InputError(
            f"weight: got 0 for each of the {len(counts) // slices} microbatches, expected a positive one. Skip this "
            "batch on every rank."
        )
    if total is None:
        return [count / here for count in counts]
    require_total(total, here)
    return [count / total for count in counts]


def count_weight(weight: Weight, units: Iterable[tuple[Any, Any]], slices: int = 1) -> float:
    """Return the weight of all these microbatches, or slices; raise `InputError` if one is invalid."""
    return sum(_count_units(weight, units, slices))


def require_total(total: object, here: float) -> None:
    """Raise `InputError` unless the total is a number, and at least the weight of the microbatches `here`."""
    if not isinstance(total, int | float) or isinstance(total, bool) or not 0 < total <= float_info.max:
        raise InputError(f"total: got {total!r}, expected a finite number above 0. {WHOLE}")
    if here > total * (1 + 1e-9):  # sums of fractions are rounded
        raise InputError(
            f"total: got {total:g}, expected at least {here:g}, the weight of the microbatches of this step alone. "
            f"{WHOLE}"
        )


def _count_units(weight: Weight, units: Iterable[tuple[Any, Any]], slices: int) -> list[float]:
    """Return the weight of each unit; wait for a device at most once for all those that it computes alike."""
    counts = [_weigh(weight, _name(i, slices), *given) for i, given in enumerate(units)]
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, count in enumerate(counts):
        if isinstance(count, Tensor):
            alike.setdefault((count.device, count.dtype), []).append(i)
    values = {i: count for i, count in enumerate(counts) if not isinstance(count, Tensor)}
    for some in alike.values():
        found = torch.stack([count for i in some if isinstance(count := counts[i], Tensor)]).tolist()
        values.update(zip(some, map(float, found), strict=True))
    for i, value in sorted(values.items()):
        if not (math.isfinite(value) and value >= 0):
            raise InputError(
                f"weight, {_name(i, slices)}: got {value}, expected a finite number, 0 or more. Return its number of "
                "rows or tokens."
            )
    return [values[i] for i in range(len(counts))]


def _name(unit: int, slices: int) -> str:
    i, k = divmod(unit, slices)
    return f"microbatch {i}" if slices == 1 else f"microbatch {i}, slice {k}"


def _weigh(weight: Weight, unit: str, inputs: Any, targets: Any) -> float | Tensor:
    """Return a unit's weight: a number, or a tensor without dimensions that is not read yet."""
    missing = [what for what, tree in (("inputs", inputs), ("targets", targets)) if tree is None]
    lacks = f"This rank was given no {' and no '.join(missing)}. " if missing else ""
    try:
        count = weight(inputs, targets)
        if type(count) is Tensor and not (count.is_meta or count.is_complex()):
            return count.detach().reshape(())
        return float(count.item() if isinstance(count, Tensor) else count)
    except Exception as error:
        raise InputError(
            f"weight, {unit}: got {type(error).__name__}: {error}, expected a number or a tensor with one "
            f"element. {lacks}Pass what the weight reads, with its values, on every rank that computes the loss."
        ) from error
