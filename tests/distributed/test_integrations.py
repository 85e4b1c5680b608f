# SPDX-License-Identifier: Apache-2.0
"""Accelerate, Lightning and the Trainer of transformers train a drop-in module on two ranks with the bits of one
device."""

from pathlib import Path

import pytest

from tests.common.processes import run_under_torchrun
from tests.common.sizes import by_night

WORKER = Path(__file__).parent / "integration_worker.py"


@pytest.mark.parametrize("library", [pytest.param("accelerate", marks=by_night), "lightning", "transformers"])
def test_two_ranks_train_as_one_device(library, tmp_path):
    """The Trainer of transformers runs on Accelerate, so by day that need not be tried alone."""
    code, out, err = run_under_torchrun(WORKER, library, tmp_path)
    assert code == 0, err[-3000:]
    assert out.count("passed") == 2
