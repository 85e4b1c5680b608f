# SPDX-License-Identifier: Apache-2.0
"""Schedules as JSON values: the call that made them.

A schedule is its factory and its arguments, so a file that names both brings the schedule back, equal and as short as
it was. A factory that is not part of this package can't be named in a file; such a schedule is spelled action by
action, as a `table`. Nothing in a file is evaluated: names are looked up among the built-in factories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

from schedules import families
from schedules.errors import ArgumentError, TableError, quote
from schedules.files.cells import own
from schedules.files.csv import table
from schedules.language.schedule import Factory, Schedule
from schedules.playing.costs import Costs, Link, Sizes
from schedules.transforms.defer import defer_weights
from schedules.transforms.forwards import forwards
from schedules.transforms.mirror import mirror
from schedules.transforms.offload import offload
from schedules.transforms.overlap import overlap
from schedules.transforms.recompute import recompute
from schedules.transforms.reduce import reduce_gradients
from schedules.transforms.repeat import repeat
from schedules.transforms.shard import shard
from schedules.transforms.split import merge_backward, split_backward
from schedules.transforms.update import update_weights

NAMED_TRANSFORMS: Final = (
    *(recompute, offload, split_backward, merge_backward, defer_weights, repeat, mirror, overlap),
    *(reduce_gradients, shard, update_weights, forwards),
)
VALUES: Final = {"Costs": Costs, "Link": Link, "Sizes": Sizes}
_Value = TypeVar("_Value", Costs, Sizes)
DEEPEST: Final = 16  # a schedule of schedules of schedules, with tuples of tuples
MOST_READ_ACTIONS: Final = 2**22
"""More forwards than a schedule in a file has; readers play all of them."""
MOST_READ_STAGES: Final = 2**12
"""More stages than a schedule in a file has; some families look at all of them for each rank."""


def spell_call(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule as a JSON value, for `read_call`. Raise `TableError` if its stage graph is not the chain.

    >>> from schedules import one_f_one_b, recompute
    >>> spell_call(recompute(one_f_one_b(2, 4), stages=(0,)))["arguments"]["stages"]
    [0]
    >>> spell_call(one_f_one_b(2, 4))
    {'schedule': 'one_f_one_b', 'arguments': {'ranks': 2, 'microbatches': 4}}
    """
    if schedule.graph is not None:
        raise TableError(
            f"schedule: got one for {schedule.graph}, expected the chain of stages. Save its graph separately."
        )
    name = schedule.factory.__name__
    if _factories().get(name) is not schedule.factory:
        rows = tuple(own(schedule, rank) for rank in range(schedule.ranks))
        return spell_call(table(rows))
    return {"schedule": name, "arguments": {key: _spell(value) for key, value in schedule.arguments}}


def _spell(value: object) -> Any:
    if isinstance(value, Schedule):
        return spell_call(value)
    if isinstance(value, tuple):
        return [_spell(one) for one in value]
    if type(value).__name__ in VALUES:
        usual = {field.name: field.default for field in fields(VALUES[type(value).__name__])}
        given = {key: _spell(one) for key, one in vars(value).items() if one != usual[key]}  # JSON has no infinity
        return {"value": type(value).__name__, "arguments": given}
    return value


def read_call(call: object) -> Schedule:
    """Return the schedule that a JSON value spells.

    Raise `TableError` if it is not one of `spell_call`, or names an unknown factory or parameter; `SizeError` for
    arguments that the factory refuses.

    >>> read_call({"schedule": "gpipe", "arguments": {"ranks": 2, "microbatches": 3}})
    gpipe(ranks=2, microbatches=3)
    >>> read_call({"schedule": "system", "arguments": {}})
    Traceback (most recent call last):
    schedules.errors.TableError: schedule: got 'system', expected a built-in schedule or transform, such as gpipe. \
Write the file with a version of schedules that has the same ones.
    """
    found = _read(call, 0)
    if not isinstance(found, Schedule):
        raise TableError(f"schedule: got {quote(call)}, expected the call of a schedule. Write it with spell_call.")
    return found


def _read(value: object, depth: int) -> Any:
    if depth > DEEPEST:
        raise TableError(f"schedule: got values {depth} deep, expected at most {DEEPEST}. Write it with spell_call.")
    if isinstance(value, list):
        return tuple(_read(one, depth + 1) for one in value)
    if not isinstance(value, Mapping):
        return value
    arguments = value.get("arguments")
    if not isinstance(arguments, Mapping) or len(value) != 2:
        raise TableError(f"schedule: got {quote(value)}, expected a name and its arguments. Write it with spell_call.")
    kind = VALUES.get(str(value.get("value")))
    if kind is not None:
        return _make_value(kind, {key: _read(one, depth + 1) for key, one in arguments.items()})
    factory = _factories().get(str(value.get("schedule")))
    if factory is None:
        raise TableError(
            f"schedule: got {quote(value.get('schedule'))}, expected a built-in schedule or transform, such as gpipe. "
            "Write the file with a version of schedules that has the same ones."
        )
    return _call(factory, {key: _read(one, depth + 1) for key, one in arguments.items()})


def spell_value(value: Costs | Sizes) -> Any:
    """Return costs or sizes as a JSON value, for `read_value`.

    >>> spell_value(Costs(F=(1, 2)))
    {'value': 'Costs', 'arguments': {'F': [1, 2]}}
    """
    return _spell(value)


def read_value(value: object, kind: type[_Value]) -> _Value:
    """Return the costs or sizes that a JSON value spells.

    Raise `TableError` if it is not one of `spell_value`, and `SizeError` for numbers that cannot be.

    >>> read_value(spell_value(Sizes(activation=3)), Sizes) == Sizes(activation=3)
    True
    """
    found = _read(value, 0)
    if not isinstance(found, kind):
        raise TableError(f"{kind.__name__}: got {quote(value)}, expected its arguments. Write it with spell_value.")
    return found


def _make_value(kind: type[Costs | Link | Sizes], arguments: dict[str, Any]) -> Costs | Link | Sizes:
    _require_names(kind.__name__, arguments, {one.name for one in fields(kind)})
    return kind(**arguments)


def _call(factory: Factory[...], arguments: dict[str, Any]) -> Schedule:
    """Return what the factory makes of these arguments, which may be of any type."""
    _require_names(factory.__name__, arguments, set(factory.signature.parameters))
    inner = arguments.get("schedule")
    if "schedule" in factory.signature.parameters and not isinstance(inner, Schedule):
        raise TableError(f"{factory.__name__}: got {quote(inner)}, expected a schedule. Write it with spell_call.")
    try:
        found = factory(**arguments)
    except ArgumentError as error:
        raise TableError(
            f"{factory.__name__}: got {error}, expected its arguments. Write it with spell_call."
        ) from error
    if found.stages > MOST_READ_STAGES:
        raise TableError(
            f"{quote(found)}: got {found.stages} stages, expected at most {MOST_READ_STAGES}. Call the factory "
            "yourself."
        )
    size = found.stages * found.microbatches * found.slices
    if size > MOST_READ_ACTIONS:
        raise TableError(
            f"{quote(found)}: got {size} passes, expected at most {MOST_READ_ACTIONS}. Call the factory yourself."
        )
    return found


def _require_names(what: str, arguments: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(arguments) - known)
    if unknown:
        raise TableError(
            f"{what}: got {quote(unknown[:3])}, expected some of {sorted(known)}. Write it with spell_call."
        )


def _factories() -> dict[str, Factory[...]]:
    """Return the factories that a file may name."""
    built_in = [one for name in families.__all__ if isinstance(one := getattr(families, name), Factory)]
    return {one.__name__: one for one in (*built_in, *NAMED_TRANSFORMS, table)}
