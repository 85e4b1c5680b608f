# SPDX-License-Identifier: Apache-2.0
"""Drawn models, pipelines and faults with real processes: runs end as on one device, or name where a fault struck."""

import json
import sys
from collections import Counter

import pytest

from tests.common.processes import finish
from tests.common.sizes import by_night
from tests.distributed import drawn_runs

BY_DAY, FEW = 3, 2  # an interrupt, and an exception after which the run comes back
DRAWN = 250


def run(folder, seed, cases):
    """Run cases in one process that forks their ranks, and return their outcomes."""
    code = finish((drawn_runs.__file__, folder, seed, cases), folder / "log", limit=5 * drawn_runs.LIMIT * cases)
    assert not code, (folder / "log").read_text()
    return json.loads((folder / "outcomes.json").read_text())


def test_drawn_runs_end_as_on_one_device_or_name_the_fault(tmp_path):
    found = run(tmp_path, BY_DAY, FEW)
    assert [one["struck"] for one in found] == [["interrupt"], ["raise"]]
    assert not [one for one in found if one["wrong"]]


@by_night
@pytest.mark.parametrize("seed", range(10_000, 10_000 + 4 * DRAWN, DRAWN))
def test_a_thousand_drawn_runs(tmp_path, seed):
    """Each quarter in a process of its own."""
    found = run(tmp_path, seed, DRAWN)
    struck = Counter(kind for one in found for kind in one["struck"])
    print(Counter(one["ended"] for one in found), struck, file=sys.stderr)
    assert len(found) == DRAWN
    assert not [one for one in found if one["wrong"]]
    assert struck.total() > DRAWN // 4
