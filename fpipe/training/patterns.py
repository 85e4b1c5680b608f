# SPDX-License-Identifier: Apache-2.0
"""Patterns that select parameters by name.

A pattern is matched against the whole name, as `fnmatch` does: in `*.bias` the star stands for any text, dots included,
so it matches `blocks.3.norm.bias`. (Where a model is cut, a star stands for one name between dots.) A tied parameter
goes by the first of its names, as in `model.named_parameters()`.

Invariant: the names are those of the whole model, so a pattern selects the same parameters on every rank.

Runs in every step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from fpipe.errors import InputError
from schedules.arguments import each


def as_patterns(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Return one pattern, or several, as a tuple; raise `InputError` for anything but strings."""
    several = (patterns,) if isinstance(patterns, str) else patterns
    found = tuple(each("names", several, str, InputError)) if isinstance(several, Iterable) else ()
    if not found:
        raise InputError(
            f'names: got {patterns!r}, expected a pattern or several. Write names="*.bias", or ("*.bias", "norm.*").'
        )
    return found


def select_names(patterns: Iterable[str], names: Sequence[str], where: str = "names") -> list[str]:
    """Return the names that match any of the patterns, in the order of `names`.

    Raise `InputError` for a pattern that matches nothing.

    >>> select_names(["*.bias"], ["0.weight", "0.bias", "1.norm.bias"])
    ['0.bias', '1.norm.bias']
    """
    patterns = tuple(patterns)
    if patterns == ("*",):
        return list(names)
    for pattern in patterns:
        require_match(pattern, names, where)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def require_match(pattern: str, names: Sequence[str], where: str) -> None:
    """Raise `InputError` if a pattern matches none of the names."""
    if any(fnmatchcase(name, pattern) for name in names):
        return
    close = difflib.get_close_matches(pattern, names, n=3) or list(names)[:3]
    raise InputError(
        f"{where}: got the pattern {pattern!r}, which matches none of the model's {len(names)} parameters, expected it "
        f"to match one. The star stands for any text, dots included, and a tied parameter goes by the first of its "
        f"names. Parameters are named {close}, say."
    )
