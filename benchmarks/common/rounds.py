# SPDX-License-Identifier: Apache-2.0
"""How often to measure: as often as a figure needs to be steady, or, for a first look, a fraction of that.

`python -m benchmarks --quick` runs every benchmark with fewer rounds. Its figures are rough, and are not written to the
page.
"""

from __future__ import annotations

import os
from typing import Final

QUICK: Final = "BENCHMARKS_QUICK"
"""The variable of the environment that is set to run fewer rounds."""
SHARE: Final = 8


def rounds(full: int) -> int:
    """Return how often to measure what takes `full` rounds for the page.

    >>> os.environ.pop(QUICK, None)
    >>> rounds(20)
    20
    """
    return max(1, full // SHARE) if os.environ.get(QUICK) else full
