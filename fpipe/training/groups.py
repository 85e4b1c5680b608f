# SPDX-License-Identifier: Apache-2.0
"""Parameters selected by patterns over names, and groups of them with options of their own.

A pattern is matched against the whole name, as `fnmatch` does: in `*.bias` the star stands for any text, dots included,
so it matches `blocks.3.norm.bias`. (Where a model is cut, a star stands for one name between dots.) A tied parameter
goes by the first of its names, as in `model.named_parameters()`.

Invariants. The names are those of the whole model, so a pattern selects the same parameters on every rank. A parameter
is in one group at most, and a group's options are those of the optimizer with the group's own ones in their place, as
in `torch.optim`.

Runs when an optimizer is made, and in every step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, TypeAlias

from fpipe.errors import InputError
from schedules.arguments import each

Options: TypeAlias = Mapping[str, Any]
"""Options of an optimizer class by name, such as `lr`."""


@dataclass(frozen=True)
class Groups:
    """The options of all parameters, and by pattern those of some."""

    options: Options
    own: Mapping[str, Options]

    @classmethod
    def of(cls, options: Options, groups: Mapping[str, Options] | None) -> Groups:
        """Return the groups of an optimizer; raise `InputError` unless `groups` maps patterns to options."""
        own = {} if groups is None else groups
        if not (
            isinstance(own, Mapping) and all(isinstance(k, str) and isinstance(v, Mapping) for k, v in own.items())
        ):
            raise InputError(
                f"groups: got {groups!r}, expected a dict from pattern to options. Write groups={{'*.bias': "
                "{'weight_decay': 0.0}}."
            )
        return cls(options, {pattern: dict(one) for pattern, one in own.items()})

    def merge(self, pattern: str | None) -> Options:
        """Return the options of one group; those of the rest, if `pattern` is `None`."""
        return {**self.options, **(self.own[pattern] if pattern is not None else {})}

    def replace(self, options: Options, groups: Mapping[str, Options] | None) -> Groups:
        """Return these groups with other values for one update: of the optimizer's options, and of groups' own."""
        other = Groups.of(options, groups).own
        for pattern in other:
            if pattern not in self.own:
                raise InputError(
                    f"groups[{pattern!r}]: got a pattern that is none of the optimizer's, expected one of "
                    f"{list(self.own)}. Give the group to fpipe.optimizer, too."
                )
        own = {pattern: {**one, **other.get(pattern, {})} for pattern, one in self.own.items()}
        return Groups({**self.options, **options}, own)

    def require_partition(self, names: Iterable[str], whole: bool) -> None:
        """Raise `InputError` if a name is in two groups, or if a group has none of the names of the `whole` model."""
        names = list(names)
        for name in names:
            find_group(name, tuple(self.own))
        for pattern in self.own if whole else ():
            require_match(pattern, names, f"groups[{pattern!r}]")


@lru_cache(maxsize=2**16)
def find_group(name: str, patterns: tuple[str, ...]) -> str | None:
    """Return the pattern that matches a name, if one does; raise `InputError` if two do.

    >>> find_group("0.bias", ("*.bias", "1.*")), find_group("0.weight", ("*.bias", "1.*"))
    ('*.bias', None)
    """
    found = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
    if len(found) > 1:
        raise InputError(
            f"groups: got {name!r} in two groups, {found[0]!r} and {found[1]!r}, expected it in one. Make one of the "
            "patterns narrower."
        )
    return found[0] if found else None


def as_patterns(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Return one pattern, or several, as a tuple; raise `InputError` for anything but strings."""
    several = (patterns,) if isinstance(patterns, str) else patterns
    found = tuple(each("names", several, str, InputError)) if isinstance(several, Iterable) else ()
    if not found:
        raise InputError(
            f'names: got {patterns!r}, expected a pattern or several. Write names="*.bias", or ("*.bias", "norm.*").'
        )
    return found


def select_names(patterns: tuple[str, ...], names: Sequence[str]) -> set[str]:
    """Return the names that match any of the patterns; raise `InputError` for a pattern that matches nothing.

    >>> sorted(select_names(("*.bias",), ["0.weight", "0.bias", "1.norm.bias"]))
    ['0.bias', '1.norm.bias']
    """
    if patterns == ("*",):
        return set(names)
    for pattern in patterns:
        require_match(pattern, names, "names")
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def require_match(pattern: str, names: Sequence[str], where: str) -> None:
    """Raise `InputError` if a pattern matches none of the names."""
    if any(fnmatchcase(name, pattern) for name in names):
        return
    close = difflib.get_close_matches(pattern, names, n=3) or list(names)[:3]
    raise InputError(
        f"{where}: got the pattern {pattern!r}, which matches none of the model's {len(names)} parameters, expected it "
        "to match one. A star matches any text, including dots, and a tied parameter has the first of its names. Some "
        f"parameters are {close}."
    )
