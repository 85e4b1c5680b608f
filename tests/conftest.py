# SPDX-License-Identifier: Apache-2.0
"""One thread, so that sums are made in one order; and how long Hypothesis looks."""

import os
import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "distributed")]

torch.set_num_threads(1)

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("quick", deadline=None, max_examples=100, suppress_health_check=SLOW)
settings.register_profile("nightly", deadline=None, max_examples=3000, suppress_health_check=SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
