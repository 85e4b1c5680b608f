# SPDX-License-Identifier: Apache-2.0
"""How schedules and programs print: an open function, for which `schedules.drawing` registers the pictures.

Printing needs a simulation, which is far above this room.
"""

from functools import singledispatch


@singledispatch
def picture(value: object) -> str:
    """Return the text that `print(value)` shows."""
    return repr(value)
