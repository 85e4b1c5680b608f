# SPDX-License-Identifier: Apache-2.0
"""Groups of parameters with options of their own, by patterns over names.

Invariant: a parameter is in one group at most, and a group's options are those of the optimizer with the group's own
ones in their place, as in `torch.optim`.

Runs when an optimizer is made, and in every update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, TypeAlias

from fpipe.errors import InputError
from fpipe.training.patterns import require_match

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
