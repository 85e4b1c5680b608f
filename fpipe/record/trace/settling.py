# SPDX-License-Identifier: Apache-2.0
"""Run a fake model twice, until its Python state has settled, and keep the second record.

Models install hooks, register buffers and fill caches on their first call. The second run comes after that, so calls in
a step find the state that they found in the record. Fake tensors that the first run left behind are replaced with real
ones if they depend on constants alone; all others are removed.

Microbatches must not depend on each other. So of what the first run left behind, the second may read only constants,
and it must do the same work.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import copy_context
from threading import active_count
from typing import Any, NamedTuple

from torch import Tensor

from fpipe.errors import CaptureError
from fpipe.record.captured import Value
from fpipe.record.fakes.generators import Generators, Suspects, drawing_error
from fpipe.record.model.snapshot import (
    ContainerState,
    Snapshot,
    defining_files,
    fill,
    remove_fakes,
    user_classes,
    user_files,
)
from fpipe.record.model.state import changed_attributes, plain_state, require_unchanged
from fpipe.record.model.walk import CACHED, NOT_SET, Walk, contents
from fpipe.record.objective import Computed
from fpipe.record.questions import Answer, Ask, Question, refuse_questions
from fpipe.record.trace.comparison import require_same_run
from fpipe.record.trace.fake_model import FakeModel
from fpipe.record.trace.record import KeptError
from fpipe.record.trace.recorder import Recorder
from fpipe.tensors.torch_private import FakeTensor, FakeTensorMode


class SettledRun(NamedTuple):
    """A recorded run that did the same as the run before it.

    - `written`: the containers that a run changes. `state`: all containers that any call may change.
    - `changed_attributes`: the names of attributes that only the first run changes.
    """

    recorder: Recorder
    computed: Computed
    written: tuple[ContainerState, ...]
    state: tuple[ContainerState, ...]
    changed_attributes: frozenset[str]


class _UncertainError(Exception):
    """Some thread has drawn random numbers during a run: find out whether it was the forward."""


class Settling:
    """Runs a fake model to a fixed point.

    - `left`: containers elsewhere in which a failed run left fake tensors; the next run restores them.
    - `caches`: function caches, such as `functools.lru_cache`. `filled`: those that runs have filled.
    """

    def __init__(self, model: FakeModel) -> None:
        self.model = model
        self.left: list[Any] = []
        self.caches: list[ContainerState] = []
        self.filled: dict[int, ContainerState] = {}

    def run(self, ask: Ask) -> SettledRun:
        """Return the settled run, in which `ask` answers the model's questions.

        If a run fails and has left fake tensors elsewhere, remove them and try again.
        """
        try:
            return self._settle(ask)
        except CaptureError as error:
            classes = user_classes(self.model.model)
            near = defining_files(classes, self.model.objective.loss)
            self.left = remove_fakes(user_files() if isinstance(error, KeptError) else near, classes)
            if not self.left:
                raise
            return self._settle(ask)

    def _settle(self, ask: Ask) -> SettledRun:
        """Run the model twice, from the start again if some thread has drawn random numbers meanwhile."""
        suspects = Suspects(), Suspects()
        while True:
            with suppress(_UncertainError):
                found = copy_context().run(self._run_twice, ask, suspects)  # discards changes to context variables
                seen = [drawing for one in suspects for drawing in one.common]
                if seen and active_count() == 1:
                    raise drawing_error(seen[0])  # it drew once in this process: nothing else could have
                return found

    def _run_twice(self, ask: Ask, suspects: tuple[Suspects, Suspects]) -> SettledRun:
        skeleton, mode = self.model.skeleton, self.model.mode
        original = Walk()
        original.follow([self.model.model])
        roots = skeleton, original.containers.keys(), self.model.objective.loss, *self.left
        before = Snapshot.of(*roots)
        self.caches = [one for one in before.containers.values() if isinstance(one.container, CACHED)]
        try:
            answers: list[Answer] = []

            def ask_and_remember(question: Question) -> Answer:
                answers.append(ask(question))
                return answers[-1]

            first, _ = self._run(ask_and_remember, suspects[0])
            plain = plain_state(skeleton)
            self._keep_constant_buffers(first)
            fill_caches(before, Snapshot.of(*roots), first, mode)
            settled = Snapshot.of(*roots)
            remaining = iter(answers)
            second, computed = self._run(lambda q: next(remaining, None) or refuse_questions(q), suspects[1])
            require_unchanged(plain, plain_state(skeleton))
            require_same_run(first, second)
            changed = changed_attributes(skeleton, before, settled)
        except BaseException:
            before.restore()
            raise
        tables = [
            ContainerState(one.table, contents(one.table), False) for one in second.reassignments.by_place.values()
        ]
        written = (*settle(before, settled, mode), *tables, *self.filled.values())
        return SettledRun(second, computed, written, tuple(settled.containers.values()), changed)

    def _keep_constant_buffers(self, recorder: Recorder) -> None:
        """Keep the caches that a run computed from constants alone and assigned to buffers.

        Every run would compute the same.
        """
        constants = recorder.record.constants().values
        for one in recorder.reassignments.caches:
            tensor = try_constant(recorder, one.new) if one.new in constants else None
            if tensor is not None:
                one.table[one.name] = tensor
                self.model.remove_seat((one.table, one.name))

    def _run(self, ask: Ask, suspects: Suspects) -> tuple[Recorder, Computed]:
        """Run the model, and restore the buffers that it assigned.

        Raise `CaptureError` if it draws from generators other than torch's, `_UncertainError` if something may have.
        """
        whole, calls = Generators(), Generators()
        recorder = self.model.recorder(ask, calls if suspects.rounds else None)
        whole.look("model")
        try:
            computed = self.model.run(recorder)
        finally:
            self.empty_caches()
            whole.look("model")
            _suspect(calls if suspects.rounds else whole, suspects)
        recorder.reassignments.restore()
        return recorder, computed

    def empty_caches(self) -> None:
        """Clear the function caches that a run has filled."""
        for one in self.caches:
            if one.has_changed:
                self.filled[id(one.container)] = one
                one.restore()


def _suspect(generators: Generators, suspects: Suspects) -> None:
    if generators.drawings and suspects.narrow(generators.drawings):
        if suspects.are_certain:
            raise drawing_error(suspects.common[0])
        raise _UncertainError


def fill_caches(before: Snapshot, now: Snapshot, recorder: Recorder, mode: FakeTensorMode) -> None:
    """Replace the fake constants that a recorded run left behind with real tensors.

    Remove those that cannot be computed, such as on a device that this machine lacks: every run creates them again.
    """
    values = {id(recorder.values.tensors[value]): value for value in recorder.record.constants().values}
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
        return recorder.record.compute_constant(value)
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
