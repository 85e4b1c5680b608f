# SPDX-License-Identifier: Apache-2.0
"""State of the original model that code outside of it reads.

Problem. Stages run a copy of the model. A loss that closes over the original, or over a dict or an object that the
original holds, doesn't see what the copy's forward stores there.

Idea. Find the attributes that a run of the copy changes, and those that outside code reads from the original. If any
attribute is in both sets, refuse. What only a model's first call changes is no obstacle if the model was called before
the pipeline was built.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import is_not
from typing import Any

from torch import nn

from fpipe.record.capture.module_state import is_torchs
from fpipe.record.capture.places import module_place
from fpipe.record.model.snapshot import ContainerState, Snapshot
from fpipe.record.model.walk import NOT_SET, Walk
from fpipe.record.refusals import original_state_error
from fpipe.tensors.tree import PLAIN

TABLES = frozenset({"_parameters", "_buffers", "_modules"})


def place(path: str, module: nn.Module, name: str) -> str:
    """Return text that names an attribute of a module in errors."""
    return f"{module_place(path, module)}, attribute {name!r}"


def changed_attributes(model: nn.Module, before: Snapshot, after: Snapshot) -> frozenset[str]:
    """Return the places of the attributes of user modules that a run changed, or whose contents it changed."""
    pairs = {
        key: (before.containers[key], one)
        for key, one in after.containers.items()
        if key in before.containers and not one.outside
    }
    changed = {key: names for key, pair in pairs.items() if (names := _changes(*pair))}
    if not changed:
        return frozenset()
    rows = {place(*row) for row in _attributes(model) if row[-1] in changed.get(id(vars(row[1])), ())}
    return frozenset({*rows, *holding_attributes(model, changed)})


def shared_attributes(model: nn.Module, outside: object) -> frozenset[str]:
    """Return the places of the attributes whose contents code `outside` reaches other than through the model."""
    mine, others = Walk(), Walk()
    mine.follow([model])
    others.seen.update({id(module): module for module in model.modules()})
    others.enter()
    others.follow([outside])
    both = mine.containers.keys() & others.containers.keys()
    return frozenset(holding_attributes(model, both) if both else ())


def holding_attributes(model: nn.Module, containers: Collection[object]) -> Iterator[str]:
    """Yield the places of the attributes that are, or contain, one of these containers."""
    modules = {id(module): module for module in model.modules()}
    for path, module, name in _attributes(model):
        walk = Walk()
        walk.seen.update(modules)
        walk.follow([vars(module)[name]])
        if not walk.containers.keys().isdisjoint(containers):
            yield place(path, module, name)


def require_own_state(moved: Collection[str], read: Collection[str]) -> None:
    """Raise `CaptureError` if outside code reads from the original model what the forward changes in the copy.

    `moved`, `read`: the places of the attributes that are changed, and of those that are read.
    """
    for where in sorted({*moved} & {*read}):
        raise original_state_error(where)


def _attributes(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, module and name of each attribute of the user's modules."""
    for path, module in model.named_modules():
        if not is_torchs(module):
            yield from [(path, module, name) for name in vars(module) if name not in TABLES]


def _changes(old: ContainerState, new: ContainerState) -> list[object]:
    """Return the keys of a dict, or the positions in another container, whose contents have changed."""
    if len(old.contents) == len(new.contents) and not any(map(is_not, old.contents, new.contents)):
        return []
    was, now = _contents_by_key(old), _contents_by_key(new)
    return [key for key in {**was, **now} if not _is_equal(was.get(key, NOT_SET), now.get(key, NOT_SET))]


def _contents_by_key(held: ContainerState) -> dict[object, Any]:
    parts = held.contents
    return dict(zip(parts[::2], parts[1::2], strict=True) if isinstance(held.container, dict) else enumerate(parts))


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and bool(one == other))
