# SPDX-License-Identifier: Apache-2.0
"""Four real processes train as one does, bit for bit, in pipelines of two and of four, and refuse together."""

from tests.common.processes import finish_workers
from tests.distributed import training_worker


def test_four_processes_train_as_one_does(tmp_path):
    finish_workers(training_worker, 4, tmp_path)
