# SPDX-License-Identifier: Apache-2.0
"""Advice to users whose forward fails on fake tensors, which have no values.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

import re
from collections.abc import Collection

LOSS = "loss"
"""The name of the loss in `unsplittable`."""


def advise_on_values(where: str, unsplittable: Collection[str] = ()) -> str:
    """Return the repair for a forward that reads values.

    `where`: the place of the error, as `fpipe.record.capture.places.module_place` writes it. `unsplittable`: names of
    modules that run as is.
    """
    if re.match(r"module \S+ \(", where) is None:
        where, loss = "module loss (loss)", "pass unsplittable=['loss'], and it runs as it is."
        out = "Take control flow and shapes that depend on data out of the loss; or, if shapes do not depend on it,"
        return advise_on_values(where, unsplittable) if LOSS in unsplittable else f"{out} {loss}"
    path = where.split(" ")[1]
    if any(f"{path}.".startswith(f"{name or '(root)'}.") for name in unsplittable):
        return (
            "It runs as it is already, as unsplittable says, and may ask for values there, but shapes may not follow "
            "from them: take shapes that depend on data out of it."
        )
    outside = "Take control flow and shapes that depend on data out of the model; or, if shapes do not depend on it, "
    if path == "(root)":
        return (
            f"{outside}put that part into a separate module, and name this in unsplittable: the model itself cannot "
            "be, since it is to be split."
        )
    return f"{outside}name the module in unsplittable, and it runs as it is."


def advise_on_errors() -> str:
    """Return the repair for an exception that missing values do not explain, such as a failed lookup."""
    return (
        "Call the model with the example: what it raises there too is its own. What it raises here only comes of "
        "looking up something of the original's, by id, in a closure or a global: reach that through self. Or of "
        "handing tensors to another library, which wants their values: do that before the step, and pass the result."
    )
