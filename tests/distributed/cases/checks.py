# SPDX-License-Identifier: Apache-2.0
"""The registry of cases, and the checks that they share: exact results over all ranks together, and errors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import torch.distributed as dist

from schedules import Schedule
from tests.common.comparison import Result, assert_same
from tests.common.loops import loop
from tests.common.running import FRONT_END, build, run, run_reference
from tests.common.sizes import NIGHTLY
from tests.common.zoo import ZOO


class Case(NamedTuple):
    """A function of (rank, size) that all ranks of a job call together, and the sizes of the jobs that run it."""

    run: Callable[[int, int], object]
    by_night: Collection[int]
    by_day: Collection[int]


CASES: dict[str, Case] = {}
LAST = "after_the_group_is_gone"


def case(function=None, *, sizes: Collection[int] = (2, 4), day: Collection[int] | None = None, name: str = ""):
    """Add a function to `CASES` under its name; `sizes` are those of the jobs that run it by night.

    By day, it runs on two ranks, or on `day` if a rank in the middle could go wrong, or if it takes long.
    """
    if function is None:
        return partial(case, sizes=sizes, day=day, name=name)
    name, by_day = name or function.__name__, day if day is not None else [2] if 2 in sizes else sizes
    assert name not in CASES, f"two cases are called {name}"
    CASES[name] = Case(function, sizes, by_day)
    return function


def names(size: int) -> list[str]:
    """Return the names of the cases that one job of this size runs now, in order."""
    chosen = [name for name, one in CASES.items() if size in (one.by_night if NIGHTLY else one.by_day)]
    return sorted(chosen, key=lambda name: (name == LAST, name))


def gather(value):
    """Return the values that all ranks pass, on every rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def raises(error: type[Exception], *words: str) -> _Raises:
    """Require that the block raises this error, with these words in its message; `text` is the message."""
    return _Raises(error, words)


class _Raises:
    """A block that must raise this error, with these words in its message."""

    def __init__(self, error, words):
        self.error, self.words = error, words

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        assert kind is not None, f"nothing raised, expected {self.error.__name__}"
        if not issubclass(kind, self.error):
            return False
        self.text = str(value)
        missing = [word for word in self.words if word not in str(value)]
        assert not missing, f"{missing} are not in: {value}"
        return True


def require_whole(got: Result, want: Result, rank: int, size: int) -> None:
    """Require that this rank's part equals the whole's, and that all ranks together have the whole."""
    last = rank == size - 1
    mine = want._replace(
        outputs=want.outputs if last else None,
        grads={name: grad for name, grad in want.grads.items() if name in got.grads},
        buffers={name: buffer for name, buffer in want.buffers.items() if name in got.buffers},
    )
    assert_same(got, mine)
    names = gather((list(got.grads), list(got.buffers)))
    assert {name for grads, _ in names for name in grads} == set(want.grads)
    assert {name for _, buffers in names for name in buffers} == set(want.buffers)


def require_exact_across_ranks(
    name: str, how: Schedule, rank: int, size: int, capture: str = FRONT_END, order=None, **options: str
) -> Result:
    """Require that one step of a model of the zoo over all ranks equals one device."""
    one = ZOO[name]
    seed = 5 if one.random else None
    pipe, model, inputs, targets = build(one, how, 2 * how.microbatches, capture=capture, **options)
    got = run(pipe, model, inputs, targets, seed=seed)
    # Outputs are on the last rank; in a vee, on the first; where stages have replicas, on both.
    turned = size - 1 if rank in how.placement.replicas(how.stages - 1) else 0
    require_whole(got, run_reference(pipe, model, inputs, targets, seed=seed), turned, size)
    if not one.random and not how.placement.mirrors and options.get("tied", "exact") == "exact":
        require_whole(got, loop(model, one.loss, inputs, targets, how.microbatches, order), turned, size)
    return got
