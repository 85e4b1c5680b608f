# SPDX-License-Identifier: Apache-2.0
"""Every model of the zoo, by every front end that takes it."""

from __future__ import annotations

from collections.abc import Callable

from tests.common.schedules import SCHEDULES
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import require_exact_across_ranks
from tests.distributed.cases.registry import CASES


def step_of(name: str, front: str, kind: str) -> Callable[[int, int], None]:
    """Return the case that runs one step of a model of the zoo."""

    def check(rank, size):
        require_exact_across_ranks(name, SCHEDULES[kind](ranks=size, microbatches=4), rank, size, front)

    return check


for _k, (_name, _front) in enumerate((name, front) for name, one in ZOO.items() for front in one.fronts):
    _kind = ("one_f_one_b", "split_backward", "gpipe")[_k % 3]
    CASES[f"{_name}-{_front}-{_kind}"] = step_of(_name, _front, _kind)

for _name in ("skips", "chained"):
    for _kind in SCHEDULES:
        CASES[f"{_name}-export-{_kind}"] = step_of(_name, "export", _kind)
