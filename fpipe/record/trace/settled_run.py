# SPDX-License-Identifier: Apache-2.0
"""Run a fake model twice, until its Python state has settled, and keep the second recording.

Microbatches must not depend on each other. So of what the first run left behind, the second may read only constants,
and it must do the same work. By then, whatever models do only on their first call (install hooks, fill caches) has
happened, and stays in the skeleton.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import copy_context
from threading import active_count
from typing import Any, NamedTuple

from torch import Tensor

from fpipe.errors import CaptureError
from fpipe.record.fakes.generators import Generators, Suspects, drawing_error
from fpipe.record.fakes.leftovers import defining_files, remove_fakes, user_classes, user_files
from fpipe.record.model.snapshot import ContainerState, Snapshot
from fpipe.record.model.state import changed_attributes, plain_state, require_unchanged
from fpipe.record.model.walk import CACHED, Walk, contents
from fpipe.record.questions import Answer, Ask
from fpipe.record.trace.fake_model import FakeModel
from fpipe.record.trace.recorder import Recorder
from fpipe.record.trace.second_run import remember_answers, repeat_answers, require_same_run
from fpipe.record.trace.settling import fill_caches, settle, try_constant
from fpipe.record.trace.values import KeptError


class SettledRun(NamedTuple):
    """A recorded run that did the same as the run before it.

    - `written`: the containers that a run changes. `state`: all containers that any call may change.
    - `changed_attributes`: the names of attributes that only the first run changes.
    """

    recorder: Recorder
    loss: Tensor | None
    outputs: Any
    written: tuple[ContainerState, ...]
    state: tuple[ContainerState, ...]
    changed_attributes: frozenset[str]


class _Run(NamedTuple):
    recorder: Recorder
    loss: Tensor | None
    outputs: Any


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
            first = self._run(remember_answers(ask, answers), suspects[0]).recorder
            plain = plain_state(skeleton)
            self._keep_constant_buffers(first)
            fill_caches(before, Snapshot.of(*roots), first, mode)
            settled = Snapshot.of(*roots)
            second, loss, outputs = self._run(repeat_answers(answers), suspects[1])
            require_unchanged(plain, plain_state(skeleton), "each microbatch would see another value")
            require_same_run(first, second)
            changed = changed_attributes(skeleton, before, settled)
        except BaseException:
            before.restore()
            raise
        tables = [
            ContainerState(one.table, contents(one.table), False) for one in second.reassignments.by_place.values()
        ]
        written = (*settle(before, settled, mode), *tables, *self.filled.values())
        return SettledRun(second, loss, outputs, written, tuple(settled.containers.values()), changed)

    def _keep_constant_buffers(self, recorder: Recorder) -> None:
        """Keep the caches that a run computed from constants alone and assigned to buffers.

        Every run would compute the same.
        """
        constants = recorder.history.constants().values
        for one in recorder.reassignments.caches:
            tensor = try_constant(recorder, one.new) if one.new in constants else None
            if tensor is not None:
                one.table[one.name] = tensor
                self.model.remove_seat((one.table, one.name))

    def _run(self, ask: Ask, suspects: Suspects) -> _Run:
        """Run the model, and restore the buffers that it assigned.

        Raise `CaptureError` if it draws from generators other than torch's, `_UncertainError` if something may have.
        """
        whole, calls = Generators(), Generators()
        recorder = self.model.recorder(ask, calls if suspects.rounds else None)
        whole.look("model")
        try:
            loss, outputs = self.model.run(recorder)
        finally:
            self.empty_caches()
            whole.look("model")
            _suspect(calls if suspects.rounds else whole, suspects)
        recorder.reassignments.restore()
        return _Run(recorder, loss, outputs)

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
