# SPDX-License-Identifier: Apache-2.0
"""Cut a phase into blocks, where it repeats itself, so that a compiler gets each kind of block once.

Problem. A phase of twenty equal layers has a thousand operators, and a compiler takes as long for them as for a
thousand different ones.

Idea. Equal layers call the same operators in the same order, so the phase has a period. It is cut into a beginning, its
repetitions, and an end, where the fewest values cross. Each of these blocks is a phase by itself; whose form two of
them share is decided by the graph (`fpipe.stages.graph.form`).

Invariant: the blocks together run the nodes of the phase, in their order.

Runs when a plan is made, if stages are compiled.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Final

from fpipe.stages.graph.form import code_of
from fpipe.stages.graph.joint import Node
from fpipe.stages.graph.phases import Phase

LEAST: Final = 8
"""The least number of operators in a block: calling a smaller one takes as long as running it."""
TRIED: Final = 8
"""The number of periods that are tried, the most frequent distances between equal operators first."""


def cut_blocks(phase: Phase) -> list[Phase]:
    """Return the blocks of a phase, each with one group of arguments and one of results; just one if nothing repeats.

    A phase that writes in place is one block: what is written may be read through a view in another.
    """
    ends = [] if any(node.writes for node in phase.nodes) else _find_ends(phase)
    bounds = [*dict.fromkeys((0, *ends, len(phase.nodes)))]
    given, last = {*phase.inputs, *phase.nodes}, _last_uses(phase)
    outputs, blocks = {*phase.outputs}, list[Phase]()
    for start, stop in pairwise(bounds):
        nodes = phase.nodes[start:stop]
        made = {*nodes}
        takes = dict.fromkeys(one for node in nodes for one in node.reads if one in given and one not in made)
        gives = [node for node in nodes if node in outputs or last.get(node, 0) >= stop]
        blocks.append(Phase(nodes, (tuple(takes),), (tuple(gives),), ()))
    return blocks


def _last_uses(phase: Phase) -> dict[Node, int]:
    """Return the position at which each node is read last."""
    return {one: k for k, node in enumerate(phase.nodes) for one in node.reads}


def _find_ends(phase: Phase) -> list[int]:
    """Return the positions at which the repetitions of a phase begin, and where the last one ends; none without any."""
    start, period, run = _find_period([*map(code_of, phase.nodes)])
    if not period:
        return []
    crossing, closed = _crossings(phase)
    choices = list[tuple[int, int, int]]()
    for first in range(start, start + period):
        count = (start + run - first) // period
        ends = range(first, first + count * period + 1, period)
        if count > 1 and not any(closed[end] for end in ends):
            choices.append((crossing[first], -count, first))
    if not choices:
        return []
    _, count, first = min(choices)
    return [*range(first, first - count * period + 1, period)]


def _find_period(codes: Sequence[Hashable]) -> tuple[int, int, int]:
    """Return where the longest repetition starts, its period, and its length; a period of 0 if there is none."""
    places = defaultdict[Hashable, list[int]](list)
    for k, code in enumerate(codes):
        places[code].append(k)
    distances = Counter(b - a for some in places.values() for a, b in pairwise(some) if b - a >= LEAST)
    found = 0, 0, 0
    for period, _ in distances.most_common(TRIED):
        same = 0
        for k in range(len(codes) - period):
            same = same + 1 if codes[k] == codes[k + period] else 0
            if same >= period and same + period > found[2]:
                found = k + 1 - same, period, same + period
    return found


def _crossings(phase: Phase) -> tuple[list[int], list[bool]]:
    """Return, per position, how many values cross it, and whether one does that is not a tensor."""
    last, count = _last_uses(phase), len(phase.nodes)
    crossing, closed = [0] * (count + 1), [False] * (count + 1)
    for made, node in enumerate(phase.nodes):
        for k in range(made + 1, last.get(node, 0) + 1):
            crossing[k] += 1
            closed[k] |= node.value is None
    return crossing, closed
