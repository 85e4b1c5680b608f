# SPDX-License-Identifier: Apache-2.0
"""A run whose ranks are killed at any moment, saving included, ends with the bits of one that nobody disturbed."""

import json
import sys
from collections import Counter

import pytest

from tests.common.processes import finish
from tests.common.sizes import by_night
from tests.distributed import comeback

BY_DAY, FEW = 12957, 3  # a case, and its kills
DRAWN = 20


def come_back(folder, seed, cases, kills):
    """Run cases; return what has happened in all of them, and what is wrong, by case."""
    code = finish((comeback.__file__, folder, seed, cases, kills), folder / "log")
    assert not code, (folder / "log").read_text()
    outcomes = json.loads((folder / "outcomes.json").read_text())
    counts = sum((comeback.count(one["events"]) for one in outcomes), Counter())
    return counts, {one["seed"]: one["wrong"] for one in outcomes if one["wrong"]}


def test_a_run_that_is_killed_ends_as_if_it_had_not_been(tmp_path):
    counts, wrong = come_back(tmp_path, BY_DAY, 1, FEW)
    assert not wrong
    assert counts["killed"] == FEW
    assert counts["killed while saving"]
    assert counts["damaged"]
    assert counts["other ranks"]
    assert counts["other schedule"]


@by_night
@pytest.mark.parametrize("seed", [0, 1000])
def test_killed_at_any_moments(tmp_path, seed):
    """Four hundred kills."""
    counts, wrong = come_back(tmp_path, seed, DRAWN, comeback.KILLS)
    print(*counts.items(), sep="\n", file=sys.stderr)
    assert not wrong
    assert counts["killed"] >= 200
