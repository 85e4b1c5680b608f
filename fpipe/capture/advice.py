# SPDX-License-Identifier: Apache-2.0
"""What to do about a forward that asks for values which fake tensors do not have."""

from __future__ import annotations

import re
from collections.abc import Collection


def on_values(where: str, unsplittable: Collection[str] = ()) -> str:
    """Return the repair for what happens `where` (see `fpipe.capture.guards.places`), given what is `unsplittable`."""
    if re.match(r"module \S+ \(", where) is None:
        return "Take control flow and shapes that depend on data out of the loss, which no name in unsplittable keeps."
    path = where.split(" ")[1]
    if any(f"{path}.".startswith(f"{name or '(root)'}.") for name in unsplittable):
        return (
            "It runs as it is already, as unsplittable says, and may ask for values there, but shapes may not follow "
            "from them: take shapes that depend on data out of it."
        )
    outside = "Take control flow and shapes that depend on data out of the model; or, if shapes do not depend on it, "
    if path == "(root)":
        return (
            f"{outside}put that part into a module of its own, and name this in unsplittable: the model itself cannot "
            "be, since it is to be split."
        )
    return f"{outside}name the module in unsplittable, and it runs as it is."
