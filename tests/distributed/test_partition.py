# SPDX-License-Identifier: Apache-2.0
"""Two ranks with a cable between them: one that is pulled is an error on both, and one that only loosens is nothing."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.common.sizes import by_night

WORKER = Path(__file__).with_name("partition_worker.py")
PATIENCE = 60.0  # seconds until both have started, and until both have ended


def ip(words):
    return subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False).returncode == 0


@pytest.fixture
def rooms():
    """The names of two network namespaces with a cable between them."""
    names = [f"fpipe{os.getpid()}x{k}" for k in range(2)]
    try:
        made = [ip(f"netns add {name}") for name in names]
        made.append(ip(f"link add cable0 netns {names[0]} type veth peer name cable1 netns {names[1]}"))
        for k, name in enumerate(names):
            made += [
                ip(f"-n {name} {words}") for words in (f"addr add 10.99.0.{k + 1}/24 dev cable{k}", "link set lo up")
            ]
            made.append(ip(f"-n {name} link set cable{k} up"))
        if not all(made):
            pytest.skip("no network namespaces here: they need root, and iproute2")
        yield names
    finally:
        for name in names:
            ip(f"netns del {name}")


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
def test_a_cable_that_is_pulled_is_an_error_on_both_ranks(rooms, tmp_path):
    ranks = start(rooms, PATIENCE, tmp_path)
    assert ip(f"-n {rooms[0]} link set cable0 down")
    first, second = outputs(ranks)
    assert first.startswith("RankError after "), first
    assert "The first failure: rank 1" in first
    assert "no sign of life from it since, within the timeout of 6 s" in first
    assert second.startswith("RankError after "), second
    assert "The first failure: rank 0, which holds the store" in second


@by_night
def test_a_cable_that_loosens_for_a_second_changes_nothing(rooms, tmp_path):
    ranks = start(rooms, 5.0, tmp_path)
    assert ip(f"-n {rooms[0]} link set cable0 down")
    time.sleep(1.0)
    assert ip(f"-n {rooms[0]} link set cable0 up")
    first, second = outputs(ranks)
    assert first.strip() == "done"
    assert second.startswith("RankError after "), second  # the first has left
