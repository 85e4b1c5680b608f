# SPDX-License-Identifier: Apache-2.0
"""Processes that train with other libraries: the ranks of `integration_worker`, and `option_worker` alone.

They are forks of one process, which imports the libraries: that takes longer than all that they train.
"""

from __future__ import annotations

import warnings
from importlib import import_module

import transformers

from tests.distributed import integration_worker, option_worker
from tests.distributed.integration_worker import RANKS

with warnings.catch_warnings(action="ignore"):  # libraries use what others deprecate
    for library in ("accelerate", "lightning", "transformers"):
        import_module(f"fpipe.integrations.{library}")
    transformers.GPT2LMHeadModel  # noqa: B018  (imports it)


def main(rank: int, folder: str, seed: str, draws: str, *libraries: str) -> None:
    """Be a rank, or, after the last, the process that draws options."""
    if rank < RANKS:
        integration_worker.main(rank, f"{folder}/store", folder, *libraries)
    else:
        warnings.resetwarnings()
        option_worker.main(folder, int(seed), int(draws))
