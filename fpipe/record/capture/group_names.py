# SPDX-License-Identifier: Apache-2.0
"""Process groups among the arguments of a captured collective.

Problem. torch's functional collectives take the name of a process group. Ranks compare what their models do, but a
group over another dimension of the mesh has another name on each of them.

Idea. A description says how many processes the group has.

Runs when a pipeline is built, and when a plan is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from fpipe.tensors.torch_private import process_groups


def hide_group_names(function: Any, arguments: Iterable[Any]) -> list[Any]:
    """Return the arguments of a call that a description shows: for process groups of collectives, their sizes."""
    if not dist.is_available() or "c10d_functional" not in str(getattr(function, "__module__", "")):
        return [*arguments]
    sizes = {group.group_name: group.size() for group in process_groups()}
    return [f"group of {sizes[one]}" if isinstance(one, str) and one in sizes else one for one in arguments]
