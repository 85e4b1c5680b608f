# SPDX-License-Identifier: Apache-2.0
"""Update each stage's weights inside the step, as soon as their gradient is complete.

Problem. An optimizer that runs after the step leaves ranks idle while the pipeline drains, and then makes all of them
wait for the one with the most to update.

Idea. Most stages have their complete gradient long before the step ends. Put the update there, as an action of the
schedule (arXiv 2401.10241, section 4): then it is checked, simulated and drawn like any other action.

Invariant: an update waits only for gradients, and no gradient waits for an update, so updates add no deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator

from schedules.errors import SizeError
from schedules.language.actions import KINDS, Action, U
from schedules.language.schedule import Schedule, completes_gradient, graph_of
from schedules.transforms.transform import KEPT, transform


@transform(limits=KEPT)
def update_weights(rank: int, schedule: Schedule) -> Iterator[Action]:
    """Update every stage once, right after its last weight gradient, or after the `G` that sums its replicas.

    A stage that uses a parameter of another stage waits for that one's gradient too, so its update goes to the end of
    the rank's actions, where nothing else has to wait with it. Which stages share parameters is known from the
    schedule's stage graph (`connect`). The same goes for a stage that is reduced (`reduce_gradients`): its update waits
    for the reduction. A schedule without backwards stays unchanged.

    Ranks that drain early update while the others still compute. The rank that finishes last cannot: a step is shorter
    than one with the updates at its end if that rank has less to update than another, as when the first stage is
    frozen, and just as long if all ranks have the same to do.

    Generating the actions raises `SizeError` if the schedule already has updates.

    >>> from schedules import Costs, drawing, interleaved_1f1b, simulate
    >>> s = interleaved_1f1b(ranks=2, microbatches=2, chunks=2)
    >>> print(drawing.text(update_weights(s), Costs(U=1)))
    rank 0 |0F0 0F1 2F0 2F1 .   .   2B0     .   2B1     2U1 0B0     0B1     0U1 |
    rank 1 |.   1F0 1F1 3F0 3B0     3F1 3B1     3U1 1B0     1B1     1U1 .   .   |
    """
    shared = {target for _, target in graph_of(schedule, None).gradients}
    reduced = {s for s in schedule.placement.stages_on(rank) if completes_gradient(schedule, s, rank) == "REDUCE_GRAD"}
    units = schedule.microbatches * schedule.slices
    left = dict.fromkeys(schedule.placement.stages_on(rank), units)  # weight gradients; never 0 for a replica
    late: list[Action] = []
    for action in schedule.actions(rank):
        kind, stage, i, _, _ = action
        if kind == "U":
            repair = "Pass the schedule without its updates."
            raise SizeError.of("update_weights", "schedule", schedule, "one that updates no weights", repair)
        yield action
        if KINDS[kind].after == "done" and schedule.backward:
            left[stage] -= 1
        if stage in reduced:
            complete = kind == "REDUCE_GRAD"
        else:
            complete = kind == "G" or (KINDS[kind].after == "done" and not left[stage])
        if not complete:
            continue
        update = U(stage, schedule.microbatches - 1 if KINDS[kind].after else i)
        if stage in shared or stage in reduced:
            late.append(update)
        else:
            yield update
    yield from late
