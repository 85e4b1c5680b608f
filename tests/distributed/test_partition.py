# SPDX-License-Identifier: Apache-2.0
"""Two ranks with a cable between them: pulled, it is an error on both; loose, slow or lossy, it changes nothing."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.common.cable import Cable
from tests.common.sizes import by_night

WORKER = Path(__file__).with_name("partition_worker.py")
PATIENCE = 60.0  # seconds until both have started, and until both have ended


@contextlib.contextmanager
def plugged(**how):
    try:
        cable = Cable(**how).__enter__()
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    with contextlib.ExitStack() as stack:
        stack.push(cable)
        yield cable


def start(rooms, seconds, folder):
    """Start both ranks; return once they run."""
    job = {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": "29571", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(WORKER.parents[2]), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", room, sys.executable, WORKER, str(rank), str(seconds), folder],
            env={**os.environ, **job, "RANK": str(rank), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, room in enumerate(rooms)
    ]
    end = time.monotonic() + PATIENCE
    while not all((folder / f"started{rank}").exists() for rank in range(2)):
        assert time.monotonic() < end
        time.sleep(0.1)
    return ranks


def outputs(ranks):
    try:
        return [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@by_night
def test_a_cable_that_is_pulled_is_an_error_on_both_ranks(tmp_path):
    with plugged() as cable:
        ranks = start(cable.rooms, PATIENCE, tmp_path)
        cable.pulled = True
        first, second = outputs(ranks)
    assert first.startswith("RankError after "), first
    assert "The first failure: rank 1" in first
    assert "no sign of life from it since, within the timeout of 6 s" in first
    assert second.startswith("RankError after "), second
    assert "The first failure: rank 0, which holds the store" in second


@by_night
def test_a_cable_that_loosens_for_a_second_changes_nothing(tmp_path):
    with plugged() as cable:
        ranks = start(cable.rooms, 5.0, tmp_path)
        cable.pulled = True
        time.sleep(1.0)
        cable.pulled = False
        first, second = outputs(ranks)
    assert first.strip() == "done"
    assert second.startswith("RankError after "), second  # the first has left


@by_night
@pytest.mark.parametrize(("delay", "loss"), [(0.05, 0.0), (0.2, 0.0), (0.0, 0.01), (0.02, 0.02)])
def test_a_cable_that_is_slow_or_loses_packets_changes_nothing(tmp_path, delay, loss):
    with plugged(delay=delay, loss=loss) as cable:
        first, second = outputs(start(cable.rooms, 5.0, tmp_path))
    assert first.strip() == "done"
    assert second.startswith("RankError after "), second  # the first has left
