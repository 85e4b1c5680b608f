# SPDX-License-Identifier: Apache-2.0
"""Options of a pipeline by the names of their fields, which many tests draw or vary one by one."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from inspect import signature
from typing import Any

import fpipe
from fpipe.pipelines.options import RENAMED


def grouped(given: Mapping[str, Any], function: Callable[..., Any] = fpipe.pipeline) -> dict[str, Any]:
    """Return keywords for a function, with fields of its options in those."""
    own = {name: one.default for name, one in signature(function).parameters.items()}
    kinds = {name: value for name, value in own.items() if is_dataclass(value)}
    homes = {field.name: name for name, value in kinds.items() for field in fields(value)}
    homes |= {old: homes[new] for old, new in RENAMED.items() if new in homes}
    made = {name: value for name, value in given.items() if name in own or name not in homes}
    for name in given.keys() - made.keys():
        made[homes[name]] = replace(made.get(homes[name], kinds[homes[name]]), **{RENAMED.get(name, name): given[name]})
    return made
