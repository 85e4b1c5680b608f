# SPDX-License-Identifier: Apache-2.0
"""Let Python's garbage collector rest while a model is captured.

A capture makes hundreds of thousands of objects, most of which stay. They make the collector walk all objects of the
process again and again, for a tenth of the time or more, and find nothing.

Runs when a plan is made: once per kind of batch.
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
