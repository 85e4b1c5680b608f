# SPDX-License-Identifier: Apache-2.0
"""Bring a model's Python state to where a run leaves it as it finds it: what happens at a first call has happened.

Models install hooks, register buffers and fill caches when they are first called. The run that is recorded is the one
after that, so that whatever is played finds what it found in the recording. Tensors that the first run left behind are
computed for real if they follow from constants alone. No other fake tensor stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fpipe.capture.contract import Value
from fpipe.capture.recorder import Recorder
from fpipe.capture.snapshot import MISSING, Held, Snapshot, contents, fill


def fill_caches(before: Snapshot, now: Snapshot, recorder: Recorder, mode: FakeTensorMode) -> None:
    """Put real tensors in the place of the constants that a recorded run left behind.

    One that cannot be computed, on a device that this machine lacks, say, is taken out: every run makes it anew.
    """
    values = {id(recorder.values.tensors[value]): value for value in recorder.constants().values}
    for key, one in now.held.items():
        wanted = {id(tensor) for part in one.contents for tensor in _fakes(part, mode)} & values.keys()
        if wanted:
            found = {k: tensor for k in wanted if (tensor := real(recorder, values[k])) is not None}
            filled = one._replace(contents=tuple([_replaced(part, found) for part in one.contents]))
            missing = len(found) < len(wanted)
            fill(one.container, _without_fakes(filled, before.held.get(key), mode) if missing else filled.contents)


def real(recorder: Recorder, value: Value) -> Tensor | None:
    """Return the tensor that a constant value has; `None` if it cannot be computed, on a device that is not there."""
    try:
        return recorder.real(value)
    except Exception:  # whatever a device does that is not there
        return None


def settle(before: Snapshot, settled: Snapshot, mode: FakeTensorMode) -> tuple[Held, ...]:
    """End a capture: leave the model's copy as every run finds it, and what is the user's as it was `before`.

    Returns the containers that a run changes, or the first one of the user's, with what is to be in them after a run.
    """
    written: list[Held] = []
    for key, one in settled.held.items():
        old = before.held.get(key)
        written += [one] if one.changed or (one.outside and old is not None and old.changed) else []
        one.restore()
        if old is not None and one.outside:
            old.restore()
        elif any(True for part in one.contents for _ in _fakes(part, mode)):
            fill(one.container, _without_fakes(one, old, mode))
    return tuple([one._replace(contents=contents(one.container)) for one in _with_inner(written)])


def _without_fakes(held: Held, old: Held | None, mode: FakeTensorMode) -> tuple[Any, ...]:
    """The contents without fake tensors; in their places what was there before, if anything was."""
    if not isinstance(held.container, dict):
        return tuple([part for part in held.contents if not any(True for _ in _fakes(part, mode))])
    was = {} if old is None else dict(zip(old.contents[::2], old.contents[1::2], strict=True))
    kept: list[Any] = []
    for key, value in zip(held.contents[::2], held.contents[1::2], strict=True):
        value = was.get(key, MISSING) if any(True for _ in _fakes(value, mode)) else value
        kept += [] if value is MISSING else [key, value]
    return tuple(kept)


def _fakes(part: Any, mode: FakeTensorMode) -> Iterator[Tensor]:
    """The fake tensors that a part of a container's contents is, or holds as a tuple."""
    if isinstance(part, tuple):
        for one in part:
            yield from _fakes(one, mode)
    elif isinstance(part, FakeTensor) and part.fake_mode is mode:
        yield part


def _replaced(part: Any, real: Mapping[int, Tensor]) -> Any:
    """The same with real tensors in the place of those with these identities, in tuples too."""
    if isinstance(part, tuple):
        made = [_replaced(one, real) for one in part]
        return type(part)(*made) if hasattr(part, "_fields") else tuple(made)
    return real.get(id(part), part)


def _with_inner(written: Iterable[Held]) -> Iterator[Held]:
    """Yield the containers and those in them.

    A forward that begins with `self.found = []` fills a new list; played in part, it fills the one that it left behind.
    """
    seen, stack = set[int](), list(written)
    while stack:
        one = stack.pop()
        if id(one.container) not in seen:
            seen.add(id(one.container))
            yield one
            inner = [child for child in contents(one.container) if isinstance(child, dict | list | set | deque)]
            stack += [Held(child, (), one.outside) for child in inner]
