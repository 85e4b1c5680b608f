# SPDX-License-Identifier: Apache-2.0
"""Random numbers that follow from a seed, on the device on which the tests run."""

import torch


def seeded(seed: int) -> torch.Generator:
    """Return a generator of the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
