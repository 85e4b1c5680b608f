# SPDX-License-Identifier: Apache-2.0
"""The text that `print` shows for schedules and programs: a generic function that `schedules.drawing` extends.

Printing needs a simulation, which this room must not import.
"""

from functools import singledispatch


@singledispatch
def picture(value: object) -> str:
    """Return the text that `print(value)` shows."""
    return repr(value)
