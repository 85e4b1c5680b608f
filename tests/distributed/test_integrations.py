# SPDX-License-Identifier: Apache-2.0
"""Accelerate, Lightning and the Trainer of transformers train a drop-in module on two ranks with the bits of one
device."""

from pathlib import Path

import pytest

from tests.common.processes import run_under_torchrun

WORKER = Path(__file__).parent / "integration_worker.py"


@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_two_ranks_train_as_one_device(library, tmp_path):
    code, out, err = run_under_torchrun(WORKER, library, tmp_path)
    assert code == 0, err[-3000:]
    assert out.count("passed") == 2
