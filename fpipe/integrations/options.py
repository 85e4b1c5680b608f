# SPDX-License-Identifier: Apache-2.0
"""Tables of the options and methods of a library that are refused, with the repair.

Problem. A library has hundreds of options, and some would be ignored: they concern replicas, what the first process
holds, or a loss that the drop-in module computes by itself. The run would train something else, without a word.

Idea. A table of those that are refused at construction. Refusals of methods are made from the table, so it can't say
anything else than the code does. `docs/integrations.md` also lists all other names, which are honored. A test compares
them with those that the library has, so a new one is seen.

Runs when a trainer is made, or when a method is called that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fpipe.errors import InputError

Library = TypeVar("Library", bound=type)


@dataclass(frozen=True)
class Exclusion:
    """The values of an option that are refused, and the repair.

    - `accepted`: the only values that are not; if there are none, `refused` are the only ones that are.
    """

    repair: str
    accepted: tuple[object, ...] = ()
    refused: tuple[object, ...] = ()

    def concerns(self, value: object) -> bool:
        """Return whether this value is refused."""
        return value not in self.accepted if self.accepted else value in self.refused

    def __str__(self) -> str:
        if self.accepted:
            return f"{' or '.join(dict.fromkeys(map(str, self.accepted)))}. {self.repair}"
        return f"none of {', '.join(map(str, self.refused))}. {self.repair}" if self.refused else self.repair


@dataclass(frozen=True)
class Refusals:
    """The options or methods of `subject` that are refused, with the repair.

    >>> table = Refusals("Trainer(...)", {"shards": Exclusion("Leave it out.", accepted=(1,))})
    >>> table.require({"epochs": 3, "shards": 1})
    >>> table.require({"shards": 2})
    Traceback (most recent call last):
    fpipe.errors.InputError: Trainer(...): got shards=2, expected 1. Leave it out.
    """

    subject: str
    refused: Mapping[str, Exclusion]

    def require(self, options: Mapping[str, object]) -> None:
        """Raise `InputError` for an option with a value that is refused."""
        for name, refusal in self.refused.items():
            if name in options and refusal.concerns(options[name]):
                raise InputError(f"{self.subject}: got {name}={options[name]!r}, expected {refusal}")

    def refuse(self, name: str) -> Callable[..., Any]:
        """Return the method of this name, which raises `InputError`."""

        def method(self_: object, *args: Any, **kwargs: Any) -> Any:
            raise InputError(f"{name}: got a call, expected none. {self.refused[name].repair}")

        method.__name__ = name
        method.__doc__ = f"Raise `InputError`. {self.refused[name].repair}"
        return method


def refusing(table: Refusals) -> Callable[[Library], Library]:
    """Return a class decorator that adds the methods that a table refuses."""

    def decorate(cls: Library) -> Library:
        for name in table.refused:
            setattr(cls, name, table.refuse(name))
        return cls

    return decorate
