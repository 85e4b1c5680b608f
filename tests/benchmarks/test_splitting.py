# SPDX-License-Identifier: Apache-2.0
"""The benchmark of split backwards runs, and counts what it says: it reads what a stage keeps between the halves."""

import torch
from torch import nn

from benchmarks.splitting import least, measure


def test_it_counts_the_bytes_that_are_kept():
    layers, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    found = measure(layers, x, rounds=1)
    assert {name: kept for name, (_, kept) in found.items()} == dict.fromkeys(found, least(layers, x))
