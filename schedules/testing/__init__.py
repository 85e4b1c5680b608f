# SPDX-License-Identifier: Apache-2.0
"""Property tests for schedules: strategies, and a whole suite in one line. Needs Hypothesis.

Problem. A schedule that works for 4 ranks and 8 microbatches may fail for 3 and 2, and nobody writes that test.

Idea. `conformance(factory)` is a test: Hypothesis searches for sizes, a stage graph and costs that break a property
every schedule must have, shrinks them, and draws the smallest failing schedule in the message.

    from schedules.testing import conformance
    test_mine = conformance(mine)
"""

from schedules.testing.collectives import collective_orders
from schedules.testing.mutants import mutants
from schedules.testing.orders import orders
from schedules.testing.strategies import costs, graphs, schedules, sizes
from schedules.testing.suite import conformance, require_bounds, require_matching_ends, require_round_trip
from schedules.testing.timing import require_same_times, time_program

__all__ = [
    "collective_orders",
    "conformance",
    "costs",
    "graphs",
    "mutants",
    "orders",
    "require_bounds",
    "require_matching_ends",
    "require_round_trip",
    "require_same_times",
    "schedules",
    "sizes",
    "time_program",
]
