# SPDX-License-Identifier: Apache-2.0
"""Accelerate, Lightning and the Trainer of transformers train a drop-in module on two ranks with the bits of one
device."""

import doctest
import os

import pytest

from fpipe.integrations import options
from tests.common.processes import finish_ranks, once, run_under_torchrun
from tests.common.sizes import NIGHTLY, by_night
from tests.distributed import integration_worker, option_worker
from tests.distributed.integration_worker import RANKS

JOB = "tests.distributed.integration_job"  # which imports all libraries
BY_DAY = ("transformers",)
SEED, DRAWS = int(os.environ.get("OPTION_SEED", "0")), int(os.environ.get("OPTION_DRAWS", "6"))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A folder, and the exit codes and outputs of two ranks, and of the process that draws options.

    They import libraries together, and the ranks have the environment that torchrun gives to them.
    """

    def start(folder):
        return str(folder), *finish_ranks(JOB, RANKS + 1, folder, folder, SEED, DRAWS, *BY_DAY)

    return once(tmp_path_factory, "integrations", start)


@pytest.mark.parametrize("library", BY_DAY)
def test_two_ranks_train_as_one_device(library, job):
    _, (*codes, _), (*printed, _) = job
    assert [text.count(f"passed with {library}\n") for text in printed] == [1] * RANKS, "\n".join(printed)[-3000:]
    assert not any(codes)


@by_night
@pytest.mark.parametrize("library", integration_worker.LIBRARIES)
def test_two_ranks_train_as_one_device_under_torchrun(library, tmp_path):
    code, out, err = run_under_torchrun(integration_worker.__file__, tmp_path, library)
    assert code == 0, f"{out}\n{err}"[-3000:]
    assert out.count(f"passed with {library}") == 2


def test_drawn_options_are_honored_or_refused(job):
    """A script with a pipeline, and the plain script: equal, or refused before anything is trained."""
    folder, (*_, code), (*_, printed) = job
    assert code == 0, printed[-3000:]
    assert f"passed {DRAWS}: " in printed
    if NIGHTLY:
        code, out, err = run_under_torchrun(option_worker.__file__, folder, SEED, DRAWS)
        assert code == 0, f"{out}\n{err}"[-3000:]
        assert out.count(f"passed {DRAWS}: ") == 2


def test_the_example_of_a_table_runs():
    assert not doctest.testmod(options, optionflags=doctest.ELLIPSIS).failed
