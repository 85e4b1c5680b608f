# SPDX-License-Identifier: Apache-2.0
"""Bring a model's Python state to a fixed point, so that each run leaves it as it found it.

Models install hooks, register buffers and fill caches on their first call. The recorded run comes after that, so calls
in a step find the state that they found in the recording. Fake tensors that the first run left behind are replaced with
real ones if they depend on constants alone; all others are removed.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from fpipe.record.captured import Value
from fpipe.record.model.snapshot import ContainerState, Snapshot, fill
from fpipe.record.model.walk import NOT_SET, contents
from fpipe.record.trace.recorder import Recorder
from fpipe.tensors.torch_private import FakeTensor, FakeTensorMode


def fill_caches(before: Snapshot, now: Snapshot, recorder: Recorder, mode: FakeTensorMode) -> None:
    """Replace the fake constants that a recorded run left behind with real tensors.

    Remove those that cannot be computed, such as on a device that this machine lacks: every run creates them again.
    """
    values = {id(recorder.values.tensors[value]): value for value in recorder.history.constants().values}
    for key, one in now.containers.items():
        wanted = {id(tensor) for part in one.contents for tensor in _fakes(part, mode)} & values.keys()
        if wanted:
            found = {k: tensor for k in wanted if (tensor := try_constant(recorder, values[k])) is not None}
            filled = one._replace(contents=tuple([_replace_fakes(part, found) for part in one.contents]))
            missing = len(found) < len(wanted)
            fill(
                one.container, _without_fakes(filled, before.containers.get(key), mode) if missing else filled.contents
            )


def try_constant(recorder: Recorder, value: Value) -> Tensor | None:
    """Return the real tensor of a constant value; `None` if it cannot be computed, say on a missing device."""
    try:
        return recorder.history.compute_constant(value)
    except Exception:  # whatever a missing device raises
        return None


def settle(before: Snapshot, settled: Snapshot, mode: FakeTensorMode) -> tuple[ContainerState, ...]:
    """End a capture: leave the model's copy as every run finds it, and restore the user's state as it was `before`.

    Return the containers that every run changes, and those of the user that the first run changes, with their contents
    between runs.
    """
    written: list[ContainerState] = []
    for key, one in settled.containers.items():
        old = before.containers.get(key)
        written += [one] if one.has_changed or (one.outside and old is not None and old.has_changed) else []
        one.restore()
        if old is not None and one.outside:
            old.restore()
        elif any(True for part in one.contents for _ in _fakes(part, mode)):
            fill(one.container, _without_fakes(one, old, mode))
    return tuple([one._replace(contents=contents(one.container)) for one in _with_inner(written)])


def _without_fakes(held: ContainerState, old: ContainerState | None, mode: FakeTensorMode) -> tuple[Any, ...]:
    """Return a container's contents without fake tensors; in a dict, replace them with the old values, if any."""
    if not isinstance(held.container, dict):
        return tuple([part for part in held.contents if not any(True for _ in _fakes(part, mode))])
    was = {} if old is None else dict(zip(old.contents[::2], old.contents[1::2], strict=True))
    kept: list[Any] = []
    for key, value in zip(held.contents[::2], held.contents[1::2], strict=True):
        value = was.get(key, NOT_SET) if any(True for _ in _fakes(value, mode)) else value
        kept += [] if value is NOT_SET else [key, value]
    return tuple(kept)


def _fakes(part: Any, mode: FakeTensorMode) -> Iterator[Tensor]:
    """Yield the fake tensors in one part of a container's contents: the part itself or, in a tuple, its items."""
    if isinstance(part, tuple):
        for one in part:
            yield from _fakes(one, mode)
    elif isinstance(part, FakeTensor) and part.fake_mode is mode:
        yield part


def _replace_fakes(part: Any, real: Mapping[int, Tensor]) -> Any:
    """Return `part` with the tensors of these ids replaced by real ones, in tuples too."""
    if isinstance(part, tuple):
        made = [_replace_fakes(one, real) for one in part]
        return type(part)(*made) if hasattr(part, "_fields") else tuple(made)
    return real.get(id(part), part)


def _with_inner(written: Iterable[ContainerState]) -> Iterator[ContainerState]:
    """Yield these containers and, recursively, those inside them.

    A forward that begins with `self.found = []` fills a new list; if only part of it runs, that part fills the old one.
    """
    seen, stack = set[int](), list(written)
    while stack:
        one = stack.pop()
        if id(one.container) not in seen:
            seen.add(id(one.container))
            yield one
            inner = [child for child in contents(one.container) if isinstance(child, dict | list | set | deque)]
            stack += [ContainerState(child, (), one.outside) for child in inner]
