# SPDX-License-Identifier: Apache-2.0
"""Accelerate, Lightning and the Trainer of transformers train a drop-in module on two ranks with the bits of one
device."""

import doctest
import os
import subprocess
import sys

import pytest

from fpipe.integrations import options
from tests.common.processes import ENVIRONMENT, finish_ranks, once, run_under_torchrun
from tests.common.sizes import NIGHTLY, by_night
from tests.distributed import integration_worker, option_worker

BY_DAY = ("transformers",)
SEED, DRAWS = int(os.environ.get("OPTION_SEED", "0")), int(os.environ.get("OPTION_DRAWS", "6"))


@pytest.mark.parametrize("library", BY_DAY)
def test_two_ranks_train_as_one_device(library, tmp_path_factory):

    def start(folder):
        """Start two ranks, which import torch together, with the environment that torchrun gives to them."""
        return finish_ranks(integration_worker, 2, folder, folder / "store", folder, *BY_DAY)

    codes, printed = once(tmp_path_factory, "integrations", start)
    assert "\n".join(printed).count(f"passed with {library}") == 2, "\n".join(printed)[-3000:]
    assert not any(codes)


@by_night
@pytest.mark.parametrize("library", integration_worker.LIBRARIES)
def test_two_ranks_train_as_one_device_under_torchrun(library, tmp_path):
    code, out, err = run_under_torchrun(integration_worker.__file__, tmp_path, library)
    assert code == 0, f"{out}\n{err}"[-3000:]
    assert out.count(f"passed with {library}") == 2


def test_drawn_options_are_honored_or_refused(tmp_path):
    """A script with a pipeline, and the plain script: equal, or refused before anything is trained."""
    command = [sys.executable, option_worker.__file__, tmp_path, SEED, DRAWS]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-3000:]
    assert f"passed {DRAWS}: " in done.stdout
    if NIGHTLY:
        code, out, err = run_under_torchrun(option_worker.__file__, tmp_path, SEED, DRAWS)
        assert code == 0, f"{out}\n{err}"[-3000:]
        assert out.count(f"passed {DRAWS}: ") == 2


def test_the_example_of_a_table_runs():
    assert not doctest.testmod(options, optionflags=doctest.ELLIPSIS).failed
