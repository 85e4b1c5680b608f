# SPDX-License-Identifier: Apache-2.0
"""One thread, so that sums are made in one order; and how long Hypothesis looks."""

import gc
import os
import sys

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from tests.common.sizes import drop_by_day

torch.set_num_threads(1)
if "TEST_DEVICE" in os.environ:  # tests in one process make models and batches there
    torch.set_default_device(os.environ["TEST_DEVICE"])
    torch.use_deterministic_algorithms(True)

with torch.device(
    "cpu"
):  # torch now lists what such a block changes; while it loads a model, transformers replaces some
    torch.empty(0)

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
PHASES = [phase for phase in Phase if phase is not Phase.explain]  # which traces every line, and explains little
EVERYWHERE = settings(deadline=None, suppress_health_check=SLOW, phases=PHASES)
settings.register_profile("quick", EVERYWHERE, max_examples=10)
settings.register_profile("nightly", EVERYWHERE, max_examples=1500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what runs by night only to the night."""
    dropped = drop_by_day(items)
    config.hook.pytest_deselected(items=dropped)
    left = {*dropped}
    items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """Collect garbage less often, and leave out all that has been imported: each collection would walk it again."""
    if "fpipe" in sys.modules:
        from fpipe.tensors.torch_private import import_tracer

        import_tracer()
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000)  # a test makes many objects that last as long as it does
