# SPDX-License-Identifier: Apache-2.0
"""Real processes over Gloo compute what one process computes, bit for bit, and fail clearly.

One job per number of ranks runs all cases of `tests/distributed/cases`; here every case is a test.
"""

import json
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch

from fpipe.tensors.tree import same_bits
from tests.common.processes import TORCHRUN, finish, finish_ranks, once
from tests.common.running import build, run
from tests.common.schedules import SCHEDULES
from tests.common.zoo import ZOO
from tests.distributed import worker


class Job:
    """The reports of all ranks."""

    def __init__(self, size, folder, codes, printed):
        self.folder, self.codes, self.printed = Path(folder), codes, printed
        paths = [self.folder / f"{rank}.json" for rank in range(size)]
        self.reports = [json.loads(path.read_text()) if path.exists() else {} for path in paths]

    def require(self, name):
        for rank, report in enumerate(self.reports):
            found = report.get(name, f"did not run; the job ended with\n{self.ending()}")
            assert found.startswith("passed"), f"rank {rank}: {found}"

    def ending(self):
        failed = [
            f"{name}, rank {rank}: {text}" for rank, report in enumerate(self.reports) for name, text in report.items()
        ]
        failed = [text for text in failed if ": passed" not in text]
        return "\n".join([*failed, *(text[-3000:] for text in self.printed)])


def start_by_torchrun(size, folder):
    """Start the ranks as users do."""
    code = finish((*shlex.split(TORCHRUN.format(size, 0)), worker.__file__, folder), folder / "log")
    return size, str(folder), [code], [(folder / "log").read_text()]


def start_by_hand(size, folder):
    return size, str(folder), *finish_ranks(worker, size, folder, size, folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """All cases on two ranks."""
    return Job(*once(tmp_path_factory, "two", partial(start_by_torchrun, 2)))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """All cases on four ranks."""
    return Job(*once(tmp_path_factory, "four", partial(start_by_hand, 4)))


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """The cases that need eight ranks."""
    return Job(*once(tmp_path_factory, "eight", partial(start_by_hand, 8)))


@pytest.mark.parametrize("name", worker.names(2))
def test_two_ranks_pass(two, name):
    two.require(name)


@pytest.mark.parametrize("name", worker.names(4))
def test_four_ranks_pass(four, name):
    four.require(name)


@pytest.mark.parametrize("name", worker.names(8))
def test_eight_ranks_pass(eight, name):
    eight.require(name)


def test_jobs_exit_with_code_zero(two, four, eight):
    assert (two.codes, four.codes, eight.codes) == ([0], [0] * 4, [0] * 8), "\n".join(two.printed + four.printed)


def test_dropout_is_the_same_on_one_process_two_and_four(two, four):
    """Ranks, cuts, schedule and transport: none of them changes a bit."""
    alone = run(*build(ZOO["dropping"], SCHEDULES["gpipe"](ranks=1, microbatches=4), 8), seed=5)
    for size, job in ((2, two), (4, four)):
        found = {}
        for rank in range(size):
            grads, loss = torch.load(job.folder / f"dropping-{size}-{rank}.pt")
            assert same_bits(loss, alone.loss)
            found |= grads
        assert found.keys() == alone.grads.keys()
        assert all(same_bits(found[name], alone.grads[name]) for name in found)


def test_a_killed_peer_makes_the_others_fail(tmp_path):
    """One rank ends in the middle of a step: none of the others hangs, all fail."""
    codes, printed = finish_ranks(worker, 4, tmp_path, 4, tmp_path, "dies_in_the_middle")
    assert codes[2] == 7
    assert [codes[rank] for rank in (0, 1, 3)] == [1, 1, 1], "\n".join(printed)
    assert all("failed at once" in printed[rank] for rank in (0, 1, 3)), "\n".join(printed)
