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
from typing import Any, NamedTuple

from torch import Tensor

from fpipe.capture.generators import Drawing, Generators, drawing_error
from fpipe.capture.leftovers import defining_files, remove_fakes, user_classes, user_files
from fpipe.capture.module_state import plain_state, require_unchanged
from fpipe.capture.originals import changed_attributes
from fpipe.capture.trace.fake_model import FakeModel
from fpipe.capture.trace.recorder import Recorder
from fpipe.capture.trace.second_run import remember_answers, repeat_answers, require_same_run
from fpipe.capture.trace.settling import fill_caches, settle, try_constant
from fpipe.capture.trace.values import KeptError
from fpipe.errors import CaptureError, PipelineError
from fpipe.ir.questions import Answer
from fpipe.model.snapshot import CACHED, ContainerState, Snapshot, Walk, contents


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

    def run(self) -> SettledRun:
        """Return the settled run; if a run fails and has left fake tensors elsewhere, remove them and try again."""
        try:
            return copy_context().run(self._run_twice)  # discards changes to context variables
        except CaptureError as error:
            classes = user_classes(self.model.model)
            near = defining_files(classes, self.model.objective.loss)
            self.left = remove_fakes(user_files() if isinstance(error, KeptError) else near, classes)
            if not self.left:
                raise
            return copy_context().run(self._run_twice)

    def _run_twice(self) -> SettledRun:
        skeleton, mode = self.model.skeleton, self.model.mode
        original = Walk()
        original.follow([self.model.model])
        roots = skeleton, original.containers.keys(), self.model.objective.loss, *self.left
        before = Snapshot.of(*roots)
        self.caches = [one for one in before.containers.values() if isinstance(one.container, CACHED)]
        try:
            answers: list[Answer] = []
            first = self.model.recorder(remember_answers(self.model.objective.ask, answers))
            self._run(first)
            plain = plain_state(skeleton)
            self._keep_constant_buffers(first)
            fill_caches(before, Snapshot.of(*roots), first, mode)
            settled = Snapshot.of(*roots)
            second = self.model.recorder(repeat_answers(answers))
            loss, outputs = self._run(second)
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

    def _run(self, recorder: Recorder) -> tuple[Tensor | None, Any]:
        """Run the model once, restore the buffers that it reassigned, and return its loss and outputs.

        Raise `CaptureError` if it draws from generators other than torch's.
        """
        generators = Generators()
        try:
            result = self.model.run(recorder)
        finally:
            self.empty_caches()
            drawing = generators.look("model")
            if drawing is not None:
                raise drawing_error(self._find_drawing() or drawing)
        recorder.reassignments.restore()
        return result

    def empty_caches(self) -> None:
        """Clear the function caches that a run has filled."""
        for one in self.caches:
            if one.has_changed:
                self.filled[id(one.container)] = one
                one.restore()

    def _find_drawing(self) -> Drawing | None:
        """Run once more to find the module that draws."""
        generators = Generators()
        with suppress(PipelineError):
            self.model.run(self.model.recorder(generators=generators))
        return generators.drawing
