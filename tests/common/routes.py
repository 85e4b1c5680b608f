# SPDX-License-Identifier: Apache-2.0
"""Schedules whose microbatches take several routes, in turn or by another rule."""

from schedules import B, F, Placement, schedule, sum_replicas


def turned(ranks):
    """As many routes as ranks: each begins one rank later."""
    first, *others = (tuple((s + k) % ranks for s in range(ranks)) for k in range(ranks))
    return Placement(ranks, first, tuple(others))


def two_of_three(ranks):
    """Two of three microbatches go down the ranks, and one up."""
    down = tuple(range(ranks))
    return Placement(ranks, down, (down, down[::-1]))


def wandering(ranks):
    """The first and last stages stay where they are, and the ones between wander."""
    homes = [(0, *[(k + s) % ranks for s in range(ranks)], ranks - 1) for k in range(ranks)]
    return Placement(ranks, homes[0], tuple(homes[1:]))


def _fill_and_drain(place, rank, microbatches):
    mine = [(s, i) for i in range(microbatches) for s in range(place.stages) if place.home(s, i) == rank]
    yield from (F(s, i) for s, i in mine)
    yield from (B(s, i) for s, i in sorted(mine, key=lambda one: (one[1], -one[0])))
    yield from sum_replicas(rank, place, microbatches)


@schedule(placement=turned)
def in_turn(rank: int, ranks: int, microbatches: int):
    """Fill and drain, on as many routes as ranks."""
    yield from _fill_and_drain(turned(ranks), rank, microbatches)


@schedule(placement=two_of_three)
def by_threes(rank: int, ranks: int, microbatches: int):
    """Fill and drain, by a rule other than in turn."""
    yield from _fill_and_drain(two_of_three(ranks), rank, microbatches)


@schedule(placement=wandering)
def between(rank: int, ranks: int, microbatches: int):
    """Fill and drain, where some stages have one home and others several."""
    yield from _fill_and_drain(wandering(ranks), rank, microbatches)


SEVERAL_ROUTES = (by_threes, in_turn, between)
