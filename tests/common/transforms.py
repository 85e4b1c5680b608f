# SPDX-License-Identifier: Apache-2.0
"""Requirements on transforms that add one action per stage after its last gradient."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise

from schedules import (
    KINDS,
    Graph,
    Schedule,
    SizeError,
    chain,
    check,
    families,
    lower,
    merge_backward,
    mirror,
    overlap,
    recompute,
    split_backward,
)
from schedules.proof.interpreter import ideal, interpret, prove
from schedules.proof.networks import fifo
from tests.common.rows import rows

Transform = Callable[[Schedule], Schedule]

TRANSFORMS: list[Transform] = [split_backward, merge_backward, recompute, overlap, mirror]
FAMILIES = [getattr(families, name) for name in families.__all__ if not name.startswith("pipedream")]


def require_proved(s: Schedule, graph: Graph) -> None:
    """Require that a schedule and its program are correct."""
    check(s, graph)
    check(lower(s, graph))
    prove(s, graph)


def require_updates_of_the_whole_gradient(s: Schedule, graph: Graph) -> None:
    """Require that it is correct, and that every update applies the sum of all gradient terms, on every rank."""
    require_proved(s, graph)
    for meaning in (ideal(s, graph), interpret(lower(s, graph), fifo)):
        assert meaning.updates == (meaning.sums if s.backward else ((),) * s.stages)


def require_correct_among(
    added: Transform,
    require: Callable[[Schedule, Graph], None],
    s: Schedule,
    before: Sequence[Transform],
    after: Transform | None,
) -> None:
    """Require that `added` stays correct under other transforms before and after it."""
    for change in before:
        with suppress(SizeError):  # what cannot be mirrored
            s = change(s)
    s = added(s)
    require(s, chain(s.stages))
    if after not in (mirror, None):
        require(after(s), chain(s.stages))


def require_right_after_the_last_gradient(kind: str, added: Transform, s: Schedule) -> None:
    """Require that `added` only adds one action of this kind per stage, as soon as its gradient is whole."""
    for before, now in zip(rows(s), rows(added(s)), strict=True):
        assert [a for a in now if a.kind != kind] == before
        made = [(a, b) for a, b in pairwise(now) if b.kind == kind]
        assert len(made) == len({b.stage for _, b in made}) == len({a.stage for a in before if s.backward})
        assert all(a.stage == b.stage and (a.kind == "G" or KINDS[a.kind].after == "done") for a, b in made)
