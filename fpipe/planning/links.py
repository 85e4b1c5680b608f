# SPDX-License-Identifier: Apache-2.0
"""Fit latency and bandwidth to measured transfers.

A transfer takes `latency + bytes / bandwidth`, as `schedules.Link` assumes. Both are those of the median pair of ranks.
Pairs that take clearly longer or shorter are noted with the factor by which they do.

Runs when a model is profiled by several processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import exp, inf, log
from statistics import fmean, median
from typing import Final, TypeAlias

from torch import Tensor

from schedules import Link

MESSAGE_SIZES: Final = (2**10, 2**14, 2**18, 2**22)
UNLIKE: Final = 1.1
"""Two ranks whose transfers take this factor longer, or shorter, than those of the median pair are noted."""
Measurements: TypeAlias = Sequence[tuple[float, float]]
"""Bytes and seconds."""


def fit_link(rows: Tensor) -> Link:
    """Return the link for measured transfers: rows of sender, receiver, bytes and seconds. Without any, it is instant.

    >>> import torch
    >>> rows = [(0, 1, size, 2.0 + size / 8) for size in (8, 64)] + [(1, 0, size, 2.0 + size / 8) for size in (8, 64)]
    >>> link = fit_link(torch.tensor([*rows, (0, 2, 8, 9.0), (0, 2, 64, 30.0)]))
    >>> round(link.latency, 6), round(link.bandwidth, 6), [(ends, round(factor, 6)) for ends, factor in link.slow]
    (2.0, 8.0, [((0, 2), 3.0)])
    """
    pairs = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    for source, target, size, seconds in rows.tolist():
        pairs[int(source), int(target)].append((size, seconds))
    if not pairs:
        return Link()
    fits = [fit_line(transfers) for transfers in pairs.values()]
    latency, per_byte = (median(column) for column in zip(*fits, strict=True))
    usual = Link(latency, 1 / per_byte if per_byte else inf)
    factors = {ends: _factor(transfers, latency, per_byte) for ends, transfers in sorted(pairs.items())}
    slow = tuple((ends, one) for ends, one in factors.items() if max(one, 1 / one) > UNLIKE)
    return Link(usual.latency, usual.bandwidth, slow=slow)


def fit_line(transfers: Measurements) -> tuple[float, float]:
    """Return the latency and the seconds per byte with the least relative error; neither is negative.

    >>> [round(number, 6) for number in fit_line([(0, 3.0), (10, 8.0)])]
    [3.0, 0.5]
    >>> fit_line([(1, 1.0), (10, 0.5)])[1]
    0.0
    """
    weights = [1 / seconds**2 for _, seconds in transfers]
    total = sum(weights)
    size, time = (sum(w * one[k] for w, one in zip(weights, transfers, strict=True)) / total for k in (0, 1))
    spread = sum(w * (one[0] - size) ** 2 for w, one in zip(weights, transfers, strict=True))
    slope = sum(w * (one[0] - size) * (one[1] - time) for w, one in zip(weights, transfers, strict=True))
    per_byte = max(0.0, slope / spread) if spread else 0.0
    if time < per_byte * size:
        return 0.0, time / size
    return time - per_byte * size, per_byte


def _factor(transfers: Measurements, latency: float, per_byte: float) -> float:
    """Return by which factor transfers take longer than usual, in the geometric mean over sizes."""
    return exp(fmean(log(max(seconds, 1e-12) / max(latency + size * per_byte, 1e-12)) for size, seconds in transfers))
