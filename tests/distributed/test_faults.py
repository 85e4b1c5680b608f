# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to one rank, none hangs, and all others name it."""

import json
import re
import sys

import pytest

from tests.common.processes import finish
from tests.common.sizes import NIGHTLY, by_night
from tests.distributed import drill

BY_DAY = [
    "kill-stage-one_f_one_b-4-2-3-1-file",
    "kill-action-gpipe-2-0-2-1-tcp",
    "raise-loss-zb_h1-4-3-2-1-tcp",
    "stop-hook-one_f_one_b-2-0-2-0-file",
    "exit-join-one_f_one_b-2-1-1-1-file",
    "interrupt-hook-zb_v-2-0-3-1-file",
    "recover-stage-interleaved_1f1b-2-1-3-1-file",
    "control_c-action-one_f_one_b-2-1-1-1-file",
    "kill-start-gpipe-4-2-1-0-file",
    "kill-build-one_f_one_b-4-2-2-0-file",
    "kill-group-one_f_one_b-4-2-2-0-tcp",
    "raise-group-replicated-4-2-2-0-tcp",
    "recover-group-one_f_one_b-4-1-2-0-tcp",
    "kill-clock-one_f_one_b-4-2-5-0-file",
]
BY_NIGHT = [
    "less-action-gpipe-2-0-1-2-file",
    "raise-build-one_f_one_b-4-1-1-0-file",
    "interrupt-group-one_f_one_b-4-3-4-0-file",
]
DRILLS = [*BY_DAY, *(BY_NIGHT if NIGHTLY else ())]
DRAWN = 200


def run(folder, *drills):
    """Run drills in one process, and return their outcomes."""
    code = finish((drill.__file__, folder, *drills), folder / "log", limit=drill.LIMIT * 5 * DRAWN)
    assert not code, (folder / "log").read_text()
    return json.loads((folder / "outcomes.json").read_text())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    found = run(tmp_path_factory.mktemp("drills"), *DRILLS)
    return {one["drill"]: one for one in found}


@pytest.mark.parametrize("name", DRILLS)
def test_all_others_name_the_rank_that_failed(outcomes, name):
    assert not outcomes[name]["wrong"]


def test_an_error_says_where_it_was_raised_and_what_was_awaited(outcomes):
    said = outcomes["kill-stage-one_f_one_b-4-2-3-1-file"]["said"]
    form = r"rank 3, a step \(call 4\), position \d+, 3F(\d): got no 2SEND_F\1>3 from rank 2, expected it\. "
    assert re.match(form + r"The first failure: rank 2, before \d\S+: it died, or left", said[3]["said"])
    said = outcomes["raise-loss-zb_h1-4-3-2-1-tcp"]["said"]
    assert said[3]["kind"] == "PlannedError"
    assert said[3]["notes"] == [f"rank 3, {said[0]['cause'][1]}: the first failure; the other ranks were told"]
    assert all(one["cause"] == [3, said[0]["cause"][1], "PlannedError: on purpose"] for one in said[:3])
    assert said[0]["cause"][1].startswith("a step (call 4), position ")
    assert said[0]["cause"][1].endswith(", 3F1")


@by_night
@pytest.mark.parametrize("seed", range(5))
def test_drawn_faults_are_named(tmp_path, seed):
    """Of a thousand, 99 in 100 name the culprit, and none hangs."""
    found = run(tmp_path, seed, DRAWN)
    assert len(found) == DRAWN
    wrong = [f"{one['drill']}: {one['wrong']}" for one in found if one["wrong"]]
    print(f"{DRAWN - len(wrong)} of {DRAWN} named", *wrong, sep="\n", file=sys.stderr)
    assert not any(one["seconds"] >= drill.LIMIT for one in found), wrong
    assert len(wrong) <= DRAWN // 100, wrong
