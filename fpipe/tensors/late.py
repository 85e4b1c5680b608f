# SPDX-License-Identifier: Apache-2.0
"""Classes of torch whose packages fpipe does not import until a capture needs them.

Problem. `torch.distributed.tensor` takes .7 s to import, and a process that never captures has no use for it.

Idea. If nobody has imported the package of a class, no object can be an instance of the class.

Runs when fpipe checks its arguments, and in every step.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def find_imported(module: str, name: str) -> Any:
    """Return the class `name` of a module if somebody has imported it; else `()`, of which nothing is an instance."""
    return getattr(sys.modules.get(module), name, ())


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Return whether a value is a DTensor."""
    return isinstance(value, find_imported("torch.distributed.tensor", "DTensor"))
