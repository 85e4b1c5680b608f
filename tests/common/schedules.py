# SPDX-License-Identifier: Apache-2.0
"""Small schedules that several tests run."""

from __future__ import annotations

from collections.abc import Callable

from schedules import B, F, Schedule, gpipe, linear, looped, one_f_one_b, schedule, split_backward, vee


def split_1f1b(ranks: int, microbatches: int) -> Schedule:
    return split_backward(one_f_one_b(ranks=ranks, microbatches=microbatches))


def _fill_drain(placement):
    def actions(rank, ranks, microbatches, chunks=2):
        stages = placement(ranks, chunks).stages_on(rank)
        yield from (F(s, i) for s in stages for i in range(microbatches))
        yield from (B(s, i) for s in reversed(stages) for i in range(microbatches))

    actions.__name__ = f"{placement.__name__}_fill_drain"
    return schedule(placement=placement)(actions)


linear_fill_drain, looped_fill_drain, vee_fill_drain = map(_fill_drain, (linear, looped, vee))


@schedule(placement=linear)
def descending(rank, ranks, microbatches):
    """Gradients are added in the order of the backwards, which is the reverse of the forwards here."""
    yield from (F(rank, i) for i in range(microbatches))
    yield from (B(rank, i) for i in reversed(range(microbatches)))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "split_backward": split_1f1b,
}
