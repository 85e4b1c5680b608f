# SPDX-License-Identifier: Apache-2.0
"""The garbage collector, off while much is made that stays.

Problem. An import and a capture make hundreds of thousands of objects, most of which stay. They make the collector walk
all objects of the process again and again, torch's among them, for a tenth of the time or more, and find nothing.

Invariant: the collector is as it was before, whatever happens meanwhile.

Runs when fpipe is imported, at build time and on request.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def postpone_collection() -> Iterator[None]:
    """Turn the garbage collector off inside, for all threads; leave it off if it was off before.

    >>> with postpone_collection():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
