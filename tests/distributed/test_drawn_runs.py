# SPDX-License-Identifier: Apache-2.0
"""Drawn models, pipelines and faults with real processes: runs end as on one device, or name where a fault struck."""

import json
import sys
from collections import Counter
from itertools import count

import pytest

from tests.common.processes import finish
from tests.common.sizes import by_night
from tests.common.world.drawing import draw
from tests.distributed import drawn_runs

DRAWN = 250


def run(folder, seed, cases):
    """Run cases in one process that forks their ranks, and return their outcomes."""
    code = finish((drawn_runs.__file__, folder, seed, cases), folder / "log", limit=5 * drawn_runs.LIMIT * cases)
    assert not code, (folder / "log").read_text()
    return json.loads((folder / "outcomes.json").read_text())


def find_seeds():
    """Yield the cases in which an early action of one of two ranks raises, and that come back."""
    for seed in count(43):
        case = draw(seed)
        faults = [fault for run in case.runs for fault in run]
        drawn = [(one.kind, one.builds, one.count < 4) for one in faults]
        if case.setup.processes == 2 and drawn == [("raise", False, True)]:
            yield seed


@by_night
def test_a_drawn_run_names_the_fault_and_comes_back_to_end_as_on_one_device(tmp_path):
    ran = (found for seed in find_seeds() for found in run(tmp_path, seed, 1))
    found = next(one for one in ran if one["ended"] != "refused")
    assert (found["struck"], found["wrong"], found["runs"]) == (["raise"], "", 2)


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
