# SPDX-License-Identifier: Apache-2.0
"""Frozen values as JSON: profiles and plans.

Problem. A file may have been altered, or be anything else. Every number in it must be checked, and an error must name
the one that is wrong.

Idea. The annotations of a class say what its fields are, so one function reads values of all classes. A dataclass is an
object of its fields; a tuple is a list, with or without names. A schedule is the call that makes it, and so are costs
and sizes; a certificate is a document of its own. A number is at least 0, and finite but for a `Limit`, which is `null`
if there is none. Reading runs no code of a file. A checksum finds what is a number, but not the one that was written;
whoever edits a file removes it.

Runs when a profile or a plan is made, written or read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from math import inf, isnan
from typing import Annotated, Any, Final, NoReturn, TypeAlias, get_args, get_origin, get_type_hints

from fpipe.errors import InputError, PipelineError
from fpipe.weights.files import AnyPath, as_path, read_text, write_whole
from schedules import Certificate, Costs, Link, Schedule, Sizes
from schedules.errors import printable, quote
from schedules.files.calls import read_call, read_value, spell_call, spell_value

Limit: TypeAlias = Annotated[float, "or infinity"]
MOST_TEXT: Final = 10_000
LINK_FIELDS: Final = ("latency", "bandwidth", "slow")
"""Of a link, without the sizes of messages."""


def _is_number(got: object) -> bool:
    if isinstance(got, bool) or not isinstance(got, int | float) or (isinstance(got, int) and got >= 2**62):
        return False  # an integer that no tensor holds
    return not isnan(got) and got >= 0


LEAVES: Final[Mapping[Any, tuple[str, Callable[[Any], bool]]]] = {
    str: (f"a text of at most {MOST_TEXT} characters", lambda got: isinstance(got, str) and len(got) <= MOST_TEXT),
    bool: ("true or false", lambda got: isinstance(got, bool)),
    int: ("an integer of at least 0", lambda got: type(got) is int and 0 <= got < 2**62),
    float: ("a finite number of at least 0", lambda got: _is_number(got) and got < inf),
    Limit: ("a number of at least 0, or none", _is_number),
}
"""What the simplest values are: in words, and as a test."""


@dataclass(frozen=True)
class Format:
    """A kind of document, in one version; `repair` is what to do about a wrong one."""

    kind: str
    version: int
    repair: str
    indent: int | None = None

    def save(self, path: AnyPath, value: Any) -> None:
        """Write a value to a file, whole or not at all; raise `InputError` if there can be none at this path."""
        write_whole(path, self.write(value))

    def load(self, path: AnyPath, make: type[Any]) -> Any:
        """Return the value in a file; raise `InputError`, naming the file and the field, for anything else."""
        text = read_text(as_path(path), f"a {self.kind} that fpipe saved")
        try:
            return self.read(text, make)
        except PipelineError as error:
            raise InputError(f"{path}: {error}") from error

    def write(self, value: Any) -> str:
        """Return a value as a JSON text."""
        document = {"kind": f"fpipe {self.kind}", "version": self.version, **_encode(value)}
        checksum = zlib.crc32(json.dumps(document, allow_nan=False).encode())
        return json.dumps({"crc32": checksum, **document}, indent=self.indent)

    def read(self, text: str, make: type[Any]) -> Any:
        """Return the value of class `make` in a JSON text; raise `InputError`, naming the field, for anything else."""
        try:
            document = json.loads(text, parse_constant=_refuse_constant)
            checksum = document.pop("crc32", None) if isinstance(document, dict) else None
            expected = zlib.crc32(json.dumps(document).encode())
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"got {error}, expected a {self.kind} that fpipe saved, as JSON. Make it again."
            ) from error
        if not isinstance(document, dict) or document.pop("kind", None) != f"fpipe {self.kind}":
            raise InputError(f"got {quote(document)[:80]}, expected a {self.kind} that fpipe saved. Check the path.")
        version = document.pop("version", None)
        if version != self.version:
            raise InputError(
                f"version: got {quote(version)}, expected {self.version}. Read it with the version of fpipe that saved "
                f"it. {self.repair}"
            )
        made = self.decode("", make, document)
        if checksum not in (None, expected):
            raise InputError(
                f"crc32: got {quote(checksum)}, expected {expected}: the {self.kind} was altered after it was written. "
                f"{self.repair} If you edited it on purpose, remove crc32."
            )
        return made

    def require(self, value: Any) -> None:
        """Raise `InputError`, naming the field, unless all fields of a dataclass are what its annotations say."""
        kind: Any = type(value)
        for name, hint in _list_fields(kind).items():
            self.decode(name, hint, getattr(value, name))

    def decode(self, where: str, hint: Any, got: Any) -> Any:
        """Return the value of type `hint` that a JSON value describes; values of the type itself are checked, too."""
        if hint == Certificate | None:
            return got if got is None or isinstance(got, Certificate) else self._decode_certificate(where, got)
        if hint in (Costs, Link, Schedule, Sizes):
            return got if isinstance(got, hint) else self._decode_call(where, hint, got)
        if hint in LEAVES:
            got = inf if got is None and hint is Limit else got
            expected, accepts = LEAVES[hint]
            if not accepts(got):
                raise self.wrong(where, quote(got), expected)
            return got
        if is_dataclass(hint):
            made: Any = hint
            named = _list_fields(made)
            if not isinstance(got, dict) or {*got} != {*named}:
                found = f"the fields {sorted(got)}" if isinstance(got, dict) else quote(got)
                raise self.wrong(where, found, str(sorted(named)))
            return made(**{name: self.decode(_join(where, name), named[name], got[name]) for name in named})
        return self._decode_tuple(where, hint, got)

    def _decode_certificate(self, where: str, got: Any) -> Certificate:
        try:
            return Certificate.parse(json.dumps(got), where)
        except PipelineError as error:
            raise InputError(f"{error} {self.repair}") from error

    def _decode_tuple(self, where: str, hint: Any, got: Any) -> tuple[Any, ...]:
        if not isinstance(got, list | tuple):
            raise self.wrong(where, got, "a list")
        parts = get_args(hint)
        if parts[-1:] == (...,):
            return tuple([self.decode(f"{where}[{k}]", parts[0], one) for k, one in enumerate(got)])
        columns: Sequence[tuple[str, Any]] = [(f"{where}[{k}]", part) for k, part in enumerate(parts)]
        if get_origin(hint) is not tuple:
            columns = [(_join(where, name), kind) for name, kind in _list_fields(hint).items()]
        if len(got) != len(columns):
            raise self.wrong(where, got, f"a list of {len(columns)} entries")
        found = [self.decode(place, kind, one) for (place, kind), one in zip(columns, got, strict=True)]
        return tuple(found) if get_origin(hint) is tuple else hint(*found)

    def _decode_call(self, where: str, hint: Any, got: Any) -> Any:
        if hint is Schedule:
            return read_call(got)
        if hint in (Costs, Sizes):
            return self._decode_value(where, hint, got)
        if not isinstance(got, dict) or {*got} != {*LINK_FIELDS}:
            raise self.wrong(where, got, ", ".join(LINK_FIELDS))
        hints = get_type_hints(Link)
        slow = self.decode(_join(where, "slow"), hints["slow"], got["slow"])
        try:
            return Link(got["latency"], inf if got["bandwidth"] is None else got["bandwidth"], slow=slow)
        except (PipelineError, TypeError) as error:
            raise InputError(f"{where}: {error} {self.repair}") from error

    def _decode_value(self, where: str, hint: Any, got: Any) -> Any:
        try:
            return read_value(got, hint)
        except (PipelineError, TypeError) as error:
            raise InputError(f"{where}: {error} {self.repair}") from error

    def wrong(self, where: str, got: object, expected: str) -> InputError:
        """Return the error that says what a document has where."""
        place, text = f"{where}: " if where else "", printable(got) if isinstance(got, str) else quote(got)
        return InputError(f"{place}got {text[:80]}, expected {expected}. {self.repair}")


def _encode(value: Any) -> Any:
    if isinstance(value, Schedule):
        return spell_call(value)
    if isinstance(value, Costs | Sizes):
        return spell_value(value)
    if isinstance(value, Link):
        return {name: _encode(getattr(value, name)) for name in LINK_FIELDS}
    if isinstance(value, Certificate):
        return json.loads(value.text)
    if is_dataclass(value):
        return {one.name: _encode(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, tuple):
        return [_encode(one) for one in value]
    return None if value == inf else value


@cache  # reading annotations takes longer than checking a row
def _list_fields(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass or a NamedTuple, by name."""
    return get_type_hints(kind, include_extras=True)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name}")
