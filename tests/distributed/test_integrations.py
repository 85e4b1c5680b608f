# SPDX-License-Identifier: Apache-2.0
"""Accelerate, Lightning and the Trainer of transformers train a drop-in module on two ranks with the bits of one
device."""

import pytest

from tests.common.processes import finish_ranks, run_under_torchrun
from tests.common.sizes import by_day, by_night
from tests.distributed import integration_worker


def start_by_hand(library, folder):
    """Start two ranks, which import torch together, with the environment that torchrun gives to them."""
    codes, printed = finish_ranks(integration_worker, 2, folder, folder / "store", library, folder)
    return max(codes, key=abs), "\n".join(printed)


def start_by_torchrun(library, folder):
    code, out, err = run_under_torchrun(integration_worker.__file__, library, folder)
    return code, f"{out}\n{err}"


@pytest.mark.parametrize("start", by_day([start_by_hand, start_by_torchrun], 2))
@pytest.mark.parametrize("library", [pytest.param("accelerate", marks=by_night), "lightning", "transformers"])
def test_two_ranks_train_as_one_device(library, start, tmp_path):
    """The Trainer of transformers runs on Accelerate, so by day that need not be tried alone."""
    code, printed = start(library, tmp_path)
    assert code == 0, printed[-3000:]
    assert printed.count("passed") == 2
