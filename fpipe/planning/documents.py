# SPDX-License-Identifier: Apache-2.0
"""Profiles as JSON.

A document is a dict of the profile's fields; tuples are lists, and an infinite bandwidth is `null`. It says which
version of the format it has. Reading one runs no code of it: shapes are checked here, and the numbers by
`fpipe.planning.validity` when the profile is made of them.

Runs when a profile is written or read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final, NoReturn

from fpipe.cutting.calls import Mark
from fpipe.errors import InputError
from fpipe.planning.blocks import ModelBlock
from fpipe.planning.ranges import ActionTimes, Arrival, Hop, Spread
from fpipe.tensors.arguments import require_arguments
from fpipe.weights.files import AnyPath, as_path, read_text
from schedules import Link, SizeError

DOCUMENT_KIND: Final = "fpipe profile"
EDITION: Final = 1

Decoder = Callable[[str, Any], Any]


def write_fields(profile: Any) -> str:
    """Return a profile's fields as a JSON text."""
    link = profile.link
    fields = {name: getattr(profile, name) for name in DECODERS} | {
        "link": {
            "latency": link.latency,
            "bandwidth": None if link.bandwidth == inf else link.bandwidth,
            "slow": link.slow,
        }
    }
    return json.dumps({"kind": DOCUMENT_KIND, "version": EDITION, **fields}, allow_nan=False)


def parse_document(text: str) -> Any:
    """Return the value of a JSON text; raise `InputError` for any other, and for numbers that are not finite."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"got {error}, expected a profile that fpipe saved, or a plan, as JSON. Make it again."
        ) from error


def read_fields(text: str) -> dict[str, Any]:
    """Return the fields in a JSON text; raise `InputError`, naming the field, for anything else."""
    document = parse_document(text)
    if not isinstance(document, dict) or document.get("kind") != DOCUMENT_KIND:
        raise InputError(f"got {str(document)[:80]}, expected a profile that fpipe saved. Check the path.")
    if document.get("version") != EDITION:
        raise InputError(
            f"version: got {document.get('version')!r}, expected {EDITION}. Read it with the version of fpipe that "
            "saved it, or profile the model again."
        )
    names = {*document} - {"kind", "version"}
    if names != {*DECODERS}:
        raise InputError(f"got the fields {sorted(names)}, expected {sorted(DECODERS)}. Profile the model again.")
    return {name: decode(name, document[name]) for name, decode in DECODERS.items()}


def read_document(path: AnyPath) -> str:
    """Return the text of a file; raise `InputError` if there is none, or if it is larger than any profile."""
    require_arguments(read_document, locals())
    return read_text(as_path(path), "a profile or plan that fpipe saved")


def write_document(path: AnyPath, text: str) -> None:
    """Write a text to a file; raise `InputError` if there can be none at this path."""
    require_arguments(write_document, locals())
    try:
        as_path(path).write_text(text)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: got {type(error).__name__}: {error}, expected a file. Choose another path."
        ) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name}")


def _whole(where: str, got: Any) -> Any:
    """Return a text or number as it is; it is checked once the profile is made."""
    return got


def _row(make: Callable[..., Any], *columns: Decoder) -> Decoder:
    """Return the decoder of a list of as many entries as there are `columns`, which are passed to `make`."""

    def decode(where: str, got: Any) -> Any:
        if not isinstance(got, list) or len(got) != len(columns):
            raise InputError(
                f"{where}: got {str(got)[:80]}, expected a list of {len(columns)} entries. Profile the model again."
            )
        return make(*[column(f"{where}[{k}]", one) for k, (column, one) in enumerate(zip(columns, got, strict=True))])

    return decode


def _rows(decode: Decoder) -> Decoder:
    """Return the decoder of a list of any length."""

    def decode_all(where: str, got: Any) -> Any:
        if not isinstance(got, list):
            raise InputError(f"{where}: got {str(got)[:80]}, expected a list. Profile the model again.")
        return tuple([decode(f"{where}[{k}]", one) for k, one in enumerate(got)])

    return decode_all


def _pair(*both: Any) -> tuple[Any, ...]:
    return both


def _link(where: str, got: Any) -> Link:
    if not isinstance(got, dict) or {*got} != {"latency", "bandwidth", "slow"}:
        raise InputError(
            f"{where}: got {str(got)[:80]}, expected latency, bandwidth and slow. Profile the model again."
        )
    slow: Sequence[Any] = _rows(_row(_pair, _row(_pair, _whole, _whole), _whole))(f"{where}.slow", got["slow"])
    bandwidth = inf if got["bandwidth"] is None else got["bandwidth"]
    try:
        return Link(latency=got["latency"], bandwidth=bandwidth, slow=tuple(slow))
    except (SizeError, TypeError) as error:
        raise InputError(f"{where}: {error} Profile the model again.") from error


_SPREADS: Final = _rows(_row(Spread, _whole, _rows(_whole)))
_TIMES: Final = _row(ActionTimes, *[_whole] * len(ActionTimes._fields))
_MARKS: Final = _rows(_row(Mark, _whole, _whole, _whole))
DECODERS: Final[dict[str, Decoder]] = {
    "model": _whole,
    "microbatch": _whole,
    "backward": _whole,
    "device": _whole,
    "blocks": _rows(_row(ModelBlock, _whole, _MARKS, _whole, _whole)),
    "times": _rows(_TIMES),
    "fixed": _TIMES,
    "step": _whole,
    "hops": _rows(_row(Hop, *[_whole] * 4)),
    "activation": _SPREADS,
    "residual": _SPREADS,
    "arrivals": _rows(_row(Arrival, *[_whole] * 4)),
    "versions": _rows(_whole),
    "parameters": _SPREADS,
    "link": _link,
}
"""How the fields of a profile are read."""
